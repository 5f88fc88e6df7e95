"""Files of rollouts as chunks of columns, so that memory is that of a chunk and not of the file.

Parquet and Arrow files are read by batches of rows, JSONL by lines, safetensors by slices; npz and .pt hold whole
arrays, of which .pt is mapped and npz is read array by array. Nothing here runs code that a file brings: no pickle,
no object arrays.
"""

import glob
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.audit.columns import Column, from_array, from_arrow, from_rows
from trm_repro.errors import InputError

DAMAGED = (pa.ArrowException, OSError, ValueError, RuntimeError, zipfile.BadZipFile, KeyError, EOFError, TypeError)
"""What readers raise: Arrow OSError for a file cut short, torch RuntimeError for one that is no archive."""
CHUNK_TOKENS = 1 << 17
"""Tokens aimed at in a chunk: a megabyte a column, which stays in a core's cache."""

CHUNK_BYTES = 1 << 22
"""Bytes of JSON in a chunk; the two log-probs of a token take 10 to 40."""


@dataclass
class RawChunk:
    """Some consecutive rows of a file.

    Attributes:
        path: the file.
        first_row: number of the first row in it, as a reader would say it.
        columns: by the file's own names; a column without any value is left out.
        row_word: what a row is called in this kind of file.
        row_numbers: numbers of the rows where they are not consecutive.
        problems: rows, by index in the chunk, that could not be read, each with why.
        fraction_read: of the file, before or with this chunk, for the progress bar.
        num_rows: rows in the chunk.
    """

    path: Path
    first_row: int
    columns: dict[str, Column]
    row_word: str = "row"
    row_numbers: list[int] | None = None
    problems: list[tuple[int, str]] = field(default_factory=list)
    fraction_read: float = 0.0
    num_rows: int | None = None

    def where(self, index: int) -> str:
        """Name a row of the chunk: file and number."""
        number = self.first_row + index if self.row_numbers is None else self.row_numbers[index]
        return f"{self.path}: {self.row_word} {number}"


def find_files(patterns: list[str]) -> list[Path]:
    """Find the files that paths, folders and globs stand for.

    Returns:
        Files of a kind that can be read, in the order given and sorted within a folder or glob, each once.

    Raises:
        InputError: if a pattern finds nothing that can be read.
    """
    files: dict[Path, None] = {}
    for pattern in patterns:
        if not pattern.strip():
            raise InputError(f"{pattern!r} is no path; expected a file, a folder or a glob")
        path = Path(pattern)
        if path.is_dir():
            found = sorted(_files_below(path))
            reason = f"a folder without {', '.join(READERS)} files"
        elif path.is_file():
            if path.suffix not in READERS:
                raise InputError(f"{path}: unknown kind of file; expected {', '.join(READERS)}")
            found, reason = [path], ""
        else:
            matches = (Path(match) for match in glob.glob(pattern, recursive=True))
            found = sorted(match for match in matches if match.is_file() and match.suffix in READERS)
            reason = "no such file or folder, and no match as a glob"
        if not found:
            raise InputError(f"{pattern}: {reason}")
        files |= dict.fromkeys(found)
    return list(files)


def _files_below(folder: str | Path) -> Iterator[Path]:
    """Find files of a kind that can be read; by what the folder says of them, a tenth of the time of asking each."""
    try:
        entries = list(os.scandir(folder))
    except PermissionError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(entry.path)
        elif os.path.splitext(entry.name)[1] in READERS and entry.is_file():
            yield Path(entry.path)


def read_chunks(path: Path, wanted: Callable[[list[str]], set[str]]) -> Iterator[RawChunk]:
    """Read a file chunk by chunk.

    Args:
        path: the file.
        wanted: given the names of all columns, those to read; raises InputError where they are not what is needed.

    Yields:
        The chunks, in the order of the file.

    Raises:
        InputError: if the file is empty, damaged, truncated, or of another kind than its name says.
    """
    if path.stat().st_size == 0:
        raise InputError(f"{path}: is empty (0 bytes)")
    is_any = False
    try:
        for chunk in READERS[path.suffix](path, wanted):
            is_any = True
            yield chunk
    except InputError:
        raise
    except DAMAGED as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{path}: cannot be read as {path.suffix} ({reason}); damaged, cut short, or another kind of file"
        ) from None
    if not is_any:
        raise InputError(f"{path}: has no rows")


