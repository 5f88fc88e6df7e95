"""Whether the perplexity gap tells beforehand which runs will collapse, and how early. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from evaluation.outcomes import GAP
from evaluation.statistics import FloatArray
from evaluation.study_runs import StudyRun

STEPS = (2, 4, 8, 12, 16, 20, 30)
FALSE_ALARMS = 0.05
"""Share of the runs without a collapse in which an alarm may sound."""


@dataclass(frozen=True, kw_only=True)
class PredictionRow:
    """How well the gap at a step separates the runs that will collapse from those that will not.

    Attributes:
        step: at which the gap is read; only runs that have not collapsed by then take part.
        num_collapsing: of them, those that collapse later.
        num_lasting: those that do not.
        auc: chance that a run that will collapse has the larger gap, ties half; 0.5 is a coin. NaN without both kinds.
        low: lower end of its bootstrap interval over runs; NaN with fewer than 5 of either kind.
        high: upper end.
    """

    step: int
    num_collapsing: int
    num_lasting: int
    auc: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class AlarmRow:
    """What an alarm on the gap would have given.

    Attributes:
        threshold: gap above which it sounds, nats per token; each seed's is set on the others' runs: the median.
        num_collapsing: runs that collapse.
        num_warned: of them, those in which it sounds before the collapse.
        median_lead: of those, steps from the alarm to the collapse; NaN where there is none.
        num_lasting: runs that do not collapse.
        num_false_alarms: of them, those in which it sounds.
    """

    threshold: float
    num_collapsing: int
    num_warned: int
    median_lead: float
    num_lasting: int
    num_false_alarms: int


def area_under_roc(positives: ArrayLike, negatives: ArrayLike) -> float:
    """Compute the chance that a positive is larger than a negative, ties counted half (Mann-Whitney U over its most).

    Args:
        positives: ``[P]``.
        negatives: ``[N]``.

    Returns:
        In [0, 1]; NaN where one is empty.
    """
    above = np.asarray(positives, dtype=np.float64)[:, None] - np.asarray(negatives, dtype=np.float64)[None]  # [P, N]
    return float(((above > 0) + 0.5 * (above == 0)).mean()) if above.size else math.nan


def predict_collapse(
    runs: Sequence[StudyRun], steps: Sequence[int] = STEPS, *, num_resamples: int = 2000, seed: int = 0
) -> list[PredictionRow]:
    """Ask at several steps whether the gap tells who will collapse.

    Args:
        runs: whose outcome says whether they collapsed; others are left out.
        steps: at which to ask.
        num_resamples: bootstrap resamples of the runs, of each kind by itself.
        seed: of the resampling.

    Returns:
        A row a step.
    """
    rows = []
    for step in steps:
        kinds: tuple[list[float], list[float]] = ([], [])  # collapsing, lasting
        for run in runs:
            gap = run.gap_at(step)
            if run.outcome.has_collapsed is None or math.isnan(gap):
                continue
            if run.outcome.collapse_step is None:
                kinds[1].append(gap)
            elif run.outcome.collapse_step > step:
                kinds[0].append(gap)
        low, high = _interval(*kinds, num_resamples=num_resamples, seed=seed)
        rows.append(
            PredictionRow(
                step=step,
                num_collapsing=len(kinds[0]),
                num_lasting=len(kinds[1]),
                auc=area_under_roc(*kinds),
                low=low,
                high=high,
            )
        )
    return rows


def alarm(runs: Sequence[StudyRun]) -> AlarmRow | None:
    """Sound an alarm at the first step whose gap exceeds a threshold, and count what it would have told.

    The threshold for the runs of one seed is the 1 - `FALSE_ALARMS` quantile of the largest gaps of the runs of the
    other seeds that last: it never sees the runs it is used on.

    Args:
        runs: of several seeds.

    Returns:
        The counts, or None where no seed has lasting runs of other seeds to learn from.
    """
    known = [run for run in runs if run.outcome.has_collapsed is not None]
    thresholds, leads, counts = [], [], {"collapsing": 0, "lasting": 0, "false": 0}
    for seed in sorted({run.seed for run in known}):
        lasting = [run for run in known if run.seed != seed and run.outcome.collapse_step is None]
        others = [gap for gap in map(_largest, lasting) if not math.isnan(gap)]
        if not others:
            continue
        threshold = float(np.quantile(others, 1 - FALSE_ALARMS))
        thresholds.append(threshold)
        for run in (run for run in known if run.seed == seed):
            first = next((step for step, _ in run.curves[GAP] if run.gap_at(step) > threshold), None)
            collapse = run.outcome.collapse_step
            if collapse is None:
                counts["lasting"] += 1
                counts["false"] += first is not None
            else:
                counts["collapsing"] += 1
                if first is not None and first < collapse:
                    leads.append(collapse - first)
    if not thresholds:
        return None
    return AlarmRow(
        threshold=10 ** float(np.median(thresholds)),
        num_collapsing=counts["collapsing"],
        num_warned=len(leads),
        median_lead=float(np.median(leads)) if leads else math.nan,
        num_lasting=counts["lasting"],
        num_false_alarms=counts["false"],
    )


def _largest(run: StudyRun) -> float:
    gaps = [run.gap_at(step) for step, _ in run.curves[GAP]]
    return max((gap for gap in gaps if not math.isnan(gap)), default=math.nan)  # NaN where every gap is 0


def _interval(
    positives: Sequence[float], negatives: Sequence[float], *, num_resamples: int, seed: int
) -> tuple[float, float]:
    if min(len(positives), len(negatives)) < 5:
        return math.nan, math.nan
    rng = np.random.default_rng(seed)
    drawn = np.array(
        [area_under_roc(_resample(positives, rng), _resample(negatives, rng)) for _ in range(num_resamples)]
    )
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def _resample(values: Sequence[float], rng: np.random.Generator) -> FloatArray:
    return rng.choice(np.asarray(values, dtype=np.float64), size=len(values))
