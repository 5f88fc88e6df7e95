"""A claim's row, and how its verdict is reached: thresholds set before the runs, an interval and a test over seeds.

Pure: values per seed in, standing and row out. Which claims there are is in evaluation/claims.py.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from evaluation.statistics import FloatArray, bootstrap_mean, holm, sign_flip_p_value
from trm_repro.config_sections.claims import ENOUGH_SEEDS, ClaimThresholds

Verdict = Literal["reproduced", "not reproduced", "inconclusive", "not run"]
Standing = Literal["holds", "fails", "undecided"]
Relation = Literal[">", "<"]
EffectKind = Literal["interval", "range", "exact"]
__all__ = [
    "ENOUGH_SEEDS",
    "ClaimRow",
    "ClaimThresholds",
    "Effect",
    "MeasuredPart",
    "PartResult",
    "Verdict",
    "adjust_for_number",
    "claims_summary",
    "claims_table",
    "join_notes",
    "judge_part",
    "judge_row",
]


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What was measured for one part of a claim's test.

    Attributes:
        estimate: mean over seeds, or a computed number.
        low: lower end.
        high: upper end.
        kind: ``interval``, bootstrap over seeds; ``range``, smallest and largest seed, where seeds are too few for an
            interval; ``exact``, no sampling: both ends are the estimate.
    """

    estimate: float
    low: float
    high: float
    kind: EffectKind

    @classmethod
    def exact(cls, value: float) -> "Effect":
        """Make the effect of a number that was computed and not sampled."""
        return cls(estimate=value, low=value, high=value, kind="exact")

    def __str__(self) -> str:
        """Write it out, its ends in brackets; without them where one seed, or seeds that agree, leave no range."""
        if math.isnan(self.estimate):
            return "not measured"
        if self.kind == "exact":
            return f"{self.estimate:.4g} (exact)"
        if self.kind == "range" and self.low == self.high:
            return f"{self.estimate:.3g}"  # a table says once what a bare number is
        word = "range " if self.kind == "range" else ""
        return f"{self.estimate:.3g} ({word}{self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True, kw_only=True)
class ClaimRow:
    """One claim with its verdict.

    Attributes:
        source: where it is claimed.
        text: the claim.
        test: what has to be so, its parts joined by semicolons.
        data: what the test needs.
        num_seeds: seeds that have all of the data; None where no run is needed.
        effects: one a part of the test, in its order.
        p_value: the largest of its parts' one-sided sign-flip p-values (the claim holds only if all parts do); None
            where it has no test.
        adjusted_p_value: by Holm, over the claims that have one.
        verdict: of the claim here.
        note: what a reader has to know beside it.
    """

    source: str
    text: str
    test: str = ""
    data: str
    num_seeds: int | None
    effects: tuple[Effect, ...] = ()
    p_value: float | None = None
    adjusted_p_value: float | None = None
    verdict: Verdict = "not run"
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class MeasuredPart:
    """One thing that has to be so: ``values``, one a seed, whose mean is on the claimed side of a threshold."""

    name: str
    values: tuple[float, ...]
    relation: Relation
    threshold: float

    def describe(self) -> str:
        """Say what has to be so."""
        return f"{self.name} {self.relation} {self.threshold:.3g}"


@dataclass(frozen=True, kw_only=True)
class PartResult:
    """One part of a claim's test: effect, one-sided p-value for it, and whether it holds."""

    effect: Effect
    p_value: float
    standing: Standing


def judge_part(part: MeasuredPart, thresholds: ClaimThresholds) -> PartResult:
    """Judge whether the mean over seeds is on the claimed side.

    It holds where the whole bootstrap interval is strictly on the claimed side and the one-sided sign-flip test of
    value minus threshold is significant. It fails where the whole interval is not on that side, and the test in the
    other direction is significant or no seed is on the claimed side. Else it is undecided, as it is with fewer seeds
    than wanted or with a value that is not finite: leaving such a seed out would keep the survivors.

    Args:
        part: with the values of the seeds.
        thresholds: number of seeds, confidence and significance.

    Returns:
        The effect, its p-value (1 where seeds are too few or not finite) and its standing.
    """
    array = np.asarray(part.values, dtype=np.float64)
    relation, threshold = part.relation, part.threshold
    if len(array) < thresholds.min_seeds or not np.all(np.isfinite(array)):
        return PartResult(effect=_range(array[np.isfinite(array)]), p_value=1.0, standing="undecided")
    rng = np.random.default_rng(thresholds.seed)
    interval = bootstrap_mean(array, rng, num_resamples=thresholds.num_resamples, confidence=thresholds.confidence)
    low, high = float(interval.low), float(interval.high)
    effect = Effect(estimate=float(interval.estimate), low=low, high=high, kind="interval")
    side = 1.0 if relation == ">" else -1.0
    margins = side * (array - threshold)  # [S]; above 0 on the claimed side
    is_inside, is_outside = (low > threshold, high <= threshold) if side > 0 else (high < threshold, low >= threshold)
    p_value = sign_flip_p_value(margins, rng, alternative="greater")
    if is_inside and p_value <= thresholds.significance:
        return PartResult(effect=effect, p_value=p_value, standing="holds")
    p_against = sign_flip_p_value(margins, rng, alternative="less")
    is_against = p_against <= thresholds.significance or not np.any(margins > 0)
    return PartResult(effect=effect, p_value=p_value, standing="fails" if is_outside and is_against else "undecided")


