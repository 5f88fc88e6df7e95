"""Surrogate losses: per-token objectives with one signature, and one reduction for all of them.

Shape letters: B sequences, T response tokens. A loss is four calls: log-ratio, mask, objective, reduction.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trm_repro.divergence import importance_ratio


@dataclass(frozen=True, kw_only=True)
class ClipRange:
    """PPO's range [1 - low, 1 + high] of unclipped ratios."""

    low: float = 0.2
    high: float = 0.2


Objective = Callable[[Tensor, Tensor, ClipRange], Tensor]


def token_importance_sampling(log_ratio: Tensor, advantages: Tensor, clip: ClipRange) -> Tensor:
    """Weight each token's advantage by its importance ratio, unclipped.

    Its gradient is A rho_t grad log pi_theta(y_t | c_t).
    Source: TRM (arXiv 2512.23075v3), Algorithm 1.

    Args:
        log_ratio: ``[B, T]`` float32, nats, with gradient.
        advantages: ``[B]`` float32.
        clip: not used; every objective has the same signature.

    Returns:
        ``[B, T]`` float32; to be maximised.
    """
    del clip
    return importance_ratio(log_ratio) * advantages[:, None]


def ppo_clip(log_ratio: Tensor, advantages: Tensor, clip: ClipRange) -> Tensor:
    """Take the smaller of the unclipped and the clipped objective, token by token.

    The ratio is policy over rollout. A ratio far above 1 with a negative advantage is not clipped.
    Source: PPO (arXiv 1707.06347), clipped surrogate.

    Args:
        log_ratio: ``[B, T]`` float32, nats, with gradient.
        advantages: ``[B]`` float32.
        clip: range of unclipped ratios.

    Returns:
        ``[B, T]`` float32; to be maximised.
    """
    ratio = importance_ratio(log_ratio)  # [B, T]
    clipped = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    return torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])


OBJECTIVES: dict[str, Objective] = {"token_is": token_importance_sampling, "ppo_clip": ppo_clip}


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
