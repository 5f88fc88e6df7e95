"""Our own rollout shards: policy log-probs and exact KL lie in the mask file of the same step."""

import enum
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.audit.columns import from_arrow
from pipelines.audit.sources import DAMAGED, RawChunk, find_files
from trm_repro.errors import InputError

NUMBER = re.compile(r"[0-9]+")
NUMBERS = ("step", "update", "sequence_id")
"""Columns of a mask file with a whole number a row; a shard has the first."""


class FileKind(enum.Enum):
    """What a file is to this project."""

    SHARD = "rollouts"
    MASKS = "masks"
    OTHER = "other"


@dataclass
class PolicyRows:
    """One row a sequence of a shard, null where the mask file has none; token_kl None where KL is not known."""

    policy_logprobs: pa.Array
    token_kl: pa.Array | None


def kind_of(path: Path) -> FileKind:
    """Tell our own Parquet files from others by their metadata; a damaged file is `OTHER`."""
    if path.suffix != ".parquet":
        return FileKind.OTHER
    try:
        metadata = pq.read_schema(path).metadata or {}
        kind = json.loads(metadata.get(b"trm_repro", b"{}")).get("kind")
    except (pa.ArrowException, OSError, ValueError, AttributeError, RecursionError):
        return FileKind.OTHER
    return next((known for known in FileKind if known.value == kind), FileKind.OTHER)


def find_dumps(patterns: list[str]) -> list[Path]:
    """Find the files to audit; of a folder of ours, such as a run's, the rollout shards alone.

    Files of one folder whose names differ in numbers alone are taken to be of one kind, so that a store of thousands of
    shards is listed without opening each; what is in a file is checked when it is read.

    Raises:
        InputError: if a pattern finds nothing that can be read.
    """
    files: dict[Path, None] = {}
    for pattern in patterns:
        found = find_files([pattern])
        files |= dict.fromkeys((_own_shards(found) if Path(pattern).is_dir() else []) or found)
    return list(files)


def _own_shards(files: list[Path]) -> list[Path]:
    alike: dict[tuple[Path, str], list[Path]] = {}
    for file in files:
        alike.setdefault((file.parent, NUMBER.sub("#", file.name)), []).append(file)
    kinds = {key: next(filter(_is_own, map(kind_of, own)), FileKind.OTHER) for key, own in alike.items()}
    is_shard = {file for key, own in alike.items() if kinds[key] is FileKind.SHARD for file in own}
    return [file for file in files if file in is_shard]


def _is_own(kind: FileKind) -> bool:
    return kind is not FileKind.OTHER


def read_policy(shard: Path, masks: Path | None) -> PolicyRows:
    """Read what the policy gave each sequence of a shard, just before the first update that used it.

    Args:
        shard: of one step.
        masks: the mask file or its folder; None looks in ../masks/, masks/ and beside the shard.

    Returns:
        Rows in the order of the shard.

    Raises:
        InputError: if there is no mask file of the step, it is of another one, or a file is damaged.
    """
    file = _mask_file(shard, masks)
    shard_steps = _columns(shard, ["step"])
    num_rows = shard_steps.num_rows
    table = _columns(file, [*NUMBERS, "policy_logprobs", "token_kl"])
    steps = [set(of["step"].unique().to_pylist()) for of in (shard_steps, table)]
    if steps[0] != steps[1] and table.num_rows:
        of = [", ".join(map(str, sorted(found, key=str))) for found in steps]
        raise InputError(f"{file}: holds masks of step {of[1]}; give those of {shard}, which is of step {of[0]}")
    table = table.take(pc.sort_indices(table, sort_keys=[("sequence_id", "ascending"), ("update", "ascending")]))
    ids, first = np.unique(table["sequence_id"].to_numpy(), return_index=True)
    if len(ids) and (ids[0] < 0 or ids[-1] >= num_rows):
        raise InputError(f"{file}: has masks of sequence {ids[-1]}, {shard} has {num_rows}; give --masks of its run")
    rows = np.full(num_rows, -1)
    rows[ids] = first
    indices = pa.array(rows, mask=rows < 0)
    token_kl = table["token_kl"].combine_chunks().take(indices)
    return PolicyRows(
        table["policy_logprobs"].combine_chunks().take(indices), None if token_kl.null_count == num_rows else token_kl
    )


def _columns(path: Path, names: list[str]) -> pa.Table:
    """Read columns of a shard or mask file, of which those of `NUMBERS` hold a whole number in every row."""
    try:
        table = pq.read_table(path, columns=names)
        table.validate(full=True)
        wrong = [name for name in NUMBERS if name in names and not _is_whole(table[name])]
    except DAMAGED as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: cannot be read for {', '.join(names)} ({reason}); write it again") from None
    if wrong:
        raise InputError(f"{path}: column {wrong[0]} must hold a whole number in every row; write it again")
    return table


def _is_whole(column: pa.ChunkedArray) -> bool:
    return bool(pa.types.is_integer(column.type)) and not column.null_count


def add_policy(raw: RawChunk, policy: PolicyRows) -> None:
    """Put policy log-probs, and exact KL where known, beside the rows of a chunk of the shard."""
    for name in ("policy_logprobs", "token_kl"):
        array = getattr(policy, name)
        column = None if array is None else from_arrow(array.slice(raw.first_row, raw.num_rows))
        if column is not None:
            raw.columns[name] = column


def _mask_file(shard: Path, masks: Path | None) -> Path:
    if masks is not None and masks.is_file():
        return masks
    folders = [masks] if masks is not None else [shard.parent.parent / "masks", shard.parent / "masks", shard.parent]
    candidates = [folder / name for folder in folders for name in (shard.name, f"masks_{shard.name}")]
    for file in candidates:
        if file != shard and file.is_file() and kind_of(file) is FileKind.MASKS:
            return file
    raise InputError(
        f"{shard}: is a rollout shard without its policy log-probs; trm-repro mask or update writes them, "
        f"then give --masks DIR (looked for {candidates[0]})"
    )
