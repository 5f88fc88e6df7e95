import math
from dataclasses import replace

import pandas as pd
import pytest

from evaluation.outcomes import ACCEPTANCE, GAP, SCORE, SHOWINGS, RunOutcome, count_showings, run_outcomes
from trm_repro.config import arm_names


def rows(metric, values, *, arm="ppo_clip", seed=1, run_id="r1", first_step=1):
    return [
        {"arm": arm, "seed": seed, "run_id": run_id, "metric": metric, "step": step, "value": value}
        for step, value in enumerate(values, start=first_step)
    ]


def outcome(arm="ppo_clip", *, seed=1, start=0.4, final=0.4, gap=0.01):
    return RunOutcome(
        arm=arm,
        seed=seed,
        run_id=f"{arm}-{seed}",
        num_steps=60,
        start_score=start,
        final_score=final,
        best_score=max(start, final),
        final_gap=gap,
        acceptance=1.0,
    )


@pytest.mark.parametrize(
    ("start", "final", "verdict"),
    [
        (0.5, 0.0, "collapsed"),
        (0.5, 0.249, "collapsed"),
        (0.5, 0.25, "fell"),  # half of the start is not below half
        (0.5, 0.449, "fell"),
        (0.5, 0.45, "level"),  # 0.05 less is not more than 0.05 less
        (0.5, 0.5, "level"),
        (0.5, 0.55, "level"),
        (0.5, 0.551, "improved"),
        (0.0, 0.0, "level"),
        (0.0, 0.06, "improved"),
        (0.06, 0.02, "collapsed"),
        (1.0, 1.0, "level"),
    ],
)
def test_the_verdict_has_its_boundaries_where_the_report_says(start, final, verdict):
    assert outcome(start=start, final=final).verdict == verdict


def test_a_run_is_summarised_by_hand():
    points = pd.DataFrame(
        rows(SCORE, [0.4], first_step=0)
        + rows(SCORE, [0.9], first_step=4)
        + rows(SCORE, [0.7], first_step=8)
        + rows(GAP, [9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 0.1, 0.3])
        + rows(ACCEPTANCE, [1.0, 0.5, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5])
    )
    (result,) = run_outcomes(points.sample(frac=1.0, random_state=0))  # whatever order the points come in
    assert (result.arm, result.seed, result.run_id, result.num_steps) == ("ppo_clip", 1, "r1", 8)
    assert (result.start_score, result.final_score, result.best_score) == (0.4, 0.7, 0.9)
    assert result.final_gap == pytest.approx(0.2)  # median of steps 7 and 8, the last quarter
    assert result.acceptance == 0.5


def test_one_wild_step_does_not_make_the_final_gap():
    points = pd.DataFrame(rows(SCORE, [0.4], first_step=0) + rows(GAP, [0.01] * 17 + [5.0] + [0.01] * 2))
    assert run_outcomes(points)[0].final_gap == 0.01


def test_runs_come_in_the_order_in_which_they_appear_and_unfinished_ones_are_left_out():
    points = pd.DataFrame(
        rows(SCORE, [0.4], arm="trm_avg_0.001", seed=2, run_id="b", first_step=0)
        + rows(GAP, [0.1], arm="trm_avg_0.001", seed=2, run_id="b")
        + rows(SCORE, [0.4], arm="token_is", run_id="no steps", first_step=0)
        + rows(GAP, [0.1], arm="token_is", seed=3, run_id="no scores")
        + rows(SCORE, [0.5], run_id="a", first_step=0)
        + rows(GAP, [0.2], run_id="a")
    )
    assert [(result.arm, result.seed, result.run_id) for result in run_outcomes(points)] == [
        ("trm_avg_0.001", 2, "b"),
        ("ppo_clip", 1, "a"),
    ]


def showing_counts(outcomes):
    return {showing.statement: (holding, seeds) for showing, holding, seeds in count_showings(outcomes)}


