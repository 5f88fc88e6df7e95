"""Columns of a dump as flat numpy arrays with offsets, whatever file they came from.

Shape letters: B rows, N values. No Python loop over tokens: lists of a Parquet file keep their Arrow buffers.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Array = NDArray[Any]
Offsets = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Column:
    """One field of B rows.

    Example: rows ``[0.1, 0.2]``, ``[]``, ``[0.3]`` are values ``[0.1, 0.2, 0.3]`` and offsets ``[0, 2, 2, 3]``.

    Attributes:
        values: ``[N]``; with offsets the rows' values one after the other, else one value a row.
        offsets: ``[B+1]`` int64, or None for a scalar column.
        is_null: ``[B]`` bool, rows that have no value at all; None when every row has one.
        shape: sizes of further axes, after tokens, that are flattened into values.
    """

    values: Array
    offsets: Offsets | None = None
    is_null: Flags | None = None
    shape: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @property
    def lengths(self) -> Offsets:
        """``[B]``: values a row; 1 for a scalar column."""
        return np.ones(len(self.values), dtype=np.int64) if self.offsets is None else np.diff(self.offsets)

    def take(self, keep: Flags) -> "Column":
        """Keep the rows where ``[B]`` is True."""
        is_null = None if self.is_null is None else self.is_null[keep]
        if self.offsets is None:
            return Column(self.values[keep], None, is_null, self.shape)
        lengths = np.diff(self.offsets)
        start, end = self.offsets[0], self.offsets[-1]
        return Column(self.values[start:end][np.repeat(keep, lengths)], offsets_of(lengths[keep]), is_null, self.shape)

    def keep_values(self, keep: Flags) -> "Column":
        """Keep the values where ``[N]`` is True; rows get shorter."""
        assert self.offsets is not None
        ends = np.concatenate(([0], np.cumsum(keep)))
        return Column(self.values[keep], ends[self.offsets], self.is_null, self.shape)

    def flat(self) -> "Column":
        """Return the column with values and offsets from 0."""
        if self.offsets is None or (self.offsets[0] == 0 and self.offsets[-1] == len(self.values)):
            return self
        start, end = self.offsets[0], self.offsets[-1]
        return Column(self.values[start:end], self.offsets - start, self.is_null, self.shape)


def offsets_of(lengths: Array) -> Offsets:
    """Return where rows of these lengths, ``[B]``, begin and end: ``[B+1]``."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)))


def from_array(array: Array) -> Column:
    """Make a column of an array ``[B]``, ``[B, T]`` or ``[B, T, ...]``.

    Raises:
        ValueError: for an array without rows' axis or without numbers.
    """
    if array.ndim == 0 or array.dtype.kind not in "fiub":
        raise ValueError(f"is an array of shape {array.shape} and type {array.dtype}; expected rows of numbers")
    if array.ndim == 1:
        return Column(array)
    num_rows, length = array.shape[:2]
    return (
        Column(
            array.reshape(-1),
            np.arange(num_rows + 1) * array[0].size if num_rows else np.zeros(1, np.int64),
            None,
            array.shape[2:],
        )
        if length
        else Column(array.reshape(-1), np.zeros(num_rows + 1, np.int64))
    )


