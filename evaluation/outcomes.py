"""What each run did, and in how many seeds the paper's figures show. Pure: a frame of points in, rows out.

A frame of points has the columns arm, seed, run_id, metric, step, value.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

SCORE = "score/greedy"
GAP = "divergence/ppl_gap"
ACCEPTANCE = "mask/kept_sequence_fraction"
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
    "bounds/num_refuting_sequences",
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
        final_gap: median perplexity gap over the last quarter of its steps, nats per token.
        acceptance: mean kept fraction over all steps.
    """

    arm: str
    seed: int
    run_id: str
    num_steps: int
    start_score: float
    final_score: float
    best_score: float
    final_gap: float
    acceptance: float

    @property
    def verdict(self) -> str:
        """Collapsed (below half the start), fallen, level or improved."""
        if self.final_score < 0.5 * self.start_score:
            return "collapsed"
        if self.final_score < self.start_score - IMPROVED_BY:
            return "fell"
        return "improved" if self.final_score > self.start_score + IMPROVED_BY else "level"


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
        last_quarter = gaps[gaps.step > 0.75 * gaps.step.max()]
        outcomes.append(
            RunOutcome(
                arm=str(run.arm.iloc[0]),
                seed=int(run.seed.iloc[0]),
                run_id=str(run_id),
                num_steps=int(gaps.step.max()),
                start_score=float(scores.value.iloc[0]),
                final_score=float(scores.value.iloc[-1]),
                best_score=float(scores.value.max()),
                final_gap=float(last_quarter.value.median()),
                acceptance=float(run[run.metric == ACCEPTANCE].value.mean()),
            )
        )
    return outcomes


Arms = dict[str, RunOutcome]


@dataclass(frozen=True, kw_only=True)
class Showing:
    """One thing a figure of the paper shows, as a question about the runs of one seed.

    Attributes:
        figure: the paper's figure, or ours.
        statement: what it says.
        arms: the arms it needs.
        holds: whether the runs of one seed show it.
    """

    figure: str
    statement: str
    arms: tuple[str, ...]
    holds: Callable[[Arms], bool]


SHOWINGS = (
    Showing(
        figure="Figure 1",
        statement="PPO clipping ends with a larger gap and a lower score than token-level importance sampling",
        arms=("token_is", "ppo_clip"),
        holds=lambda a: (
            a["ppo_clip"].final_gap > a["token_is"].final_gap and a["ppo_clip"].final_score < a["token_is"].final_score
        ),
    ),
    Showing(
        figure="Figure 2",
        statement="TRM-Avg 0.001 improves and ends with a smaller gap and a higher score than PPO clipping",
        arms=("ppo_clip", "trm_avg_0.001"),
        holds=lambda a: _improves_and_beats(a["trm_avg_0.001"], a["ppo_clip"]),
    ),
    Showing(
        figure="Figure 2",
        statement="TRM-Max 0.05 improves and ends with a smaller gap and a higher score than PPO clipping",
        arms=("ppo_clip", "trm_max_0.05"),
        holds=lambda a: _improves_and_beats(a["trm_max_0.05"], a["ppo_clip"]),
    ),
    Showing(
        figure="Figure 3",
        statement="TRM-Max 0.1 alone fails: it does not end above its start",
        arms=("trm_max_0.1",),
        holds=lambda a: a["trm_max_0.1"].verdict != "improved",
    ),
    Showing(
        figure="Figure 3",
        statement="TRM-Avg 0.002 alone fails: it does not end above its start",
        arms=("trm_avg_0.002",),
        holds=lambda a: a["trm_avg_0.002"].verdict != "improved",
    ),
    Showing(
        figure="Figure 3",
        statement="TRM-Max 0.1 and TRM-Avg 0.002 together improve",
        arms=("trm_max_0.1_avg_0.002",),
        holds=lambda a: a["trm_max_0.1_avg_0.002"].verdict == "improved",
    ),
    Showing(
        figure="Control (ours)",
        statement="TRM-Avg 0.001 ends above random rejection of as many sequences",
        arms=("trm_avg_0.001", "random_as_trm_avg_0.001"),
        holds=lambda a: a["trm_avg_0.001"].final_score > a["random_as_trm_avg_0.001"].final_score + IMPROVED_BY,
    ),
)


def count_showings(outcomes: list[RunOutcome]) -> list[tuple[Showing, int, int]]:
    """Count the seeds in which each thing shows.

    Args:
        outcomes: of all runs.

    Returns:
        (showing, seeds in which it shows, seeds that have all its arms).
    """
    by_seed: dict[int, Arms] = {}
    for outcome in outcomes:
        by_seed.setdefault(outcome.seed, {})[outcome.arm] = outcome
    counts = []
    for showing in SHOWINGS:
        complete = [arms for arms in by_seed.values() if all(arm in arms for arm in showing.arms)]
        counts.append((showing, sum(showing.holds(arms) for arms in complete), len(complete)))
    return counts


def _improves_and_beats(arm: RunOutcome, other: RunOutcome) -> bool:
    return arm.verdict == "improved" and arm.final_gap < other.final_gap and arm.final_score > other.final_score
