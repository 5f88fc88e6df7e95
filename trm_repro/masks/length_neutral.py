"""Length-neutral masks: LN-TRM and SER judge a response by an average of |rho_t - 1| over its tokens.

Shape letters: B sequences, T response tokens. Both work on sampled tokens alone, so they certify nothing about
the whole distribution. An empty response has average 0 and is kept; a NaN or infinite log-ratio rejects its sequence.
"""

import torch
from torch import Tensor

from trm_repro.divergence import MAX_LOG_RATIO, masked_mean
from trm_repro.masks.trust_region import check_bool, check_tokens, finite_mask


@torch.no_grad()
def ln_trm_mask(log_ratio: Tensor, response_mask: Tensor, *, epsilon: float, delta: float, threshold: float) -> Tensor:
    """Keep sequences whose weighted mean of |rho_t - 1| is at most the threshold (LN-TRM).

    Source: TRM (arXiv 2512.23075v3), LN-TRM criterion W(y) / Z(T) <= delta_W. A response of one token has W = Z = 0
    and is kept when its log-ratio is finite.

    Args:
        log_ratio: ``[B, T]`` float, nats; policy over rollout, of the sampled tokens.
        response_mask: ``[B, T]`` bool.
        epsilon: assumed largest token TV, in (0, 1]; a setting, not measured on the same batch.
        delta: assumed largest token KL, nats, > 0, infinity when nothing is assumed; likewise a setting.
        threshold: delta_W > 0; infinity keeps every sequence whose log-ratios are finite.

    Returns:
        ``[B]`` bool.

    Raises:
        ValueError: if the shapes differ, the mask is not bool or a number is out of range.
    """
    _check_threshold(threshold)
    average = weighted_ratio_deviation(log_ratio, response_mask, epsilon=epsilon, delta=delta)  # [B]
    return finite_mask(log_ratio, response_mask) & (average <= threshold)


@torch.no_grad()
def ser_mask(log_ratio: Tensor, response_mask: Tensor, threshold: float) -> Tensor:
    """Keep sequences whose mean of |rho_t - 1| is at most the threshold (SER).

    Source: TRM (arXiv 2512.23075v3), SER criterion.

    Args:
        log_ratio: ``[B, T]`` float, nats; policy over rollout, of the sampled tokens.
        response_mask: ``[B, T]`` bool.
        threshold: delta_SER > 0, the paper recommends 0.03 to 0.10; infinity keeps every sequence whose
            log-ratios are finite.

    Returns:
        ``[B]`` bool.

    Raises:
        ValueError: if the shapes differ, the mask is not bool or the threshold is not positive.
    """
    _check_threshold(threshold)
    average = mean_ratio_deviation(log_ratio, response_mask)  # [B]
    return finite_mask(log_ratio, response_mask) & (average <= threshold)


@torch.no_grad()
def weighted_ratio_deviation(log_ratio: Tensor, response_mask: Tensor, *, epsilon: float, delta: float) -> Tensor:
    """Compute W(y) / Z(T): W = sum_t |rho_t - 1| w_t over Z = sum_t w_t, with the weights of `future_weights`.

    Source: TRM (arXiv 2512.23075v3), LN-TRM criterion.

    Args:
        log_ratio: ``[B, T]`` float, nats.
        response_mask: ``[B, T]`` bool.
        epsilon: in (0, 1].
        delta: nats, > 0.

    Returns:
        ``[B]`` float, >= 0; 0 for a response of no token or of one. A non-finite log-ratio among tokens of
        positive weight need not show: combine with `finite_mask`.

    Raises:
        ValueError: if the shapes differ, the mask is not bool or a number is out of range.
    """
    deviation = ratio_deviation(log_ratio, response_mask)  # [B, T]
    weights = future_weights(response_mask, epsilon=epsilon, delta=delta).to(deviation.dtype)  # [B, T]
    total = weights.sum(dim=-1)  # [B], Z
    weighted = (deviation * weights).sum(dim=-1)  # [B], W
    # 0 / 0 for a single token: nothing follows that it could shift.
    return torch.where(total > 0, weighted / total, 0.0)


@torch.no_grad()
def mean_ratio_deviation(log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    """Compute mean_t |rho_t - 1| of each sequence: ``[B]`` from ``[B, T]``, 0 for an empty response.

    Source: TRM (arXiv 2512.23075v3), SER criterion. Raises ValueError if the shapes differ.
    """
    return masked_mean(ratio_deviation(log_ratio, response_mask), response_mask, dim=-1)


def future_weights(response_mask: Tensor, *, epsilon: float, delta: float) -> Tensor:
    """Compute w_t = min(1, (T - t) epsilon, sqrt((T - t) delta / 2)): what the tokens after t can differ by.

    T is the number of response tokens of the sequence itself, so a weight looks ahead to the realised length: a
    heuristic, where the bounds have the length limit. The last token weighs 0. Source: TRM (arXiv 2512.23075v3),
    LN-TRM criterion, weights of the Adaptive bound.

    Args:
        response_mask: ``[B, T]`` bool; t counts its True entries.
        epsilon: in (0, 1].
        delta: nats, > 0; infinity leaves (T - t) epsilon.

    Returns:
        ``[B, T]`` float32 in [0, 1]; 0 on padding.

    Raises:
        ValueError: if the mask is not bool or a number is out of range.
    """
    check_bool(response_mask)
    if not 0 < epsilon <= 1:
        raise ValueError(f"epsilon must be in (0, 1], got {epsilon}")
    if not delta > 0:
        raise ValueError(f"delta must be > 0, got {delta}")
    position = response_mask.long().cumsum(dim=-1)  # [B, T], t from 1
    remaining = (position[:, -1:] - position).float() if response_mask.shape[-1] else position.float()  # [B, T]
    root = torch.where(remaining > 0, (remaining * (delta / 2)).sqrt(), 0.0)  # 0 times an infinite delta is NaN
    weights = torch.minimum(remaining * epsilon, root).clamp(max=1.0)
    return torch.where(response_mask, weights, 0.0)


def ratio_deviation(log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    """Compute |rho_t - 1| from the log-ratio, 0 on padding.

    The log-ratio is clamped to +-MAX_LOG_RATIO, which leaves every deviation below 5e8 as it is and makes
    that of an infinite one finite; NaN stays.

    Args:
        log_ratio: ``[B, T]`` float, nats.
        response_mask: ``[B, T]`` bool.

    Returns:
        ``[B, T]`` float, >= 0.

    Raises:
        ValueError: if the shapes differ or the mask is not bool.
    """
    check_tokens("log_ratio", log_ratio, response_mask)
    deviation = torch.expm1(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).abs()
    return torch.where(response_mask, deviation, 0.0)


def _check_threshold(threshold: float) -> None:
    if not threshold > 0:
        raise ValueError(f"the threshold must be > 0, got {threshold}")
