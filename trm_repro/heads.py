"""Output heads beside rollout shards: one safetensors file per weight version, for shards of hidden states.

A shard of hidden states says what the rollout policy was only together with the head that the engine held. Shape
letters: V vocabulary, H hidden size.
"""

import contextlib
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trm_repro.batch import Rollout
from trm_repro.errors import InputError

NAME = re.compile(r"head_(\d{5,})\.safetensors")
KEY = "lm_head.weight"


def head_path(folder: Path, version: int) -> Path:
    """Name the file of a weight version's head."""
    return folder / f"head_{version:05d}.safetensors"


def write_head(folder: Path, version: int, head: Tensor) -> None:
    """Write the head that the engine held, whole or not at all.

    Args:
        folder: of the shards that need it.
        version: weight version.
        head: ``[V, H]``, in the engine's dtype.

    Raises:
        InputError: if it cannot be written.
    """
    path = head_path(folder, version)
    partial = path.with_name(f"{path.name}.partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({KEY: head.contiguous()}, partial, metadata={"weight_version": str(version)})
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written ({error}); free the place or choose another") from None


def read_heads(folder: Path, rollouts: Sequence[Rollout]) -> dict[int, Tensor] | None:
    """Read the heads that rollouts of hidden states need.

    Args:
        folder: of their shard.
        rollouts: as read from it.

    Returns:
        ``[V, H]`` by weight version; None for rollouts without hidden states.

    Raises:
        InputError: if one is missing, damaged, of another version, or does not fit the hidden states.
    """
    hidden = rollouts[0].hidden
    if hidden is None:
        return None
    heads = {}
    for version in sorted({rollout.weight_version for rollout in rollouts}):
        path = head_path(folder, version)
        if not path.is_file():
            raise InputError(
                f"{path}: no such file; the shard holds hidden states sampled from weight version {version}, so copy "
                "the head of that name together with the shard"
            )
        try:
            with safe_open(path, framework="pt") as file:
                found = (file.metadata() or {}).get("weight_version")
                head = file.get_tensor(KEY)
        except (SafetensorError, OSError, ValueError) as error:
            raise InputError(f"{path}: is not a readable output head ({error}); sample the shard again") from None
        if found != str(version):
            raise InputError(f"{path}: is the head of weight version {found}; expected {version}, as its name says")
        if head.dim() != 2 or head.shape[1] != hidden.shape[1] or head.dtype != hidden.dtype:
            raise InputError(
                f"{path}: is {list(head.shape)} of {head.dtype}; expected [vocabulary, {hidden.shape[1]}] of "
                f"{hidden.dtype}, as the shard's hidden states"
            )
        heads[version] = head
    return heads


def remove_unused_heads(folder: Path) -> None:
    """Delete the heads that no shard of the folder needs any more.

    A head above every shard's version stays: it is written before the shard that needs it.

    Args:
        folder: of shards, named step_NNNNN.parquet.
    """
    heads = {int(match[1]): path for path in folder.glob("head_*") if (match := NAME.fullmatch(path.name))}
    if not heads:
        return
    needed: set[int] = set()
    for shard in folder.glob("step_*.parquet"):
        try:
            needed |= _versions(shard, shard.stat().st_mtime_ns)
        except OSError:
            continue
    for version in heads.keys() - needed:
        if version < max(needed, default=version + 1):
            heads[version].unlink(missing_ok=True)


@lru_cache(maxsize=1 << 16)
def _versions(shard: Path, changed: int) -> frozenset[int]:
    """Read the weight versions of a shard, once for each time it was written: this is asked after every step."""
    try:
        return frozenset(pq.read_table(shard, columns=["weight_version"]).column(0).to_pylist())
    except (pa.ArrowException, KeyError):
        return frozenset()  # mask files and damaged shards need no head
