"""From configuration to numbers: measurement, mask and loss of one update.

Training and the stage commands call the same functions. Shape letters: B sequences, T response tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trm_repro.batch import RolloutBatch
from trm_repro.certified import CertifiedMask, certified_mask
from trm_repro.config_sections import LossConfig, MaskConfig
from trm_repro.divergence import k2_divergence, k3_divergence, log_ratio
from trm_repro.gate_specs import GATE_SPECS
from trm_repro.losses import OBJECTIVES, ClipRange, reduce_objective
from trm_repro.masks import (
    TokenStatistics,
    finite_mask,
    gate_mask,
    kept_sequences,
    length_matched_mask,
    max_divergence_mask,
    mean_divergence_mask,
    random_mask,
    token_weights,
)
from trm_repro.measurement import Measurement
from trm_repro.policy import Policy


@dataclass(frozen=True, kw_only=True)
class ReferenceUpdate:
    """What the arm that a control copies did at one update.

    Example: of four sequences it rejected two, of 12 and 31 tokens: ``ReferenceUpdate(num_kept=2,
    rejected_lengths=(12, 31))``.

    Attributes:
        num_kept: sequences it kept.
        rejected_lengths: response lengths of those it rejected, tokens; None where that was not recorded.
    """

    num_kept: int
    rejected_lengths: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Control:
    """What the criteria random and length_matched need: what the other arm did, and chance."""

    reference: ReferenceUpdate
    generator: torch.Generator


@torch.no_grad()
def gate(
    measurement: Measurement,
    response_mask: Tensor,
    config: MaskConfig,
    control: Control | None = None,
    batch: RolloutBatch | None = None,
) -> Tensor:
    """Decide which sequences to keep (Algorithm 1, line 3).

    A sequence with a non-finite log-ratio is rejected under every criterion. Of a gate of tokens, a sequence is kept
    when some token of it is; `weigh_tokens` gives the rest.

    Args:
        measurement: of the B sequences.
        response_mask: ``[B, T]`` bool.
        config: the mask's section.
        control: for the criteria random and length_matched.
        batch: for gates that look at advantages or probabilities.

    Returns:
        ``[B]`` bool.
    """
    is_finite = finite_mask(measurement.log_ratio, response_mask)
    inputs = MaskInputs(
        measurement=measurement, response_mask=response_mask, config=config, control=control, batch=batch
    )
    return is_finite & CRITERIA[config.criterion](inputs)


def weigh_tokens(batch: RolloutBatch, measurement: Measurement, config: MaskConfig) -> RolloutBatch:
    """Give the minibatch the token weights of a gate of tokens; under a gate of sequences it stays as it is.

    Args:
        batch: B sequences.
        measurement: of them.
        config: the mask's section.

    Returns:
        The minibatch, with ``token_weights`` where the gate decides tokens.
    """
    if config.gate.level == "sequence":
        return batch
    statistics = token_statistics(measurement, batch.response_mask, batch)
    mask = gate_mask(config.criterion, statistics, **config.gate_thresholds)
    return replace(batch, token_weights=token_weights(mask, batch.response_mask))


def token_statistics(
    measurement: Measurement, response_mask: Tensor, batch: RolloutBatch | None = None
) -> TokenStatistics:
    """Gather what a gate may look at.

    Args:
        measurement: of B sequences.
        response_mask: ``[B, T]`` bool.
        batch: the same sequences, for advantages and rollout log-probs.

    Returns:
        The statistics; without a batch, those of log-ratios and divergences alone.
    """
    return TokenStatistics(
        log_ratio=measurement.log_ratio,
        response_mask=response_mask,
        policy_logprobs=measurement.policy_logprobs,
        rollout_logprobs=None if batch is None else batch.rollout_logprobs,
        kl=measurement.kl,
        total_variation=measurement.total_variation,
        advantages=None if batch is None else batch.advantages,
    )


def surrogate_loss(
    policy: Policy, batch: RolloutBatch, config: LossConfig, *, temperature: float, denominator: float
) -> Tensor:
    """Compute the loss of kept sequences (Algorithm 1, line 4): ratio, objective, reduction.

    Args:
        policy: pi_theta.
        batch: kept sequences only; a rejected one is left out and so contributes exactly zero. With the normalizers
            of its measurement (`policy_normalizers`), the vocabulary is passed over once less.
        config: the loss's section.
        temperature: sampling temperature of the rollouts.
        denominator: N, the number of sequences of the whole update.

    Returns:
        Scalar float32 with gradient.
    """
    policy_logprobs = batch.dense(policy(batch, temperature=temperature).logprobs)  # [B, T]
    return loss_of_logprobs(policy_logprobs, batch, config, denominator=denominator)


def loss_of_logprobs(policy_logprobs: Tensor, batch: RolloutBatch, config: LossConfig, *, denominator: float) -> Tensor:
    """Compute the loss of kept sequences from their log-probs; see `surrogate_loss`.

    Args:
        policy_logprobs: ``[B, T]`` float32, nats, with gradient.
        batch: kept sequences only.
        config: the loss's section.
        denominator: N, the number of sequences of the whole update.

    Returns:
        Scalar float32 with gradient.
    """
    ratio = log_ratio(policy_logprobs, batch.rollout_logprobs)
    objective = OBJECTIVES[config.name](ratio, batch.response_mask, batch.advantages, clip_range(config))
    if batch.token_weights is not None:
        objective = objective * batch.token_weights
    return reduce_objective(
        objective, batch.response_mask, denominator=denominator, length_normalizer=config.length_normalizer
    )


def clip_range(config: LossConfig) -> ClipRange:
    """Take the clip range out of the loss's section."""
    return ClipRange(low=config.clip_low, high=config.clip_high)


