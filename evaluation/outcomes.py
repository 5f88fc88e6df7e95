"""What each run did. Pure: a frame of points in, one outcome a run out; evaluation/claims.py compares them.

A frame of points has the columns arm, seed, run_id, metric, step, value.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pandas as pd

SCORE = "score/greedy"
SAMPLED_SCORE = "score/avg_at_k"
FINAL_SCORE = "score/final_greedy"
FINAL_SAMPLED_SCORE = "score/final_avg_at_k"
"""Of the last evaluation, which may answer more problems."""
GAP = "divergence/ppl_gap"
ACCEPTANCE = "mask/kept_sequence_fraction"
NUM_REFUTING = "bounds/num_refuting_sequences"
REPORTED_METRICS = (
    SCORE,
    SAMPLED_SCORE,
    FINAL_SCORE,
    FINAL_SAMPLED_SCORE,
    GAP,
    ACCEPTANCE,
    "rollout/reward_mean",
    "policy/entropy_mean",
    "divergence/kl_mean",
    "divergence/kl_max",
    "router/agreement_fraction",
    "router/kl_flipped_mean",
    "router/kl_unflipped_mean",
    "mask/kept_correct_fraction",
    "mask/kept_wrong_fraction",
    "mask/kept_long_fraction",
    "mask/kept_short_fraction",
    "bounds/unified_paper",
    "bounds/unified_sharp",
    "bounds/trivial",
    "bounds/surrogate",
    NUM_REFUTING,
    "confusion/max_wrongly_accepted_fraction",
    "confusion/max_wrongly_rejected_fraction",
    "confusion/avg_wrongly_accepted_fraction",
    "confusion/avg_wrongly_rejected_fraction",
    "mask/undecided_fraction",
    "train/num_skipped_updates",
    "time/sync_seconds",
    "time/rollout_seconds",
    "time/mask_seconds",
    "time/update_seconds",
    "time/evaluate_seconds",
    "time/record_seconds",
    "time/step_seconds",
    "throughput/rollout_tokens_per_second",
    "throughput/step_tokens_per_second",
)
OUTCOME_METRICS = (SCORE, SAMPLED_SCORE, FINAL_SCORE, FINAL_SAMPLED_SCORE, GAP, ACCEPTANCE, NUM_REFUTING)
IMPROVED_BY = 0.05
"""A score this much above its start counts as improved, as much below as fallen."""
COLLAPSE_SHARE = 0.5
COLLAPSE_EVALUATIONS = 4
"""A run has collapsed where its score is below this share of its start at so many evaluations running."""


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """One run, summarised.

    Attributes:
        arm: its arm.
        seed: its seed.
        run_id: its MLflow run.
        num_steps: steps it has done.
        start_score: score before the first step, in [0, 1].
        final_score: score of all problems of the last evaluation.
        final_sampled_score: of the same by sampling, avg@k; NaN where there is none.
        best_score: largest score.
        first_gap: median perplexity gap over the first quarter of its steps, nats per token.
        final_gap: the same over the last quarter.
        acceptance: mean kept fraction over all steps.
        score_area: area under the score curve over the number of steps between its ends: a mean score, in [0, 1]; NaN
            for a run with one evaluation.
        has_collapsed: whether its score was below half of its start at 4 evaluations running; None for a run with fewer
            evaluations after the start, which cannot say.
        collapse_step: step of the first of those evaluations; None where it did not collapse or cannot say.
        refuted_fraction: share of its steps with a token whose exact KL is above TRM-Max's threshold, among steps in
            which exact KL was computed; NaN where there is none.
    """

    arm: str
    seed: int
    run_id: str
    num_steps: int
    start_score: float
    final_score: float
    final_sampled_score: float
    best_score: float
    first_gap: float
    final_gap: float
    acceptance: float
    refuted_fraction: float
    score_area: float
    has_collapsed: bool | None
    collapse_step: int | None

    @property
    def verdict(self) -> str:
        """Collapsed (below half the start), fallen, level or improved."""
        if self.final_score < 0.5 * self.start_score:
            return "collapsed"
        if self.final_score < self.start_score - IMPROVED_BY:
            return "fell"
        return "improved" if self.final_score > self.start_score + IMPROVED_BY else "level"

    @property
    def rise(self) -> float:
        """Final score minus the score before the first step."""
        return self.final_score - self.start_score

    @property
    def log_gap(self) -> float:
        """log10 of the final gap, as on the axis of the paper's figures; NaN where it is 0."""
        return _log10(self.final_gap)

    @property
    def gap_growth(self) -> float:
        """log10 of the final gap over the first one: 1 is ten times as large; NaN where one is 0."""
        return _log10(self.final_gap) - _log10(self.first_gap)


