"""Which sequences an update may learn from."""

from dataclasses import dataclass
from typing import Literal

from trm_repro.config_sections.checks import (
    require,
    require_fraction,
    require_plain_name,
)

MaskCriterion = Literal["none", "trm_max", "trm_avg", "trm_max_avg", "ln_trm", "ser", "random"]
MaxEstimator = Literal["exact", "k2"]
MeanEstimator = Literal["exact", "k3"]


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Which sequences an update may learn from."""

    criterion: MaskCriterion = "trm_avg"
    """none keeps all; trm_*, ln_trm and ser are the paper's; random copies another arm's rate."""
    max_threshold: float = 0.05
    """TRM-Max: largest token divergence of an accepted sequence, nats."""
    avg_threshold: float = 0.001
    """TRM-Avg: largest mean token divergence of an accepted sequence, nats."""
    max_estimator: MaxEstimator = "exact"
    """Token divergence behind TRM-Max: exact KL(rollout || policy), or k2 from the sampled token."""
    avg_estimator: MeanEstimator = "k3"
    """Token divergence behind TRM-Avg: exact KL(rollout || policy), or k3 from the sampled token."""
    ln_trm_threshold: float = 0.05
    """LN-TRM: largest weighted mean of |ratio - 1| of an accepted sequence."""
    ln_trm_epsilon: float = 0.1
    """LN-TRM: token TV assumed in the weights, in (0, 1]."""
    ln_trm_delta: float = 0.05
    """LN-TRM: token KL assumed in the weights, nats."""
    ser_threshold: float = 0.05
    """SER: largest mean of |ratio - 1| of an accepted sequence; the paper recommends 0.03 to 0.10."""
    undecided: Literal["reject", "accept"] = "reject"
    """What to do with a sequence whose exact KL the stored log-probs do not settle (rollout.distribution top_k)."""
    timing: Literal["each_update", "once"] = "each_update"
    """Recompute the mask before each update (Algorithm 1), or keep the one from before the first."""
    reference_arm: str | None = None
    """criterion random: the arm whose number of kept sequences is copied, update by update."""

    def __post_init__(self) -> None:
        """Check ranges."""
        require_fraction("mask", ln_trm_epsilon=self.ln_trm_epsilon)
        for name in ("max_threshold", "avg_threshold", "ln_trm_threshold", "ln_trm_delta", "ser_threshold"):
            value = getattr(self, name)
            require(value > 0, f"mask.{name}", "> 0", value)
        if self.reference_arm is not None:
            require_plain_name("mask.reference_arm", self.reference_arm)
        needs_reference = self.criterion == "random"
        require(
            needs_reference == (self.reference_arm is not None),
            "mask.reference_arm",
            "an arm's name when mask.criterion is random, and null otherwise",
            self.reference_arm,
        )

    @property
    def has_exact_max(self) -> bool:
        """Whether the criterion reads the exact largest divergence."""
        return self.criterion in ("trm_max", "trm_max_avg") and self.max_estimator == "exact"

    @property
    def has_exact_avg(self) -> bool:
        """Whether the criterion reads the exact mean divergence."""
        return self.criterion in ("trm_avg", "trm_max_avg") and self.avg_estimator == "exact"
