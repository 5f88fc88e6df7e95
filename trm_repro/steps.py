"""From configuration to numbers: measurement, mask and loss of one update.

Training and the stage commands call the same functions. Shape letters: B sequences, T response tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trm_repro.batch import RolloutBatch
from trm_repro.certified import CertifiedMask, KLInterval, certified_mask
from trm_repro.config_sections import LossConfig, MaskConfig, MaskCriterion
from trm_repro.divergence import k2_divergence, k3_divergence, log_ratio
from trm_repro.losses import OBJECTIVES, ClipRange, reduce_objective
from trm_repro.masks import (
    finite_mask,
    ln_trm_mask,
    max_divergence_mask,
    mean_divergence_mask,
    random_mask,
    ser_mask,
)
from trm_repro.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The policy on one minibatch just before an update; no gradient, 0 on padding.

    Attributes:
        policy_logprobs: ``[B, T]`` float32, nats; log pi_theta of the sampled tokens.
        log_ratio: ``[B, T]`` float32, nats; policy over rollout.
        entropy: ``[B, T]`` float32, nats.
        kl: ``[B, T]`` float32, nats; exact KL(pi_roll || pi_theta), or None.
        total_variation: ``[B, T]`` float32, or None.
        kl_interval: ``[B, T]`` ends, nats; what KL is at least and at most, or None.
        is_flipped: ``[B, T]`` bool; whether engine and policy routed the token to other experts in some layer, or
            None without routing.
    """

    policy_logprobs: Tensor
    log_ratio: Tensor
    entropy: Tensor
    kl: Tensor | None
    total_variation: Tensor | None
    is_flipped: Tensor | None
    kl_interval: KLInterval | None = None


@dataclass(frozen=True, kw_only=True)
class RandomControl:
    """What the random criterion needs: how many to keep, and chance."""

    num_kept: int
    generator: torch.Generator


@torch.no_grad()
def measure(policy: Policy, batch: RolloutBatch, *, temperature: float, tokens_per_micro_batch: int) -> Measurement:
    """Score a minibatch with the current policy (Algorithm 1, lines 1 and 2).

    Args:
        policy: pi_theta.
        batch: B sequences.
        temperature: sampling temperature of the rollouts.
        tokens_per_micro_batch: padded tokens in one forward pass.

    Returns:
        Log-probs, divergences, entropy and routing, per token.
    """
    outputs = [policy(part, temperature=temperature, measure=True) for part in batch.split(tokens_per_micro_batch)]

    def dense(name: str) -> Tensor | None:
        parts = [getattr(output, name) for output in outputs]
        return None if parts[0] is None else batch.dense(torch.cat(parts))

    is_flipped = None
    if batch.rollout_experts is not None and outputs[0].experts is not None:
        policy_experts = torch.cat([output.experts for output in outputs]).sort(dim=-1).values  # [N, L, K]
        rollout_experts = batch.rollout_experts.long().sort(dim=-1).values
        is_flipped = batch.dense((policy_experts != rollout_experts).flatten(1).any(dim=-1))  # [B, T]
    policy_logprobs, entropy = dense("logprobs"), dense("entropy")
    kl_low, kl_high = dense("kl_low"), dense("kl_high")
    assert policy_logprobs is not None
    assert entropy is not None
    return Measurement(
        policy_logprobs=policy_logprobs,
        log_ratio=log_ratio(policy_logprobs, batch.rollout_logprobs),
        entropy=entropy,
        kl=dense("kl"),
        total_variation=dense("total_variation"),
        is_flipped=is_flipped,
        kl_interval=None if kl_low is None or kl_high is None else KLInterval(kl_low, kl_high),
    )


def mean_divergence(measurement: Measurement, token_mask: Tensor) -> float:
    """Average the divergence from the rollout policy over tokens: exact KL where it is known, else k3.

    Args:
        measurement: of B sequences.
        token_mask: ``[B, T]`` bool, at least one True.

    Returns:
        Nats per token; not finite where a token's log-probs are not.
    """
    divergence = k3_divergence(measurement.log_ratio) if measurement.kl is None else measurement.kl
    return float(divergence[token_mask].mean())


@torch.no_grad()
def gate(
    measurement: Measurement, response_mask: Tensor, config: MaskConfig, control: RandomControl | None = None
) -> Tensor:
    """Decide which sequences to keep (Algorithm 1, line 3).

    A sequence with a non-finite log-ratio is rejected under every criterion.

    Args:
        measurement: of the B sequences.
        response_mask: ``[B, T]`` bool.
        config: the mask's section.
        control: for criterion random.

    Returns:
        ``[B]`` bool.
    """
    is_finite = finite_mask(measurement.log_ratio, response_mask)
    inputs = MaskInputs(measurement=measurement, response_mask=response_mask, config=config, control=control)
    return is_finite & CRITERIA[config.criterion](inputs)


def surrogate_loss(
    policy: Policy, batch: RolloutBatch, config: LossConfig, *, temperature: float, denominator: float
) -> Tensor:
    """Compute the loss of kept sequences (Algorithm 1, line 4): ratio, objective, reduction.

    Args:
        policy: pi_theta.
        batch: kept sequences only; a rejected one is left out and so contributes exactly zero.
        config: the loss's section.
        temperature: sampling temperature of the rollouts.
        denominator: N, the number of sequences of the whole update.

    Returns:
        Scalar float32 with gradient.
    """
    policy_logprobs = batch.dense(policy(batch, temperature=temperature).logprobs)  # [B, T]
    ratio = log_ratio(policy_logprobs, batch.rollout_logprobs)
    objective = OBJECTIVES[config.name](ratio, batch.advantages, clip_range(config))
    return reduce_objective(
        objective, batch.response_mask, denominator=denominator, length_normalizer=config.length_normalizer
    )


def clip_range(config: LossConfig) -> ClipRange:
    """Take PPO's clip range out of the loss's section."""
    return ClipRange(low=config.clip_low, high=config.clip_high)


@dataclass(frozen=True, kw_only=True)
class MaskInputs:
    """What a criterion may look at."""

    measurement: Measurement
    response_mask: Tensor
    config: MaskConfig
    control: RandomControl | None


def _keep_all(inputs: MaskInputs) -> Tensor:
    return torch.ones(inputs.response_mask.shape[0], dtype=torch.bool, device=inputs.response_mask.device)


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


def _ln_trm(inputs: MaskInputs) -> Tensor:
    config = inputs.config
    return ln_trm_mask(
        inputs.measurement.log_ratio,
        inputs.response_mask,
        epsilon=config.ln_trm_epsilon,
        delta=config.ln_trm_delta,
        threshold=config.ln_trm_threshold,
    )


def _ser(inputs: MaskInputs) -> Tensor:
    return ser_mask(inputs.measurement.log_ratio, inputs.response_mask, inputs.config.ser_threshold)


def _random(inputs: MaskInputs) -> Tensor:
    if inputs.control is None:
        raise ValueError(f"criterion random copies the rate of {inputs.config.reference_arm}, which was not given")
    mask = random_mask(inputs.response_mask.shape[0], inputs.control.num_kept, inputs.control.generator)
    return mask.to(inputs.response_mask.device)


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


CRITERIA: dict[MaskCriterion, Callable[[MaskInputs], Tensor]] = {
    "none": _keep_all,
    "trm_max": _trm_max,
    "trm_avg": _trm_avg,
    "trm_max_avg": _trm_max_avg,
    "ln_trm": _ln_trm,
    "ser": _ser,
    "random": _random,
}
