"""Trust Region Masking as a LightningModule: one class for the dense, the mixture-of-experts and the 8B policy."""

import math
from collections.abc import Mapping, Sequence

import lightning as L  # noqa: N812
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from trm_repro.batch import RolloutBatch
from trm_repro.config import RunConfig, derive_seed
from trm_repro.errors import FaultError
from trm_repro.policy import Policy, build_policy
from trm_repro.stage_clock import StageClock
from trm_repro.step_control import StepOutcome, bound_step, copy_parameters
from trm_repro.step_metrics import UpdateRecord
from trm_repro.steps import Measurement, RandomControl, gate, mean_divergence, measure, surrogate_loss


class TRMModule(L.LightningModule):
    """Algorithm 1: measure, mask, update. An epoch is one reinforcement-learning step."""

    policy: Policy

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerFast | None = None,
        num_kept: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Set up; the policy itself is built in `configure_model`.

        Args:
            config: the run.
            tokenizer: gives vocabulary size and special tokens to a policy built from sizes.
            num_kept: for mask.criterion random: number of sequences to keep, by step, update by update.
        """
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        self.tokenizer = tokenizer
        self.num_kept = num_kept
        self.clock = StageClock()
        self.records: list[UpdateRecord] = []
        self.fixed_mask: dict[int, bool] = {}

    def configure_model(self) -> None:
        """Build the policy, once."""
        if not hasattr(self, "policy"):
            seed = derive_seed(self.config.seed, "initial weights")
            self.policy = build_policy(self.config.policy, self.tokenizer, seed)

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
        with self.clock.measure("update"):
            loss, has_gradient = self.backward_kept(batch, sequence_mask)  # line 4
            before = copy_parameters(self.policy) if self.config.update.step_limit is not None else None
            gradient_norm, is_skipped = self.step_optimizer(has_gradient)  # line 5
        step = None
        if before is not None and not is_skipped:
            with self.clock.measure("control"):
                step = self.bound_step(before, batch, measurement, sequence_mask)
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
        """Stop when an update left weights that are not finite: nothing after it would mean anything."""
        if not all(bool(weight.isfinite().all()) for weight in self.policy.parameters()):
            raise FaultError(
                f"the policy's weights are not finite after update {batch_idx} of step {self.current_epoch}; lower "
                "update.learning_rate or update.max_gradient_norm"
            )

    def measure(self, batch: RolloutBatch) -> Measurement:
        """Score a minibatch with the current policy, without gradient."""
        return measure(
            self.policy,
            batch,
            temperature=self.config.rollout.temperature,
            tokens_per_micro_batch=self.config.update.tokens_per_micro_batch,
        )

    def mask(self, measurement: Measurement, batch: RolloutBatch, update: int) -> Tensor:
        """Decide which sequences to keep: ``[B]`` bool."""
        if self.fixed_mask:
            kept = [self.fixed_mask[sequence] for sequence in batch.sequence_ids.tolist()]
            return torch.tensor(kept, device=batch.rewards.device)
        control = None
        if self.num_kept is not None:
            seed = derive_seed(self.config.seed, "random mask", self.current_epoch, update)
            generator = torch.Generator().manual_seed(seed)
            control = RandomControl(num_kept=self.num_kept[self.current_epoch][update], generator=generator)
        return gate(measurement, batch.response_mask, self.config.mask, control)

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
        loss = 0.0
        for micro_batch in batch.select(contributes).split(self.config.update.tokens_per_micro_batch):
            part = surrogate_loss(
                self.policy,
                micro_batch,
                self.config.loss,
                temperature=self.config.rollout.temperature,
                denominator=float(counted.sum()),
            )
            self.manual_backward(part)
            loss += part.item()
        return loss, True

    def bound_step(
        self, before: list[Tensor], batch: RolloutBatch, measurement: Measurement, sequence_mask: Tensor
    ) -> StepOutcome:
        """Shrink or undo a step that left the policy too far from the rollout policy (update.step_limit).

        Args:
            before: the parameters before the step.
            batch: B sequences.
            measurement: of the batch, before the step.
            sequence_mask: ``[B]`` bool; the divergence is that of the kept ones.

        Returns:
            What became of the step.
        """
        limit = self.config.update.step_limit
        assert limit is not None
        kept = batch.select(sequence_mask)
        return bound_step(
            self.policy,
            before,
            lambda: mean_divergence(self.measure(kept), kept.response_mask),
            divergence_before=mean_divergence(measurement, batch.response_mask & sequence_mask[:, None]),
            limit=limit,
            max_halvings=self.config.update.step_halvings,
        )

    def step_optimizer(self, has_gradient: bool) -> tuple[float, bool]:
        """Clip the gradient and step, unless there is no gradient or it is not finite.

        With a zero gradient AdamW would still move the weights by momentum and decay: a run that rejects
        everything would drift.

        Args:
            has_gradient: whether any sequence contributed.

        Returns:
            The global gradient norm before clipping, and whether the step was skipped.
        """
        if not has_gradient:
            return 0.0, True
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.update.max_gradient_norm)
        if not math.isfinite(norm.item()):
            return norm.item(), True
        self.optimizers().step()
        return norm.item(), False
