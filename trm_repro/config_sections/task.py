"""What the policy is trained on."""

from dataclasses import dataclass
from typing import Literal

from trm_repro.config_sections.checks import (
    require,
)


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What the policy is trained on."""

    name: Literal["chain_arithmetic"] = "chain_arithmetic"
    """Training task; chain_arithmetic: running sums modulo 10, written out in characters."""
    min_operands: int = 8
    """Fewest operands of a training problem; n operands need 6 n - 3 response tokens."""
    max_operands: int = 14
    """Most operands of a training problem."""

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.min_operands >= 2, "task.min_operands", ">= 2", self.min_operands)
        require(
            self.min_operands <= self.max_operands <= 100,
            "task.max_operands",
            f"between task.min_operands = {self.min_operands} and 100",
            self.max_operands,
        )
