"""Whether the gap tells of a collapse beforehand: hand cases."""

import math

import pytest

from evaluation.gap_prediction import alarm, area_under_roc, predict_collapse
from tests.unit.test_study_runs import study_run


def test_the_area_is_the_share_of_pairs_in_order():
    assert area_under_roc([3, 1], [2, 0]) == 3 / 4  # 3 > 2, 3 > 0, 1 > 0, but 1 < 2
    assert area_under_roc([1], [1]) == 0.5
    assert math.isnan(area_under_roc([], [1]))


def test_only_runs_that_have_not_collapsed_yet_are_asked():
    runs = [
        study_run(seed=1, gaps=[0.1] * 20, collapse_step=15),
        study_run(seed=2, gaps=[0.2] * 20, collapse_step=5),
        study_run(seed=3, gaps=[0.01] * 20),
        study_run(seed=4, gaps=[0.15] * 20),
        study_run(seed=5, gaps=[9.0] * 20, can_say=False),
    ]
    early, late, end = predict_collapse(runs, steps=(4, 10, 15))
    assert (early.num_collapsing, early.num_lasting, early.auc) == (2, 2, 0.75)
    assert (late.num_collapsing, late.num_lasting, late.auc) == (1, 2, 0.5)
    assert (end.num_collapsing, end.num_lasting) == (0, 2)
    assert math.isnan(early.low)  # too few of a kind for an interval


def test_an_interval_needs_five_of_each_kind_and_holds_the_estimate():
    lasting = [study_run(seed=i, gaps=[0.01 * (i + 1)] * 8) for i in range(6)]
    dying = [study_run(seed=i + 9, gaps=[0.035 + 0.01 * i] * 8, collapse_step=7) for i in range(6)]
    (row,) = predict_collapse([*lasting, *dying], steps=(4,))
    assert row.low <= row.auc <= row.high
    assert 0.5 < row.auc < 1


def test_an_alarm_is_set_on_the_runs_of_other_seeds():
    runs = [
        study_run(seed=1, gaps=[0.01] * 20),
        study_run(seed=1, arm="b", gaps=[0.01] * 5 + [0.5] * 15, collapse_step=15),
        study_run(seed=2, gaps=[0.1] * 20),
    ]
    found = alarm(runs)
    assert found is not None
    # Seed 1 is judged by seed 2 (0.1) and seed 2 by seed 1 (0.01), which therefore raises a false alarm.
    assert found.threshold == pytest.approx(math.sqrt(0.1 * 0.01))
    assert (found.num_warned, found.num_collapsing) == (1, 1)
    # The gap rises at step 6; the median of three steps follows at step 7, 8 before the collapse.
    assert found.median_lead == 8
    assert (found.num_false_alarms, found.num_lasting) == (1, 2)


def test_without_lasting_runs_of_other_seeds_there_is_no_alarm():
    assert alarm([study_run(seed=1, gaps=[0.1] * 9, collapse_step=5)]) is None


def test_a_run_without_a_gap_sets_no_alarm():
    runs = [study_run(seed=1, gaps=[0.0] * 9), study_run(seed=2, gaps=[0.1] * 9), study_run(seed=3, gaps=[0.1] * 9)]
    found = alarm(runs)
    assert found is not None
    assert found.threshold == pytest.approx(0.1)
    assert alarm(runs[:1] * 2) is None
