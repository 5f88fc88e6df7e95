"""Rollouts as a LightningDataModule: `train_dataloader` syncs weights, samples, grades and batches one step."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import lightning as L  # noqa: N812
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trm_repro import ranks
from trm_repro.batch import TOKEN_TENSORS, Rollout, RolloutBatch
from trm_repro.config import RunConfig, derive_seed
from trm_repro.errors import FaultError
from trm_repro.heads import write_head
from trm_repro.policy import Policy
from trm_repro.rollout.ahead import RolloutsAhead
from trm_repro.rollout.leading import lead
from trm_repro.rollout.precision import engine_head
from trm_repro.rollout.probe import ProbeReading
from trm_repro.rollout.sampler import RolloutSampler
from trm_repro.sharding import ShardedWeights, load_snapshots, policy_weights
from trm_repro.shards import write_rollouts
from trm_repro.shares import Share, divide
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
        heads: Mapping[int, Tensor] | None = None,
        snapshot_dir: Path | None = None,
    ) -> None:
        """Set up.

        Args:
            config: the run.
            sampler: makes rollouts; None to train on stored ones.
            run_name: names the run to the engine, which counts weight versions within it.
            shard_dir: where each step's rollouts are written, or None to write none.
            stored: the rollouts of the one step to train on, where there is no sampler.
            heads: for stored rollouts with hidden states, the output head of each weight version.
            snapshot_dir: where the snapshots of a sharded policy are read from when the run goes on.
        """
        super().__init__()
        if (sampler is None) == (not stored):
            raise ValueError("give either a sampler or stored rollouts")
        self.config = config
        self.sampler = sampler
        self.run_name = run_name
        self.shard_dir = shard_dir
        self.stored = list(stored)
        self.heads = dict(heads or {})
        self.clock = StageClock()
        self.snapshots: deque[tuple[int, Mapping[str, Tensor]]] = deque(maxlen=config.rollout.staleness_steps + 1)
        self.versions_to_load: list[int] = []
        self.snapshot_dir = snapshot_dir
        self.ahead = RolloutsAhead() if config.rollout.overlap else None
        self.share = Share()
        self.readings: dict[int, ProbeReading] = {}
        """The probe after the sync of each step's weights, until it is taken."""

    def train_dataloader(self) -> DataLoader[RolloutBatch]:
        """Make the minibatches of the current step: sync, roll out, grade, write the shard, divide."""
        step = self.trainer.current_epoch
        if self.sampler is None:
            return as_loader(self._divided(self.stored, step))
        if step >= self.config.num_steps:  # killed after the last checkpoint: Lightning asks before it finds it is done
            return as_loader([])
        if self.versions_to_load:
            assert self.snapshot_dir is not None
            self.snapshots.extend(load_snapshots(self.snapshot_dir, self.versions_to_load, self._policy))
            self.versions_to_load = []
        if not self.snapshots:
            self.take_snapshot(step)
        rollouts = self.ahead.take(step) if self.ahead is not None else None
        if self.ahead is None or not self.ahead.has_taken:
            version = self._sync(step)
            with self.clock.measure("rollout"):
                rollouts = lead(self.sampler.engine.engine, lambda: self._sample(step, version))
        loader = as_loader(self._divided(rollouts or [], step))
        if self.ahead is not None and step + 1 < self.config.num_steps:
            following = self._sync(step + 1)
            self.ahead.begin(step + 1, lambda: self._sample(step + 1, following))
        return loader

    def _sync(self, step: int) -> int:
        """Give the engine the weights that a step samples from; returns their version."""
        assert self.sampler is not None
        expected = max(0, step - self.config.rollout.staleness_steps)
        versions = [version for version, _ in self.snapshots]
        if expected not in versions:
            raise FaultError(f"step {step} should sample from weight version {expected}, found {versions}")
        engine = self.sampler.engine
        engine.probe.policy = engine.probe.policy or self._policy
        with self.clock.measure("sync"):
            weights = self.snapshots[versions.index(expected)][1]
            engine.sync(weights, run=self.run_name, version=expected)
            self._keep_head(expected, weights)
        self.readings[step] = engine.reading
        return expected

    def _keep_head(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Keep the engine's output head where rollouts are stored as hidden states."""
        if self.config.rollout.distribution == "hidden" and version not in self.heads:
            # The version before may still be in use: the next step's weights can go in ahead of time.
            self.heads = {kept: head for kept, head in self.heads.items() if kept >= version - 1}
            self.heads[version] = engine_head(weights, self.config.rollout.precision)

    def _sample(self, step: int, version: int) -> list[Rollout]:
        assert self.sampler is not None
        rollouts = self.sampler.sample_step(step, version)
        if self.shard_dir is not None:
            if rollouts[0].hidden is not None:
                write_head(self.shard_dir, version, self.heads[version])
            write_rollouts(self.shard_dir / shard_name(step), rollouts, step)
        return rollouts

    def _divided(self, rollouts: Sequence[Rollout], step: int) -> list[RolloutBatch]:
        """Divide a step into minibatches, and its forward and backward passes among the ranks."""
        if ranks.num_ranks() == 1:
            self.share = Share()
            return minibatches(rollouts, self.config, step, self.heads)
        batches: list[RolloutBatch] = []
        parts: list[list[int]] = []
        if ranks.is_first():
            nothing: dict[str, Any] = dict.fromkeys(TOKEN_TENSORS)
            bare = [replace(rollout, **nothing) for rollout in rollouts]
            batches = minibatches(bare, self.config, step)
            parts = divide(batches[: self.config.update.num_updates_per_rollout], ranks.num_ranks())

        def share_of(rank: int) -> RolloutBatch:
            lengths = [len(rollout.prompt_ids) + len(rollout.response_ids) for rollout in rollouts]
            ids = sorted(parts[rank], key=lambda index: lengths[index])
            part = RolloutBatch.from_rollouts([rollouts[index] for index in ids], self.heads)
            return replace(part, sequence_ids=torch.tensor(ids))

        batches, own = ranks.broadcast(batches), ranks.deal(share_of)
        self.share = Share(own)
        return batches

    @property
    def _policy(self) -> Policy:
        return self.trainer.lightning_module.policy

    def transfer_batch_to_device(self, batch: RolloutBatch, device: torch.device, dataloader_idx: int) -> RolloutBatch:
        """Move a minibatch; Lightning's own transfer refuses frozen dataclasses."""
        return batch.to(device)

    def take_snapshot(self, version: int) -> None:
        """Keep a copy of the policy's weights, forgetting those too old to be sampled from."""
        self.snapshots.append((version, policy_weights(self._policy)))

    def state_dict(self) -> dict[str, Any]:
        """Return the snapshots for the checkpoint; of sharded ones the versions, as their shards go beside it."""
        if self.sharded_snapshots:
            return {"versions": [version for version, _ in self.snapshots]}
        return {"snapshots": list(self.snapshots)}

    @property
    def sharded_snapshots(self) -> list[tuple[int, ShardedWeights]]:
        """The snapshots, where the policy is sharded."""
        return [(version, weights) for version, weights in self.snapshots if isinstance(weights, ShardedWeights)]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the snapshots; sharded ones are read when the policy is there."""
        self.snapshots.extend(state_dict.get("snapshots", []))
        self.versions_to_load = list(state_dict.get("versions", []))


def as_loader(batches: list[RolloutBatch]) -> DataLoader[RolloutBatch]:
    """Serve ready-made minibatches in their order."""
    return DataLoader(cast(Dataset[RolloutBatch], batches), batch_size=None, shuffle=False)


def minibatches(
    rollouts: Sequence[Rollout], config: RunConfig, step: int, heads: Mapping[int, Tensor] | None = None
) -> list[RolloutBatch]:
    """Divide a step's rollouts into the minibatches of its updates.

    Args:
        rollouts: of the step, in the order of its shard.
        config: the run.
        step: index of the step, from 0.
        heads: for rollouts with hidden states, the output head of each weight version.

    Returns:
        ``num_epochs * num_updates_per_rollout`` minibatches; those of one epoch are disjoint.
    """
    batch = RolloutBatch.from_rollouts(rollouts, heads)
    size = len(rollouts) // config.update.num_updates_per_rollout
    parts = []
    for epoch in range(config.update.num_epochs):
        generator = torch.Generator().manual_seed(derive_seed(config.seed, "minibatches", step, epoch))
        for chosen in torch.randperm(len(rollouts), generator=generator).split(size):
            keep = torch.zeros(len(rollouts), dtype=torch.bool)
            keep[chosen] = True
            parts.append(batch.select(keep))
    return parts
