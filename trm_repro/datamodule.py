"""Rollouts as a LightningDataModule: `train_dataloader` syncs weights, samples, grades and batches one step."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import lightning as L  # noqa: N812
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trm_repro.batch import Rollout, RolloutBatch
from trm_repro.config import RunConfig, derive_seed
from trm_repro.errors import FaultError
from trm_repro.rollout.sampler import RolloutSampler
from trm_repro.rollout.synced_engine import policy_weights
from trm_repro.shards import write_rollouts
from trm_repro.stage_clock import StageClock


def shard_name(step: int) -> str:
    """Name the rollout shard of a step."""
    return f"step_{step:05d}.parquet"


class RolloutDataModule(L.LightningDataModule):
    """Gives each step (epoch) its minibatches, sampled from weights ``rollout.staleness_steps`` steps old."""

    def __init__(
        self,
        config: RunConfig,
        sampler: RolloutSampler | None,
        *,
        run_name: str,
        shard_dir: Path | None = None,
        stored: Sequence[Rollout] = (),
    ) -> None:
        """Set up.

        Args:
            config: the run.
            sampler: makes rollouts; None to train on stored ones.
            run_name: names the run to the engine, which counts weight versions within it.
            shard_dir: where each step's rollouts are written, or None to write none.
            stored: the rollouts of the one step to train on, where there is no sampler.
        """
        super().__init__()
        if (sampler is None) == (not stored):
            raise ValueError("give either a sampler or stored rollouts")
        self.config = config
        self.sampler = sampler
        self.run_name = run_name
        self.shard_dir = shard_dir
        self.stored = list(stored)
        self.clock = StageClock()
        self.snapshots: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=config.rollout.staleness_steps + 1)

    def train_dataloader(self) -> DataLoader[RolloutBatch]:
        """Make the minibatches of the current step: sync, roll out, grade, write the shard, divide."""
        step = self.trainer.current_epoch
        if self.sampler is None:
            return as_loader(minibatches(self.stored, self.config, step))
        if not self.snapshots:
            self.take_snapshot(step)
        version, weights = self.snapshots[0]
        expected = max(0, step - self.config.rollout.staleness_steps)
        if version != expected:
            raise FaultError(f"step {step} should sample from weight version {expected}, found {version}")
        with self.clock.measure("sync"):
            self.sampler.engine.sync(weights, run=self.run_name, version=version)
        with self.clock.measure("rollout"):
            rollouts = self.sampler.sample_step(step, version)
            if self.shard_dir is not None:
                write_rollouts(self.shard_dir / shard_name(step), rollouts, step)
        return as_loader(minibatches(rollouts, self.config, step))

    def transfer_batch_to_device(self, batch: RolloutBatch, device: torch.device, dataloader_idx: int) -> RolloutBatch:
        """Move a minibatch; Lightning's own transfer refuses frozen dataclasses."""
        return batch.to(device)

    def take_snapshot(self, version: int) -> None:
        """Keep a copy of the policy's weights, forgetting those too old to be sampled from."""
        self.snapshots.append((version, policy_weights(self.trainer.lightning_module.policy)))

    def state_dict(self) -> dict[str, Any]:
        """Return the snapshots for the checkpoint."""
        return {"snapshots": list(self.snapshots)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the snapshots."""
        self.snapshots.extend(state_dict["snapshots"])


def as_loader(batches: list[RolloutBatch]) -> DataLoader[RolloutBatch]:
    """Serve ready-made minibatches in their order."""
    return DataLoader(cast(Dataset[RolloutBatch], batches), batch_size=None, shuffle=False)


def minibatches(rollouts: Sequence[Rollout], config: RunConfig, step: int) -> list[RolloutBatch]:
    """Divide a step's rollouts into the minibatches of its updates.

    Args:
        rollouts: of the step, in the order of its shard.
        config: the run.
        step: index of the step, from 0.

    Returns:
        ``num_epochs * num_updates_per_rollout`` minibatches; those of one epoch are disjoint.
    """
    batch = RolloutBatch.from_rollouts(rollouts)
    size = len(rollouts) // config.update.num_updates_per_rollout
    parts = []
    for epoch in range(config.update.num_epochs):
        generator = torch.Generator().manual_seed(derive_seed(config.seed, "minibatches", step, epoch))
        for chosen in torch.randperm(len(rollouts), generator=generator).split(size):
            keep = torch.zeros(len(rollouts), dtype=torch.bool)
            keep[chosen] = True
            parts.append(batch.select(keep))
    return parts
