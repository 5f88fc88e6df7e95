import math

import pandas as pd
import pytest

from evaluation.outcomes import (
    ACCEPTANCE,
    FINAL_SAMPLED_SCORE,
    FINAL_SCORE,
    GAP,
    NUM_REFUTING,
    SAMPLED_SCORE,
    SCORE,
    RunOutcome,
    area_under,
    first_collapse,
    run_outcomes,
)


def rows(metric, values, *, arm="ppo_clip", seed=1, run_id="r1", first_step=1):
    return [
        {"arm": arm, "seed": seed, "run_id": run_id, "metric": metric, "step": step, "value": value}
        for step, value in enumerate(values, start=first_step)
    ]


def outcome(
    arm="ppo_clip", *, seed=1, start=0.4, final=0.4, first_gap=0.01, gap=0.01, has_collapsed=None, collapse_step=None
):
    return RunOutcome(
        arm=arm,
        seed=seed,
        run_id=f"{arm}-{seed}",
        num_steps=60,
        start_score=start,
        final_score=final,
        final_sampled_score=final,
        best_score=max(start, final),
        first_gap=first_gap,
        final_gap=gap,
        acceptance=1.0,
        refuted_fraction=0.0,
        score_area=0.4,
        has_collapsed=has_collapsed,
        collapse_step=collapse_step,
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
        + rows(GAP, [0.5, 0.7, 9.0, 9.0, 9.0, 9.0, 0.1, 0.3])
        + rows(ACCEPTANCE, [1.0, 0.5, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5])
        + rows(NUM_REFUTING, [0.0, 3.0, 1.0, 0.0])
    )
    (result,) = run_outcomes(points.sample(frac=1.0, random_state=0))  # whatever order the points come in
    assert (result.arm, result.seed, result.run_id, result.num_steps) == ("ppo_clip", 1, "r1", 8)
    assert (result.start_score, result.final_score, result.best_score) == (0.4, 0.7, 0.9)
    assert result.first_gap == pytest.approx(0.6)  # median of steps 1 and 2, the first quarter
    assert result.final_gap == pytest.approx(0.2)  # median of steps 7 and 8, the last quarter
    assert result.acceptance == 0.5
    assert result.refuted_fraction == 0.5  # two of the four steps in which it was counted
    assert result.score_area == pytest.approx((0.65 * 4 + 0.8 * 4) / 8)
    assert (result.has_collapsed, result.collapse_step) == (None, None)  # three evaluations cannot say
    assert result.rise == pytest.approx(0.3)
    assert result.log_gap == pytest.approx(math.log10(0.2))
    assert result.gap_growth == pytest.approx(math.log10(0.2 / 0.6))


def test_the_final_score_is_that_of_the_larger_evaluation_after_the_last_step():
    curves = rows(SCORE, [0.4, 0.6], first_step=0) + rows(GAP, [0.1])
    curves += rows(SAMPLED_SCORE, [0.3, 0.35], first_step=0)
    (few,) = run_outcomes(pd.DataFrame(curves))
    assert (few.final_score, few.final_sampled_score) == (0.6, 0.35)
    more = rows(FINAL_SCORE, [0.55], first_step=1) + rows(FINAL_SAMPLED_SCORE, [0.32], first_step=1)
    (both,) = run_outcomes(pd.DataFrame(curves + more))
    assert (both.final_score, both.final_sampled_score, both.score_area) == (
        0.55,
        0.32,
        0.5,
    )  # the area is of the curve


def test_a_run_without_exact_divergences_has_no_refuted_fraction():
    points = pd.DataFrame(rows(SCORE, [0.4], first_step=0) + rows(GAP, [0.1]))
    assert math.isnan(run_outcomes(points)[0].refuted_fraction)


def test_a_run_of_one_step_has_a_first_gap():
    points = pd.DataFrame(rows(SCORE, [0.4], first_step=0) + rows(GAP, [0.1]))
    assert run_outcomes(points)[0].gap_growth == 0.0


@pytest.mark.parametrize(("first", "last"), [(0.0, 0.1), (0.1, 0.0), (math.nan, 0.1)])
def test_a_gap_of_zero_or_none_has_no_growth(first, last):
    assert math.isnan(outcome(first_gap=first, gap=last).gap_growth)


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


def curve(*scores):
    return [(5 * index, score) for index, score in enumerate(scores)]


@pytest.mark.parametrize(
    ("scores", "step"),
    [
        ([0.6, 0.2, 0.2, 0.2, 0.2], 5),
        ([0.6, 0.5, 0.29, 0.1, 0.0, 0.2, 0.9], 10),  # that it comes back later does not undo it
        ([0.6, 0.2, 0.2, 0.2, 0.3, 0.2, 0.2, 0.2], None),  # half of the start is not below half
        ([0.6, 0.2, 0.2, 0.2], None),
        ([0.0, 0.0, 0.0, 0.0, 0.0, 0.0], None),  # nothing to lose
    ],
)
def test_a_collapse_is_four_evaluations_running_below_half_of_the_start(scores, step):
    assert first_collapse(curve(*scores)) == step


@pytest.mark.parametrize(
    ("scores", "has_collapsed"),
    [([0.6, 0.1, 0.1, 0.1, 0.1], True), ([0.6, 0.1, 0.1, 0.1, 0.5], False), ([0.6, 0.1, 0.1, 0.1], None)],
)
def test_a_run_with_fewer_than_four_evaluations_after_its_start_cannot_say(scores, has_collapsed):
    points = rows(GAP, [0.1]) + [rows(SCORE, [score], first_step=step)[0] for step, score in curve(*scores)]
    assert run_outcomes(pd.DataFrame(points))[0].has_collapsed is has_collapsed


def test_the_area_weighs_evaluations_by_the_steps_between_them():
    assert area_under([(0, 0.0), (10, 1.0), (12, 1.0)]) == pytest.approx((5 + 2) / 12)
    assert math.isnan(area_under([(0, 0.5)]))
