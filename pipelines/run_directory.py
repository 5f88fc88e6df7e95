"""The files of one run: where they are, and whether they belong to the configuration at hand."""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from pipelines.credentials import public_config
from trm_repro.config import RunConfig, load_config, to_yaml
from trm_repro.errors import InputError
from trm_repro.file_locks import file_lock

WHERE = ("num_nodes", "devices", "strategy", "accelerator", "cpu_offload", "activation_checkpointing")
UNCOMPARED = (
    *("name", "num_steps", "claims", "reproduce", "output", "tracking"),
    *(f"trainer.{key}" for key in WHERE),
    *(f"rollout.{key}" for key in ("placement", "server_urls", "weight_transfer", "overlap")),
)  # keys that do not change what a step computes, but for rounding


class RunDirectory:
    """``output.dir/ARM/seed_N``: configuration, metrics, shards, masks, checkpoint, final policy."""

    def __init__(self, config: RunConfig) -> None:
        """Name the files; nothing is written yet."""
        self.config = config
        self.path = Path(config.output.dir) / config.arm / f"seed_{config.seed}"
        self.config_file = self.path / "config.yaml"
        self.spool_file = self.path / "metrics.jsonl"
        self.shards = self.path / "shards"
        self.masks = self.path / "masks"
        self.faults = self.path / "faults"
        self.checkpoint = self.path / "checkpoint.ckpt"
        self.policy = self.path / "policy"
        self.finished_file = self.path / "finished"

    @property
    def name(self) -> str:
        """Arm and seed."""
        return f"{self.config.arm}/seed_{self.config.seed}"

    @property
    def is_finished(self) -> bool:
        """Whether the run has done all its steps; with num_steps raised it goes on."""
        try:
            return int(self.finished_file.read_bytes()) >= self.config.num_steps
        except (OSError, ValueError):
            return False

    def prepare(self) -> None:
        """Make the folder and write the configuration, or check that the one there is the same.

        Raises:
            InputError: if the folder holds a run with another configuration.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if self.config_file.is_file():
            there = load_config([self.config_file])
            different = list(differences(dataclasses.asdict(there), dataclasses.asdict(self.config)))
            if different:
                raise InputError(
                    f"{self.path} holds a run with another configuration ({'; '.join(different[:3])}); choose another "
                    "output.dir, or delete that folder"
                )
        write_atomically(self.config_file, to_yaml(public_config(self.config)))

    def locked(self) -> AbstractContextManager[None]:
        """Hold the run for this process; a second process gets an InputError."""
        return file_lock(self.path / "lock", busy="another process is training this run; wait for it or stop it")

    def finish(self) -> None:
        """Note the number of steps done."""
        write_atomically(self.finished_file, f"{self.config.num_steps}\n")


def differences(there: dict[str, object], here: dict[str, object], prefix: str = "") -> Iterator[str]:
    """Name the keys in which two configurations differ, with both values."""
    for key, value in here.items():
        if f"{prefix}{key}" in UNCOMPARED:
            continue
        other = there[key]
        if isinstance(value, dict) and isinstance(other, dict):
            yield from differences(other, value, prefix=f"{prefix}{key}.")
        elif value != other:
            yield f"{prefix}{key} is {other} there and {value} here"


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
