"""A run's last checkpoints on disk: written whole or not at all, and the newest intact one found again.

``checkpoint.ckpt`` is the newest, ``checkpoint.1.ckpt`` the one before it, and so on.
"""

import os
import re
import shutil
import sys
from pathlib import Path

import torch

from pipelines.checkpoints import SNAPSHOTS, read_checkpoint
from pipelines.sharded_checkpoints import METADATA, check_shards
from trm_repro.errors import InputError

STATE = "meta.pt"
"""What Lightning writes into a folder of shards: where the run is."""


def older(path: Path, age: int) -> Path:
    """Name the checkpoint that was the newest so many checkpoints ago; 0 is the newest."""
    return path if age == 0 else path.with_name(f"{path.stem}.{age}{path.suffix}")


def replace_checkpoint(partial: Path, path: Path, *, keep: int) -> None:
    """Make a finished checkpoint, a file or a folder, the newest; at any moment at least one is whole.

    Args:
        partial: what was written; it is synced to the disk first.
        path: the newest checkpoint's name.
        keep: how many are kept, this one among them.
    """
    for file in sorted(partial.rglob("*")) if partial.is_dir() else [partial]:
        _sync(file)
    for age in range(keep, 0, -1):
        if older(path, age - 1).exists():
            _remove(older(path, age))
            os.replace(older(path, age - 1), older(path, age))
    os.replace(partial, path)
    _sync(path.parent)
    _remove(older(path, keep))


def find_checkpoint(path: Path, *, is_sharded: bool) -> Path | None:
    """Find the newest intact checkpoint; a damaged one is left out with a warning.

    Args:
        path: the newest checkpoint's name.
        is_sharded: whether the run's policy is.

    Returns:
        The checkpoint to go on from, or None where the run begins.

    Raises:
        InputError: if all there are are damaged, or one was written by the other kind of run.
    """
    names = re.compile(rf"{re.escape(path.stem)}\.([0-9]+){re.escape(path.suffix)}")
    ages = {int(match[1]): file for file in path.parent.glob("*") if (match := names.fullmatch(file.name))}
    found = [ages[age] for age in sorted(ages)]
    candidates = [*([path] if path.exists() else []), *found]
    problem: InputError | None = None
    for candidate in candidates:
        _check_kind(candidate, is_sharded=is_sharded)
        try:
            _check_intact(candidate)
        except InputError as error:
            problem = problem or error
            continue
        if problem is not None:
            sys.stderr.write(f"trm-repro: {problem}\ntrm-repro: going on from the one before it, {candidate}\n")
        return candidate
    if problem is not None:
        raise InputError(f"{problem}" + f"; so are the {len(found)} before it" * (len(found) > 0 and path.exists()))
    return None


def _check_kind(path: Path, *, is_sharded: bool) -> None:
    if is_sharded and path.is_file():
        raise InputError(
            f"{path}: was written by one process with trainer.strategy=auto, and cannot go on sharded (FSDP2); set "
            "trainer.strategy=auto and one process, or choose another output.dir"
        )
    if not is_sharded and path.is_dir():
        raise InputError(
            f"{path}: was written by a run whose policy is sharded (FSDP2); set trainer.strategy=fsdp2, with any "
            "number of processes, or choose another output.dir"
        )


def _check_intact(path: Path) -> None:
    if path.is_file():
        read_checkpoint(path)
        return
    try:
        check_shards(path)
        torch.load(path / STATE, weights_only=True)
        if (path / SNAPSHOTS).exists():
            check_shards(path / SNAPSHOTS)
    except Exception as error:  # a damaged pickle can raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(
            f"{path}: is damaged ({reason}); expected the shards of a checkpoint and their {METADATA}"
        ) from None


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
