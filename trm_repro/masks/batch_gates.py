"""Gates whose decision about one sequence depends on the others of its batch: M2PO and the controls.

Shape letters: B sequences, T response tokens, N response tokens of the batch.
"""

import torch
from torch import Tensor

from trm_repro.masks.controls import length_matched_mask, random_mask
from trm_repro.masks.gates import TokenStatistics


def m2po(statistics: TokenStatistics, *, threshold: float) -> Tensor:
    """Reject the tokens of largest (log rho_t)^2, as few as bring the mean of the others to the threshold.

    Only tokens that PPO could clip compete: those that the update pushes further from the rollout policy. The others
    are kept. Sequences with a non-finite log-ratio do not count.
    Source: M2PO (arXiv 2510.01161v2), Algorithm 1 and "Only constrain trust-region tokens".

    Args:
        statistics: of the whole batch, with advantages.
        threshold: largest mean of (log rho_t)^2 over the competing tokens that are kept, nats^2.

    Returns:
        ``[B, T]`` bool.
    """
    assert statistics.advantages is not None
    is_pushed_away = statistics.advantages[:, None] * statistics.log_ratio > 0  # [B, T]
    counted = statistics.is_counted & is_pushed_away
    moments, order = statistics.log_ratio[counted].double().square().sort()  # [N], ascending
    means = moments.cumsum(dim=0) / torch.arange(1, len(moments) + 1, device=moments.device)
    num_kept = int((means <= threshold).sum())  # means of ascending values do not fall
    keep = torch.zeros_like(moments, dtype=torch.bool)
    keep[order[:num_kept]] = True
    return (~counted).masked_scatter(counted, keep)


def random_control(statistics: TokenStatistics, *, seed: float) -> Tensor:
    """Keep as many sequences as the reference mask, chosen at random."""
    assert statistics.reference_mask is not None
    generator = torch.Generator().manual_seed(int(seed))
    reference = statistics.reference_mask
    return random_mask(len(reference), int(reference.sum()), generator).to(reference.device)


def length_matched_control(statistics: TokenStatistics, *, num_length_bins: float, seed: float) -> Tensor:
    """Reject as many sequences of each length bin as the reference mask, chosen at random within the bin."""
    reference, lengths = statistics.reference_mask, statistics.response_mask.sum(dim=-1)  # [B]
    assert reference is not None
    generator = torch.Generator().manual_seed(int(seed))
    mask = length_matched_mask(lengths, lengths[~reference].tolist(), int(num_length_bins), generator)
    return mask.to(reference.device)
