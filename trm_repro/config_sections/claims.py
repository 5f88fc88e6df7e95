"""What the tests of the claims compare with: set before the runs, and recorded with them."""

import math
from dataclasses import dataclass

from trm_repro.config_sections.checks import require, require_at_least

ENOUGH_SEEDS = 5
"""Below this many seeds no claim about runs is decided."""


@dataclass(frozen=True, kw_only=True)
class ClaimThresholds:
    """What the tests of the claims compare with; every run is recorded with it."""

    min_seeds: int = ENOUGH_SEEDS
    """Seeds below which every claim about runs is inconclusive; at least 5."""
    confidence: float = 0.95
    """Of the bootstrap intervals over seeds, in (0, 1)."""
    significance: float = 0.05
    """Largest one-sided sign-flip p-value of a part that holds or fails, in (0, 1); five seeds reach 1/32."""
    is_holm_required: bool = False
    """Whether a reproduced claim needs its Holm-adjusted p-value, too, at or below significance."""
    num_resamples: int = 10000
    """Bootstrap resamples of an interval; 100 to 1,000,000."""
    seed: int = 0
    """Seed of the resampling and of the random pairs."""
    improvement: float = 0.05
    """Rise of the score, final minus start, above which an arm improves; in [0, 1]."""
    score_difference: float = 0.0
    """Difference of two arms' final scores above which one is higher; in [0, 1]."""
    gap_factor: float = 1.0
    """Ratio of two arms' final PPL gaps above which one is larger; at least 1."""
    bounded_gap_factor: float = 10.0
    """Final PPL gap over that of the first quarter, below which an arm stays bounded; above 1."""
    acceptance: float = 0.7
    """Kept fraction that acceptance has to exceed, in [0, 1]; the paper recommends 70%."""
    length_growth: float = 0.1
    """Rise of rejection from the shortest to the longest problems above which it grows; in (0, 1)."""
    flat_within: float = 0.1
    """Absolute change of rejection from the shortest to the longest problems below which it is flat; in (0, 1)."""
    table_tolerance: float = 0.005
    """Relative difference from a printed number within which it is matched, in (0, 1)."""
    num_random_pairs: int = 1000
    """Random pairs of policies enumerated for what token-level methods leave; 1 to 1,000,000."""

    def __post_init__(self) -> None:
        """Check ranges."""
        require_at_least("claims", ENOUGH_SEEDS, min_seeds=self.min_seeds)
        require(100 <= self.num_resamples <= 10**6, "claims.num_resamples", "100 to 1000000", self.num_resamples)
        require(1 <= self.num_random_pairs <= 10**6, "claims.num_random_pairs", "1 to 1000000", self.num_random_pairs)
        require_at_least("claims", 0, seed=self.seed)
        require(1 <= self.gap_factor < math.inf, "claims.gap_factor", ">= 1 and finite", self.gap_factor)
        bounded = self.bounded_gap_factor
        require(1 < bounded < math.inf, "claims.bounded_gap_factor", "> 1 and finite", bounded)
        for name in ("improvement", "score_difference", "acceptance"):
            require(0 <= getattr(self, name) <= 1, f"claims.{name}", "in [0, 1]", getattr(self, name))
        for name in ("confidence", "significance", "length_growth", "flat_within", "table_tolerance"):
            require(0 < getattr(self, name) < 1, f"claims.{name}", "between 0 and 1", getattr(self, name))
