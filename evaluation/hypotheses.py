"""Hypotheses of a study: what was expected, in words and in numbers, and what the runs say of it. Pure.

A hypothesis is written down before its runs. It is supported where the paired interval over seeds lies wholly on the
expected side and the sign-flip test, corrected by Holm for the number of the cell's hypotheses, is significant; refuted
where the interval lies wholly on the other; else not supported.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from evaluation.arm_summaries import QUANTITIES
from evaluation.claim_rows import Effect, MeasuredPart, Relation, judge_part
from evaluation.outcomes import COLLAPSE_EVALUATIONS, COLLAPSE_SHARE, IMPROVED_BY, RunOutcome
from evaluation.statistics import holm
from trm_repro.config_sections.claims import ClaimThresholds

HypothesisVerdict = Literal["supported", "not supported", "refuted", "not run"]

OUTCOME_DEFINITIONS = {
    "collapse": f"score below {COLLAPSE_SHARE:g} of its start at {COLLAPSE_EVALUATIONS} evaluations running",
    "time to collapse": "step of the first of those evaluations; a run that does not collapse is watched to its end",
    "area under the score curve": "trapezoids over the evaluations, over the number of steps",
    "PPL gap": "mean over sequences of |mean log policy - mean log rollout|; median over the last quarter of the steps",
    "final score": "share solved greedily of all problems that the evaluation after the last step answers",
    "improved": f"final score more than {IMPROVED_BY:g} above its start",
}
"""Set before the runs and recorded with them."""


@dataclass(frozen=True, kw_only=True)
class HypothesisPart:
    """One thing that has to be so.

    Example: final score of trm_avg_0.001 minus that of ppo_clip > 0, in the mean over the seeds that have both.

    Attributes:
        quantity: a key of `QUANTITIES`.
        arm: whose quantity it is.
        against: an arm whose quantity is taken off, seed by seed; None for the quantity itself.
        against_cell: the cell of the study that ``against`` ran in, with the same seeds; None for the hypothesis's own.
        relation: the expected side of the threshold.
        threshold: in the quantity's unit.
        every_seed: whether it has to be so in every seed, and not only in their mean.
    """

    quantity: str
    arm: str
    against: str | None = None
    against_cell: str | None = None
    relation: Relation = ">"
    threshold: float = 0.0
    every_seed: bool = False

    def __post_init__(self) -> None:
        """Check names and numbers."""
        if self.quantity not in QUANTITIES:
            raise ValueError(f"quantity must be one of {', '.join(QUANTITIES)}, got {self.quantity!r}")
        if self.relation not in (">", "<"):
            raise ValueError(f'relation must be ">" or "<", got {self.relation!r}')
        if not math.isfinite(self.threshold):
            raise ValueError(f"threshold must be finite, got {self.threshold}")
        if self.against_cell is not None and self.against is None:
            raise ValueError(f"against_cell {self.against_cell!r} needs against, an arm of that cell")

    @property
    def reference(self) -> str | None:
        """Name of the arm that is taken off, with its cell where that is another."""
        return self.against if self.against_cell is None else arm_elsewhere(str(self.against), self.against_cell)

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms it needs."""
        return (self.arm,) if self.reference is None else (self.arm, self.reference)

    def describe(self) -> str:
        """Say what has to be so."""
        apart = "" if self.reference is None else f" minus {self.reference}"
        scope = "in every seed" if self.every_seed else "mean over seeds"
        return f"{self.quantity}, {self.arm}{apart} {self.relation} {self.threshold:g} ({scope})"

    def measure(self, runs: Mapping[str, RunOutcome]) -> float:
        """Measure it on the runs of one seed, by arm."""
        quantity = QUANTITIES[self.quantity]
        return quantity(runs[self.arm]) - (0.0 if self.reference is None else quantity(runs[self.reference]))


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A sentence and the parts that all have to be so.

    Attributes:
        text: the sentence.
        parts: at least one.
    """

    text: str
    parts: tuple[HypothesisPart, ...]

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms its parts need, each once."""
        return tuple(dict.fromkeys(arm for part in self.parts for arm in part.arms))

    def describe(self) -> str:
        """Write the sentence with its test."""
        return f"{self.text} [{'; '.join(part.describe() for part in self.parts)}]"