def from_arrow(array: pa.Array) -> Column | None:
    """Make a column of an Arrow array of numbers, booleans, strings or lists; None where nothing but nulls is in it.

    Raises:
        ValueError: for any other type.
    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # no chunk at all
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if array.null_count == len(array) and len(array):
        return None
    is_null = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    kind = array.type
    if pa.types.is_fixed_size_list(kind):
        array = array.cast(pa.list_(kind.value_type))
        kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = array.values
        shape: tuple[int, ...] = ()
        offsets = _numbers(array.offsets).astype(np.int64)
        if pa.types.is_list(inner.type) or pa.types.is_large_list(inner.type):
            inner, offsets, shape = _unnest(inner, offsets)
        return Column(_numbers(inner), offsets, is_null, shape).flat()
    return Column(_numbers(array), None, is_null)


def _unnest(inner: pa.Array, offsets: Offsets) -> tuple[pa.Array, Offsets, tuple[int, ...]]:
    """Flatten lists of lists whose inner lists are all of one length, such as distributions."""
    ends = _numbers(inner.offsets).astype(np.int64)
    widths = np.unique(np.diff(ends[offsets[0] : offsets[-1] + 1]))
    if len(widths) > 1 or inner.null_count:
        raise ValueError("holds lists of lists of several lengths; expected one list a row, or inner lists of one size")
    return inner.values, ends[offsets], (int(widths[0]),) if len(widths) else (1,)


def _numbers(array: pa.Array) -> Array:
    kind = array.type
    if not array.null_count and len(array) and (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        # The buffer itself: Arrow's own conversion imports pandas first, a third of a second.
        letter = "f" if pa.types.is_floating(kind) else "u" if pa.types.is_unsigned_integer(kind) else "i"
        size = kind.bit_width // 8
        return np.frombuffer(array.buffers()[1], f"{letter}{size}", count=len(array), offset=array.offset * size)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    if pa.types.is_decimal(kind):
        array = array.cast(pa.float64())
    elif not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise ValueError(f"is of type {kind}; expected numbers or lists of numbers")
    return np.asarray(array.to_numpy(zero_copy_only=False))


def from_rows(rows: list[Any]) -> tuple[Column | None, list[tuple[int, str]]]:
    """Make a column of the values of a JSON field, one a row.

    Args:
        rows: numbers, strings, booleans, lists of numbers, or None.

    Returns:
        The column, None where every value is None; and the rows that fit no column, each with why.
    """
    problems: list[tuple[int, str]] = []
    num_values = sum(row is not None for row in rows)
    if not num_values:
        return None, problems
    is_null = np.array([row is None for row in rows])
    nulls = is_null if is_null.any() else None
    if 2 * sum(isinstance(row, list) for row in rows) < num_values:  # what most rows have is what is expected
        return _scalars(rows, nulls, problems), problems
    arrays: list[Array] = []
    for index, row in enumerate(rows):
        try:
            arrays.append(_list_of_numbers([] if row is None else row))
        except (ValueError, TypeError, OverflowError) as error:
            arrays.append(np.zeros(0))
            problems.append((index, " ".join(str(error).split())))
    shapes = Counter(array.shape[1:] for array in arrays if array.size)
    shape = shapes.most_common(1)[0][0] if shapes else ()
    for index, array in enumerate(arrays):
        if array.size and array.shape[1:] != shape:
            problems.append((index, "lists nested otherwise than in other rows"))
            arrays[index] = np.zeros(0)
    arrays = [array.reshape(-1) for array in arrays]
    return Column(np.concatenate(arrays), offsets_of(np.array([len(a) for a in arrays])), nulls, shape), problems


def _list_of_numbers(row: Any) -> Array:  # noqa: ANN401
    """Make float64 of a list of numbers, whose nulls become NaN; a text is no number even where it looks like one."""
    try:
        array = np.array(row)
    except ValueError:  # of lists of several lengths, in numpy's own words
        raise ValueError("inner lists of several lengths, or numbers beside lists; expected one size") from None
    if array.ndim == 0:
        raise ValueError("one number where other rows have a list")
    if array.dtype.kind not in "fiub":
        text = next((value for value in [*row, *array.reshape(-1)] if isinstance(value, str)), None)
        if text is not None:
            raise ValueError(f"could not convert string {str(text)[:40]!r} to a number; expected numbers")
    return array.astype(np.float64)


def _scalars(rows: list[Any], nulls: Flags | None, problems: list[tuple[int, str]]) -> Column:
    """Make numbers of numbers; where a text is among them, keep every value as it is: identifiers may be of both."""
    if any(isinstance(row, str) for row in rows):
        for index, row in enumerate(rows):
            if not isinstance(row, str | int | float | None):
                problems.append((index, f"{str(row)[:40]!r} where other rows have a text"))
        values = np.empty(len(rows), dtype=object)
        values[:] = ["" if row is None or not isinstance(row, str | int | float) else row for row in rows]
        return Column(values, None, nulls)
    numbers = np.full(len(rows), np.nan)
    for index, row in enumerate(rows):
        try:
            numbers[index] = np.nan if row is None else float(row)
        except (ValueError, TypeError, OverflowError):
            problems.append((index, f"{str(row)[:40]!r} where other rows have a number"))
    return Column(numbers, None, nulls)
