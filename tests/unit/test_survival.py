"""Survival curves against hand examples and an independent formula."""

import math

import numpy as np
import pytest

from evaluation.survival import collapse_curve, survival_curve
from tests.unit.test_outcomes import outcome


def test_freireichs_leukaemia_remissions_by_hand():
    """Weeks of 21 patients on 6-MP, the textbook example: 6, 6, 6, 7, 10, 13, 16, 22, 23 end, + is watched only."""
    ended = [6, 6, 6, 7, 10, 13, 16, 22, 23]
    watched = [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    curve = survival_curve([*ended, *watched], [True] * 9 + [False] * 12)
    assert curve.times.tolist() == [6, 7, 10, 13, 16, 22, 23]
    assert curve.num_at_risk.tolist() == [21, 17, 15, 12, 11, 7, 6]
    assert curve.num_events.tolist() == [3, 1, 1, 1, 1, 1, 1]
    by_hand = [18 / 21]
    for at_risk in (17, 15, 12, 11, 7, 6):
        by_hand.append(by_hand[-1] * (at_risk - 1) / at_risk)
    assert curve.survival.tolist() == pytest.approx(by_hand)
    assert curve.survival[-1] == pytest.approx(0.448, abs=5e-4)  # as printed in textbooks


def test_the_interval_is_greenwoods_on_the_log_minus_log_scale():
    curve = survival_curve([6, 6, 6, 6, 7, 9], [True, True, True, False, True, False])
    survival = 0.5  # 3 of 6 end at 6
    spread = math.sqrt(3 / (6 * 3)) / abs(math.log(survival))  # standard error of log(-log S)
    ends = [math.exp(-math.exp(math.log(-math.log(survival)) + sign * 1.959964 * spread)) for sign in (1, -1)]
    assert [curve.low[0], curve.high[0]] == pytest.approx(ends)


def test_without_censoring_it_is_the_share_that_goes_on():
    durations = np.random.default_rng(0).integers(1, 9, size=50)
    curve = survival_curve(durations, [True] * 50)
    assert curve.survival.tolist() == pytest.approx([float((durations > time).mean()) for time in curve.times])
    assert curve.survival[-1] == 0
    assert (curve.low[-1], curve.high[-1]) == (0.0, 0.0)
    assert np.all((curve.low <= curve.survival) & (curve.survival <= curve.high))


def test_where_nothing_ends_there_is_no_time():
    assert survival_curve([3, 4], [False, False]).times.tolist() == []


@pytest.mark.parametrize(
    ("durations", "is_event"), [([], []), ([1.0], [True, False]), ([-1.0], [True]), ([math.nan], [True])]
)
def test_what_has_no_curve_is_refused(durations, is_event):
    with pytest.raises(ValueError, match="durations"):
        survival_curve(durations, is_event)


def test_runs_that_cannot_say_are_left_out_of_an_arms_curve():
    runs = [
        outcome(seed=1, has_collapsed=True, collapse_step=20),
        outcome(seed=2, has_collapsed=False),  # 60 steps
        outcome(seed=3, has_collapsed=None),
    ]
    curve = collapse_curve(runs)
    assert curve is not None
    assert (curve.times.tolist(), curve.survival.tolist(), curve.num_at_risk.tolist()) == ([20], [0.5], [2])
    assert collapse_curve(runs[2:]) is None
