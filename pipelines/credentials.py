"""Addresses without what must not be stored or shown: user names, passwords and query values."""

import dataclasses
import re

from trm_repro.config import RunConfig


def without_credentials(uri: str) -> str:
    """Drop user name, password and query values from an address; other text is left as it is.

    Args:
        uri: such as ``https://user:password@host/path?token=secret``.

    Returns:
        Such as ``https://host/path?token=***``.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return uri
    authority, slash, path = rest.partition("/")
    before_query, mark, query = f"{authority.rpartition('@')[2]}{slash}{path}".partition("?")
    before_query = re.sub(r"^[^/]*@", "", before_query)  # a password may hold a slash
    return f"{scheme}://{before_query}{mark}{re.sub(r'=[^&]*', '=***', query)}"


def public_config(config: RunConfig) -> RunConfig:
    """Return a configuration as it may be stored: its tracking URI has no credentials."""
    if config.tracking.uri is None:
        return config
    tracking = dataclasses.replace(config.tracking, uri=without_credentials(config.tracking.uri))
    return dataclasses.replace(config, tracking=tracking)