@dataclass(frozen=True, kw_only=True)
class HypothesisRow:
    """What the runs say of a hypothesis.

    Attributes:
        hypothesis: that was tested.
        num_seeds: seeds that have all of its arms.
        effects: one a part.
        p_value: the largest one-sided sign-flip p-value of the parts about a mean; None where there is none.
        adjusted_p_value: by Holm, over the hypotheses of the cell.
        verdict: of it here.
    """

    hypothesis: Hypothesis
    num_seeds: int
    effects: tuple[Effect, ...] = ()
    p_value: float | None = None
    adjusted_p_value: float | None = None
    verdict: HypothesisVerdict = "not run"


def arm_elsewhere(arm: str, cell: str) -> str:
    """Name an arm of another cell."""
    return f"{arm} of {cell}"


def judge_hypotheses(
    hypotheses: Sequence[Hypothesis],
    outcomes: Sequence[RunOutcome],
    thresholds: ClaimThresholds,
    *,
    elsewhere: Mapping[str, Sequence[RunOutcome]] | None = None,
) -> list[HypothesisRow]:
    """Judge the hypotheses of one cell.

    Args:
        hypotheses: written down before the runs.
        outcomes: of the cell's runs.
        thresholds: number of seeds, confidence and significance.
        elsewhere: outcomes of the study's cells by name, for parts with ``against_cell``.

    Returns:
        A row a hypothesis, with Holm's correction over those that have a p-value.
    """
    by_seed: dict[int, dict[str, RunOutcome]] = {}
    for outcome in outcomes:
        by_seed.setdefault(outcome.seed, {})[outcome.arm] = outcome
    for cell, others in (elsewhere or {}).items():
        for outcome in others:
            by_seed.setdefault(outcome.seed, {})[arm_elsewhere(outcome.arm, cell)] = outcome
    rows = [_judge(hypothesis, list(by_seed.values()), thresholds) for hypothesis in hypotheses]
    adjusted = iter(holm([row.p_value for row in rows if row.p_value is not None]))
    return [row if row.p_value is None else _adjusted(row, float(next(adjusted)), thresholds) for row in rows]


def _adjusted(row: HypothesisRow, p_value: float, thresholds: ClaimThresholds) -> HypothesisRow:
    is_lost = row.verdict == "supported" and p_value > thresholds.significance
    return dataclasses.replace(row, adjusted_p_value=p_value, verdict="not supported" if is_lost else row.verdict)


def _judge(
    hypothesis: Hypothesis, seeds: Sequence[Mapping[str, RunOutcome]], thresholds: ClaimThresholds
) -> HypothesisRow:
    complete = [runs for runs in seeds if all(arm in runs for arm in hypothesis.arms)]
    if not complete:
        return HypothesisRow(hypothesis=hypothesis, num_seeds=0)
    effects, standings, p_values = [], set(), []
    for part in hypothesis.parts:
        values = tuple(part.measure(runs) for runs in complete)
        measured = MeasuredPart(
            name=part.quantity, values=values, relation=part.relation, threshold=float(part.threshold)
        )
        result = judge_part(measured, thresholds)
        effects.append(result.effect)
        if part.every_seed:
            standings.add(_in_every_seed(values, part))
        else:
            standings.add(result.standing)
            p_values.append(result.p_value)
    verdict: HypothesisVerdict = "not supported"
    if "fails" in standings:
        verdict = "refuted"
    elif standings == {"holds"} and len(complete) >= thresholds.min_seeds:
        verdict = "supported"
    p_value = max(p_values) if p_values and len(complete) >= thresholds.min_seeds else None
    return HypothesisRow(
        hypothesis=hypothesis, num_seeds=len(complete), effects=tuple(effects), p_value=p_value, verdict=verdict
    )


def _in_every_seed(values: Sequence[float], part: HypothesisPart) -> Literal["holds", "fails", "undecided"]:
    """One seed on the other side refutes it; a seed that cannot say leaves it open."""
    side = 1.0 if part.relation == ">" else -1.0
    known = [value for value in values if math.isfinite(value)]
    if any(side * (value - part.threshold) <= 0 for value in known):
        return "fails"
    return "holds" if len(known) == len(values) else "undecided"


def hypotheses_table(rows: Sequence[HypothesisRow]) -> str:
    """Lay the hypotheses out as a Markdown table."""
    lines = [
        "| hypothesis | test | seeds | effect, part by part | p (Holm) | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        p_value = "" if row.p_value is None else f"{row.p_value:.3f} ({row.adjusted_p_value:.3f})"
        test = "; ".join(part.describe() for part in row.hypothesis.parts)
        effects = "; ".join(str(effect) for effect in row.effects)
        cells = [row.hypothesis.text, test, str(row.num_seeds), effects, p_value, row.verdict]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
