"""Control masks: they reject as many sequences as a criterion does, but not by its reason."""

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
