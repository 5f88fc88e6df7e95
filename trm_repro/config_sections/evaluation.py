"""Scores on problems that are never trained on."""

from dataclasses import dataclass
from typing import Literal

from trm_repro.config_sections.checks import (
    require,
    require_at_least,
    require_fraction,
    require_positive,
)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Scores on problems that are never trained on."""

    every_steps: int = 10
    """Steps between two evaluations; before the first step and after the last there is always one."""
    num_problems: int = 256
    """Held-out problems answered greedily."""
    num_sampled_problems: int = 64
    """Held-out problems answered num_samples times by sampling."""
    num_samples: int = 4
    """k of avg@k."""
    temperature: float = 1.0
    """Temperature of the sampled answers."""
    top_p: float = 0.95
    """Nucleus of the sampled answers."""
    max_response_tokens: int = 90
    """Longest answer, tokens."""
    length_operands: tuple[int, ...] = (8, 14, 20, 28, 38, 50)
    """Problem sizes at which rejection against response length is measured; an empty list leaves it out."""
    num_length_prompts: int = 32
    """Prompts of each of those sizes, rollout.group_size responses each."""
    prompt_template: Literal["plain", "chat"] = "plain"
    """Text as it is, or as one user turn of the tokenizer's chat template (for instruction-tuned models)."""

    def __post_init__(self) -> None:
        """Check ranges."""
        counts = ["every_steps", "num_problems", "num_sampled_problems", "num_samples", "max_response_tokens"]
        counts += ["num_length_prompts"]
        for size in self.length_operands:
            require(2 <= size <= 100, "evaluation.length_operands", "between 2 and 100", size)
        require_at_least("evaluation", 1, **{name: getattr(self, name) for name in counts})
        require_positive("evaluation", temperature=self.temperature)
        require_fraction("evaluation", top_p=self.top_p)