def judge_row(
    row: ClaimRow, parts: Sequence[MeasuredPart], thresholds: ClaimThresholds, *, is_comparable: bool = True
) -> ClaimRow:
    """Fill in a claim's effects, p-value and verdict.

    ``not run`` without a seed and ``inconclusive`` below the number needed, or where runs are not comparable; then
    ``not reproduced`` where a part fails, ``reproduced`` where all hold, else ``inconclusive``.

    Args:
        row: with source, text, data, number of seeds and note.
        parts: of its test.
        thresholds: of the test.
        is_comparable: whether its runs may be compared.

    Returns:
        The row, complete but for the correction for the number of claims.
    """
    num_seeds = row.num_seeds
    assert num_seeds is not None, "a claim without runs is not judged by seeds"
    assert all(len(part.values) == num_seeds for part in parts), "every part has a value a seed"
    row = dataclasses.replace(row, test="; ".join(part.describe() for part in parts))
    if num_seeds == 0:
        return dataclasses.replace(row, verdict="not run")
    results = [judge_part(part, thresholds) for part in parts]
    effects = tuple(result.effect for result in results)
    num_broken = int((~np.isfinite([part.values for part in parts])).any(axis=0).sum())
    if num_broken:
        row = dataclasses.replace(row, note=join_notes(row.note, f"undecided for {num_broken} seeds without a value"))
    if num_seeds < thresholds.min_seeds or not is_comparable:
        return dataclasses.replace(row, effects=effects, verdict="inconclusive")
    standings = {result.standing for result in results}
    verdict: Verdict = "inconclusive"
    if "fails" in standings:
        verdict = "not reproduced"
    elif standings == {"holds"}:
        verdict = "reproduced"
    p_value = max(result.p_value for result in results)
    return dataclasses.replace(row, effects=effects, p_value=p_value, verdict=verdict)


def adjust_for_number(rows: Sequence[ClaimRow], thresholds: ClaimThresholds) -> list[ClaimRow]:
    """Add Holm's p-values, over all rows that have one; where required, let the verdict follow them.

    Args:
        rows: of all claims.
        thresholds: whether they are required, and the significance.

    Returns:
        The rows, in their order.
    """
    tested = [index for index, row in enumerate(rows) if row.p_value is not None]
    p_values = [row.p_value for row in rows if row.p_value is not None]
    result = list(rows)
    for index, adjusted in zip(tested, holm(p_values), strict=True):
        row = dataclasses.replace(rows[index], adjusted_p_value=float(adjusted))
        if thresholds.is_holm_required and row.verdict == "reproduced" and adjusted > thresholds.significance:
            note = join_notes(row.note, "holds by itself, not after Holm's correction")
            row = dataclasses.replace(row, verdict="inconclusive", note=note)
        result[index] = row
    return result


def claims_table(rows: Sequence[ClaimRow]) -> str:
    """Lay the claims out as a Markdown table: every effect has its interval or range beside it."""
    heads = ["source", "claim", "verdict", "seeds", "test", "effect, test by test", "p (Holm)", "data", "note"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        p_value = "" if row.p_value is None else f"{row.p_value:.3f}"
        adjusted = "" if row.adjusted_p_value is None else f" ({row.adjusted_p_value:.3f})"
        cells = [
            row.source,
            row.text,
            row.verdict,
            _seeds(row),
            row.test,
            "; ".join(str(effect) for effect in row.effects),
            p_value + adjusted,
            row.data,
            row.note,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def claims_summary(rows: Sequence[ClaimRow]) -> str:
    """Lay the claims that were run out as a Markdown table, for a terminal, and count the others below it."""
    tested = [row for row in rows if row.verdict != "not run"]
    lines = ["| source | claim | seeds | verdict |", "|---|---|---|---|"] if tested else []
    lines += [f"| {row.source} | {row.text} | {_seeds(row)} | {row.verdict} |" for row in tested]
    untested = len(rows) - len(tested)
    if untested:
        are = (
            "1 claim was not run; the report lists it."
            if untested == 1
            else f"{untested} claims were not run; the report lists them."
        )
        lines += ["", are] if tested else [are]
    return "\n".join(lines)


def join_notes(*notes: str) -> str:
    """Join the notes that are not empty."""
    return "; ".join(note for note in notes if note)


def _range(values: FloatArray) -> Effect:
    if not len(values):
        return Effect(estimate=math.nan, low=math.nan, high=math.nan, kind="range")
    return Effect(estimate=float(values.mean()), low=float(values.min()), high=float(values.max()), kind="range")


def _seeds(row: ClaimRow) -> str:
    return "none needed" if row.num_seeds is None else str(row.num_seeds)
