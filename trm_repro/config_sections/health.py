"""When a run that goes on computing has stopped making sense."""

from dataclasses import dataclass

from trm_repro.config_sections.checks import require, require_at_least


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """When to stop a run whose numbers say that going on is pointless; 0 and false never stop one."""

    patience: int = 20
    """Steps running for which a condition must hold before the run stops."""
    acceptance_floor: float = 0.0
    """Stop when a smaller share of the sequences than this is kept."""
    entropy_floor: float = 0.0
    """Stop when the policy's mean entropy is below this, nats per token."""
    stop_without_variance: bool = False
    """Stop when no group has differing rewards, so that nothing can be learned."""
    max_nonfinite_steps: int = 3
    """Stop after so many steps running with log-probs, a loss or a gradient that are not finite; batches are saved."""

    def __post_init__(self) -> None:
        """Check ranges."""
        require_at_least("health", 1, patience=self.patience, max_nonfinite_steps=self.max_nonfinite_steps)
        require(0 <= self.acceptance_floor <= 1, "health.acceptance_floor", "in [0, 1]", self.acceptance_floor)
        require_at_least("health", 0, entropy_floor=self.entropy_floor)
