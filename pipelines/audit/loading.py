"""From a file's columns to checked chunks: masks and padding applied, bad rows named, what was assumed said."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pipelines.audit import top_k
from pipelines.audit.adapters import FORMATS, find_fields
from pipelines.audit.checks import Rows, check_kinds, check_lengths, check_scalars, check_values
from pipelines.audit.columns import Array, Column, Flags
from pipelines.audit.own_shards import FileKind, PolicyRows, add_policy, kind_of, read_policy
from pipelines.audit.slices import doubling_bin
from pipelines.audit.sources import RawChunk, read_chunks
from pipelines.audit.statistics import Chunk, segment_sum
from trm_repro.errors import InputError

MAX_NAMED = 20
"""Bad rows that are named one by one in the report; the rest are counted."""

LEAST_FLOAT32 = np.float64(np.finfo(np.float32).min)
"""What is below it, such as the least float64, stands for -inf: its square has no float64."""


@dataclass
class Reading:
    """What happened while files were read.

    Attributes:
        skip_bad: whether bad rows are left out; otherwise the first one ends the audit.
        is_quick: whether token ids, which drift and the paper's gates do not need, are left unread.
        counts: of rows, tokens and what was dropped, by name.
        nonfinite_steps: sequences with a -inf by step.
        nonfinite_step_tokens: their tokens by step.
        nonfinite_lengths: the same sequences by doubling of length.
        formats: files read by format.
        used: column names by field, over all files.
        unused: columns that no field uses.
        bad_rows: the first ones, each with file, row and reason.
        notes: assumptions that were made, by key.
    """

    skip_bad: bool = False
    is_quick: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    nonfinite_steps: Counter[int] = field(default_factory=Counter)
    nonfinite_step_tokens: Counter[int] = field(default_factory=Counter)
    nonfinite_lengths: Counter[int] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    used: dict[str, str] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)
    bad_rows: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    dtypes: set[str] = field(default_factory=set)

    def report(self, message: str) -> None:
        """Count a bad row, or end the audit.

        Raises:
            InputError: without skip_bad.
        """
        if not self.skip_bad:
            raise InputError(f"{message}; --skip-bad analyses the rest and counts such rows")
        self.counts["bad_rows"] += 1
        if len(self.bad_rows) < MAX_NAMED:
            self.bad_rows.append(message)


def load_file(
    path: Path, reading: Reading, *, chosen: str | None, mapped: dict[str, str], masks: Path | None
) -> Iterator[tuple[Chunk, float]]:
    """Read one file.

    Args:
        path: the file.
        reading: filled on the way.
        chosen: format that --format names, or None.
        mapped: fields that --map names.
        masks: folder or file of our own masks, or None to look beside the shard.

    Yields:
        Checked chunks, and the fraction of the file that is read.

    Raises:
        InputError: if the file is damaged or is no dump, or a row is bad and reading.skip_bad is not set.
    """
    kind = kind_of(path)
    if kind is FileKind.MASKS:
        return
    fields: dict[str, str] = {}
    policy = read_policy(path, masks) if kind is FileKind.SHARD and "policy_logprobs" not in mapped else None

    def wanted(available: list[str]) -> set[str]:
        return _choose(path, available, fields, reading, policy, chosen=chosen, mapped=mapped)

    for raw in read_chunks(path, wanted):
        if policy is not None:
            add_policy(raw, policy)
        chunk = _checked(raw, fields, reading)
        if chunk is not None:
            yield chunk, raw.fraction_read
    if not fields:
        raise InputError(f"{path}: no row could be read")


def _choose(
    path: Path,
    available: list[str],
    fields: dict[str, str],
    reading: Reading,
    policy: PolicyRows | None,
    *,
    chosen: str | None,
    mapped: dict[str, str],
) -> set[str]:
    """Fill in which column holds which field, more of them when columns appear later; return those to read."""
    if policy is not None:
        available = [*available, "policy_logprobs", *(["token_kl"] if policy.token_kl is not None else [])]
    is_first = "format" not in fields
    known = chosen if is_first or policy is not None else fields["format"]
    name, found = find_fields(str(path), available, chosen=known, mapped=mapped)
    if policy is not None:  # the whole distribution is not needed where its KL is known
        name, found = "trm-repro", {k: v for k, v in found.items() if not k.endswith("_distribution")}
    if "policy_log_distribution" not in found or "rollout_top_logprobs" in found:
        found.pop("rollout_log_distribution", None)
    unread: set[str] = set()
    if reading.is_quick:
        unread = {found.pop(name, "") for name in ("token_ids", *top_k.FIELDS)}
    late = [theirs for ours, theirs in found.items() if ours in ("mask", "length") and ours not in fields]
    if late and not is_first:  # what came before was taken to be all response
        raise InputError(f"{path}: {late[0]} is in later rows and in none of the first; give it to every row")
    fields.update({"format": name} | found | fields)
    found = {ours: theirs for ours, theirs in fields.items() if ours != "format"}
    reason = top_k.unused(found)
    if reason is not None:
        reading.notes["top_k_unused"] = reason
    reading.formats[name] += is_first
    reading.used |= found
    reading.unused |= set(available) - set(found.values()) - unread
    return set(found.values())


def _checked(raw: RawChunk, fields: dict[str, str], reading: Reading) -> Chunk | None:
    num_rows = raw.num_rows if raw.num_rows is not None else max(c.num_rows for c in raw.columns.values())
    reading.counts["rows"] += num_rows
    rows = Rows(raw, num_rows, reading.report)
    for index, reason in raw.problems:
        rows.bad(index, reason)
    columns = {ours: raw.columns[theirs] for ours, theirs in fields.items() if theirs in raw.columns}
    for name in ("rollout_logprobs", "policy_logprobs"):
        if name not in columns:
            rows.drop(np.ones(num_rows, dtype=bool), f"no {fields.get(name, name)}")
            return None
    columns = check_kinds(raw.path, columns, fields)
    for name in ("rollout_logprobs", "policy_logprobs"):
        reading.dtypes.add(str(columns[name].values.dtype))
        is_null = columns[name].is_null
        if is_null is not None:
            rows.drop(is_null, f"no {fields[name]}")
    check_lengths(columns, fields, rows)
    top_k.check_top(columns, fields, rows)
    columns = rows.take(check_scalars(columns, fields, rows))
    if not len(rows.index):
        return None
    columns = _responses_only(columns, fields, rows, reading)
    check_values(columns, fields, rows)
    return _to_chunk(rows.take(columns), reading)


def _responses_only(
    columns: dict[str, Column], fields: dict[str, str], rows: Rows, reading: Reading
) -> dict[str, Column]:
    """Leave out padding and prompt tokens, by mask, by length, or by what padding looks like."""
    rollout, policy = columns["rollout_logprobs"].flat(), columns["policy_logprobs"].flat()
    columns = columns | {"rollout_logprobs": rollout, "policy_logprobs": policy}
    assert rollout.offsets is not None
    lengths = rollout.lengths
    columns = _token_tails(columns, lengths)
    mask, keep = columns.pop("mask", None), None
    if mask is not None and mask.offsets is not None:
        keep = mask.flat().values.astype(bool) if mask.values.dtype.kind != "f" else mask.flat().values > 0
    elif "length" in columns and columns["length"].offsets is None:
        limit = np.asarray(columns["length"].values, dtype=np.float64)
        rows.drop(~(limit <= lengths), lambda i: f"{fields['length']} is {limit[i]:g}, it has {lengths[i]} log-probs")
        limit = np.where(limit <= lengths, limit, 0).astype(np.int64)
        if (limit < lengths).any():
            keep = np.arange(len(rollout.values)) < np.repeat(rollout.offsets[:-1] + limit, lengths)
    elif len(lengths) > 1 and (lengths == lengths[0]).all() and lengths[0] > 1:
        keep = _without_padding(rollout.values, policy.values, int(lengths[0]), reading)
    if fields["format"] in FORMATS and FORMATS[fields["format"]].is_shifted and keep is not None:
        columns["policy_logprobs"] = policy = _aligned(rollout, policy, keep, reading)
    if keep is None or keep.all():
        return columns
    reading.counts["padding_tokens"] += int((~keep).sum())
    return _keep_tokens(columns, keep)


def _keep_tokens(columns: dict[str, Column], keep: Flags) -> dict[str, Column]:
    """Keep the tokens where ``[N]`` is True in every column with values for all of them."""
    columns, total = dict(columns), len(keep)
    for name, column in columns.items():
        num_values = len(column.flat().values) if column.offsets is not None else 0
        if num_values == total:
            columns[name] = column.flat().keep_values(keep)
        elif (name.endswith("_distribution") or name in top_k.FIELDS) and total and num_values % total == 0:
            columns[name] = column.flat().keep_values(np.repeat(keep, num_values // total))
    return columns


def _token_tails(columns: dict[str, Column], lengths: Array) -> dict[str, Column]:
    """Match ids of prompt and response to log-probs of the response alone: the last ones of each row."""
    ids = columns["token_ids"].flat() if "token_ids" in columns else None
    if ids is None or ids.offsets is None or np.array_equal(ids.lengths, lengths):
        return columns
    extra = ids.lengths - lengths
    if (extra < 0).any():
        return {name: column for name, column in columns.items() if name != "token_ids"}
    position = np.arange(len(ids.values)) - np.repeat(ids.offsets[:-1], ids.lengths)
    return columns | {"token_ids": ids.keep_values(position >= np.repeat(extra, ids.lengths))}


def _without_padding(rollout: Array, policy: Array, length: int, reading: Reading) -> Flags | None:
    """Find what follows the last token that is not 0, or not a number, in both: ``[B * T]`` bool, or None."""
    is_pad = ((rollout == 0) & (policy == 0)) | (np.isnan(rollout) & np.isnan(policy))
    trailing = np.logical_and.accumulate(is_pad.reshape(-1, length)[:, ::-1], axis=1)[:, ::-1]
    if not trailing.any():
        return None
    reading.notes["padding_guessed"] = (
        "no mask or length: trailing positions where both log-probs are 0 or NaN were taken for padding; "
        "name the mask with --map mask=NAME"
    )
    return ~trailing.reshape(-1)


def _aligned(rollout: Column, policy: Column, keep: Flags, reading: Reading) -> Column:
    """Move policy log-probs one position on where that is where they belong: decided once, on the first chunk."""
    moved = np.roll(policy.values, 1)
    if "policy_shift" not in reading.notes:
        gaps = [float(np.abs(values[keep] - rollout.values[keep]).mean()) for values in (policy.values, moved)]
        reading.notes["policy_shift"] = (
            "policy log-probs stand one position before their token and were moved on"
            if gaps[1] < gaps[0]
            else "policy log-probs stand at their token"
        )
    return policy if reading.notes["policy_shift"].endswith("their token") else Column(moved, policy.offsets)


def _to_chunk(columns: dict[str, Column], reading: Reading) -> Chunk | None:
    rollout, policy = columns["rollout_logprobs"].flat(), columns["policy_logprobs"].flat()
    assert rollout.offsets is not None
    if not rollout.num_rows:
        return None
    if len(rollout.values) and not min(float(rollout.values.min()), float(policy.values.min())) >= LEAST_FLOAT32:
        is_infinite = (rollout.values < LEAST_FLOAT32) | (policy.values < LEAST_FLOAT32)
        keep = segment_sum(is_infinite.astype(np.float64), rollout.offsets) == 0
        steps = _steps(columns)
        _count_nonfinite(rollout.lengths[~keep], None if steps is None else steps[~keep], reading)
        return _to_chunk({name: column.take(keep) for name, column in columns.items()}, reading)
    chunk = Chunk(rollout.offsets, rollout.values, policy.values)
    reading.counts["empty_sequences"] += int((rollout.lengths == 0).sum())
    for name in ("reward", "advantage"):
        column = columns.get(name)
        if column is None or column.values.dtype.kind not in "fiub":
            continue
        values = np.asarray(column.values, dtype=np.float64)
        if column.offsets is not None:  # one a token: a reward adds up, an advantage is the same at every token
            flat = column.flat()
            assert flat.offsets is not None
            values = segment_sum(np.nan_to_num(flat.values.astype(np.float64)), flat.offsets)
            values = values / np.maximum(column.lengths, 1) if name == "advantage" else values
        setattr(chunk, name, values)
    chunk.step = _steps(columns)
    if "prompt_id" in columns and columns["prompt_id"].offsets is None:
        chunk.prompt_id = columns["prompt_id"].values
    ids = columns.get("token_ids")
    if ids is not None and ids.offsets is not None and np.array_equal(ids.lengths, rollout.lengths):
        chunk.token_ids = ids.flat().values.astype(np.int64)
    chunk.token_kl = _token_kl(columns, len(rollout.values))
    chunk.interval = top_k.intervals(columns, chunk.token_ids)
    return chunk


def _count_nonfinite(lengths: Array, steps: Array | None, reading: Reading) -> None:
    """Count what every gate rejects: lengths and, where known, steps of sequences with a -inf, ``[B]`` each."""
    reading.counts["nonfinite_sequences"] += len(lengths)
    reading.counts["nonfinite_tokens"] += int(lengths.sum())
    reading.nonfinite_lengths.update(doubling_bin(np.maximum(lengths, 1)).tolist())
    if steps is not None:
        for step, length in zip(steps.tolist(), lengths.tolist(), strict=True):
            reading.nonfinite_steps[step] += 1
            reading.nonfinite_step_tokens[step] += length


def _steps(columns: dict[str, Column]) -> Array | None:
    """Take the step of each sequence, -1 where it has none: ``[B]`` int64, or None."""
    step = columns.get("step")
    if step is None:
        return None
    return np.nan_to_num(np.asarray(step.values, dtype=np.float64), nan=-1.0).astype(np.int64)


def _token_kl(columns: dict[str, Column], num_tokens: int) -> Array | None:
    """Take exact KL as given, or compute it from two whole distributions: ``[N]`` or None."""
    given = columns.get("token_kl")
    if given is not None and given.offsets is not None:
        return given.flat().values if len(given.flat().values) == num_tokens else None
    both = [columns.get(f"{name}_log_distribution") for name in ("rollout", "policy")]
    if both[0] is None or both[1] is None or num_tokens == 0:
        return None
    sizes = [len(column.flat().values) for column in both if column is not None]
    if sizes[0] != sizes[1] or sizes[0] % num_tokens:
        return None
    rollout, policy = (c.flat().values.reshape(num_tokens, -1).astype(np.float64) for c in both if c is not None)
    with np.errstate(invalid="ignore"):
        terms = np.where(np.isneginf(rollout), 0.0, np.exp(rollout) * (rollout - policy))  # [N, V]
    return np.maximum(terms.sum(axis=1), 0.0)
