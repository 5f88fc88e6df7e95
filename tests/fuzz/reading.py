"""One reader under test: what it is given, and what must hold of whatever comes out."""

import json
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.fuzz.damage import changed_rows, damaged, json_values
from trm_repro.errors import InputError

LONGEST_MESSAGE = 1500
FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-"))
"""Where inputs are written."""


@dataclass(frozen=True)
class Target:
    """One reader.

    Attributes:
        inputs: what it is given.
        check: raises anything where it does not do as it should.
        cost: how many times less often the unit tests try it than others.
    """

    inputs: st.SearchStrategy[Any]
    check: Callable[[Any], None]
    cost: int = 1


def refused(read: Callable[[], Any]) -> Any:
    """Return what a reader gives, or None where it refuses in one line."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return read()
    except InputError as error:
        message = str(error)
        assert message, "a message without words"
        assert "\n" not in message, message
        assert len(message) <= LONGEST_MESSAGE, message
        return None


def written(name: str, content: bytes) -> Path:
    """Write an input to a file."""
    path = FOLDER / name
    path.write_bytes(content)
    return path


def bytes_of(write: Callable[[Path], Any], suffix: str) -> bytes:
    path = FOLDER / f"whole{suffix}"
    write(path)
    return path.read_bytes()


def lines(rows: list[Any]) -> bytes:
    """Write rows as lines of JSON."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def json_files(rows: list[Any]) -> st.SearchStrategy[bytes]:
    """Damage a file that holds a list of rows."""
    changed = changed_rows(rows) | json_values
    return damaged(json.dumps(rows).encode()) | changed.map(lambda value: json.dumps(value).encode())


def first(rows: bytes) -> bytes:
    """Take the one object out of a list, as text."""
    return rows.removeprefix(b"[").removesuffix(b"]")


def clean_up() -> None:
    """Delete what was written."""
    shutil.rmtree(FOLDER, ignore_errors=True)
