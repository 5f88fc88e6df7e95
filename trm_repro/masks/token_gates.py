"""Other methods' gates of single tokens: statistics in, mask or weights ``[B, T]`` out.

Shape letters: B sequences, T response tokens. Ratios are policy over rollout. What stands on padding in the result is
not meant: `trm_repro.masks.gates.gate_mask` clears it. Weights multiply the surrogate rho_t A.
"""

import math

import torch
from torch import Tensor

from trm_repro.divergence import MAX_LOG_RATIO
from trm_repro.masks.gates import TokenStatistics


def token_tis(statistics: TokenStatistics, *, cap: float) -> Tensor:
    """Weigh so that each token's gradient carries min(rho_t, cap) (truncated importance sampling).

    Source: Yao et al. 2025, Your efficient RL framework secretly brings you off-policy RL training.
    """
    log_ratio = _clamped(statistics.log_ratio)
    return (log_ratio.clamp(max=_log(cap)) - log_ratio).exp()


def cispo(statistics: TokenStatistics, *, low: float, high: float) -> Tensor:
    """Weigh so that each token's gradient carries clip(rho_t, 1 - low, 1 + high).

    Source: CISPO (MiniMax-M1, arXiv 2506.13585).
    """
    log_ratio = _clamped(statistics.log_ratio)
    return (log_ratio.clamp(_log(1 - low), math.log1p(high)) - log_ratio).exp()


def minpro(statistics: TokenStatistics, *, low: float, high: float) -> Tensor:
    """Weigh so that each token's gradient carries clip(rho_t times the smallest ratio before it, 1 - low, 1 + high).

    The first token has nothing before it. Source: MinPRO (arXiv 2601.22718), objective; its clip range was not found.
    """
    log_ratio = _clamped(statistics.log_ratio)
    smallest = torch.where(statistics.response_mask, log_ratio, math.inf).cummin(dim=-1).values  # [B, T], s <= t
    before = torch.cat([torch.full_like(smallest[:, :1], math.inf), smallest[:, :-1]], dim=-1)  # s < t
    prefix = torch.where(before.isinf(), 0.0, before)
    return ((log_ratio + prefix).clamp(_log(1 - low), math.log1p(high)) - log_ratio).exp()


def icepop(statistics: TokenStatistics, *, low: float, high: float) -> Tensor:
    """Keep tokens whose ratio lies in [low, high]. Source: IcePop (arXiv 2510.18855)."""
    return (statistics.log_ratio >= _log(low)) & (statistics.log_ratio <= _log(high))


def ipo(statistics: TokenStatistics, *, threshold: float) -> Tensor:
    """Keep tokens whose probability differs by at most the threshold. Source: prime-rl, IPO."""
    return statistics.probability_change.abs() <= threshold


def dppo_binary_tv(statistics: TokenStatistics, *, low: float, high: float) -> Tensor:
    """Reject tokens that have moved too far already in the direction in which the advantage pushes them.

    The distance is the TV of the two-point distributions (sampled token, all others): the change of its probability.
    Source: DPPO (arXiv 2602.04879), Binary-TV.
    """
    change = statistics.probability_change
    return torch.where(_is_pushed_up(statistics), change <= high, change >= -low)


def dppo_binary_kl(statistics: TokenStatistics, *, low: float, high: float) -> Tensor:
    """As `dppo_binary_tv`, by the KL of the two-point distributions, rollout first.

    Source: DPPO (arXiv 2602.04879), Binary-KL.
    """
    divergence, is_up = binary_kl(statistics), _is_pushed_up(statistics)
    is_far = divergence > torch.where(is_up, high, low)
    return ~(is_far & _is_moving_away(statistics.log_ratio, is_up))


def dppo_top_k_tv(statistics: TokenStatistics, *, threshold: float) -> Tensor:
    """As `dppo_binary_tv`, by a total variation over more of the vocabulary. Source: DPPO, Top-K TV."""
    assert statistics.total_variation is not None
    is_moving_away = _is_moving_away(statistics.log_ratio, _is_pushed_up(statistics))
    return ~((statistics.total_variation > threshold) & is_moving_away)


def dppo_top_k_kl(statistics: TokenStatistics, *, threshold: float) -> Tensor:
    """As `dppo_binary_tv`, by a KL(rollout, policy) over more of the vocabulary. Source: DPPO, Top-K KL."""
    assert statistics.kl is not None
    return ~((statistics.kl > threshold) & _is_moving_away(statistics.log_ratio, _is_pushed_up(statistics)))


