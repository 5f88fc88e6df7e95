"""The metrics of one reinforcement-learning step, over all its updates.

Names are family/quantity. ``*_mean`` of a per-token quantity is weighted by tokens, the perplexity gap by sequences.
Each sequence is measured at the update it is used in, just before that update.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trm_repro.batch import RolloutBatch
from trm_repro.config_sections import LossConfig, MaskConfig
from trm_repro.confusion import mask_confusion
from trm_repro.divergence import (
    MAX_LOG_RATIO,
    k1_divergence,
    k2_divergence,
    k3_divergence,
    perplexity_gap,
)
from trm_repro.losses import is_clipped
from trm_repro.masks import max_divergence_mask, mean_divergence_mask
from trm_repro.measurement import Measurement
from trm_repro.step_control import StepOutcome
from trm_repro.steps import certified_decision, clip_range


@dataclass(frozen=True, kw_only=True)
class UpdateRecord:
    """What one update saw and did.

    Attributes:
        batch: its minibatch.
        measurement: of the minibatch, before the update.
        sequence_mask: ``[B]`` bool.
        loss: the surrogate loss of the kept sequences.
        gradient_norm: global norm before clipping; 0 where nothing was backpropagated.
        is_skipped: whether the optimizer step was left out.
        learning_rate: the rate in force.
        step: what step control made of the step; None without it, or where the step was skipped.
    """

    batch: RolloutBatch
    measurement: Measurement
    sequence_mask: Tensor
    loss: float
    gradient_norm: float
    is_skipped: bool
    learning_rate: float
    step: StepOutcome | None = None

    @property
    def is_finite(self) -> bool:
        """Whether loss, gradient and the log-ratios of its tokens are."""
        log_ratio = self.measurement.log_ratio[self.batch.response_mask]
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm) and bool(log_ratio.isfinite().all())


def step_metrics(records: Sequence[UpdateRecord], loss_config: LossConfig) -> dict[str, float]:
    """Summarise a step.

    Args:
        records: its updates, at least one.
        loss_config: gives the clip range whose fraction is reported.

    Returns:
        Metric names and values; a quantity that nothing was observed of is left out.
    """
    metrics = _rollout_metrics(records)
    metrics |= _divergence_metrics(records)
    metrics |= _mask_metrics(records)
    metrics |= _router_metrics(records)
    finite_norms = [record.gradient_norm for record in records if math.isfinite(record.gradient_norm)]
    if finite_norms:
        metrics["train/gradient_norm_mean"] = _mean(finite_norms)
        metrics["train/gradient_norm_max"] = max(finite_norms)
    metrics |= {
        "train/surrogate_loss": _mean([record.loss for record in records]),
        "train/num_nonfinite_gradients": float(len(records) - len(finite_norms)),
        "train/num_nonfinite_updates": float(sum(not record.is_finite for record in records)),
        "train/num_skipped_updates": float(sum(record.is_skipped for record in records)),
        "train/learning_rate": records[-1].learning_rate,
    }
    steps = [record.step for record in records if record.step is not None]
    if steps:
        metrics["control/scale_mean"] = _mean([step.scale for step in steps])
        metrics["control/num_shrunk_steps"] = float(sum(step.scale < 1 for step in steps))
        metrics["control/num_undone_steps"] = float(sum(step.scale == 0 for step in steps))
        metrics["control/divergence_after_max"] = max(step.taken for step in steps)
    clipped = torch.cat(
        [
            is_clipped(record.measurement.log_ratio, record.batch.advantages, clip_range(loss_config))[
                record.batch.response_mask
            ]
            for record in records
        ]
    )
    metrics["train/clip_fraction"] = float(clipped.float().mean())
    return metrics


def mask_confusions(records: Sequence[UpdateRecord], mask_config: MaskConfig) -> dict[str, float]:
    """Compare masks from sampled tokens with masks of exact KL on the same sequences, for both criteria.

    Args:
        records: the step's updates.
        mask_config: gives the thresholds.

    Returns:
        For max (k2) and avg (k3): fractions of all sequences that the sampled estimator accepts and exact KL
        rejects, and the reverse. Where KL is only known to lie in an interval, the undecided fraction instead.
    """
    if records[0].measurement.kl is None:
        return _undecided_metrics(records, mask_config)
    criteria = {
        "max": (max_divergence_mask, k2_divergence, mask_config.max_threshold),
        "avg": (mean_divergence_mask, k3_divergence, mask_config.avg_threshold),
    }
    metrics = {}
    for name, (criterion, estimator, threshold) in criteria.items():
        sampled, exact = [], []
        for record in records:
            mask, kl = record.batch.response_mask, record.measurement.kl
            assert kl is not None
            sampled.append(criterion(estimator(record.measurement.log_ratio), mask, threshold))
            exact.append(criterion(kl, mask, threshold))
        table = mask_confusion(torch.cat(sampled), torch.cat(exact))
        metrics[f"confusion/{name}_wrongly_accepted_fraction"] = table.wrongly_accepted_fraction
        metrics[f"confusion/{name}_wrongly_rejected_fraction"] = table.wrongly_rejected_fraction
        metrics[f"confusion/{name}_exact_kept_fraction"] = float(torch.cat(exact).float().mean())
    return metrics


def _undecided_metrics(records: Sequence[UpdateRecord], mask_config: MaskConfig) -> dict[str, float]:
    decisions = [certified_decision(r.measurement, r.batch.response_mask, mask_config) for r in records]
    undecided = [decision.undecided for decision in decisions if decision is not None]
    if not undecided:
        return {}
    return {"mask/undecided_fraction": float(torch.cat(undecided).float().mean())}


def _rollout_metrics(records: Sequence[UpdateRecord]) -> dict[str, float]:
    rewards = torch.cat([record.batch.rewards for record in records])
    groups = torch.cat([record.batch.groups for record in records])
    lengths = torch.cat([record.batch.response_lengths for record in records]).float()
    is_mixed = [bool(rewards[groups == group].unique().numel() > 1) for group in groups.unique()]
    return {
        "rollout/reward_mean": float(rewards.mean()),
        "rollout/mixed_group_fraction": _mean([float(mixed) for mixed in is_mixed]),
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/num_tokens": float(lengths.sum()),
        "rollout/weight_version": float(records[0].batch.weight_versions.max()),
    }


def _divergence_metrics(records: Sequence[UpdateRecord]) -> dict[str, float]:
    log_ratio = _tokens(records, [record.measurement.log_ratio for record in records])
    is_finite = log_ratio.isfinite()
    finite = log_ratio[is_finite]
    gaps = torch.cat(
        [
            perplexity_gap(
                record.measurement.policy_logprobs, record.batch.rollout_logprobs, record.batch.response_mask
            )
            for record in records
        ]
    )
    metrics = {
        "divergence/num_nonfinite_tokens": float((~is_finite).sum()),
        "divergence/num_clamped_tokens": float((finite.abs() > MAX_LOG_RATIO).sum()),
        "policy/entropy_mean": float(_tokens(records, [record.measurement.entropy for record in records]).mean()),
    }
    finite_gaps = gaps[gaps.isfinite()]
    if finite_gaps.numel():
        metrics["divergence/ppl_gap"] = float(finite_gaps.mean())
    if finite.numel():
        metrics["divergence/k1_mean"] = float(k1_divergence(finite).mean())
        metrics |= _distribution("divergence/k2", k2_divergence(finite))
        metrics |= _distribution("divergence/k3", k3_divergence(finite))
    errors = [record.measurement.rebuilding_error for record in records]
    if errors[0] is not None:
        metrics["rollout/rebuilding_error_mean"] = float(_tokens(records, errors).mean())
        metrics["rollout/rebuilding_error_max"] = float(_tokens(records, errors).max())
    kl = [record.measurement.kl for record in records]
    total_variation = [record.measurement.total_variation for record in records]
    if kl[0] is not None:
        metrics |= _distribution("divergence/kl", _tokens(records, kl))
        metrics |= _distribution("divergence/tv", _tokens(records, total_variation))
    return metrics


def _mask_metrics(records: Sequence[UpdateRecord]) -> dict[str, float]:
    mask = torch.cat([record.sequence_mask for record in records])
    lengths = torch.cat([record.batch.response_lengths for record in records]).float()
    is_correct = torch.cat([record.batch.rewards for record in records]) > 0
    is_long = lengths > lengths.median()
    metrics = {"mask/kept_sequence_fraction": float(mask.float().mean())}
    subsets = {"correct": is_correct, "wrong": ~is_correct, "long": is_long, "short": ~is_long}
    for name, subset in subsets.items():
        if bool(subset.any()):
            metrics[f"mask/kept_{name}_fraction"] = float(mask[subset].float().mean())
    if records[0].batch.token_weights is not None:
        weights = _tokens(records, [record.batch.token_weights for record in records])
        metrics["mask/kept_token_fraction"] = float((weights > 0).float().mean())
        metrics["mask/token_weight_mean"] = float(weights.mean())
    return metrics


def _router_metrics(records: Sequence[UpdateRecord]) -> dict[str, float]:
    flips = [record.measurement.is_flipped for record in records]
    if flips[0] is None:
        return {}
    is_flipped = _tokens(records, flips)
    metrics = {"router/agreement_fraction": float((~is_flipped).float().mean())}
    if records[0].measurement.kl is not None:
        kl = _tokens(records, [record.measurement.kl for record in records])
        for name, subset in (("flipped", is_flipped), ("unflipped", ~is_flipped)):
            if bool(subset.any()):
                metrics[f"router/kl_{name}_mean"] = float(kl[subset].mean())
    return metrics


def _tokens(records: Sequence[UpdateRecord], dense: Sequence[Tensor | None]) -> Tensor:
    pairs = zip(records, dense, strict=True)
    return torch.cat([values[record.batch.response_mask] for record, values in pairs if values is not None])


def _distribution(name: str, values: Tensor) -> dict[str, float]:
    # torch.quantile refuses more than 16 million values; kthvalue does not.
    rank = math.ceil(0.99 * values.numel())
    p99 = values.kthvalue(rank).values
    return {f"{name}_mean": float(values.mean()), f"{name}_p99": float(p99), f"{name}_max": float(values.max())}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
