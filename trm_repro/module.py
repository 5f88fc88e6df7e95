"""Trust Region Masking as a LightningModule: one class for the dense, the mixture-of-experts and the 8B policy."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import lightning as L  # noqa: N812
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from trm_repro import ranks
from trm_repro.advantages import kept_advantages
from trm_repro.batch import RolloutBatch
from trm_repro.config import RunConfig, derive_seed
from trm_repro.errors import FaultError
from trm_repro.fault_batches import save_batch
from trm_repro.measurement import Measurement, mean_divergence, measure_to_learn
from trm_repro.memory_limits import MASK_KEYS, UPDATE_KEYS, memory_limited
from trm_repro.policy import Policy, build_policy
from trm_repro.sharding import is_sharded, load_sharded, local, prepare_policy, shard_policy, whole
from trm_repro.shares import Share, gather_measurements, measure_shared
from trm_repro.stage_clock import StageClock
from trm_repro.step_control import StepOutcome, bound_step, copy_parameters
from trm_repro.step_metrics import UpdateRecord
from trm_repro.steps import Control, ReferenceUpdate, gate, loss_of_logprobs, surrogate_loss, weigh_tokens

ONE_PASS_SHARE = 2 / 3
"""Share learned from, from which 3 products of every sequence are fewer than 1 of every and 3 of each learned from."""
DECIDED_ALONE = ("none", "trm_max", "trm_avg", "trm_max_avg")
"""Criteria that need nothing but a sequence's own tokens to decide about it."""


class Learned(NamedTuple):
    """What was made of a minibatch before the optimizer's step.

    Attributes:
        batch: B sequences, with what weighed them.
        measurement: of all of them, before the step.
        sequence_mask: ``[B]`` bool.
        loss: that was backpropagated.
        has_gradient: whether any sequence contributed.
    """

    batch: RolloutBatch
    measurement: Measurement
    sequence_mask: Tensor
    loss: float
    has_gradient: bool


