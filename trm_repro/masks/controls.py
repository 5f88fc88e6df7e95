"""Control masks: they reject as many sequences as a criterion does, but not by its reason."""

from collections.abc import Sequence

import torch
from torch import Tensor


def random_mask(num_sequences: int, num_kept: int, generator: torch.Generator) -> Tensor:
    """Keep a given number of sequences, chosen uniformly at random.

    Args:
        num_sequences: B >= 1.
        num_kept: between 0 and B.
        generator: the source of randomness.

    Returns:
        ``[B]`` bool with exactly ``num_kept`` True entries.

    Raises:
        ValueError: if ``num_kept`` is out of range.
    """
    if not 0 <= num_kept <= num_sequences:
        raise ValueError(f"num_kept must be between 0 and {num_sequences}, got {num_kept}")
    keep = torch.zeros(num_sequences, dtype=torch.bool)
    keep[torch.randperm(num_sequences, generator=generator)[:num_kept]] = True
    return keep


def length_matched_mask(
    lengths: Tensor, rejected_lengths: Sequence[int], num_bins: int, generator: torch.Generator
) -> Tensor:
    """Reject as many sequences as another arm did, of about the same lengths, chosen at random.

    Bins of length end at the quantiles of ``lengths``, so that each holds about B / num_bins sequences. From each bin
    as many are rejected as the other arm rejected of its lengths, uniformly without replacement. Where a bin has too
    few, the nearest bin with room takes the rest (of two as near, the shorter). Inside a bin chance decides: matching
    lengths one by one would, on the same rollouts, reject the very sequences that the other arm did.

    Args:
        lengths: ``[B]`` int, tokens; B >= 1.
        rejected_lengths: lengths of the sequences that the other arm rejected, tokens; 0 to B of them.
        num_bins: >= 1; with 1 it is `random_mask`.
        generator: the source of randomness.

    Returns:
        ``[B]`` bool, True where kept; ``len(rejected_lengths)`` entries are False.

    Raises:
        ValueError: if more were rejected than there are sequences, or there is no bin.
    """
    num_sequences = lengths.shape[0]
    if len(rejected_lengths) > num_sequences:
        raise ValueError(f"rejected_lengths must be at most {num_sequences} lengths, got {len(rejected_lengths)}")
    if num_bins < 1:
        raise ValueError(f"num_bins must be >= 1, got {num_bins}")
    own = lengths.cpu().double()
    edges = own.quantile(torch.arange(1, num_bins, dtype=torch.float64) / num_bins)  # [num_bins - 1]; inner edges
    own_bins = torch.bucketize(own, edges)  # [B]
    other_bins = torch.bucketize(torch.tensor(list(rejected_lengths), dtype=torch.float64), edges)
    room = own_bins.bincount(minlength=num_bins).tolist()
    wanted = other_bins.bincount(minlength=num_bins).tolist()
    keep = torch.ones(num_sequences, dtype=torch.bool)
    for index, count in enumerate(fit_counts(wanted, room)):
        members = (own_bins == index).nonzero()[:, 0]
        keep[members[torch.randperm(len(members), generator=generator)[:count]]] = False
    return keep


def fit_counts(wanted: Sequence[int], room: Sequence[int]) -> list[int]:
    """Move what does not fit in its bin to the nearest one with room, the lower of two as near.

    Example: wanted (3, 0, 0), room (1, 1, 5) gives (1, 1, 1).

    Args:
        wanted: counts by bin; together at most those of ``room``.
        room: largest counts by bin.

    Returns:
        Counts by bin with the same sum as ``wanted``, none above its room.
    """
    counts = [min(want, space) for want, space in zip(wanted, room, strict=True)]
    for index, want in enumerate(wanted):
        rest = max(0, want - room[index])
        for other in sorted(range(len(room)), key=lambda other: (abs(other - index), other)):
            moved = min(rest, room[other] - counts[other])
            counts[other] += moved
            rest -= moved
    return counts
