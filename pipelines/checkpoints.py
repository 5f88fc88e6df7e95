"""Reading a run's checkpoint outside of training. Nothing in it is executed: tensors and plain values only."""

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from trm_repro.errors import InputError
from trm_repro.policy import Policy

POLICY_PREFIX = "policy."
SNAPSHOTS = "snapshots"
"""Folder of a sharded run's snapshots within its checkpoint, which is then a folder too."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a run after a number of steps.

    Attributes:
        num_steps: steps done.
        policy: the policy's weights by name.
        snapshots: (weight version, the model's weights by name), oldest first; the next step samples from the first.
    """

    num_steps: int
    policy: dict[str, Tensor]
    snapshots: list[tuple[int, dict[str, Tensor]]]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Args:
        path: a ``checkpoint.ckpt``.

    Returns:
        What a stage command needs of it.

    Raises:
        InputError: if the file is missing, damaged, or no checkpoint of a run.
    """
    if path.is_dir():
        raise InputError(
            f"{path}: is the checkpoint of a run whose policy is sharded (FSDP2), which only training reads; give the "
            "run's policy folder, or a checkpoint of a run with trainer.strategy=auto and one process"
        )
    if not path.is_file():
        raise InputError(f"{path}: no such file; expected the checkpoint.ckpt of a run")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about pickles it does not open
            stored = torch.load(path, weights_only=True, map_location="cpu")
        if not isinstance(stored, dict):
            raise TypeError("no dictionary")
        weights, snapshots = stored["state_dict"], list(stored["RolloutDataModule"]["snapshots"])
        checkpoint = Checkpoint(
            num_steps=int(stored["epoch"]) + 1,
            policy={name.removeprefix(POLICY_PREFIX): weight for name, weight in weights.items()},
            snapshots=[(int(version), dict(tensors)) for version, tensors in snapshots],
        )
        tensors = [tensor for _, held in (*checkpoint.snapshots, (0, checkpoint.policy)) for tensor in held.values()]
        if not checkpoint.snapshots or checkpoint.num_steps < 1 or not all(isinstance(t, Tensor) for t in tensors):
            raise ValueError("no snapshots, no steps, or weights that are no tensors")
    except Exception:  # a damaged pickle can raise anything, and the rest whatever its types do
        raise InputError(
            f"{path}: is damaged or no checkpoint of a run; expected its checkpoint.ckpt: give another, or delete this "
            "file and train again"
        ) from None
    return checkpoint


def load_into(policy: Policy, checkpoint: Checkpoint, path: Path) -> None:
    """Give a policy the checkpoint's weights.

    Raises:
        InputError: if the policy has another architecture than the checkpoint or its snapshots.
    """
    try:
        policy.load_state_dict(checkpoint.policy)
    except RuntimeError as error:
        line = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise InputError(
            f"{path}: the checkpoint does not fit the configured policy ({line[:150]}); give the configuration of its "
            "run"
        ) from None
    check_snapshots(policy.model, checkpoint, path)


def check_snapshots(model: nn.Module, checkpoint: Checkpoint, path: Path) -> None:
    """Check that an engine on a model's architecture can hold the checkpoint's snapshots.

    Args:
        model: the policy's Hugging Face model.
        checkpoint: as read.
        path: its file, for the message.

    Raises:
        InputError: if a snapshot has other tensors than the model.
    """
    expected = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    for version, weights in checkpoint.snapshots:
        found = {name: tuple(weight.shape) for name, weight in weights.items()}
        different = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
        if different:
            name = different[0]
            raise InputError(
                f"{path}: the checkpoint's weights of version {version} do not fit the configured policy ({name} is "
                f"{found.get(name, 'missing')} there and {expected.get(name, 'missing')} here); give the configuration "
                "of its run"
            )
