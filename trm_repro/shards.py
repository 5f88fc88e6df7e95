"""Rollouts and masks as Parquet files, written whole or not at all.

A rollout shard has one row per sequence of a step; a mask file one row per update and sequence. Token-level
columns are lists with one entry per response token; those of several values a token are flattened, their
trailing shape in the file's metadata. Rollouts are written and read in row groups of at most `GROUP_BYTES` (or one
sequence), so that beside the rollouts themselves only one group's copies are in memory.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from trm_repro.batch import LOGPROB_ROUNDING, TOKEN_TENSORS, Rollout
from trm_repro.errors import InputError
from trm_repro.parquet_files import open_parquet, parquet_rows, write_table, write_tables

ROLLOUT_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("group", pa.int32()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("rollout_logprobs", pa.list_(pa.float32())),
        ("rollout_log_distribution", pa.list_(pa.float32())),
        ("rollout_hidden", pa.large_binary()),
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
HIDDEN_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""Hidden states are stored as their bytes, in the machine's order: Parquet has no bfloat16."""
TOKEN_DIMENSIONS = {"log_distribution": 2, "hidden": 2, "top_ids": 2, "top_logprobs": 2, "experts": 3}
GROUP_BYTES = 64 * 2**20
"""Token tensors of one row group."""
UNREADABLE = (ValueError, RuntimeError, TypeError, OverflowError)
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

    Raises:
        ValueError: if an optional tensor is present in some rollouts alone.
        InputError: if the file cannot be written.
    """
    shapes: dict[str, list[int]] = {}
    for name in TOKEN_TENSORS:
        values = [getattr(rollout, name) for rollout in rollouts]
        if any((value is None) != (values[0] is None) for value in values):
            raise ValueError(f"{name} is present in some rollouts and missing in others; all or none must have it")
        if values[0] is not None:
            shapes[name] = list(values[0].shape[1:])
    about = {"kind": "rollouts", "shapes": shapes}
    if rollouts[0].hidden is not None:
        about["hidden_dtype"] = str(rollouts[0].hidden.dtype).removeprefix("torch.")
    schema = ROLLOUT_SCHEMA.with_metadata({"trm_repro": json.dumps(about)})
    write_tables(path, schema, (pa.table(_columns(group, step), schema=schema) for group in row_groups(rollouts)))


def row_groups(rollouts: Sequence[Rollout]) -> Iterator[Sequence[Rollout]]:
    """Divide rollouts into consecutive groups whose token tensors take at most `GROUP_BYTES`; at least one each."""
    start, size = 0, 0
    for index, rollout in enumerate(rollouts):
        tensors = [rollout.logprobs, *(getattr(rollout, name) for name in TOKEN_TENSORS)]
        more = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
        if index > start and size + more > GROUP_BYTES:
            yield rollouts[start:index]
            start, size = index, 0
        size += more
    yield rollouts[start:]


def _columns(rollouts: Sequence[Rollout], step: int) -> dict[str, list[Any]]:
    return {
        "step": [step] * len(rollouts),
        "group": [r.group for r in rollouts],
        "prompt_ids": [np.asarray(r.prompt_ids, dtype=np.int32) for r in rollouts],
        "response_ids": [np.asarray(r.response_ids, dtype=np.int32) for r in rollouts],
        "rollout_logprobs": [r.logprobs.numpy() for r in rollouts],
        **{f"rollout_{name}": [_flat(getattr(r, name)) for r in rollouts] for name in TOKEN_DTYPES},
        "rollout_hidden": [_bytes(r.hidden) for r in rollouts],
        "finished": [r.finished for r in rollouts],
        "reward": [r.reward for r in rollouts],
        "advantage": [r.advantage for r in rollouts],
        "weight_version": [r.weight_version for r in rollouts],
    }


def read_rollouts(path: Path) -> tuple[list[Rollout], int]:
    """Read one step's rollouts.

    Args:
        path: a file written by `write_rollouts`.

    Returns:
        The rollouts, equal to the bit to those written, and the step.

    Raises:
        InputError: if the file is missing, damaged, or no rollout shard, or a row holds what no sampling gives; whether
            the rollouts fit a policy says `trm_repro.shard_checks.check_fits`.
    """
    file = open_parquet(path, "rollouts", ROLLOUT_SCHEMA)
    about = json.loads(file.schema_arrow.metadata[b"trm_repro"])
    shapes, hidden_dtype = about.get("shapes"), HIDDEN_DTYPES.get(str(about.get("hidden_dtype")))
    if not isinstance(shapes, dict):
        raise InputError(f"{path}: does not say the shapes of its token tensors; it was not written by this version")
    rollouts: list[Rollout] = []
    steps: set[int] = set()
    for number, row in enumerate(parquet_rows(path, file, "rollouts", [f"rollout_{name}" for name in TOKEN_TENSORS])):
        try:
            rollout = _to_rollout(row, shapes, hidden_dtype)
            _check_values(rollout)
            steps.add(_at_least_0(row["step"], "step"))
            if len(steps) > 1:
                raise ValueError(f"step is {row['step']}, that of the rows before is {min(steps - {row['step']})}")
            for name in TOKEN_TENSORS:
                if rollouts and (getattr(rollout, name) is None) != (getattr(rollouts[0], name) is None):
                    raise ValueError(f"{name} is present in some rows and missing in others; all or none must have it")
        except UNREADABLE as error:
            raise InputError(
                f"{path}: row {number} is no rollout ({' '.join(str(error).split())}); sample the shard again with "
                "trm-repro rollout"
            ) from None
        rollouts.append(rollout)
    if not rollouts:
        raise InputError(f"{path}: has no rollouts")
    return rollouts, steps.pop()


def write_masks(path: Path, rows: Sequence[MaskRow], step: int) -> None:
    """Write the masks of one step's updates.

    Args:
        path: the file to make or replace.
        rows: one per update and sequence.
        step: index of the step, from 0.

    Raises:
        InputError: if the file cannot be written.
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
    write_table(path, pa.table(columns, schema=MASK_SCHEMA.with_metadata(metadata)))


