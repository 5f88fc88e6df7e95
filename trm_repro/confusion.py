"""How a mask from sampled tokens differs from the mask of exact KL on the same sequences.

Shape letter: B sequences. The sampled mask is k2 under the max criterion or k3 under the average one; both
masks must come from the same thresholds, policies and sequences. True means accepted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MaskConfusion:
    """Counts of sequences by what the two masks say of them.

    Example: sampled ``[1, 1, 0, 0, 1]`` against exact ``[1, 0, 1, 0, 1]`` gives 2 accepted by both, 1 rejected by
    both, 1 wrongly accepted, 1 wrongly rejected; agreement 0.6, and half of what exact KL rejects is missed.

    Attributes:
        num_accepted_by_both: kept by either mask.
        num_rejected_by_both: dropped by either mask.
        num_wrongly_accepted: kept from sampled tokens, dropped by exact KL.
        num_wrongly_rejected: dropped from sampled tokens, kept by exact KL.
    """

    num_accepted_by_both: int
    num_rejected_by_both: int
    num_wrongly_accepted: int
    num_wrongly_rejected: int

    @property
    def num_sequences(self) -> int:
        """B."""
        return (
            self.num_accepted_by_both
            + self.num_rejected_by_both
            + self.num_wrongly_accepted
            + self.num_wrongly_rejected
        )

    @property
    def agreement_fraction(self) -> float:
        """Fraction of all sequences of which both masks say the same."""
        return (self.num_accepted_by_both + self.num_rejected_by_both) / self.num_sequences

    @property
    def wrongly_accepted_fraction(self) -> float:
        """Fraction of all sequences that are wrongly accepted."""
        return self.num_wrongly_accepted / self.num_sequences

    @property
    def wrongly_rejected_fraction(self) -> float:
        """Fraction of all sequences that are wrongly rejected."""
        return self.num_wrongly_rejected / self.num_sequences

    @property
    def missed_fraction(self) -> float | None:
        """Fraction of what exact KL rejects that the sampled mask accepts; None when exact KL rejects nothing."""
        num_rejected = self.num_rejected_by_both + self.num_wrongly_accepted
        return self.num_wrongly_accepted / num_rejected if num_rejected else None

    @property
    def lost_fraction(self) -> float | None:
        """Fraction of what exact KL accepts that the sampled mask rejects; None when exact KL accepts nothing."""
        num_accepted = self.num_accepted_by_both + self.num_wrongly_rejected
        return self.num_wrongly_rejected / num_accepted if num_accepted else None


def mask_confusion(sampled_mask: Tensor, exact_mask: Tensor) -> MaskConfusion:
    """Count where a mask from sampled tokens and the mask of exact KL differ.

    Source: TRM (arXiv 2512.23075v3), sample-based estimators of the two criteria; the table is ours.

    Args:
        sampled_mask: ``[B]`` bool; from k2 or k3.
        exact_mask: ``[B]`` bool; from exact KL at the same threshold.

    Returns:
        The counts over the B sequences.

    Raises:
        ValueError: if the shapes differ, there is no sequence, or a mask is not bool.
    """
    if sampled_mask.shape != exact_mask.shape or sampled_mask.dim() != 1 or sampled_mask.numel() == 0:
        raise ValueError(
            f"masks must have one shape [B] with B >= 1, got {tuple(sampled_mask.shape)} and {tuple(exact_mask.shape)}"
        )
    if not sampled_mask.dtype == exact_mask.dtype == torch.bool:
        raise ValueError(f"masks must be bool, got {sampled_mask.dtype} and {exact_mask.dtype}")
    return MaskConfusion(
        num_accepted_by_both=int((sampled_mask & exact_mask).sum()),
        num_rejected_by_both=int((~sampled_mask & ~exact_mask).sum()),
        num_wrongly_accepted=int((sampled_mask & ~exact_mask).sum()),
        num_wrongly_rejected=int((~sampled_mask & exact_mask).sum()),
    )
