"""Reading a run's checkpoint outside of training. Nothing in it is executed: tensors and plain values only."""

from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from trm_repro.errors import InputError
from trm_repro.policy import Policy

POLICY_PREFIX = "policy."


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
    if not path.is_file():
        raise InputError(f"{path}: no such file; expected the checkpoint.ckpt of a run")
    try:
        stored = torch.load(path, weights_only=True, map_location="cpu")
        weights = stored["state_dict"]
        return Checkpoint(
            num_steps=int(stored["epoch"]) + 1,
            policy={name.removeprefix(POLICY_PREFIX): weight for name, weight in weights.items()},
            snapshots=stored["RolloutDataModule"]["snapshots"],
        )
    except (RuntimeError, UnpicklingError, KeyError, TypeError, EOFError, ValueError, AttributeError):
        raise InputError(f"{path}: is damaged or no checkpoint of a run") from None


def load_into(policy: Policy, checkpoint: Checkpoint, path: Path) -> None:
    """Give a policy the checkpoint's weights.

    Raises:
        InputError: if the policy has another architecture.
    """
    try:
        policy.load_state_dict(checkpoint.policy)
    except RuntimeError as error:
        line = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise InputError(f"{path}: the checkpoint does not fit the configured policy ({line[:150]})") from None
