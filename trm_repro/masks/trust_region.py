"""Trust-region masks: a sequence is kept when its token divergences stay within a threshold.

Shape letters: B sequences, T response tokens. An empty response (no True in its mask row) has
divergence 0 and is kept, also where T = 0; a NaN divergence rejects its sequence, an infinite one too unless the
threshold is. Negative divergences, which estimators such as k1 give, are compared as they are.
"""

import torch
from torch import Tensor


@torch.no_grad()
def max_divergence_mask(token_divergence: Tensor, response_mask: Tensor, threshold: float) -> Tensor:
    """Keep sequences whose largest token divergence is at most the threshold (TRM-Max).

    Source: TRM (arXiv 2512.23075v3), Algorithm 1, max criterion.

    Args:
        token_divergence: ``[B, T]`` float, nats; exact KL, or k2 from sampled tokens.
        response_mask: ``[B, T]`` bool.
        threshold: delta > 0, nats; infinity keeps every sequence without NaN.

    Returns:
        ``[B]`` bool.

    Raises:
        ValueError: if the shapes differ, the mask is not bool or the threshold is not positive.
    """
    _check(token_divergence, response_mask, threshold)
    if token_divergence.shape[-1] == 0:
        return torch.ones(token_divergence.shape[:-1], dtype=torch.bool, device=token_divergence.device)
    largest = torch.where(response_mask, token_divergence, 0.0).amax(dim=-1)  # [B], NaN if any token is NaN
    return largest <= threshold


@torch.no_grad()
def mean_divergence_mask(token_divergence: Tensor, response_mask: Tensor, threshold: float) -> Tensor:
    """Keep sequences whose mean token divergence is at most the threshold (TRM-Avg).

    Source: TRM (arXiv 2512.23075v3), Algorithm 1, average criterion.

    Args:
        token_divergence: ``[B, T]`` float, nats; exact KL, or k3 from sampled tokens.
        response_mask: ``[B, T]`` bool.
        threshold: delta_avg > 0, nats; infinity keeps every sequence without NaN.

    Returns:
        ``[B]`` bool.

    Raises:
        ValueError: if the shapes differ, the mask is not bool or the threshold is not positive.
    """
    _check(token_divergence, response_mask, threshold)
    total = torch.where(response_mask, token_divergence, 0.0).sum(dim=-1)  # [B]
    return total / response_mask.sum(dim=-1).clamp(min=1) <= threshold


@torch.no_grad()
def sequence_mask(
    token_divergence: Tensor,
    response_mask: Tensor,
    *,
    max_threshold: float | None = None,
    avg_threshold: float | None = None,
) -> Tensor:
    """Keep sequences that pass every criterion a threshold is given for (TRM-Max, TRM-Avg, or both).

    Args:
        token_divergence: ``[B, T]`` float, nats; one divergence behind both criteria. For a different one
            behind each, combine `max_divergence_mask` and `mean_divergence_mask` with ``&``.
        response_mask: ``[B, T]`` bool.
        max_threshold: delta of TRM-Max, nats, or None to leave it out.
        avg_threshold: delta of TRM-Avg, nats, or None to leave it out.

    Returns:
        ``[B]`` bool.

    Raises:
        ValueError: if no threshold is given, one is not positive, the shapes differ or the mask is not bool.
    """
    if max_threshold is None and avg_threshold is None:
        raise ValueError("give max_threshold, avg_threshold or both")
    keep = torch.ones(token_divergence.shape[0], dtype=torch.bool, device=token_divergence.device)
    if max_threshold is not None:
        keep &= max_divergence_mask(token_divergence, response_mask, max_threshold)
    if avg_threshold is not None:
        keep &= mean_divergence_mask(token_divergence, response_mask, avg_threshold)
    return keep


@torch.no_grad()
def finite_mask(log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    """Keep sequences all of whose response tokens have a finite log-ratio.

    Args:
        log_ratio: ``[B, T]`` float, nats.
        response_mask: ``[B, T]`` bool.

    Returns:
        ``[B]`` bool.

    Raises:
        ValueError: if the shapes differ or the mask is not bool.
    """
    check_tokens("log_ratio", log_ratio, response_mask)
    return (log_ratio.isfinite() | ~response_mask).all(dim=-1)


def check_tokens(name: str, values: Tensor, response_mask: Tensor) -> None:
    """Raise ValueError unless values and mask are of one shape ``[B, T]`` and the mask is bool."""
    check_bool(response_mask)
    if values.shape != response_mask.shape:
        raise ValueError(f"{name} {tuple(values.shape)} and response_mask {tuple(response_mask.shape)} differ in shape")


def check_bool(response_mask: Tensor) -> None:
    """Raise ValueError unless the mask is bool; a mask of numbers would index or weigh where it should select."""
    if response_mask.dtype != torch.bool:
        raise ValueError(
            f"response_mask must be bool, True on response tokens, got {response_mask.dtype}; use mask.bool()"
        )


def _check(token_divergence: Tensor, response_mask: Tensor, threshold: float) -> None:
    check_tokens("token_divergence", token_divergence, response_mask)
    if not threshold > 0:
        raise ValueError(f"the threshold must be > 0, got {threshold}")
