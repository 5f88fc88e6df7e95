"""Scores on problems that are never trained on."""

from dataclasses import dataclass
from typing import Literal

from trm_repro.config_sections.checks import (
    require,
    require_at_least,
    require_fraction,
    require_positive,
)
from trm_repro.config_sections.task import PromptTemplate

EvaluationTask = Literal["chain_arithmetic", "aime24", "aime25", "dapo"]


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
    num_final_problems: int = 512
    """The evaluation after the last step answers at least so many, greedily and by sampling; 0: as the others."""
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
    task: EvaluationTask = "chain_arithmetic"
    """Held-out problems: chain_arithmetic draws its own; the others are data sets on the hub."""
    dataset: str | None = None
    """Hub name in the place of the task's own, or a local folder laid out like a hub repository."""
    revision: str | None = None
    """Branch, tag or commit of the hub's repository; null is the newest."""
    subset: str | None = None
    """Configuration of the data set, where it has several."""
    split: str | None = None
    """Split of the data set; null is the one its task names."""
    file: str | None = None
    """A local .jsonl or .parquet file, read in the place of the hub."""
    prompt_template: PromptTemplate = "plain"
    """Question alone, with an instruction to box the answer, DAPO's text, or either as a turn of a chat."""
    grading: Literal["strict", "verl"] = "strict"
    """strict: the last complete marker must hold the integer, cut off is wrong; verl: as verl's DAPO rule."""
    problems_per_batch: int | None = None
    """Problems `evaluate` answers and saves together; null is one of a data set, all of chain_arithmetic."""

    def __post_init__(self) -> None:
        """Check ranges."""
        counts = ["every_steps", "num_problems", "num_sampled_problems", "num_samples", "max_response_tokens"]
        counts += ["num_length_prompts"]
        for size in self.length_operands:
            require(2 <= size <= 100, "evaluation.length_operands", "between 2 and 100", size)
        require_at_least("evaluation", 1, **{name: getattr(self, name) for name in counts})
        require_at_least("evaluation", 0, num_final_problems=self.num_final_problems)
        require_positive("evaluation", temperature=self.temperature)
        require_fraction("evaluation", top_p=self.top_p)
        if self.problems_per_batch is not None:
            require_at_least("evaluation", 1, problems_per_batch=self.problems_per_batch)
        for name in ("dataset", "revision", "subset", "split", "file"):
            value = getattr(self, name)
            require(value is None or value.strip() != "", f"evaluation.{name}", "not empty", value)

    @property
    def num_held_out(self) -> int:
        """Held-out problems that a run needs."""
        return max(self.num_problems, self.num_sampled_problems, self.num_final_problems)
