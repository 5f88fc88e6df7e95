"""Which sequences an update may learn from."""

from dataclasses import dataclass, field, fields
from typing import Literal

from trm_repro.config_sections.checks import (
    require,
    require_at_least,
    require_fraction,
    require_plain_name,
)
from trm_repro.gate_specs import GateSpec, fill_thresholds, find_spec

MaxEstimator = Literal["exact", "k2"]
MeanEstimator = Literal["exact", "k3"]


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Which sequences an update may learn from."""

    criterion: str = "trm_avg"
    """A gate of docs/masks.md: none keeps all, trm_*, ln_trm and ser are the paper's, random copies an arm's rate."""
    thresholds: dict[str, float] = field(default_factory=dict)
    """Thresholds of other methods' gates by name, such as {low: 0.5, high: 5}; what is left out has its default."""
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
    """criterion random or length_matched: the arm whose number of kept sequences is copied, update by update."""
    num_length_bins: int = 4
    """length_matched: bins of length in each of which as many are rejected as the reference arm rejected there."""

    def __post_init__(self) -> None:
        """Check ranges."""
        self._check_gate()
        require_fraction("mask", ln_trm_epsilon=self.ln_trm_epsilon)
        for name in ("max_threshold", "avg_threshold", "ln_trm_threshold", "ln_trm_delta", "ser_threshold"):
            value = getattr(self, name)
            require(value > 0, f"mask.{name}", "> 0", value)
        if self.reference_arm is not None:
            require_plain_name("mask.reference_arm", self.reference_arm)
        require_at_least("mask", 1, num_length_bins=self.num_length_bins)
        needs_reference = self.criterion in ("random", "length_matched")
        require(
            needs_reference == (self.reference_arm is not None),
            "mask.reference_arm",
            "an arm's name when mask.criterion is random or length_matched, and null otherwise",
            self.reference_arm,
        )

    def _check_gate(self) -> None:
        try:
            spec = self.gate
        except ValueError as error:
            raise ValueError(f"mask.criterion: {error}") from None
        try:
            fill_thresholds(spec, self.thresholds)
        except ValueError as error:
            raise ValueError(f"mask.thresholds: {error}") from None
        for name in self.thresholds:
            own = name in {key.name for key in fields(self)}
            require(not own, f"mask.thresholds.{name}", f"given as mask.{name}", self.thresholds[name])
        is_dense = spec.level == "token"
        require(
            not (is_dense and self.timing == "once"), "mask.timing", "each_update for a gate of tokens", self.timing
        )

    @property
    def gate(self) -> GateSpec:
        """The criterion's entry in the registry."""
        return find_spec(self.criterion)

    @property
    def gate_thresholds(self) -> dict[str, float]:
        """All of the criterion's thresholds: those with a key of their own, then ``thresholds``, then defaults."""
        filled = fill_thresholds(self.gate, self.thresholds)
        return {name: getattr(self, name, value) for name, value in filled.items()}

    @property
    def has_exact_max(self) -> bool:
        """Whether the criterion reads the exact largest divergence."""
        return self.criterion in ("trm_max", "trm_max_avg") and self.max_estimator == "exact"

    @property
    def has_exact_avg(self) -> bool:
        """Whether the criterion reads the exact mean divergence."""
        return self.criterion in ("trm_avg", "trm_max_avg") and self.avg_estimator == "exact"
