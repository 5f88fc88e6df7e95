"""Masks and gates: which sequences or tokens an update may learn from. A mask is True where kept.

They are pure functions of per-token statistics and carry no gradient. `GATES` is the registry of all, the paper's and
other methods'; `gate_mask` applies one by name. Stable for other trainers: every name in ``__all__``.
"""

from trm_repro.masks.controls import length_matched_mask, random_mask
from trm_repro.masks.gates import GATES, Gate, TokenStatistics, gate_mask, kept_sequences, token_weights
from trm_repro.masks.length_neutral import ln_trm_mask, ser_mask
from trm_repro.masks.trust_region import finite_mask, max_divergence_mask, mean_divergence_mask, sequence_mask

__all__ = [
    "GATES",
    "Gate",
    "TokenStatistics",
    "finite_mask",
    "gate_mask",
    "kept_sequences",
    "length_matched_mask",
    "ln_trm_mask",
    "max_divergence_mask",
    "mean_divergence_mask",
    "random_mask",
    "sequence_mask",
    "ser_mask",
    "token_weights",
]