def _read_parquet(path: Path, wanted: Callable[[list[str]], set[str]]) -> Iterator[RawChunk]:
    # Buffering ahead would hold the whole file's columns.
    with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
        metadata = file.metadata
        chosen = wanted(file.schema_arrow.names)
        names = [name for name in file.schema_arrow.names if name in chosen]
        most_values = 1
        for group in range(metadata.num_row_groups):
            for index in range(metadata.num_columns):
                column = metadata.row_group(group).column(index)
                if column.path_in_schema.split(".")[0] in names and metadata.row_group(group).num_rows:
                    most_values = max(most_values, column.num_values // metadata.row_group(group).num_rows)
        first_row = 0
        for batch in file.iter_batches(max(1, CHUNK_TOKENS // most_values), columns=names):
            yield _from_batch(path, first_row, batch, first_row / max(1, metadata.num_rows))
            first_row += batch.num_rows


def _read_arrow(path: Path, wanted: Callable[[list[str]], set[str]]) -> Iterator[RawChunk]:
    with pa.memory_map(str(path)) as source:
        try:
            reader = pa.ipc.open_file(source)
            batches: Iterator[pa.RecordBatch] = (reader.get_batch(i) for i in range(reader.num_record_batches))
        except pa.ArrowInvalid:
            source.seek(0)
            reader = pa.ipc.open_stream(source)
            batches = iter(reader)
        chosen = wanted(reader.schema.names)
        names = [name for name in reader.schema.names if name in chosen]
        first_row = 0
        for batch in batches:
            batch = batch.select(names)
            batch.validate(full=True)  # Arrow trusts the offsets of a file, and ends the process on wrong ones
            num_rows = max(1, batch.num_rows * CHUNK_TOKENS // max(1, _most_values(batch)))
            for start in range(0, batch.num_rows, num_rows):
                part = batch.slice(start, num_rows)
                yield _from_batch(path, first_row, part, 0.0)
                first_row += part.num_rows


def _most_values(batch: pa.RecordBatch) -> int:
    return max(
        (len(array.flatten()) if hasattr(array, "flatten") else len(array) for array in batch.columns), default=1
    )


def _from_batch(path: Path, first_row: int, batch: pa.RecordBatch, fraction_read: float) -> RawChunk:
    columns = {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column = from_arrow(array)
        except ValueError as error:
            raise InputError(f"{path}: column {name} {error}") from None
        if column is not None:
            columns[name] = column
    return RawChunk(path, first_row, columns, fraction_read=fraction_read, num_rows=batch.num_rows)


def _read_jsonl(path: Path, wanted: Callable[[list[str]], set[str]]) -> Iterator[RawChunk]:
    size = path.stat().st_size
    with path.open("rb") as file:
        rows: list[dict[str, Any]] = []
        numbers: list[int] = []
        problems: list[tuple[int, str]] = []
        columns = _Union(wanted)
        num_bytes, num_read = 0, 0
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            row: Any = None
            try:
                row = _json_row(line)
                reason = "is no object of fields" if not isinstance(row, dict) else ""
            except (ValueError, RecursionError) as error:  # also of undecodable bytes
                reason = f"is no JSON ({error})"
            if reason:
                problems.append((len(rows), reason))
                row = {}
            else:
                columns.add(row)
            rows.append(row)
            numbers.append(number)
            num_bytes += len(line)
            if num_bytes >= CHUNK_BYTES:
                num_read += num_bytes
                yield _from_json_rows(path, rows, numbers, problems, columns.names(), num_read / size)
                rows, numbers, problems, num_bytes = [], [], [], 0
        if rows:
            yield _from_json_rows(path, rows, numbers, problems, columns.names(), 1.0)


def _json_row(line: bytes) -> Any:  # noqa: ANN401
    """Parse a line; by the standard library, three times slower, where it is no strict JSON, such as with NaN."""
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError:
        return json.loads(line)


class _Union:
    """Every name that a row had so far, and those of them that are wanted: asked again when a new one appears."""

    def __init__(self, wanted: Callable[[list[str]], set[str]]) -> None:
        self.wanted, self.chosen = wanted, set[str]()
        self.seen: dict[str, None] = {}
        self.num_asked: int | None = None
        self.has_rows = False

    def add(self, row: dict[str, Any]) -> None:
        self.has_rows = True  # also with a row without names, which is for `wanted` to refuse
        self.seen.update(dict.fromkeys(row))

    def names(self) -> set[str]:
        if self.has_rows and len(self.seen) != self.num_asked:
            self.chosen, self.num_asked = self.wanted(list(self.seen)), len(self.seen)
        return self.chosen


def _from_json_rows(
    path: Path,
    rows: list[dict[str, Any]],
    numbers: list[int],
    problems: list[tuple[int, str]],
    names: set[str],
    fraction_read: float,
) -> RawChunk:
    columns: dict[str, Column] = {}
    for name in sorted(names):
        column, bad = from_rows([row.get(name) for row in rows])
        problems = problems + [(index, f"{name}: {reason}") for index, reason in bad]
        if column is not None:
            columns[name] = column
    return RawChunk(path, numbers[0], columns, "line", numbers, problems, fraction_read, len(rows))


def _read_npz(path: Path, wanted: Callable[[list[str]], set[str]]) -> Iterator[RawChunk]:
    with np.load(path, allow_pickle=False) as archive:
        names = wanted(list(archive.files))
        arrays = {name: archive[name] for name in archive.files if name in names}
    yield from _from_arrays(path, arrays)


def _read_safetensors(path: Path, wanted: Callable[[list[str]], set[str]]) -> Iterator[RawChunk]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as archive:
            available = list(archive.keys())
            chosen = wanted(available)
            slices = {name: archive.get_slice(name) for name in available if name in chosen}
            yield from _from_arrays(path, slices)
    except SafetensorError as error:
        raise ValueError(str(error)) from None


def _read_torch(path: Path, wanted: Callable[[list[str]], set[str]]) -> Iterator[RawChunk]:
    import pickle

    import torch

    with path.open("rb") as file:
        is_pickle = file.read(1) == b"\x80"
    if is_pickle:  # also what torch wrote before its files were archives
        raise InputError(
            f"{path}: holds Python objects in a pickle, which is not loaded because it can run code; save a dict of "
            "tensors by torch.save"
        )
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path}: holds Python objects, which are not loaded because they can run code "
            f"({str(error).splitlines()[0][:100]}); save a dict of tensors"
        ) from None
    if isinstance(loaded, dict) and isinstance(loaded.get("batch"), dict):
        loaded = loaded["batch"]
    if isinstance(loaded, list) and loaded and all(isinstance(row, dict) for row in loaded):
        columns = _Union(wanted)
        for row in loaded:
            columns.add({str(name): value for name, value in row.items()})
        names = columns.names()
        rows = [{name: _plain(row.get(name)) for name in names} for row in loaded]
        chunk = _from_json_rows(path, rows, list(range(len(rows))), [], names, 1.0)
        chunk.row_word = "row"
        yield chunk
        return
    if not isinstance(loaded, dict):
        raise InputError(f"{path}: holds a {type(loaded).__name__}; expected a dict of tensors or a list of such dicts")
    names = wanted([str(name) for name in loaded])
    lists = {name: value for name, value in loaded.items() if name in names}
    if any(isinstance(value, list) for value in lists.values()):  # a list of tensors, one a sequence
        num_rows = max(len(value) for value in lists.values())
        rows = [{name: _plain(value[i]) for name, value in lists.items() if i < len(value)} for i in range(num_rows)]
        chunk = _from_json_rows(path, rows, list(range(num_rows)), [], names, 1.0)
        chunk.row_word = "row"
        yield chunk
        return
    yield from _from_arrays(path, lists)


def _plain(value: Any) -> Any:  # noqa: ANN401
    if hasattr(value, "tolist"):
        return _to_numpy(value).tolist()
    return list(value) if isinstance(value, tuple) else value


def _from_arrays(path: Path, arrays: dict[str, Any]) -> Iterator[RawChunk]:
    """Slice arrays of one number of rows: numpy arrays, tensors or safetensors slices."""
    sizes = {name: _shape(array) for name, array in arrays.items()}
    arrays = {name: array for name, array in arrays.items() if sizes[name]}
    counts = {name: sizes[name][0] for name in arrays}
    if len(set(counts.values())) > 1:
        raise InputError(f"{path}: arrays differ in rows ({', '.join(f'{n} {c}' for n, c in counts.items())})")
    num_rows = next(iter(counts.values()), 0)
    widest = max((int(np.prod(sizes[name][1:2])) for name in arrays), default=1)
    step = max(1, CHUNK_TOKENS // max(1, widest))
    for start in range(0, num_rows, step):
        columns = {}
        for name, array in arrays.items():
            try:
                columns[name] = from_array(_to_numpy(array[start : start + step]))
            except ValueError as error:
                raise InputError(f"{path}: {name} {error}") from None
        yield RawChunk(path, start, columns, fraction_read=start / num_rows, num_rows=min(step, num_rows - start))


def _shape(array: Any) -> tuple[int, ...]:  # noqa: ANN401
    if hasattr(array, "get_shape"):
        return tuple(array.get_shape())
    return tuple(getattr(array, "shape", ()))


def _to_numpy(array: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401
    if isinstance(array, np.ndarray):
        return array
    if array.is_meta:
        raise ValueError("is a tensor on the meta device, which has no values")
    if array.is_floating_point() and str(array.dtype) not in ("torch.float16", "torch.float32", "torch.float64"):
        array = array.float()  # numpy has no bfloat16 and no float8; float32 holds every value of them
    return np.asarray(array.detach().numpy())


READERS: dict[str, Callable[[Path, Callable[[list[str]], set[str]]], Iterator[RawChunk]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
    ".pt": _read_torch,
}
"""By the suffix of the file's name."""