def run_outcomes(points: pd.DataFrame) -> list[RunOutcome]:
    """Summarise every run that has scores and steps.

    Args:
        points: frame of points.

    Returns:
        Outcomes in the order in which arms and seeds first appear.
    """
    runs: dict[str, dict[str, list[tuple[int, float]]]] = {}
    identities: dict[str, tuple[str, int]] = {}
    chosen = points[points.metric.isin(OUTCOME_METRICS)]
    columns = [chosen[name].tolist() for name in ("arm", "seed", "run_id", "metric", "step", "value")]
    for arm, seed, run_id, metric, step, value in zip(*columns, strict=True):
        identities.setdefault(run_id, (arm, seed))
        runs.setdefault(run_id, {}).setdefault(metric, []).append((step, value))
    return [
        _outcome(*identities[run_id], run_id, {metric: sorted(curve) for metric, curve in curves.items()})
        for run_id, curves in runs.items()
        if SCORE in curves and GAP in curves
    ]


def _outcome(arm: str, seed: int, run_id: str, curves: Mapping[str, Sequence[tuple[int, float]]]) -> RunOutcome:
    scores, gaps = curves[SCORE], curves[GAP]
    num_steps = gaps[-1][0]
    refuting = [value > 0 for _, value in curves.get(NUM_REFUTING, []) if not math.isnan(value)]
    collapse_step = first_collapse(scores)
    return RunOutcome(
        arm=arm,
        seed=seed,
        run_id=run_id,
        num_steps=num_steps,
        start_score=scores[0][1],
        final_score=_last(curves.get(FINAL_SCORE) or scores),
        final_sampled_score=_last(curves.get(FINAL_SAMPLED_SCORE) or curves.get(SAMPLED_SCORE, [])),
        best_score=max(value for _, value in scores),
        first_gap=_median([gap for step, gap in gaps if step <= max(1.0, 0.25 * num_steps)]),
        final_gap=_median([gap for step, gap in gaps if step > 0.75 * num_steps]),
        acceptance=_mean([value for _, value in curves.get(ACCEPTANCE, [])]),
        refuted_fraction=_mean(refuting),
        score_area=area_under(scores),
        # The first evaluation is the start.
        has_collapsed=collapse_step is not None if len(scores) > COLLAPSE_EVALUATIONS else None,
        collapse_step=collapse_step,
    )


def area_under(curve: Sequence[tuple[int, float]]) -> float:
    """Average a score over training: area under its curve (trapezoids) over the number of steps between its ends.

    Args:
        curve: (step, score), by step.

    Returns:
        In the unit of the score; NaN for fewer than two points.
    """
    if len(curve) < 2:
        return math.nan
    area = sum((later - earlier) * (low + high) / 2 for (earlier, low), (later, high) in pairwise(curve))
    return area / (curve[-1][0] - curve[0][0])


def first_collapse(curve: Sequence[tuple[int, float]]) -> int | None:
    """Find when a score fell below half of its start for 4 evaluations running.

    A score that starts at 0 cannot collapse.

    Args:
        curve: (step, score), by step; the first is the start.

    Returns:
        Step of the first of the 4, or None.
    """
    start, running = curve[0][1], 0
    for index, (_, score) in enumerate(curve):
        running = running + 1 if score < COLLAPSE_SHARE * start else 0
        if running == COLLAPSE_EVALUATIONS:
            return curve[index - COLLAPSE_EVALUATIONS + 1][0]
    return None


def _last(curve: Sequence[tuple[int, float]]) -> float:
    return curve[-1][1] if curve else math.nan


def _log10(value: float) -> float:
    return math.log10(value) if value > 0 else math.nan


def _median(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan
