"""What a row may hold: which of its values make it a bad row, and why."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipelines.audit.columns import Column, Flags
from pipelines.audit.sources import RawChunk
from trm_repro.errors import InputError

LOGPROB_SLACK = 1e-4
"""Nats by which rounding can lift a log-prob above 0, as for our own shards."""

KL_SLACK = 1e-4
"""Nats by which rounding can take an exact KL below 0."""

TOKEN_FIELDS = ("rollout_logprobs", "policy_logprobs", "mask", "token_kl")
"""Fields with one number a token."""


class Rows:
    """The rows of a chunk that are still good, and how to say which one is not."""

    def __init__(self, raw: RawChunk, num_rows: int, report: Callable[[str], None]) -> None:
        """Begin with every row good; report is told of each bad one, and may raise."""
        self.raw, self.report = raw, report
        self.index = np.arange(num_rows)
        self.is_good: Flags = np.ones(num_rows, dtype=bool)

    def bad(self, position: int, reason: str) -> None:
        """Report a row, by position among those left, once."""
        if self.is_good[position]:
            self.is_good[position] = False
            self.report(f"{self.raw.where(int(self.index[position]))}: {reason}")

    def drop(self, is_bad: Flags, reason: object) -> None:
        """Report the rows where ``[B]`` is True, with a reason or a function of the position that gives it."""
        for position in np.flatnonzero(is_bad & self.is_good):
            self.bad(int(position), reason(position) if callable(reason) else str(reason))

    def take(self, columns: dict[str, Column]) -> dict[str, Column]:
        """Leave out the bad rows found so far, from the columns and from here."""
        if self.is_good.all():
            return columns
        keep = self.is_good
        self.index, self.is_good = self.index[keep], np.ones(int(keep.sum()), dtype=bool)
        return {name: column.take(keep) for name, column in columns.items()}


def check_kinds(path: Path, columns: dict[str, Column], fields: dict[str, str]) -> dict[str, Column]:
    """Refuse columns that are no lists of one number a token, and make log-probs and KL floating.

    Raises:
        InputError: for log-probs that are no lists, and for token fields of texts or of lists of lists.
    """
    columns = dict(columns)
    for name in TOKEN_FIELDS:
        column = columns.get(name)
        if column is None:
            continue
        kind = column.values.dtype.kind
        if name in ("rollout_logprobs", "policy_logprobs") and column.offsets is None:
            raise InputError(
                f"{path}: column {fields[name]} has one {'text' if kind == 'O' else 'number'} a row; expected a list "
                "of log-probs, one a token"
            )
        if name == "mask" and column.offsets is None:
            raise InputError(
                f"{path}: column {fields[name]} has one number a row; expected a list of 0 and 1, one a token (a "
                "number of tokens is --map length=COLUMN)"
            )
        if kind not in ("fiub" if name == "mask" else "fiu"):
            raise InputError(f"{path}: column {fields[name]} is of type {column.values.dtype}; expected numbers")
        if column.shape:
            raise InputError(
                f"{path}: column {fields[name]} holds lists of lists (inner sizes {column.shape}); expected one number "
                "a token, so one list a row"
            )
        if kind in "iu" and name != "mask":
            columns[name] = replace(column, values=column.values.astype(np.float64))
    ids = columns.get("token_ids")
    if ids is not None and ids.values.dtype.kind not in "iuf":
        del columns["token_ids"]
    return columns


def check_lengths(columns: dict[str, Column], fields: dict[str, str], rows: Rows) -> None:
    """Drop rows with another number of values in a field than log-probs, or with a mask that is not of 0 and 1."""
    for name in ("policy_logprobs", "mask", "token_kl", "advantage"):
        if name in columns and columns[name].offsets is not None:
            found, expected = columns[name].lengths, columns["rollout_logprobs"].lengths
            is_missing = columns[name].is_null if columns[name].is_null is not None else False
            rows.drop(
                (found != expected) | (is_missing if name != "token_kl" else False),
                lambda i, n=name, f=found, e=expected: f"{e[i]} {fields['rollout_logprobs']} but {f[i]} {fields[n]}",
            )
    if "mask" in columns and columns["mask"].offsets is not None and columns["mask"].values.dtype.kind != "b":
        mask = columns["mask"].flat()
        _drop_at(mask, (mask.values != 0) & (mask.values != 1), f"{fields['mask']} is neither 0 nor 1", rows)
    if "mask" in fields and "mask" not in columns:
        rows.drop(np.ones(len(rows.index), dtype=bool), f"no {fields['mask']}")


def check_scalars(columns: dict[str, Column], fields: dict[str, str], rows: Rows) -> dict[str, Column]:
    """Drop rows with a text, or with a number out of range, in a field of numbers; identifiers may be anything."""
    columns = dict(columns)
    for name in ("length", "reward", "advantage", "step"):
        column = columns.get(name)
        if column is None:
            continue
        if name in ("length", "step") and column.offsets is not None and column.values.dtype.kind in "fiub":
            column = columns[name] = _one_a_row(column, fields[name], rows)
        if column.values.dtype.kind not in "fiub":
            if column.offsets is not None:
                rows.drop(column.lengths > 0, f"{fields[name]} holds texts; expected numbers")
                del columns[name]
                continue
            is_null = column.is_null if column.is_null is not None else np.zeros(column.num_rows, dtype=bool)
            is_text = np.array([isinstance(value, str) for value in column.values], dtype=bool) & ~is_null
            rows.drop(is_text, lambda i, n=name, v=column.values: f"{fields[n]} is the text {v[i][:40]!r}, no number")
            column = replace(column, values=np.array([_number(value) for value in column.values], dtype=np.float64))
            columns[name] = column
        if column.offsets is not None or name not in ("advantage", "step"):
            continue
        values = column.values.astype(np.float64)
        is_bad = np.isinf(values) | (np.isnan(values) & (name == "advantage"))
        if name == "step" and column.values.dtype.kind != "i":
            is_bad |= np.abs(values) >= 2.0**63
        if column.is_null is not None:
            is_bad &= ~column.is_null
        rows.drop(is_bad, lambda i, n=name, v=values: f"{fields[n]} is {v[i]:g}; expected a finite number in range")
    return columns


def _one_a_row(column: Column, name: str, rows: Rows) -> Column:
    """Take the one value of each list, such as of an array ``[B, 1]``; drop rows whose list holds several values."""
    flat = column.flat()
    assert flat.offsets is not None
    values, is_some = np.full(column.num_rows, np.nan), flat.lengths > 0
    starts = flat.offsets[:-1][is_some]
    values[is_some] = flat.values[starts]
    if len(starts):
        is_mixed = np.zeros(column.num_rows, dtype=bool)
        smallest, largest = (f.reduceat(flat.values, starts) for f in (np.minimum, np.maximum))
        is_mixed[is_some] = (smallest != largest) & ~((column.lengths[is_some] == 1) & np.isnan(values[is_some]))
        rows.drop(is_mixed, f"{name} holds a list of several values; expected one number a row")
    return Column(values, None, ~is_some)


def _number(value: object) -> float:
    try:
        return float(value) if isinstance(value, int | float) else np.nan
    except OverflowError:
        return np.inf


def check_values(columns: dict[str, Column], fields: dict[str, str], rows: Rows) -> None:
    """Drop rows whose response tokens have a log-prob, an exact KL or an advantage that cannot be one."""
    advantage = columns.get("advantage")
    if advantage is not None and advantage.offsets is not None:
        flat = advantage.flat()
        _drop_at(flat, ~np.isfinite(flat.values.astype(np.float64)), f"{fields['advantage']} is not finite", rows)
    for name in ("rollout_logprobs", "policy_logprobs", "token_kl"):
        if name not in columns or columns[name].offsets is None:
            continue
        column = columns[name].flat()
        assert column.offsets is not None
        limit = LOGPROB_SLACK if name != "token_kl" else np.inf
        largest = column.values.max(initial=-np.inf)
        is_low = name == "token_kl" and not column.values.min(initial=np.inf) >= -KL_SLACK
        if largest <= limit and largest < np.inf and not is_low:
            continue
        for what, is_so in (
            ("NaN or null", np.isnan(column.values)),
            ("+inf", np.isposinf(column.values)),
            ("a positive log-prob", column.values > limit),
            ("a negative KL", (column.values < -KL_SLACK) & (name == "token_kl")),
        ):
            _drop_at(column, is_so, f"{fields.get(name, name)} is {what}", rows, _hint(column, name))


def _drop_at(column: Column, is_bad: Flags, what: str, rows: Rows, hint: str = "") -> None:
    """Drop the rows of values, ``[N]``, that are bad, naming the first token of each."""
    assert column.offsets is not None
    for position in np.flatnonzero(is_bad):
        row = int(np.searchsorted(column.offsets, position, side="right")) - 1
        if rows.is_good[row]:
            rows.bad(row, f"{what} at token {position - column.offsets[row]}{hint}")


def _hint(column: Column, name: str) -> str:
    finite = column.values[np.isfinite(column.values)]
    if name == "token_kl" or not len(finite) or finite.min() < 0 or finite.max() <= 0:
        return ""
    return " (none is negative: probabilities, or -log p?)" if finite.max() <= 1 else " (none is negative: -log p?)"
