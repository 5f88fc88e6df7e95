"""What goes wrong with files: bytes changed, cut, copied and lost; values of other kinds than expected."""

import math
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    127,
    255,
    256,
    65535,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**53,
    2**63 - 1,
    2**63,
    -(2**63),
    10**400,
)
FLOATS = (0.5, -0.0, 1e-300, 1e308, math.inf, -math.inf, math.nan)
TEXTS = (
    "",
    "0",
    "-1.5",
    "nan",
    "null",
    "true",
    "[1]",
    "{}",
    "${seed}",
    "???",
    "../x",
    "\x00",
    "\ud7ff",
    "a" * 300,
    "\n",
)

DEEP = 3000
"""Lists in lists, more than a recursive parser takes."""

scalars = st.one_of(
    st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(FLOATS), st.integers(), st.floats(),
    st.sampled_from(TEXTS), st.text(max_size=20),
)  # fmt: skip
json_values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
"""Whatever JSON or YAML can hold."""


def damaged(whole: bytes) -> st.SearchStrategy[bytes]:
    """Change a file's bytes in up to six places; it may also stay as it is."""
    position = st.integers(0, len(whole))
    word = st.sampled_from([0, 1, 0x7F, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
    changes: list[st.SearchStrategy[Callable[[bytes], bytes]]] = [
        st.builds(lambda at, new: lambda b: b[:at] + bytes([new]) + b[at + 1 :], position, st.integers(0, 255)),
        st.builds(lambda at, new: lambda b: b[:at] + new.to_bytes(4, "little") + b[at + 4 :], position, word),
        st.builds(lambda at, n: lambda b: b[:at] + b[at + n :], position, st.integers(1, 40)),
        st.builds(lambda at, n: lambda b: b[: at + n] + b[at:], position, st.integers(1, 40)),
        st.builds(lambda at, new: lambda b: b[:at] + new + b[at:], position, st.binary(max_size=12)),
        st.builds(lambda at: lambda b: b[:at], position),
        st.builds(
            lambda at, what: lambda b: b[:at] + what * DEEP + b[at:], position, st.sampled_from([b"[", b'{"a":'])
        ),
    ]
    return st.lists(st.one_of(changes), max_size=6).map(lambda chosen: _apply(chosen, whole))


def _apply(changes: list[Callable[[bytes], bytes]], whole: bytes) -> bytes:
    for change in changes:
        whole = change(whole)
    return whole


@st.composite
def changed_rows(draw: st.DrawFn, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Change some values of rows, and the entries of some lists; leave some out."""
    rows = [dict(row) for row in rows]
    for _ in range(draw(st.integers(0, 3))):
        row = draw(st.sampled_from(rows))
        name = draw(st.sampled_from([*row, "more"]))
        value = row.get(name)
        how = draw(st.sampled_from(["other", "entry", "shorter", "longer", "gone"]))
        if how == "gone":
            row.pop(name, None)
        elif how == "other" or not isinstance(value, list) or not value:
            row[name] = draw(json_values)
        elif how == "entry":
            at = draw(st.integers(0, len(value) - 1))
            row[name] = [*value[:at], draw(json_values), *value[at + 1 :]]
        else:
            row[name] = value[:-1] if how == "shorter" else [*value, value[0]]
    return rows
