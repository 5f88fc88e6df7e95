"""Addresses without what must not be stored or shown: user names, passwords and query values."""

import dataclasses
import re
from urllib.parse import quote, quote_plus, unquote

from trm_repro.config import RunConfig

HOST_AND_PATH = re.compile(r"[^:@/?#]+(:[0-9]*)?(/[^@:]*)?")
NAME = re.compile(r"[\w.-]+")
SHORTEST_SECRET = 3
"""Characters; what is shorter is left in messages, which would otherwise lose their own words."""


def without_credentials(uri: str) -> str:
    """Drop user name, password and query values from an address; other text is left as it is.

    What stands before the last @ of an address with a host is taken for user and password, also where a password holds
    characters that it should have encoded. An address that begins with a path, such as SQLite's, has no user.

    Args:
        uri: such as ``https://user:password@host/path?token=secret``.

    Returns:
        Such as ``https://host/path?token=***``.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return uri
    _, rest = _divided(scheme, rest)
    path, mark, query = rest.partition("?")
    hidden = "&".join(f"{name}=***" if equals and NAME.fullmatch(name) else "***" for name, equals, _ in _items(query))
    return f"{scheme}://{path}{mark}{hidden if query else ''}"


def censored(text: str, uri: str) -> str:
    """Hide in a message what an address holds of user names, passwords and query values, whole or in part.

    Args:
        text: such as a library's message, which may repeat the address, or parts of it.
        uri: the address.

    Returns:
        The text with ``***`` in their places.
    """
    scheme, _, rest = uri.partition("://")
    userinfo, rest = _divided(scheme, rest)
    values = [value or name for name, _, value in _items(rest.partition("?")[2])]
    pieces = [userinfo, userinfo.partition(":")[2], *re.split(r"[/:?#@&=]", userinfo), *values]
    secrets = {form(piece) for piece in pieces for form in (str, quote, quote_plus, unquote)}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***") if len(secret) >= SHORTEST_SECRET else text
    return text


def _divided(scheme: str, rest: str) -> tuple[str, str]:
    """Divide what follows the scheme into user and password, and host, path and query."""
    userinfo, at, host = rest.rpartition("@")
    is_in_query = "?" in userinfo and HOST_AND_PATH.fullmatch(userinfo.partition("?")[0]) is not None
    is_path = rest.startswith("/") and not scheme.startswith("http")
    return ("", rest) if not at or is_path or is_in_query else (userinfo, host)


def _items(query: str) -> list[tuple[str, str, str]]:
    return [item.partition("=") for item in query.split("&")] if query else []


def public_config(config: RunConfig) -> RunConfig:
    """Return a configuration as it may be stored: its tracking URI has no credentials."""
    if config.tracking.uri is None:
        return config
    tracking = dataclasses.replace(config.tracking, uri=without_credentials(config.tracking.uri))
    return dataclasses.replace(config, tracking=tracking)