def read_masks(path: Path, *, of_step: int | None = None) -> list[MaskRow]:
    """Read the masks of one step's updates.

    Args:
        path: a file written by `write_masks`.
        of_step: the step that they have to be of; None takes any.

    Returns:
        One row per update and sequence, in the order written.

    Raises:
        InputError: if the file is missing, damaged, no mask file, or of another step.
    """
    rows = []
    file = open_parquet(path, "masks", MASK_SCHEMA)
    for number, row in enumerate(parquet_rows(path, file, "masks", ["token_kl"])):
        if of_step not in (None, row["step"]):
            raise InputError(f"{path}: holds masks of step {row['step']}; give those of the shard's step, {of_step}")
        try:
            mask = MaskRow(
                update=_at_least_0(row["update"], "update"),
                sequence_id=_at_least_0(row["sequence_id"], "sequence_id"),
                kept=row["kept"],
                policy_logprobs=torch.tensor(row["policy_logprobs"], dtype=torch.float32),
                token_kl=None if row["token_kl"] is None else torch.tensor(row["token_kl"], dtype=torch.float32),
            )
            if mask.token_kl is not None and mask.token_kl.shape != mask.policy_logprobs.shape:
                raise ValueError(
                    f"{len(mask.token_kl)} values of token_kl, {len(mask.policy_logprobs)} of policy_logprobs"
                )
            if bool((mask.policy_logprobs > LOGPROB_ROUNDING).any()):
                raise ValueError(f"a policy log-prob is {float(mask.policy_logprobs.max()):.3g}, above 0")
        except UNREADABLE as error:
            raise InputError(f"{path}: row {number} is no mask ({' '.join(str(error).split())})") from None
        rows.append(mask)
    return rows


def _to_rollout(row: dict[str, Any], shapes: dict[str, Any], hidden_dtype: torch.dtype | None) -> Rollout:
    dtypes = TOKEN_DTYPES | {"hidden": hidden_dtype}
    for name in ("prompt_ids", "response_ids"):
        if None in row[name]:
            raise ValueError(f"{name} has an empty entry")
    return Rollout(
        group=_at_least_0(row["group"], "group"),
        prompt_ids=tuple(row["prompt_ids"]),
        response_ids=tuple(row["response_ids"]),
        logprobs=torch.tensor(row["rollout_logprobs"], dtype=torch.float32),
        **{name: _token_tensor(name, row[f"rollout_{name}"], shapes.get(name), dtypes[name]) for name in TOKEN_TENSORS},
        finished=row["finished"],
        reward=row["reward"],
        advantage=row["advantage"],
        weight_version=_at_least_0(row["weight_version"], "weight_version"),
    )


def _token_tensor(
    name: str, values: list[float] | bytes | None, shape: list[int] | None, dtype: torch.dtype | None
) -> Tensor | None:
    if values is None:
        return None
    is_list = isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
    if shape is None or not is_list or len(shape) != TOKEN_DIMENSIONS[name] - 1:
        raise ValueError(f"the file says shape {shape} for {name}; expected {TOKEN_DIMENSIONS[name] - 1} sizes >= 1")
    if dtype is None:
        raise ValueError(f"the file says no dtype for {name}; expected one of {', '.join(HIDDEN_DTYPES)}")
    if isinstance(values, bytes):
        return torch.frombuffer(bytearray(values), dtype=dtype).reshape(-1, *shape)
    return torch.tensor(values, dtype=dtype).reshape(-1, *shape)


def _check_values(rollout: Rollout) -> None:
    """Refuse values that no sampling gives. A NaN or -inf log-prob of a sampled token passes: masks reject it."""
    for name in ("prompt_ids", "response_ids"):
        _at_least_0(min(getattr(rollout, name)), name)
    if not 0 <= rollout.reward <= 1:
        raise ValueError(f"reward is {rollout.reward}; expected 0 to 1")
    if not math.isfinite(rollout.advantage):
        raise ValueError(f"advantage is {rollout.advantage}; expected a finite number")
    for name in ("logprobs", "log_distribution", "top_logprobs"):
        value = torch.zeros(0) if getattr(rollout, name) is None else getattr(rollout, name)
        if name != "logprobs" and bool(value.isnan().any()):
            raise ValueError(f"{name} holds NaN; expected log-probs")
        if bool((value > LOGPROB_ROUNDING).any()):
            raise ValueError(f"{name} holds {value[value > LOGPROB_ROUNDING][0]:.4g}; log-probs are at most 0")
    _check_top(rollout.top_ids, rollout.top_logprobs)


def _check_top(ids: Tensor | None, logprobs: Tensor | None) -> None:
    if ids is None and logprobs is None:
        return
    if ids is None or logprobs is None or ids.shape != logprobs.shape:
        raise ValueError("top_ids and top_logprobs differ in shape; expected one log-prob for each id")
    _at_least_0(int(ids.min()), "top_ids")
    if bool((ids.sort(dim=-1).values.diff(dim=-1) == 0).any()):
        raise ValueError("top_ids names a token twice")


def _at_least_0(value: int, name: str) -> int:
    if value < 0:
        raise ValueError(f"{name} holds {value}; expected a whole number >= 0")
    return value


def _flat(value: Tensor | None) -> np.ndarray | None:
    return None if value is None else value.reshape(-1).numpy()


def _bytes(value: Tensor | None) -> bytes | None:
    return None if value is None else value.contiguous().view(torch.uint8).numpy().tobytes()
