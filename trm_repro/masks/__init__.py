"""Masks: which sequences an update may learn from. A mask is True where the sequence is kept.

Masks are pure functions of per-token statistics; they carry no gradient.
"""

from trm_repro.masks.controls import random_mask
from trm_repro.masks.length_neutral import ln_trm_mask, ser_mask
from trm_repro.masks.trust_region import finite_mask, max_divergence_mask, mean_divergence_mask, sequence_mask

__all__ = [
    "finite_mask",
    "ln_trm_mask",
    "max_divergence_mask",
    "mean_divergence_mask",
    "random_mask",
    "sequence_mask",
    "ser_mask",
]
