"""Tables of arms: a summary of each over its seeds, and comparisons of two, never a bare mean. Pure.

From `ENOUGH_SEEDS` seeds a mean has a bootstrap interval over seeds; below, the smallest and the largest seed (a
range), and two arms are compared over the held-out problems of the seeds they share.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from evaluation.figures import arm_order
from evaluation.outcomes import RunOutcome
from evaluation.statistics import bootstrap_mean, compare_paired, holm, problem_comparison
from trm_repro.config_sections.claims import ENOUGH_SEEDS, ClaimThresholds

SummaryKind = Literal["interval", "range", "none"]
Over = Literal["seeds", "problems of the seeds", "range of the seeds", "no interval"]
ProblemScores = Mapping[tuple[str, int], Sequence[float]]

QUANTITIES: dict[str, Callable[[RunOutcome], float]] = {
    "start score": lambda run: run.start_score,
    "final score": lambda run: run.final_score,
    "final sampled score": lambda run: run.final_sampled_score,
    "area under the score curve": lambda run: run.score_area,
    "log10 PPL gap, last quarter": lambda run: run.log_gap,
    "kept fraction": lambda run: run.acceptance,
    "lasting collapse": lambda run: math.nan if run.has_collapsed is None else float(run.has_collapsed),
}
"""What a run is summarised by: name to value, NaN where the run cannot say."""
PAIRED_QUANTITIES = ("final score", "area under the score curve", "log10 PPL gap, last quarter")


@dataclass(frozen=True, kw_only=True)
class ArmSummary:
    """One quantity of one arm over its seeds.

    Example: three seeds at 0.5, 0.6, 0.7 give ``mean=0.6, low=0.5, high=0.7, num_seeds=3, kind="range"``.

    Attributes:
        arm: its name.
        quantity: a key of `QUANTITIES`.
        mean: over the seeds that have a value; NaN where none has.
        low: lower end.
        high: upper end.
        num_seeds: seeds that have a value.
        num_missing: seeds that have none.
        kind: ``interval``, bootstrap over seeds; ``range``, smallest and largest seed; ``none``, one seed or no value.
    """

    arm: str
    quantity: str
    mean: float
    low: float
    high: float
    num_seeds: int
    num_missing: int
    kind: SummaryKind

    def __str__(self) -> str:
        """Write it out, its ends in brackets; a seed by itself has none."""
        if not self.num_seeds:
            return "cannot say" if self.num_missing else "not run"
        missing = f", {self.num_missing} without" if self.num_missing else ""
        if self.kind == "none":
            return f"{self.mean:.3g} (one seed{missing})" if missing else f"{self.mean:.3g}"
        word = "range " if self.kind == "range" else ""
        return f"{self.mean:.3g} ({word}{self.low:.3g} to {self.high:.3g}, n = {self.num_seeds}{missing})"


@dataclass(frozen=True, kw_only=True)
class ArmComparison:
    """Two arms on the seeds they share.

    Attributes:
        first: an arm.
        second: the other.
        quantity: what is compared.
        mean_difference: mean over the shared seeds of first minus second; NaN where none has both.
        low: lower end of its interval, or the smallest difference where there is only a range.
        high: upper end.
        num_seeds: shared seeds with both values.
        num_missing: shared seeds where one has none: the others may be the survivors.
        num_problems: held-out problems a seed that the interval is over; 0 where it is not over problems.
        over: what was resampled for the interval. Over problems it is about other problems for these very runs, and
            counts how far the seeds differ only as far as so few can show.
        p_value: two-sided sign-flip test over seeds; None for fewer than two. N seeds give none below 2^(1-N).
        adjusted_p_value: by Holm, over the comparisons of the same quantity.
    """

    first: str
    second: str
    quantity: str
    mean_difference: float
    low: float
    high: float
    num_seeds: int
    num_missing: int
    num_problems: int
    over: Over
    p_value: float | None
    adjusted_p_value: float | None = None

    def __str__(self) -> str:
        """Write the difference out, its ends in brackets with what they are over; a seed by itself has none."""
        if not self.num_seeds:
            return "not measured"
        if self.over == "no interval":
            return f"{self.mean_difference:+.3g}"
        over = {
            "seeds": f"{self.num_seeds} seeds",
            "problems of the seeds": f"{self.num_problems} problems a seed",
            "range of the seeds": "range",
        }[self.over]
        return f"{self.mean_difference:+.3g} ({self.low:+.3g} to {self.high:+.3g}, {over})"


def summarise_arms(outcomes: Sequence[RunOutcome], thresholds: ClaimThresholds) -> list[ArmSummary]:
    """Summarise every quantity of every arm.

    Args:
        outcomes: of all runs.
        thresholds: confidence, number and seed of the resamples.

    Returns:
        Arm by arm in the order of the figures, quantity by quantity.
    """
    rows = []
    for arm in arm_order([outcome.arm for outcome in outcomes]):
        runs = [outcome for outcome in outcomes if outcome.arm == arm]
        for quantity, measure in QUANTITIES.items():
            values = np.array([measure(run) for run in runs], dtype=np.float64)
            rows.append(_summarise(arm, quantity, values, thresholds))
    return rows


def compare_arms(
    outcomes: Sequence[RunOutcome],
    thresholds: ClaimThresholds,
    *,
    pairs: Sequence[tuple[str, str]] | None = None,
    final_scores: ProblemScores | None = None,
) -> list[ArmComparison]:
    """Compare arms two by two on the seeds they share: same starting policy, prompts and held-out problems.

    Args:
        outcomes: of all runs.
        thresholds: confidence, number and seed of the resamples, and the seeds needed for an interval over them.
        pairs: which arms, (first, second); None for all pairs.
        final_scores: by (arm, seed): the score of each held-out problem at the last evaluation. With fewer seeds than
            needed the interval of the final score is over these.

    Returns:
        Quantity by quantity, pair by pair, with Holm's correction over the pairs of a quantity.
    """
    runs = {(outcome.arm, outcome.seed): outcome for outcome in outcomes}
    chosen = pairs or list(combinations(arm_order([outcome.arm for outcome in outcomes]), 2))
    rows = []
    for quantity in PAIRED_QUANTITIES:
        problems = (final_scores or {}) if quantity == "final score" else {}
        compared = [_compare(first, second, quantity, runs, problems, thresholds) for first, second in chosen]
        tested = [row for row in compared if row.p_value is not None]
        adjusted = iter(holm([row.p_value for row in tested if row.p_value is not None]))
        rows += [
            row if row.p_value is None else dataclasses.replace(row, adjusted_p_value=float(next(adjusted)))
            for row in compared
        ]
    return rows


def pairs_of(arms: Sequence[str], reference: str) -> list[tuple[str, str]]:
    """List a report's pairs: every arm against the reference, and each masking arm against its controls and variants.

    Args:
        arms: that were run.
        reference: an arm.

    Returns:
        (first, second); none twice, either way round.
    """
    order = arm_order(list(arms))
    pairs = [(arm, reference) for arm in order if arm != reference and reference in order]
    return pairs + [
        (arm, other)
        for arm in order
        for other in order
        if (other in (f"random_as_{arm}", f"length_as_{arm}") or other.startswith(f"{arm}_"))
        and (other, arm) not in pairs
    ]


def _summarise(arm: str, quantity: str, values: np.ndarray, thresholds: ClaimThresholds) -> ArmSummary:
    known = values[np.isfinite(values)]
    kind: SummaryKind = "interval" if len(known) >= ENOUGH_SEEDS else "range" if len(known) > 1 else "none"
    mean = low = high = math.nan
    if kind == "interval":
        rng = np.random.default_rng(thresholds.seed)
        mean, low, high = map(
            float,
            bootstrap_mean(known, rng, num_resamples=thresholds.num_resamples, confidence=thresholds.confidence),
        )
    elif len(known):
        mean, low, high = float(known.mean()), float(known.min()), float(known.max())
    return ArmSummary(
        arm=arm,
        quantity=quantity,
        mean=mean,
        low=low,
        high=high,
        num_seeds=len(known),
        num_missing=len(values) - len(known),
        kind=kind,
    )


def _compare(
    first: str,
    second: str,
    quantity: str,
    runs: Mapping[tuple[str, int], RunOutcome],
    problems: ProblemScores,
    thresholds: ClaimThresholds,
) -> ArmComparison:
    measure = QUANTITIES[quantity]
    shared = [seed for arm, seed in runs if arm == first and (second, seed) in runs]
    seeds = [seed for seed in shared if all(math.isfinite(measure(runs[arm, seed])) for arm in (first, second))]
    row = ArmComparison(
        first=first,
        second=second,
        quantity=quantity,
        mean_difference=math.nan,
        low=math.nan,
        high=math.nan,
        num_seeds=len(seeds),
        num_missing=len(shared) - len(seeds),
        num_problems=0,
        over="no interval",
        p_value=None,
    )
    if not seeds:
        return row
    one, other = [measure(runs[first, seed]) for seed in seeds], [measure(runs[second, seed]) for seed in seeds]
    rng = np.random.default_rng(thresholds.seed)
    num_resamples, confidence = thresholds.num_resamples, thresholds.confidence
    found = compare_paired(one, other, rng, num_resamples=num_resamples, confidence=confidence)
    row = dataclasses.replace(
        row, mean_difference=found.mean_difference, p_value=found.p_value if len(seeds) > 1 else None
    )
    if len(seeds) >= thresholds.min_seeds:
        return dataclasses.replace(row, low=found.low, high=found.high, over="seeds")
    pairs = [(problems.get((first, seed)), problems.get((second, seed))) for seed in seeds]
    known = [(a, b) for a, b in pairs if a and b and len(a) == len(b)]
    if len(known) < len(seeds):
        if len(seeds) == 1:
            return row
        apart = np.subtract(one, other)
        return dataclasses.replace(row, low=float(apart.min()), high=float(apart.max()), over="range of the seeds")
    differences = [np.subtract(a, b) for a, b in known]
    low, high = problem_comparison(differences, rng, num_resamples=num_resamples, confidence=confidence)
    return dataclasses.replace(row, low=low, high=high, over="problems of the seeds", num_problems=len(known[0][0]))
