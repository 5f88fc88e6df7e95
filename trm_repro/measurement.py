"""Measuring a policy on a minibatch: log-probs, divergences, entropy and routing, per token.

Shape letters: B sequences, T response tokens, N response tokens without padding, L layers, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trm_repro.batch import RolloutBatch
from trm_repro.certified import KLInterval
from trm_repro.divergence import k3_divergence, log_ratio
from trm_repro.errors import FaultError
from trm_repro.policy import Policy, PolicyOutput


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The policy on one minibatch just before an update; no gradient, 0 on padding.

    Attributes:
        policy_logprobs: ``[B, T]`` float32, nats; log pi_theta of the sampled tokens.
        log_ratio: ``[B, T]`` float32, nats; policy over rollout.
        entropy: ``[B, T]`` float32, nats.
        normalizers: ``[B, T]`` float32, nats; log of the sum over the vocabulary of exponentials of the policy's
            tempered logits; spares the update that follows a pass over the vocabulary.
        kl: ``[B, T]`` float32, nats; exact KL(pi_roll || pi_theta), or None.
        total_variation: ``[B, T]`` float32, or None.
        kl_interval: ``[B, T]`` ends, nats; what KL is at least and at most, or None.
        rebuilding_error: ``[B, T]`` float32, nats; distance of the sampled tokens' log pi_roll, rebuilt from hidden
            states, to what the engine returned; 0 where that is not finite. None without hidden states.
        is_flipped: ``[B, T]`` bool; whether engine and policy routed the token to other experts in some layer, or
            None without routing.
    """

    policy_logprobs: Tensor
    log_ratio: Tensor
    entropy: Tensor
    normalizers: Tensor
    kl: Tensor | None
    total_variation: Tensor | None
    is_flipped: Tensor | None
    kl_interval: KLInterval | None = None
    rebuilding_error: Tensor | None = None


@torch.no_grad()
def measure(policy: Policy, batch: RolloutBatch, *, temperature: float, tokens_per_micro_batch: int) -> Measurement:
    """Score a minibatch with the current policy (Algorithm 1, lines 1 and 2).

    Args:
        policy: pi_theta.
        batch: B sequences.
        temperature: sampling temperature of the rollouts.
        tokens_per_micro_batch: tokens in one forward pass, padding counted unless the policy packs.

    Returns:
        Log-probs, divergences, entropy and routing, per token.
    """
    parts = batch.split(tokens_per_micro_batch, packed=policy.is_packing)
    return measurement_of(batch, [policy(part, temperature=temperature, measure=True) for part in parts])


def measure_to_learn(policy: Policy, batch: RolloutBatch, *, temperature: float) -> tuple[Measurement, Tensor]:
    """Score a micro-batch in the forward pass that it will be learned from.

    Args:
        policy: pi_theta.
        batch: B sequences.
        temperature: sampling temperature of the rollouts.

    Returns:
        The measurement, without gradient, and the policy's log-probs ``[B, T]`` float32, nats, with it.
    """
    output = policy(batch, temperature=temperature, measure=True)
    assert output.differentiable is not None
    return measurement_of(batch, [output]), batch.dense(output.differentiable)


@torch.no_grad()
def measurement_of(batch: RolloutBatch, outputs: Sequence[PolicyOutput]) -> Measurement:
    """Put what passes over the consecutive parts of a batch found together.

    Args:
        batch: B sequences.
        outputs: of each part, with ``measure``.

    Returns:
        The measurement of the batch.
    """

    def dense(name: str) -> Tensor | None:
        parts = [getattr(output, name) for output in outputs]
        return None if parts[0] is None else batch.dense(torch.cat(parts))

    is_flipped = None
    routings = [output.experts for output in outputs if output.experts is not None]
    if batch.rollout_experts is not None and routings:
        policy_experts = torch.cat(routings).sort(dim=-1).values  # [N, L, K]
        rollout_experts = batch.rollout_experts.long().sort(dim=-1).values
        is_flipped = batch.dense((policy_experts != rollout_experts).flatten(1).any(dim=-1))  # [B, T]
    policy_logprobs, entropy, normalizers = dense("logprobs"), dense("entropy"), dense("normalizers")
    kl_low, kl_high = dense("kl_low"), dense("kl_high")
    assert policy_logprobs is not None
    assert entropy is not None
    assert normalizers is not None
    return Measurement(
        policy_logprobs=policy_logprobs,
        log_ratio=log_ratio(policy_logprobs, batch.rollout_logprobs),
        entropy=entropy,
        normalizers=normalizers,
        kl=dense("kl"),
        total_variation=dense("total_variation"),
        is_flipped=is_flipped,
        kl_interval=None if kl_low is None or kl_high is None else KLInterval(kl_low, kl_high),
        rebuilding_error=_rebuilding_error(batch, dense("rebuilt_logprobs"), dense("rebuilt_tolerance")),
    )


def _rebuilding_error(batch: RolloutBatch, rebuilt: Tensor | None, tolerance: Tensor | None) -> Tensor | None:
    """Compare log pi_roll rebuilt from hidden states with the engine's own; stop where rounding does not explain it.

    Returns:
        ``[B, T]`` float32, nats; None without hidden states.
    """
    if rebuilt is None or tolerance is None:
        return None
    is_known = batch.response_mask & batch.rollout_logprobs.isfinite()
    error = torch.where(is_known, (rebuilt - batch.rollout_logprobs).abs(), torch.zeros_like(rebuilt))
    if not bool((error <= tolerance).all()):  # also catches NaN
        worst = int((error - tolerance).nan_to_num(torch.inf).argmax())
        raise FaultError(
            f"hidden states do not match: they rebuild a sampled token's log-prob {error.flatten()[worst]:.1e} nats "
            f"from the engine's own, above the {tolerance.flatten()[worst]:.1e} that rounding explains; the states or "
            "the output head are not those it was sampled with"
        )
    return error


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
