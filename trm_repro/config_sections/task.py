"""What the policy is trained on."""

from dataclasses import dataclass
from typing import Literal

from trm_repro.config_sections.checks import (
    require,
)

PromptTemplate = Literal["plain", "boxed", "dapo", "chat", "dapo_chat"]


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What the policy is trained on."""

    name: Literal["chain_arithmetic", "math"] = "chain_arithmetic"
    """chain_arithmetic: running sums modulo 10, written out in characters; math: a data set with integer answers."""
    min_operands: int = 8
    """Fewest operands of a training problem; n operands need 6 n - 3 response tokens."""
    max_operands: int = 14
    """Most operands of a training problem."""
    dataset: str = "BytedTsinghua-SIA/DAPO-Math-17k"
    """math: hub name of the training problems, or a local folder laid out like a hub repository."""
    revision: str | None = None
    """math: branch, tag or commit of the hub's repository; null is the newest."""
    subset: str | None = None
    """math: configuration of the data set, where it has several."""
    split: str = "train"
    """math: split of the data set."""
    file: str | None = None
    """math: a local .jsonl or .parquet file, read in the place of the hub."""
    prompt_template: PromptTemplate = "plain"
    """math: question alone, with an instruction to box the answer, DAPO's text, or either as a turn of a chat."""
    grading: Literal["strict", "verl"] = "strict"
    """math: strict: the last complete marker must hold the integer; verl: as verl's DAPO rule."""

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.min_operands >= 2, "task.min_operands", ">= 2", self.min_operands)
        require(
            self.min_operands <= self.max_operands <= 100,
            "task.max_operands",
            f"between task.min_operands = {self.min_operands} and 100",
            self.max_operands,
        )
        for name in ("dataset", "revision", "subset", "split", "file"):
            value = getattr(self, name)
            require(value is None or value.strip() != "", f"task.{name}", "not empty", value)
