"""Range checks of the configuration's sections; each message names the key, what it must be and what it was."""

LARGEST_SETTING = 1e13  # more bytes, tokens or steps than any machine has


def require(condition: bool, key: str, wanted: str, got: object) -> None:
    """Raise ValueError naming the key, what it must be and what it was, unless the condition holds."""
    if not condition:
        shown = repr(got)
        raise ValueError(f"{key} must be {wanted}, got {shown if len(shown) <= 100 else shown[:100] + '...'}")


def require_positive(section: str, **values: float) -> None:
    """Check that values are above 0, and neither smaller nor larger than any real setting."""
    for name, value in values.items():
        is_in_range = 1 / LARGEST_SETTING <= value <= LARGEST_SETTING
        require(is_in_range, f"{section}.{name}", f"> 0 and at most {LARGEST_SETTING:g}", value)


def require_at_least(section: str, minimum: float, **values: float) -> None:
    """Check that values are not below a minimum, nor larger than any real setting."""
    for name, value in values.items():
        is_in_range = minimum <= value <= LARGEST_SETTING
        require(is_in_range, f"{section}.{name}", f">= {minimum:g} and at most {LARGEST_SETTING:g}", value)


def require_fraction(section: str, **values: float) -> None:
    """Check that values lie in (0, 1]."""
    for name, value in values.items():
        require(0 < value <= 1, f"{section}.{name}", "in (0, 1]", value)


def require_plain_name(key: str, name: str) -> None:
    """Check that a name can be a file's name: letters, digits, dots, dashes and underscores."""
    is_plain = name[:1].isalnum() and all(c.isalnum() or c in "._-" for c in name) and name.isascii()
    wanted = "letters, digits, dots, dashes and underscores, the first a letter or digit, 100 at most"
    require(is_plain and len(name) <= 100, key, wanted, name)


def require_texts(section: str, **values: tuple[str, ...]) -> None:
    """Check that lists hold texts that are not empty."""
    for name, items in values.items():
        is_text = all(isinstance(item, str) and item for item in items)
        require(is_text, f"{section}.{name}", "a list of texts that are not empty", list(items))
