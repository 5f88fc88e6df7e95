"""The paper's criteria as gates: statistics in, sequence mask ``[B]`` out."""

import torch
from torch import Tensor

from trm_repro.divergence import k2_divergence, k3_divergence
from trm_repro.masks.gates import TokenStatistics
from trm_repro.masks.length_neutral import ln_trm_mask, ser_mask
from trm_repro.masks.trust_region import max_divergence_mask, mean_divergence_mask


def keep_all(statistics: TokenStatistics) -> Tensor:
    """Keep every sequence."""
    mask = statistics.response_mask
    return torch.ones(mask.shape[0], dtype=torch.bool, device=mask.device)


def trm_max(statistics: TokenStatistics, *, max_threshold: float) -> Tensor:
    """Apply TRM-Max to exact KL, or to k2 where KL is not given."""
    divergence = k2_divergence(statistics.log_ratio) if statistics.kl is None else statistics.kl  # [B, T]
    return max_divergence_mask(divergence, statistics.response_mask, max_threshold)


def trm_avg(statistics: TokenStatistics, *, avg_threshold: float) -> Tensor:
    """Apply TRM-Avg to exact KL, or to k3 where KL is not given."""
    divergence = k3_divergence(statistics.log_ratio) if statistics.kl is None else statistics.kl  # [B, T]
    return mean_divergence_mask(divergence, statistics.response_mask, avg_threshold)


def trm_max_avg(statistics: TokenStatistics, *, max_threshold: float, avg_threshold: float) -> Tensor:
    """Apply TRM-Max and TRM-Avg."""
    is_kept = trm_max(statistics, max_threshold=max_threshold)
    return is_kept & trm_avg(statistics, avg_threshold=avg_threshold)


def ln_trm(
    statistics: TokenStatistics, *, ln_trm_threshold: float, ln_trm_epsilon: float, ln_trm_delta: float
) -> Tensor:
    """Apply LN-TRM."""
    return ln_trm_mask(
        statistics.log_ratio,
        statistics.response_mask,
        epsilon=ln_trm_epsilon,
        delta=ln_trm_delta,
        threshold=ln_trm_threshold,
    )


def ser(statistics: TokenStatistics, *, ser_threshold: float) -> Tensor:
    """Apply SER."""
    return ser_mask(statistics.log_ratio, statistics.response_mask, ser_threshold)
