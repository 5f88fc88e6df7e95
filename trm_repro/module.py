"""Trust Region Masking as a LightningModule: one class for the dense, the mixture-of-experts and the 8B policy."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

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
from trm_repro.memory_limits import MASK_KEYS, UPDATE_KEYS, memory_limited
from trm_repro.policy import Policy, build_policy
from trm_repro.sharding import is_sharded, load_sharded, local, prepare_policy, shard_policy, whole
from trm_repro.shares import Share, measure_shared
from trm_repro.stage_clock import StageClock
from trm_repro.step_control import StepOutcome, bound_step, copy_parameters
from trm_repro.step_metrics import UpdateRecord
from trm_repro.steps import Control, Measurement, ReferenceUpdate, gate, mean_divergence, surrogate_loss, weigh_tokens


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
        with self.clock.measure("mask"):
            measurement = self.measure(batch)  # lines 1 and 2: divergences under the current policy
            sequence_mask = self.mask(measurement, batch, batch_idx)  # line 3
            batch = weigh_tokens(self.weigh(batch, sequence_mask, batch_idx), measurement, self.config.mask)
            batch = dataclasses.replace(batch, policy_normalizers=measurement.normalizers)  # of the same weights
        with self.clock.measure("update"), memory_limited("update", UPDATE_KEYS):
            loss, has_gradient = self.backward_kept(batch, sequence_mask)  # line 4
            before = copy_parameters(self.policy) if self.config.update.step_limit is not None else None
            gradient_norm, is_skipped = self.step_optimizer(has_gradient, loss)  # line 5
        step = None if is_skipped or not has_gradient else self.bound_step(before, batch, measurement, sequence_mask)
        self.records.append(
            UpdateRecord(
                batch=batch,
                measurement=measurement,
                sequence_mask=sequence_mask,
                loss=loss,
                gradient_norm=gradient_norm,
                is_skipped=is_skipped,
                learning_rate=self.optimizers().param_groups[0]["lr"],
                step=step,
            )
        )
        self.lr_schedulers().step()

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

    def bound_step(
        self, before: list[Tensor] | None, batch: RolloutBatch, measurement: Measurement, sequence_mask: Tensor
    ) -> StepOutcome | None:
        """Shrink or undo a step that left the policy too far from the rollout policy (update.step_limit).

        Args:
            before: the parameters before the step; None where steps are not bounded.
            batch: B sequences.
            measurement: of the batch, before the step.
            sequence_mask: ``[B]`` bool; the divergence is that of the kept ones.

        Returns:
            What became of the step, or None.
        """
        limit = self.config.update.step_limit
        if before is None or limit is None:
            return None
        kept = batch.select(sequence_mask)
        with self.clock.measure("control"):
            return bound_step(
                self.policy,
                before,
                lambda: mean_divergence(self.measure(kept), kept.response_mask),
                divergence_before=mean_divergence(measurement, batch.response_mask & sequence_mask[:, None]),
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
