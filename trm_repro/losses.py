"""Surrogate losses: per-token objectives with one signature, and one reduction for all of them.

Shape letters: B sequences, T response tokens. A loss is four calls: log-ratio, mask, objective, reduction. Ratios are
policy over rollout in every objective, whatever denominator a method's paper has.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trm_repro.divergence import importance_ratio, masked_mean
from trm_repro.masks.gates import TokenStatistics, gate_mask


@dataclass(frozen=True, kw_only=True)
class ClipRange:
    """The range [1 - low, 1 + high] of unclipped ratios."""

    low: float = 0.2
    high: float = 0.2


Objective = Callable[[Tensor, Tensor, Tensor, ClipRange], Tensor]


def token_importance_sampling(log_ratio: Tensor, response_mask: Tensor, advantages: Tensor, clip: ClipRange) -> Tensor:
    """Weight each token's advantage by its importance ratio, unclipped.

    Its gradient is A rho_t grad log pi_theta(y_t | c_t).
    Source: TRM (arXiv 2512.23075v3), Algorithm 1.

    Args:
        log_ratio: ``[B, T]`` float32, nats, with gradient.
        response_mask: ``[B, T]`` bool; not used, every objective has the same signature.
        advantages: ``[B]`` float32.
        clip: not used.

    Returns:
        ``[B, T]`` float32; to be maximised.
    """
    del response_mask, clip
    return importance_ratio(log_ratio) * advantages[:, None]


def ppo_clip(log_ratio: Tensor, response_mask: Tensor, advantages: Tensor, clip: ClipRange) -> Tensor:
    """Take the smaller of the unclipped and the clipped objective, token by token.

    The ratio is policy over rollout. A ratio far above 1 with a negative advantage is not clipped.
    Source: PPO (arXiv 1707.06347), clipped surrogate.

    Args:
        log_ratio: ``[B, T]`` float32, nats, with gradient.
        response_mask: ``[B, T]`` bool; not used.
        advantages: ``[B]`` float32.
        clip: range of unclipped ratios.

    Returns:
        ``[B, T]`` float32; to be maximised.
    """
    del response_mask
    return _clipped(importance_ratio(log_ratio), advantages, clip)


def gspo(log_ratio: Tensor, response_mask: Tensor, advantages: Tensor, clip: ClipRange) -> Tensor:
    """Clip the geometric mean s of each sequence's ratios, as `ppo_clip` clips the single ratios.

    The sequence's value is written to each of its tokens, so that the gradient of the token sum is s A sum_t grad log
    pi_theta. Source: GSPO (arXiv 2507.18071), which divides by the length where `reduce_objective` divides by its
    constant, and whose s is over the trainer's old policy.

    Args:
        log_ratio: ``[B, T]`` float32, nats, with gradient.
        response_mask: ``[B, T]`` bool.
        advantages: ``[B]`` float32.
        clip: range of unclipped s.

    Returns:
        ``[B, T]`` float32; to be maximised.
    """
    mean = masked_mean(log_ratio, response_mask, dim=-1)  # [B], log s
    return _clipped(importance_ratio(mean)[:, None], advantages, clip).expand_as(log_ratio)


def token_tis(log_ratio: Tensor, response_mask: Tensor, advantages: Tensor, clip: ClipRange) -> Tensor:
    """Weight each token's advantage by its ratio, capped at 1 + high without losing the gradient.

    Its gradient is A min(rho_t, 1 + high) grad log pi_theta. Source: Yao et al. 2025, truncated importance sampling.

    Args:
        log_ratio: ``[B, T]`` float32, nats, with gradient.
        response_mask: ``[B, T]`` bool.
        advantages: ``[B]`` float32.
        clip: its high end alone.

    Returns:
        ``[B, T]`` float32; to be maximised.
    """
    return _weighted("token_tis", log_ratio, response_mask, advantages, cap=1.0 + clip.high)


def cispo(log_ratio: Tensor, response_mask: Tensor, advantages: Tensor, clip: ClipRange) -> Tensor:
    """Weight each token's advantage by its clipped ratio without losing the gradient.

    Its gradient is A clip(rho_t, 1 - low, 1 + high) grad log pi_theta; low = 1 leaves the lower end open, as the
    paper does. Source: CISPO (MiniMax-M1, arXiv 2506.13585).

    Args:
        log_ratio: ``[B, T]`` float32, nats, with gradient.
        response_mask: ``[B, T]`` bool.
        advantages: ``[B]`` float32.
        clip: range of the weights.

    Returns:
        ``[B, T]`` float32; to be maximised.
    """
    return _weighted("cispo", log_ratio, response_mask, advantages, low=clip.low, high=clip.high)


OBJECTIVES: dict[str, Objective] = {
    "token_is": token_importance_sampling,
    "ppo_clip": ppo_clip,
    "token_tis": token_tis,
    "gspo": gspo,
    "cispo": cispo,
}


def _clipped(ratio: Tensor, advantages: Tensor, clip: ClipRange) -> Tensor:
    clipped = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    return torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])


def _weighted(name: str, log_ratio: Tensor, response_mask: Tensor, advantages: Tensor, **thresholds: float) -> Tensor:
    statistics = TokenStatistics(log_ratio=log_ratio.detach(), response_mask=response_mask)
    weights = gate_mask(name, statistics, **thresholds)  # [B, T], no gradient
    return weights * importance_ratio(log_ratio) * advantages[:, None]


@torch.no_grad()
def is_clipped(log_ratio: Tensor, advantages: Tensor, clip: ClipRange) -> Tensor:
    """Mark the tokens whose PPO gradient the clip removes.

    Args:
        log_ratio: ``[B, T]`` float32, nats.
        advantages: ``[B]`` float32.
        clip: range of unclipped ratios.

    Returns:
        ``[B, T]`` bool.
    """
    ratio, sign = importance_ratio(log_ratio), advantages[:, None]
    return ((ratio > 1.0 + clip.high) & (sign > 0)) | ((ratio < 1.0 - clip.low) & (sign < 0))


def reduce_objective(
    objective: Tensor, response_mask: Tensor, *, denominator: float, length_normalizer: float = 1.0
) -> Tensor:
    """Reduce a per-token objective of the kept sequences to the loss to be minimised.

    Computes -1/N sum_i 1/C sum_t objective. N is the number of all sequences of the update, rejected ones too:
    leaving a rejected sequence out of ``objective`` gives it exactly zero, and nothing is renormalised.
    Source: TRM (arXiv 2512.23075v3), Algorithm 1; the constant C is ours.

    Args:
        objective: ``[B, T]`` float32; whatever stands on padding is ignored.
        response_mask: ``[B, T]`` bool.
        denominator: N > 0.
        length_normalizer: C > 0; 1 is Algorithm 1 to the letter.

    Returns:
        Scalar float32.
    """
    tokens = torch.where(response_mask, objective, torch.zeros_like(objective))
    return -tokens.sum() / (denominator * length_normalizer)
