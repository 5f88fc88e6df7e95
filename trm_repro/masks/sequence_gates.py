"""Other methods' gates of whole sequences: statistics in, mask ``[B]`` out.

Shape letters: B sequences, T response tokens. Ratios are policy over rollout. An empty response has product 1 and
mean 0. A NaN compares False; `trm_repro.masks.gates.gate_mask` rejects its sequence in any case.
"""

import math

import torch
from torch import Tensor

from trm_repro.masks.gates import TokenStatistics


def sequence_mis(statistics: TokenStatistics, *, low: float, high: float) -> Tensor:
    """Keep sequences whose product of ratios lies in [low, high] (masked importance sampling).

    Source: Liu, Li et al. 2025, When Speed Kills Stability, Seq-MIS.
    """
    total = torch.where(statistics.response_mask, statistics.log_ratio, 0.0).sum(dim=-1)  # [B], log of the product
    return _is_between(total, low, high)


def geometric(statistics: TokenStatistics, *, low: float, high: float) -> Tensor:
    """Keep sequences whose geometric mean of ratios lies in [low, high].

    Source: Li and Liu 2025, RL collapse part 3, Geo-Mask.
    """
    return _is_between(statistics.mean_log_ratio, low, high)


def opsm(statistics: TokenStatistics, *, threshold: float) -> Tensor:
    """Reject sequences of negative advantage whose mean k1 = log(rollout / policy) is above the threshold.

    The other direction, a policy that has become likelier, is never rejected. Source: DeepSeek-V3.2 (arXiv
    2512.02556), off-policy sequence masking.
    """
    assert statistics.advantages is not None
    return ~((statistics.advantages < 0) & (-statistics.mean_log_ratio > threshold))


def gspo(statistics: TokenStatistics, *, low: float, high: float) -> Tensor:
    """Reject sequences that GSPO's clip leaves without gradient, by s = (product of ratios)^(1/T).

    Source: GSPO (arXiv 2507.18071), clipped objective.
    """
    assert statistics.advantages is not None
    log_mean = statistics.mean_log_ratio  # [B], log s
    is_above = (statistics.advantages > 0) & (log_mean > math.log1p(high))
    is_below = (statistics.advantages < 0) & (log_mean < _log(1 - low))
    return ~(is_above | is_below)


def _is_between(log_value: Tensor, low: float, high: float) -> Tensor:
    return (log_value >= _log(low)) & (log_value <= _log(high))


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
