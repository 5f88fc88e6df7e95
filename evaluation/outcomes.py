"""What each run did. Pure: a frame of points in, one outcome a run out; evaluation/claims.py compares them.

A frame of points has the columns arm, seed, run_id, metric, step, value.
"""

import math
from dataclasses import dataclass

import pandas as pd

SCORE = "score/greedy"
GAP = "divergence/ppl_gap"
ACCEPTANCE = "mask/kept_sequence_fraction"
NUM_REFUTING = "bounds/num_refuting_sequences"
REPORTED_METRICS = (
    SCORE,
    "score/avg_at_k",
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
IMPROVED_BY = 0.05
"""A score this much above its start counts as improved, as much below as fallen."""


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """One run, summarised.

    Attributes:
        arm: its arm.
        seed: its seed.
        run_id: its MLflow run.
        num_steps: steps it has done.
        start_score: score before the first step, in [0, 1].
        final_score: score at the last evaluation.
        best_score: largest score.
        first_gap: median perplexity gap over the first quarter of its steps, nats per token.
        final_gap: the same over the last quarter.
        acceptance: mean kept fraction over all steps.
        refuted_fraction: share of its steps with a token whose exact KL is above TRM-Max's threshold, among steps in
            which exact KL was computed; NaN where there is none.
    """

    arm: str
    seed: int
    run_id: str
    num_steps: int
    start_score: float
    final_score: float
    best_score: float
    first_gap: float
    final_gap: float
    acceptance: float
    refuted_fraction: float

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
    outcomes = []
    for run_id, run in points.groupby("run_id", sort=False):
        scores = run[run.metric == SCORE].sort_values("step")
        gaps = run[run.metric == GAP].sort_values("step")
        if scores.empty or gaps.empty:
            continue
        num_steps = int(gaps.step.max())
        refuting = run[run.metric == NUM_REFUTING].value.dropna()
        outcomes.append(
            RunOutcome(
                arm=str(run.arm.iloc[0]),
                seed=int(run.seed.iloc[0]),
                run_id=str(run_id),
                num_steps=num_steps,
                start_score=float(scores.value.iloc[0]),
                final_score=float(scores.value.iloc[-1]),
                best_score=float(scores.value.max()),
                first_gap=float(gaps[gaps.step <= max(1.0, 0.25 * num_steps)].value.median()),
                final_gap=float(gaps[gaps.step > 0.75 * num_steps].value.median()),
                acceptance=float(run[run.metric == ACCEPTANCE].value.mean()),
                refuted_fraction=float((refuting > 0).mean()) if len(refuting) else math.nan,
            )
        )
    return outcomes


def _log10(value: float) -> float:
    return math.log10(value) if value > 0 else math.nan