@dataclass(frozen=True, kw_only=True)
class MaskInputs:
    """What a criterion may look at."""

    measurement: Measurement
    response_mask: Tensor
    config: MaskConfig
    control: Control | None
    batch: RolloutBatch | None = None


def _registered(inputs: MaskInputs) -> Tensor:
    statistics = token_statistics(inputs.measurement, inputs.response_mask, inputs.batch)
    return kept_sequences(gate_mask(inputs.config.criterion, statistics, **inputs.config.gate_thresholds))


def _trm_max(inputs: MaskInputs) -> Tensor:
    config, measurement = inputs.config, inputs.measurement
    if config.max_estimator == "k2":
        divergence = k2_divergence(measurement.log_ratio)
    elif measurement.kl is None:
        return _certified(inputs, max_threshold=config.max_threshold)
    else:
        divergence = measurement.kl
    return max_divergence_mask(divergence, inputs.response_mask, config.max_threshold)


def _trm_avg(inputs: MaskInputs) -> Tensor:
    config, measurement = inputs.config, inputs.measurement
    if config.avg_estimator == "k3":
        divergence = k3_divergence(measurement.log_ratio)
    elif measurement.kl is None:
        return _certified(inputs, avg_threshold=config.avg_threshold)
    else:
        divergence = measurement.kl
    return mean_divergence_mask(divergence, inputs.response_mask, config.avg_threshold)


def _trm_max_avg(inputs: MaskInputs) -> Tensor:
    return _trm_max(inputs) & _trm_avg(inputs)


def _random(inputs: MaskInputs) -> Tensor:
    control = _control(inputs)
    mask = random_mask(inputs.response_mask.shape[0], control.reference.num_kept, control.generator)
    return mask.to(inputs.response_mask.device)


def _length_matched(inputs: MaskInputs) -> Tensor:
    control = _control(inputs)
    if control.reference.rejected_lengths is None:
        raise ValueError(f"criterion length_matched needs the lengths that {inputs.config.reference_arm} rejected")
    lengths = inputs.response_mask.sum(dim=-1)  # [B]
    mask = length_matched_mask(
        lengths, control.reference.rejected_lengths, inputs.config.num_length_bins, control.generator
    )
    return mask.to(inputs.response_mask.device)


def _control(inputs: MaskInputs) -> Control:
    if inputs.control is None:
        criterion, arm = inputs.config.criterion, inputs.config.reference_arm
        raise ValueError(f"criterion {criterion} copies the rate of {arm}, which was not given")
    return inputs.control


def _certified(inputs: MaskInputs, *, max_threshold: float | None = None, avg_threshold: float | None = None) -> Tensor:
    if inputs.measurement.kl_interval is None:
        raise ValueError("exact divergences need rollouts that carry the whole distribution or its likeliest tokens")
    decision = certified_mask(
        inputs.measurement.kl_interval, inputs.response_mask, max_threshold=max_threshold, avg_threshold=avg_threshold
    )
    return decision.accepted | decision.undecided if inputs.config.undecided == "accept" else decision.accepted


def certified_decision(measurement: Measurement, response_mask: Tensor, config: MaskConfig) -> CertifiedMask | None:
    """Say what the stored log-probs certify of the criterion's exact parts.

    Args:
        measurement: of the B sequences.
        response_mask: ``[B, T]`` bool.
        config: the mask's section.

    Returns:
        Accepted, rejected and undecided sequences; None where the criterion has no exact part or the batch no interval.
    """
    if measurement.kl_interval is None or not (config.has_exact_max or config.has_exact_avg):
        return None
    return certified_mask(
        measurement.kl_interval,
        response_mask,
        max_threshold=config.max_threshold if config.has_exact_max else None,
        avg_threshold=config.avg_threshold if config.has_exact_avg else None,
    )


OF_TRAINING: dict[str, Callable[[MaskInputs], Tensor]] = {
    "trm_max": _trm_max,
    "trm_avg": _trm_avg,
    "trm_max_avg": _trm_max_avg,
    "random": _random,
    "length_matched": _length_matched,
}
"""Gates for which a run's settings say more than thresholds: estimators, certified intervals, another arm's rate."""

CRITERIA: dict[str, Callable[[MaskInputs], Tensor]] = {name: OF_TRAINING.get(name, _registered) for name in GATE_SPECS}