class TRMModule(L.LightningModule):
    """Algorithm 1: measure, mask, update. An epoch is one reinforcement-learning step."""

    policy: Policy

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerFast | None = None,
        reference: Mapping[int, Sequence[ReferenceUpdate]] | None = None,
        *,
        fault_dir: Path | None = None,
    ) -> None:
        """Set up; the policy itself is built in `configure_model`.

        Args:
            config: the run.
            tokenizer: gives vocabulary size and special tokens to a policy built from sizes.
            reference: for a control: what the arm that it copies did, by step, update by update.
            fault_dir: where batches whose numbers are not finite are saved; None saves none.
        """
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        self.tokenizer = tokenizer
        self.reference = reference
        self.fault_dir = fault_dir
        self.clock = StageClock()
        self.records: list[UpdateRecord] = []
        self.fixed_mask: dict[int, bool] = {}
        self.share = Share()

    def configure_model(self) -> None:
        """Build the policy, once, and divide it over the ranks where there are several."""
        mesh = None if self.device_mesh is None else self.device_mesh["data_parallel"]
        if not hasattr(self, "policy"):
            if mesh is not None and ranks.num_ranks() > 1 and self.config.policy.path is not None:
                self.policy = load_sharded(self.config.policy, self.tokenizer, self.config.trainer, mesh)
                return
            seed = derive_seed(self.config.seed, "initial weights")
            self.policy = build_policy(self.config.policy, self.tokenizer, seed)
        prepare_policy(self.policy, self.config.trainer)
        if mesh is not None and not is_sharded(self.policy):
            shard_policy(self.policy, self.config.trainer, mesh)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]:
        """Make the optimizer and its linear warm-up, counted in updates."""
        update = self.config.update
        optimizer: torch.optim.Optimizer
        if update.optimizer == "adamw":
            optimizer = torch.optim.AdamW(
                self.policy.parameters(),
                lr=update.learning_rate,
                betas=(update.adam_beta1, update.adam_beta2),
                weight_decay=update.weight_decay,
            )
        else:
            optimizer = torch.optim.SGD(
                self.policy.parameters(), lr=update.learning_rate, weight_decay=update.weight_decay
            )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda count: min(1.0, (count + 1) / update.warmup_updates)
        )
        return [optimizer], [schedule]

    def on_train_epoch_start(self) -> None:
        """Forget the last step's records; with mask.timing=once, decide all masks before the first update."""
        self.records = []
        self.fixed_mask = {}
        self.share = getattr(self.trainer.datamodule, "share", self.share)
        self.share.to(self.device)
        if self.config.mask.timing == "once":
            masks: dict[int, bool] = {}
            for index, batch in enumerate(self.trainer.train_dataloader):
                mask = self.mask(self.measure(batch), batch, index)
                masks |= dict(zip(batch.sequence_ids.tolist(), mask.tolist(), strict=True))
            self.fixed_mask = masks

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        """Run Algorithm 1 on one minibatch."""
        one_pass = self.expected_share(batch) >= ONE_PASS_SHARE
        learned = self.one_pass(batch, batch_idx) if one_pass else self.two_passes(batch, batch_idx)  # lines 1 to 4
        with self.clock.measure("update"), memory_limited("update", UPDATE_KEYS):
            before = copy_parameters(self.policy) if self.config.update.step_limit is not None else None
            gradient_norm, is_skipped = self.step_optimizer(learned.has_gradient, learned.loss)  # line 5
        step = None if is_skipped or not learned.has_gradient else self.bound_step(before, learned)
        self.records.append(
            UpdateRecord(
                batch=learned.batch,
                measurement=learned.measurement,
                sequence_mask=learned.sequence_mask,
                loss=learned.loss,
                gradient_norm=gradient_norm,
                is_skipped=is_skipped,
                learning_rate=self.optimizers().param_groups[0]["lr"],
                step=step,
            )
        )
        self.lr_schedulers().step()

    def expected_share(self, batch: RolloutBatch) -> float:
        """Guess the share of a minibatch that will be learned from, before it is measured; the same on every rank.

        What the last update of the step kept is the guess, so a step's first update under a mask counts as none; so
        does whatever has to see the whole minibatch before it decides.
        """
        loss, mask = self.config.loss, self.config.mask
        if mask.criterion not in DECIDED_ALONE or "kept" in (loss.baseline, loss.denominator):
            return 0.0
        kept = 1.0 if mask.criterion == "none" else 0.0
        if self.records:
            kept = float(self.records[-1].sequence_mask.float().mean())
        return kept * float((batch.advantages != 0).float().mean())

    def two_passes(self, batch: RolloutBatch, update: int) -> Learned:
        """Measure and mask the whole minibatch without gradient, then backpropagate what is kept."""
        with self.clock.measure("mask"):
            measurement = self.measure(batch)  # lines 1 and 2: divergences under the current policy
            sequence_mask = self.mask(measurement, batch, update)  # line 3
            batch = weigh_tokens(self.weigh(batch, sequence_mask, update), measurement, self.config.mask)
            batch = dataclasses.replace(batch, policy_normalizers=measurement.normalizers)  # of the same weights
        with self.clock.measure("update"), memory_limited("update", UPDATE_KEYS):
            loss, has_gradient = self.backward_kept(batch, sequence_mask)  # line 4
        return Learned(batch, measurement, sequence_mask, loss, has_gradient)

    def one_pass(self, batch: RolloutBatch, update: int) -> Learned:
        """Measure, mask and backpropagate one micro-batch after another, each in a single forward pass.

        A sequence's own tokens decide about it, so no micro-batch has to wait for another. Rejected sequences cost a
        backward pass here, and the others no second forward pass. A policy that overflows on a rejected sequence makes
        the gradient not finite, and the step is skipped.
        """
        self.optimizers().zero_grad()
        parts, num_fillers = self.share.passes(
            batch, self.config.update.tokens_per_micro_batch, packed=self.policy.is_packing
        )
        found: list[tuple[Tensor, Measurement]] = []
        kept_ids = batch.sequence_ids[:0]
        loss, has_gradient = 0.0, False
        for part in parts:
            with self.clock.measure("update"), memory_limited("update", UPDATE_KEYS):
                measurement, logprobs = measure_to_learn(self.policy, part, temperature=self.config.rollout.temperature)
            with self.clock.measure("mask"):
                sequence_mask = self.mask(measurement, part, update)
                found.append((part.sequence_ids, measurement))
                kept_ids = torch.cat([kept_ids, part.sequence_ids[sequence_mask]])
            with self.clock.measure("update"), memory_limited("update", UPDATE_KEYS):
                contributes = sequence_mask & (part.advantages != 0)
                if bool(contributes.any()):
                    kept = part.select(contributes)
                    part_loss = loss_of_logprobs(
                        logprobs[contributes, : kept.response_mask.shape[1]],
                        kept,
                        self.config.loss,
                        denominator=batch.num_sequences / ranks.num_ranks(),  # FSDP averages gradients over ranks
                    )
                    self.manual_backward(part_loss)
                    loss, has_gradient = loss + part_loss.item(), True
                elif ranks.num_ranks() > 1:  # whose backward passes go together
                    self.manual_backward(0.0 * logprobs.sum())
            del logprobs  # and what it keeps for a backward pass, before the next forward pass
        with self.clock.measure("update"), memory_limited("update", UPDATE_KEYS):
            for _ in range(num_fillers):
                _, logprobs = measure_to_learn(self.policy, self.share.filler(), temperature=1.0)
                self.manual_backward(0.0 * logprobs.sum())
        with self.clock.measure("mask"):
            measurement = gather_measurements(batch, found)
            all_kept = torch.cat(ranks.gather_to_all(kept_ids.cpu())).to(kept_ids.device)
            sequence_mask = torch.isin(batch.sequence_ids, all_kept)
        loss = ranks.total(loss) / ranks.num_ranks()
        return Learned(batch, measurement, sequence_mask, loss, ranks.any_rank(has_gradient))

    def on_train_batch_end(self, outputs: object, batch: RolloutBatch, batch_idx: int) -> None:
        """Save a batch that was not finite; stop when the weights are not: nothing after them would mean anything."""
        is_finite = all(bool(local(weight.detach()).isfinite().all()) for weight in self.policy.parameters())
        has_bad_weights = ranks.any_rank(not is_finite)
        record, saved = self.records[-1], ""
        if self.fault_dir is not None and (has_bad_weights or not record.is_finite):
            path = self.fault_dir / f"step_{self.current_epoch:05d}_update_{batch_idx}.safetensors"
            if ranks.is_first():
                saved = f" ({save_batch(path, record)})"
        if has_bad_weights:
            raise FaultError(
                f"the policy's weights are not finite after update {batch_idx} of step {self.current_epoch}{saved}; "
                "lower update.learning_rate or update.max_gradient_norm"
            )

    def on_train_epoch_end(self) -> None:
        """Leave the device to the engine."""
        self.free_device()

    def free_device(self) -> None:
        """Free the gradients and the step's rollout distributions, which nothing needs once its updates are done."""
        self.optimizers().zero_grad()
        self.share.sequences = None  # also the data module's, which is the same

    def measure(self, batch: RolloutBatch) -> Measurement:
        """Score a minibatch with the current policy, without gradient."""
        with memory_limited("mask", MASK_KEYS):
            return measure_shared(
                self.policy,
                batch,
                self.share,
                temperature=self.config.rollout.temperature,
                tokens_per_micro_batch=self.config.update.tokens_per_micro_batch,
            )

    def mask(self, measurement: Measurement, batch: RolloutBatch, update: int) -> Tensor:
        """Decide which sequences to keep: ``[B]`` bool."""
        if self.fixed_mask:
            kept = [self.fixed_mask[sequence] for sequence in batch.sequence_ids.tolist()]
            return torch.tensor(kept, device=batch.rewards.device)
        control = None
        if self.reference is not None:
            seed = derive_seed(self.config.seed, "random mask", self.current_epoch, update)
            generator = torch.Generator().manual_seed(seed)
            control = Control(reference=self.reference[self.current_epoch][update], generator=generator)
        return gate(measurement, batch.response_mask, self.config.mask, control, batch)

    def weigh(self, batch: RolloutBatch, sequence_mask: Tensor, update: int) -> RolloutBatch:
        """Give the minibatch the advantages of loss.baseline.

        With ``kept``, a group's mean and deviation are over those of its sequences that the mask keeps now. A group is
        spread over the minibatches of its epoch, so the others are masked, too, by the current policy; that is what
        makes it slower.

        Args:
            batch: the minibatch of this update.
            sequence_mask: ``[B]`` bool.
            update: index of the update in its step.

        Returns:
            The minibatch, with its advantages as they were for ``all``.
        """
        if self.config.loss.baseline == "all":
            return batch
        num_minibatches = self.config.update.num_updates_per_rollout
        first = update - update % num_minibatches  # of this epoch
        voters = [(batch, sequence_mask)]
        for index, other in enumerate(self.trainer.train_dataloader):
            if first <= index < first + num_minibatches and index != update:
                other = other.to(batch.rewards.device)
                voters.append((other, self.mask(self.measure(other), other, index)))
        rewards, groups = (torch.cat([getattr(part, name) for part, _ in voters]) for name in ("rewards", "groups"))
        keep = torch.cat([mask for _, mask in voters])
        advantages = kept_advantages(rewards, groups, keep, self.config.loss.advantage_epsilon)
        return dataclasses.replace(batch, advantages=advantages[: batch.num_sequences])

    def backward_kept(self, batch: RolloutBatch, sequence_mask: Tensor) -> tuple[float, bool]:
        """Backpropagate the kept sequences; a rejected one, or one with advantage 0, would add exactly zero.

        Args:
            batch: B sequences.
            sequence_mask: ``[B]`` bool.

        Returns:
            The loss, and whether any sequence contributed.
        """
        self.optimizers().zero_grad()
        contributes = sequence_mask & (batch.advantages != 0)
        if not bool(contributes.any()):
            return 0.0, False
        counted = sequence_mask if self.config.loss.denominator == "kept" else torch.ones_like(sequence_mask)
        parts, num_fillers = self.share.passes(
            batch.select(contributes),
            self.config.update.tokens_per_micro_batch,
            packed=self.policy.is_packing,
        )
        loss = 0.0
        for part in parts:
            part_loss = surrogate_loss(
                self.policy,
                part,
                self.config.loss,
                temperature=self.config.rollout.temperature,
                denominator=float(counted.sum()) / ranks.num_ranks(),  # FSDP averages gradients over ranks
            )
            self.manual_backward(part_loss)
            loss += part_loss.item()
        for _ in range(num_fillers):
            self.manual_backward(0.0 * self.policy(self.share.filler()).logprobs.sum())
        loss = ranks.total(loss) / ranks.num_ranks()
        return loss, True

    def bound_step(self, before: list[Tensor] | None, learned: Learned) -> StepOutcome | None:
        """Shrink or undo a step that left the policy too far from the rollout policy (update.step_limit).

        Args:
            before: the parameters before the step; None where steps are not bounded.
            learned: what the step was made of; the divergence is that of its kept sequences.

        Returns:
            What became of the step, or None.
        """
        limit = self.config.update.step_limit
        if before is None or limit is None:
            return None
        kept = learned.batch.select(learned.sequence_mask)
        kept_tokens = learned.batch.response_mask & learned.sequence_mask[:, None]
        with self.clock.measure("control"):
            return bound_step(
                self.policy,
                before,
                lambda: mean_divergence(self.measure(kept), kept.response_mask),
                divergence_before=mean_divergence(learned.measurement, kept_tokens),
                limit=limit,
                max_halvings=self.config.update.step_halvings,
            )

    def step_optimizer(self, has_gradient: bool, loss: float) -> tuple[float, bool]:
        """Clip the gradient and step, unless there is no gradient, or it or the loss is not finite.

        With a zero gradient AdamW would still move the weights by momentum and decay: a run that rejects
        everything would drift. ``update.skip_empty=false`` lets it.

        Args:
            has_gradient: whether any sequence contributed.
            loss: that was backpropagated.

        Returns:
            The global gradient norm before clipping, and whether the step was skipped.
        """
        if not has_gradient:
            if self.config.update.skip_empty:
                return 0.0, True
            for weight in self.policy.parameters():
                weight.grad = torch.zeros_like(weight)
        norm = whole(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.update.max_gradient_norm))
        if not (math.isfinite(norm.item()) and math.isfinite(loss)):
            return norm.item(), True
        self.optimizers().step()
        return norm.item(), False
