"""Parquet files written whole or not at all, and read a row group at a time."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trm_repro.errors import InputError


def check_target(path: Path) -> None:
    """Check that a file can be written at a path without taking the place of anything but a file.

    Args:
        path: the file to make or replace.

    Raises:
        InputError: if the path is empty, a folder, or something else that is no regular file, such as a device.
    """
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a folder; expected the name of a file to write")
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: is a device or pipe; expected the name of a file to write")


def check_folder(path: Path) -> None:
    """Check that a path is a folder to write to, or can become one; leaves nothing there.

    Raises:
        InputError: if it, or what it should lie in, is a file, or if no file can be made there.
    """
    there = next(part for part in (path, *path.parents) if part.exists())
    if not there.is_dir():
        raise InputError(f"{there}: is a file; expected a folder to write to")
    try:  # asking for the permission is not enough: root has it in /proc, too
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise InputError(f"{there}: no file can be made there ({error.strerror}); choose another folder") from None


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table as Parquet so that it is there whole or not at all; see `write_tables`."""
    write_tables(path, table.schema, [table])


def write_tables(path: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Write tables, one after another, as one Parquet file that is there whole or not at all.

    Args:
        path: the file to make or replace.
        schema: of every table.
        tables: each becomes a row group.

    Raises:
        InputError: if there can be no file at the path, or the disk does not take it.
    """
    check_target(path)
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(partial, schema, compression="zstd") as writer:
            for table in tables:
                writer.write_table(table)
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            reason = error.strerror or str(error).splitlines()[0]
            raise InputError(f"{path}: cannot be written ({reason}); free the place or choose another") from None
        raise


def open_parquet(path: Path, kind: str, schema: pa.Schema) -> pq.ParquetFile:
    """Open a Parquet file that this project wrote, and look at its schema.

    Args:
        path: the file.
        kind: what its metadata say it holds, such as rollouts.
        schema: its columns.

    Returns:
        The file, of which nothing but the footer has been read.

    Raises:
        InputError: if it is missing, damaged, or holds something else.
    """
    if not path.is_file():
        reason = "is a folder; name a file in it" if path.is_dir() else "no such file"
        raise InputError(f"{path}: {reason}; expected {kind} as Parquet")
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None
    found_schema = file.schema_arrow
    try:
        found = json.loads((found_schema.metadata or {})[b"trm_repro"])["kind"]
    except (KeyError, ValueError, TypeError, RecursionError):
        found = "something else"
    if found != kind or not found_schema.equals(schema):
        raise InputError(f"{path}: holds {found} with columns {found_schema.names}; expected {kind} of this version")
    return file


def parquet_rows(path: Path, file: pq.ParquetFile, kind: str, optional: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Read a file's rows, one row group at a time.

    Args:
        path: the file, for messages.
        file: as opened by `open_parquet`.
        kind: what it holds.
        optional: columns that may be empty.

    Yields:
        Rows by column name.

    Raises:
        InputError: if the file is damaged, or a column that may not be is empty.
    """
    num_before = 0
    for group in range(file.num_row_groups):
        try:
            table = file.read_row_group(group)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(path, error) from None
        for name in table.column_names:
            if name not in optional and table[name].null_count:
                row = num_before + table[name].is_null().index(True).as_py()
                raise InputError(f"{path}: row {row} is no {kind.removesuffix('s')} ({name} is empty)")
        num_before += table.num_rows
        yield from table.to_pylist()


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(f"{path}: is not a readable Parquet file ({str(error).splitlines()[0]})")