def count_of(outcomes, words):
    (count,) = [count for statement, count in showing_counts(outcomes).items() if words in statement]
    return count


def test_nothing_shows_where_nothing_was_run():
    assert set(showing_counts([]).values()) == {(0, 0)}


def test_seeds_count_only_where_all_arms_of_a_showing_were_run():
    outcomes = [
        outcome("ppo_clip", seed=1, gap=0.2, final=0.1),
        outcome("token_is", seed=1, gap=0.1, final=0.2),  # shows
        outcome("ppo_clip", seed=2, gap=0.1, final=0.1),
        outcome("token_is", seed=2, gap=0.2, final=0.2),  # the gap is the other way round
        outcome("ppo_clip", seed=3, gap=0.2, final=0.3),
        outcome("token_is", seed=3, gap=0.1, final=0.2),  # the score is
        outcome("ppo_clip", seed=4),  # token_is was not run
    ]
    assert count_of(outcomes, "PPO clipping ends with a larger gap") == (1, 3)


@pytest.mark.parametrize(
    ("arm", "words"), [("trm_avg_0.001", "TRM-Avg 0.001 imp"), ("trm_max_0.05", "TRM-Max 0.05 imp")]
)
@pytest.mark.parametrize(
    ("final", "gap", "holds"),
    [(0.6, 0.05, 1), (0.44, 0.05, 0), (0.6, 0.2, 0), (0.6, 0.1, 0)],
    ids=["all three", "did not improve", "larger gap", "equal gap"],
)
def test_figure_2_shows_when_an_arm_improves_with_smaller_gap_and_higher_score(arm, words, final, gap, holds):
    outcomes = [outcome("ppo_clip", gap=0.1, final=0.3), outcome(arm, final=final, gap=gap)]
    assert count_of(outcomes, words) == (holds, 1)


def test_figure_2_does_not_show_when_ppo_clipping_scores_higher_still():
    outcomes = [outcome("ppo_clip", gap=0.1, final=0.7), outcome("trm_avg_0.001", final=0.6, gap=0.05)]
    assert count_of(outcomes, "TRM-Avg 0.001 improves") == (0, 1)


@pytest.mark.parametrize(("final", "alone", "together"), [(0.46, 0, 1), (0.45, 1, 0), (0.36, 1, 0), (0.1, 1, 0)])
def test_figure_3_shows_when_single_criteria_do_not_improve_and_both_together_do(final, alone, together):
    arms = [outcome(arm, final=final) for arm in ("trm_max_0.1", "trm_avg_0.002", "trm_max_0.1_avg_0.002")]
    assert count_of(arms, "TRM-Max 0.1 alone") == (alone, 1)
    assert count_of(arms, "TRM-Avg 0.002 alone") == (alone, 1)
    assert count_of(arms, "together") == (together, 1)


@pytest.mark.parametrize(("control", "holds"), [(0.54, 1), (0.56, 0)])
def test_the_control_shows_when_the_criterion_beats_chance_clearly(control, holds):
    outcomes = [outcome("trm_avg_0.001", final=0.6), outcome("random_as_trm_avg_0.001", final=control)]
    assert count_of(outcomes, "random rejection") == (holds, 1)


def test_a_gap_that_is_not_a_number_shows_nothing():
    outcomes = [outcome("ppo_clip", final=0.1, gap=math.nan), outcome("trm_avg_0.001", final=0.9)]
    assert count_of(outcomes, "TRM-Avg 0.001 improves") == (0, 1)


def test_showings_add_up_over_seeds():
    pair = [outcome("trm_avg_0.001", final=0.9), outcome("random_as_trm_avg_0.001", final=0.1)]
    outcomes = [replace(run, seed=seed) for seed in range(6) for run in pair]
    assert count_of(outcomes, "random rejection") == (6, 6)


def test_every_arm_of_a_showing_is_one_that_can_be_run():
    assert {arm for showing in SHOWINGS for arm in showing.arms} <= set(arm_names())
