"""Rows of a data set, one at a time: from the hub by name, or from a local .jsonl or .parquet file.

Both go through Hugging Face `datasets` in streaming mode, so that a file of any size is never held in memory.
"""

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trm_repro.errors import InputError

MAX_REASON_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True)
class ProblemSource:
    """Where problems come from.

    Example: ``ProblemSource(name="math-ai/aime25", split="test")``.

    Attributes:
        name: hub name of a data set, or a local folder laid out like one; None with a file.
        revision: branch, tag or commit of the hub's repository; None is the newest.
        subset: the data set's configuration, where it has several.
        split: which split.
        file: a local .jsonl or .parquet file, read in the place of the hub.
        file_mend: how to read a file instead, for the message when the hub cannot be read.
    """

    name: str | None = None
    revision: str | None = None
    subset: str | None = None
    split: str = "train"
    file: Path | None = None
    file_mend: str = "set task.file=FILE"

    def __str__(self) -> str:
        """Name the source as messages and records do, such as ``math-ai/aime25@main (test)``."""
        if self.file is not None:
            return str(self.file)
        revision = "" if self.revision is None else f"@{self.revision}"
        subset = "" if self.subset is None else f"{self.subset}, "
        return f"{self.name}{revision} ({subset}{self.split})"


def stream_rows(source: ProblemSource) -> Iterator[Any]:
    """Read a source row by row.

    A line of .jsonl is parsed by Python: whole numbers of any length stay exact, and rows need not agree in type.

    Args:
        source: where to read.

    Yields:
        Each row: an object as a dict, or whatever else a line of .jsonl holds.

    Raises:
        InputError: if the source does not exist, cannot be reached, or is damaged; the message begins with its name.
    """
    if source.file is not None:
        yield from _stream_file(source.file)
    else:
        yield from _stream_hub(source)


def _stream_file(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise InputError(f"{path}: no such file; expected problems as .jsonl or .parquet")
    if path.stat().st_size == 0:
        return
    is_parquet = path.suffix == ".parquet"
    builder, options = ("parquet", {}) if is_parquet else ("text", {"encoding": "utf-8-sig"})
    rows = _open(builder, data_files=str(path.resolve()), split="train", **options)
    number = 0
    while True:
        number += 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except UnicodeDecodeError:
            raise InputError(f"{path}: is not UTF-8 text; expected .jsonl or .parquet") from None
        except Exception as error:  # pyarrow's or the operating system's, as the file is damaged
            kind = "a readable Parquet" if is_parquet else "a readable"
            raise InputError(f"{path}: is not {kind} file ({_reason(error)})") from None
        if is_parquet:
            yield row
        elif row["text"].strip():
            try:
                yield json.loads(row["text"])
            except (ValueError, RecursionError):  # also a number of more digits than Python reads
                raise InputError(f"{path}: line {number} is not a JSON object") from None


def _stream_hub(source: ProblemSource) -> Iterator[Any]:
    assert source.name is not None
    options: dict[str, Any] = {"split": source.split, "revision": source.revision}
    if source.subset is not None:
        options["name"] = source.subset
    rows = _open(source.name, **options)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # no connection, no such data set, split or revision, a damaged file
            offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
            mend = "unset HF_HUB_OFFLINE" if offline else "check name, revision, subset, split and connection"
            raise InputError(
                f"{source}: cannot be read from the hub ({_reason(error)}); {mend}, or read a local .jsonl or .parquet "
                f"file: {source.file_mend}"
            ) from None
        yield row


def _open(path: str, **options: Any) -> Iterator[Any]:  # noqa: ANN401
    """Open a stream; what goes wrong is raised when the first row is asked for."""
    for library in ("datasets", "huggingface_hub"):  # they log each retry, and a traceback's worth on damaged files
        logging.getLogger(library).setLevel(logging.CRITICAL)
    import datasets

    yield from datasets.load_dataset(path, streaming=True, **options)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:MAX_REASON_CHARACTERS]