def cppo(
    statistics: TokenStatistics,
    *,
    threshold: float,
    weight_floor: float,
    budget: float,
    budget_quantile: float,
    budget_scale: float,
    budget_ceiling: float,
) -> Tensor:
    """Reject tokens by a threshold that is tighter early on and after a prefix that has drifted.

    With D_t the change of the sampled token's probability and w_t = weight_floor + (1 - weight_floor) (T - t) /
    (T - 1), keeps w_t D_t <= min(threshold, threshold + b W_(t-1) - S_(t-1)), where W and S sum w and w D over the
    tokens before t, rejected ones too, and every token whose update moves towards the rollout policy.
    Source: CPPO (arXiv 2606.10968), Binary-TV.

    Args:
        statistics: with advantages and both policies' log-probs.
        threshold: of a token's weighted divergence.
        weight_floor: the last token's weight.
        budget: smallest mean weighted divergence b that a prefix may have.
        budget_quantile: b is this quantile of the sequence's D_t,
        budget_scale: times this,
        budget_ceiling: kept between budget and this many times it.

    Returns:
        ``[B, T]`` bool.
    """
    mask = statistics.response_mask
    divergence = torch.where(mask, statistics.probability_change.abs(), 0.0)  # [B, T]
    position = mask.cumsum(dim=-1, dtype=divergence.dtype)  # [B, T], t from 1
    length = mask.sum(dim=-1, keepdim=True)  # [B, 1]
    remaining = (length - position) / (length - 1).clamp(min=1)  # [B, T]; a single token counts as the first
    remaining = torch.where(length == 1, 1.0, remaining)
    weight = torch.where(mask, weight_floor + (1 - weight_floor) * remaining, 0.0)  # [B, T]
    weighted = weight * divergence
    quantile = _quantile(divergence, length, budget_quantile)  # [B, 1]
    allowance = (budget_scale * quantile).clamp(budget, budget_ceiling * budget)  # [B, 1]
    surplus = allowance * (weight.cumsum(dim=-1) - weight) - (weighted.cumsum(dim=-1) - weighted)  # [B, T]
    is_within = weighted <= threshold + surplus.clamp(max=0.0)
    assert statistics.advantages is not None
    return is_within | (statistics.advantages[:, None] * statistics.log_ratio <= 0)


def binary_kl(statistics: TokenStatistics) -> Tensor:
    """Compute KL of (q, 1 - q) to (p, 1 - p), q rollout and p policy probability of the sampled token.

    Returns:
        ``[B, T]``, nats, >= 0; infinite where p = 1 > q.
    """
    assert statistics.policy_logprobs is not None
    assert statistics.rollout_logprobs is not None
    rollout, policy = statistics.rollout_logprobs.double(), statistics.policy_logprobs.double()
    rest, policy_rest = (0.0 - torch.expm1(logprobs) for logprobs in (rollout, policy))  # 1 - q, 1 - p; no -0
    others = torch.where(rest > 0, rest * torch.log(rest / policy_rest), 0.0)
    return ((1 - rest) * (rollout - policy) + others).clamp(min=0.0).to(statistics.log_ratio.dtype)


def _quantile(values: Tensor, length: Tensor, level: float) -> Tensor:
    """Interpolate a quantile of the first ``length``, ``[B, 1]``, of each row's values >= 0, ``[B, T]``: ``[B, 1]``.

    Of the sorted values only those from the quantile up are needed, which takes a quarter of the time. What stands
    beyond a row's length must be 0. An empty row gives 0.
    """
    rank = level * (length - 1).clamp(min=0).to(values.dtype)  # [B, 1], from the smallest, 0 on
    below = rank.floor()
    from_top = (length - 1).clamp(min=0) - below.long()  # [B, 1]
    largest = values.topk(min(values.shape[-1], int(from_top.max()) + 1), dim=-1).values if values.numel() else values
    if not largest.numel():
        return torch.zeros_like(rank)
    lower, upper = largest.gather(-1, from_top), largest.gather(-1, (from_top - 1).clamp(min=0))
    return torch.lerp(lower, upper, rank - below)


def _is_pushed_up(statistics: TokenStatistics) -> Tensor:
    assert statistics.advantages is not None
    return (statistics.advantages > 0)[:, None].expand_as(statistics.log_ratio)


def _is_moving_away(log_ratio: Tensor, is_pushed_up: Tensor) -> Tensor:
    return torch.where(is_pushed_up, log_ratio > 0, log_ratio < 0)


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # as in importance_ratio, which the weights multiply


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
