"""Rollouts and masks as Parquet files, written whole or not at all.

A rollout shard has one row per sequence of a step; a mask file one row per update and sequence. Token-level
columns are lists with one entry per response token; those of several values a token are flattened, their
trailing shape in the file's metadata.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from trm_repro.batch import TOKEN_TENSORS, Rollout
from trm_repro.errors import InputError

ROLLOUT_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("group", pa.int32()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("rollout_logprobs", pa.list_(pa.float32())),
        ("rollout_log_distribution", pa.list_(pa.float32())),
        ("rollout_top_ids", pa.list_(pa.int32())),
        ("rollout_top_logprobs", pa.list_(pa.float32())),
        ("rollout_experts", pa.list_(pa.uint8())),
        ("finished", pa.bool_()),
        ("reward", pa.float32()),
        ("advantage", pa.float32()),
        ("weight_version", pa.int32()),
    ]
)
TOKEN_DTYPES = {
    "log_distribution": torch.float32,
    "top_ids": torch.int32,
    "top_logprobs": torch.float32,
    "experts": torch.uint8,
}
MASK_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("update", pa.int32()),
        ("sequence_id", pa.int32()),
        ("kept", pa.bool_()),
        ("policy_logprobs", pa.list_(pa.float32())),
        ("token_kl", pa.list_(pa.float32())),
    ]
)


@dataclass(frozen=True, kw_only=True)
class MaskRow:
    """The mask's decision about one sequence at one update.

    Attributes:
        update: index of the update within its step, from 0.
        sequence_id: position of the sequence in its step's rollout shard.
        kept: the decision.
        policy_logprobs: ``[T]`` float32, nats; log pi_theta of the sampled tokens just before the update.
        token_kl: ``[T]`` float32, nats; exact KL, or None where the rollout distribution is not known.
    """

    update: int
    sequence_id: int
    kept: bool
    policy_logprobs: Tensor
    token_kl: Tensor | None


def write_rollouts(path: Path, rollouts: Sequence[Rollout], step: int) -> None:
    """Write one step's rollouts.

    Args:
        path: the file to make or replace.
        rollouts: at least one.
        step: index of the step, from 0.
    """
    shapes = {}
    for name in TOKEN_TENSORS:
        values = [getattr(rollout, name) for rollout in rollouts]
        if any((value is None) != (values[0] is None) for value in values):
            raise ValueError(f"{name} is present in some rollouts and missing in others; all or none must have it")
        if values[0] is not None:
            shapes[name] = list(values[0].shape[1:])
    columns = {
        "step": [step] * len(rollouts),
        "group": [r.group for r in rollouts],
        "prompt_ids": [np.asarray(r.prompt_ids, dtype=np.int32) for r in rollouts],
        "response_ids": [np.asarray(r.response_ids, dtype=np.int32) for r in rollouts],
        "rollout_logprobs": [r.logprobs.numpy() for r in rollouts],
        **{f"rollout_{name}": [_flat(getattr(r, name)) for r in rollouts] for name in TOKEN_TENSORS},
        "finished": [r.finished for r in rollouts],
        "reward": [r.reward for r in rollouts],
        "advantage": [r.advantage for r in rollouts],
        "weight_version": [r.weight_version for r in rollouts],
    }
    metadata = {"trm_repro": json.dumps({"kind": "rollouts", "shapes": shapes})}
    _write(path, pa.table(columns, schema=ROLLOUT_SCHEMA.with_metadata(metadata)))


def read_rollouts(path: Path) -> tuple[list[Rollout], int]:
    """Read one step's rollouts.

    Args:
        path: a file written by `write_rollouts`.

    Returns:
        The rollouts, equal to the bit to those written, and the step.

    Raises:
        InputError: if the file is missing, damaged, or no rollout shard.
    """
    table = _read(path, "rollouts", ROLLOUT_SCHEMA, optional=[f"rollout_{name}" for name in TOKEN_TENSORS])
    shapes = json.loads(table.schema.metadata[b"trm_repro"]).get("shapes")
    if not isinstance(shapes, dict):
        raise InputError(f"{path}: does not say the shapes of its token tensors; it was not written by this version")
    rollouts = []
    for number, row in enumerate(table.to_pylist()):
        try:
            rollouts.append(
                Rollout(
                    group=row["group"],
                    prompt_ids=tuple(row["prompt_ids"]),
                    response_ids=tuple(row["response_ids"]),
                    logprobs=torch.tensor(row["rollout_logprobs"], dtype=torch.float32),
                    **{
                        name: _shaped(row[f"rollout_{name}"], shapes.get(name), dtype)
                        for name, dtype in TOKEN_DTYPES.items()
                    },
                    finished=row["finished"],
                    reward=row["reward"],
                    advantage=row["advantage"],
                    weight_version=row["weight_version"],
                )
            )
        except (ValueError, RuntimeError, TypeError) as error:
            raise InputError(f"{path}: row {number} is no rollout ({error})") from None
    if not rollouts:
        raise InputError(f"{path}: has no rollouts")
    return rollouts, int(table["step"][0].as_py())


def write_masks(path: Path, rows: Sequence[MaskRow], step: int) -> None:
    """Write the masks of one step's updates.

    Args:
        path: the file to make or replace.
        rows: one per update and sequence.
        step: index of the step, from 0.
    """
    columns = {
        "step": [step] * len(rows),
        "update": [row.update for row in rows],
        "sequence_id": [row.sequence_id for row in rows],
        "kept": [row.kept for row in rows],
        "policy_logprobs": [row.policy_logprobs.numpy() for row in rows],
        "token_kl": [_flat(row.token_kl) for row in rows],
    }
    metadata = {"trm_repro": json.dumps({"kind": "masks"})}
    _write(path, pa.table(columns, schema=MASK_SCHEMA.with_metadata(metadata)))


def read_masks(path: Path) -> list[MaskRow]:
    """Read the masks of one step's updates.

    Args:
        path: a file written by `write_masks`.

    Returns:
        One row per update and sequence, in the order written.

    Raises:
        InputError: if the file is missing, damaged, or no mask file.
    """
    return [
        MaskRow(
            update=row["update"],
            sequence_id=row["sequence_id"],
            kept=row["kept"],
            policy_logprobs=torch.tensor(row["policy_logprobs"], dtype=torch.float32),
            token_kl=_shaped(row["token_kl"], [], torch.float32),
        )
        for row in _read(path, "masks", MASK_SCHEMA, optional=["token_kl"]).to_pylist()
    ]


def _flat(value: Tensor | None) -> np.ndarray | None:
    return None if value is None else value.reshape(-1).numpy()


def _shaped(values: list[float] | None, shape: list[int] | None, dtype: torch.dtype) -> Tensor | None:
    if values is None or shape is None:
        return None
    return torch.tensor(values, dtype=dtype).reshape(-1, *shape)


def _write(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    pq.write_table(table, partial, compression="zstd")
    os.replace(partial, path)


def _read(path: Path, kind: str, schema: pa.Schema, optional: Sequence[str]) -> pa.Table:
    if not path.is_file():
        raise InputError(f"{path}: no such file; expected {kind} as Parquet")
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: is not a readable Parquet file ({str(error).splitlines()[0]})") from None
    metadata = table.schema.metadata or {}
    try:
        found = json.loads(metadata[b"trm_repro"])["kind"]
    except (KeyError, ValueError, TypeError):
        found = "something else"
    if found != kind or not table.schema.equals(schema):
        raise InputError(f"{path}: holds {found} with columns {table.column_names}; expected {kind} of this version")
    for name in table.column_names:
        if name not in optional and table[name].null_count:
            row = table[name].is_null().index(True).as_py()
            raise InputError(f"{path}: row {row} is no {kind.removesuffix('s')} ({name} is empty)")
    return table
