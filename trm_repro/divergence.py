"""Divergences between the policy and the rollout policy, from sampled tokens and from whole distributions.

Shape letters: B sequences, T response tokens, V vocabulary. Everything is in nats; a log-ratio is
always policy over rollout. No function here replaces a non-finite value: it stays visible.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp, which would overflow float32 at 89; exp(20) is 5e8."""


def log_ratio(policy_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Compute log pi_theta - log pi_roll of the sampled tokens.

    Args:
        policy_logprobs: ``[B, T]`` float32, nats.
        rollout_logprobs: ``[B, T]`` float32, nats, of the same tokens.

    Returns:
        ``[B, T]`` float32, nats; differentiable in ``policy_logprobs``.

    Raises:
        ValueError: if the shapes differ.
    """
    if policy_logprobs.shape != rollout_logprobs.shape:
        raise ValueError(
            f"log-probs differ in shape: policy {tuple(policy_logprobs.shape)}, rollout {tuple(rollout_logprobs.shape)}"
        )
    return policy_logprobs - rollout_logprobs


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """Compute pi_theta / pi_roll from its logarithm, clamped to exp(+-MAX_LOG_RATIO).

    A clamped token has no gradient. Source: TRM (arXiv 2512.23075v3), Setting; the clamp is ours.

    Args:
        log_ratio: any shape, float32, nats.

    Returns:
        The same shape; 1 where the policies agree.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def k1_divergence(log_ratio: Tensor) -> Tensor:
    """Estimate KL(pi_roll || pi_theta) per token by -log r: unbiased under pi_roll, of either sign."""
    return -log_ratio


def k2_divergence(log_ratio: Tensor) -> Tensor:
    """Estimate KL per token by (log r)^2 / 2: non-negative and symmetric in the two policies, biased.

    Source: TRM (arXiv 2512.23075v3), sample-based estimator of the max criterion. A threshold of
    0.05 means |log r| <= 0.316.

    Args:
        log_ratio: any shape, float32, nats.

    Returns:
        The same shape, nats; 0 where the policies agree.
    """
    return 0.5 * log_ratio.square()


def k3_divergence(log_ratio: Tensor) -> Tensor:
    """Estimate KL(pi_roll || pi_theta) per token by r - 1 - log r: non-negative, unbiased under pi_roll.

    Source: TRM (arXiv 2512.23075v3), sample-based estimator of the average criterion. The log-ratio is clamped
    to at most MAX_LOG_RATIO, which leaves every value below 5e8 as it is.

    Args:
        log_ratio: any shape, float32, nats.

    Returns:
        The same shape, nats; 0 where the policies agree.
    """
    clamped = log_ratio.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(clamped) - clamped


def exact_kl_divergence(rollout_log_distribution: Tensor, policy_log_distribution: Tensor) -> Tensor:
    """Compute KL(pi_roll || pi_theta) over the whole vocabulary.

    Tokens with pi_roll = 0 contribute 0; pi_theta = 0 < pi_roll makes the result infinite. Rounding
    can leave a tiny negative sum, which is clamped to 0. Source: TRM (arXiv 2512.23075v3), Divergences.

    Args:
        rollout_log_distribution: ``[..., V]`` float, nats.
        policy_log_distribution: ``[..., V]`` float, nats.

    Returns:
        ``[...]`` float, nats, >= 0; NaN where an input is NaN.
    """
    rollout = rollout_log_distribution.exp()  # [..., V]
    terms = rollout * (rollout_log_distribution - policy_log_distribution)
    impossible = rollout_log_distribution == -torch.inf
    divergence = terms.masked_fill(impossible, 0.0).sum(dim=-1)  # [...]
    return divergence.clamp(min=0.0)


def exact_total_variation(rollout_log_distribution: Tensor, policy_log_distribution: Tensor) -> Tensor:
    """Compute TV(pi_roll, pi_theta), half the sum of absolute differences over the vocabulary.

    Source: TRM (arXiv 2512.23075v3), Divergences.

    Args:
        rollout_log_distribution: ``[..., V]`` float, nats.
        policy_log_distribution: ``[..., V]`` float, nats.

    Returns:
        ``[...]`` float in [0, 1].
    """
    difference = rollout_log_distribution.exp() - policy_log_distribution.exp()  # [..., V]
    return 0.5 * difference.abs().sum(dim=-1)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average the values where the mask is True, ignoring whatever stands elsewhere.

    Args:
        values: any shape.
        mask: the same shape, bool.
        dim: axis to reduce, or None for all.

    Returns:
        The mean; 0 where the mask keeps nothing.
    """
    kept = torch.where(mask, values, torch.zeros_like(values))
    if dim is None:
        return kept.sum() / mask.sum().clamp(min=1)
    return kept.sum(dim=dim) / mask.sum(dim=dim).clamp(min=1)


def perplexity_gap(policy_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Compute each sequence's |mean_t log pi_theta - mean_t log pi_roll|: mean first, then absolute value.

    Its mean over sequences is the paper's log absolute perplexity gap.
    Source: TRM (arXiv 2512.23075v3), Experiments.

    Args:
        policy_logprobs: ``[B, T]`` float32, nats.
        rollout_logprobs: ``[B, T]`` float32, nats.
        response_mask: ``[B, T]`` bool.

    Returns:
        ``[B]`` float32, nats per token.
    """
    return masked_mean(log_ratio(policy_logprobs, rollout_logprobs), response_mask, dim=-1).abs()  # [B]
