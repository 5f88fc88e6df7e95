"""`trm-repro compare`: the table of curves; finding runs is tested with the tracking."""

import pytest

from pipelines.compare import comparison, sparkline
from pipelines.tracking import TrackedRun
from pipelines.tracking.arm_means import arm_means
from tests.tracked import evaluate_entry, train_entry

NAN = float("nan")


def test_a_curve_is_drawn_on_the_axes_of_all():
    axes = [(0, 0.0), (7, 7.0)]
    assert sparkline([(step, float(step)) for step in range(8)], axes, "01234567") == "01234567"
    assert sparkline([(step, 7.0 - step) for step in range(8)], axes, "01234567") == "76543210"


def test_a_curve_holds_its_value_between_evaluations_and_ends_where_it_ends():
    axes = [(0, 0.0), (7, 1.0)]
    assert sparkline([(0, 0.0), (2, 1.0), (4, 0.0)], axes, "_#") == "__##_"
    assert sparkline([(4, 1.0), (7, 0.0)], axes, "_#") == "    ###_"


def test_a_long_curve_is_averaged_into_the_width():
    curve = [(step, float(step % 2)) for step in range(100)]
    assert sparkline(curve, curve, "012", width=10) == "1" * 10  # each stretch of ten averages 0.5


def test_a_value_that_is_not_finite_shows():
    assert sparkline([(0, 0.0), (1, NAN), (2, 1.0)], [(0, 0.0), (2, 1.0)], "_#") == "_!#"


def test_each_metric_has_start_end_and_best_of_each_run():
    runs = [TrackedRun("a" * 32, "ppo_clip", "FINISHED", ()), TrackedRun("b" * 32, "token_is", "RUNNING", ())]
    curves = [
        {"score/greedy": [(0, 0.5), (2, 0.75), (4, 0.25)], "divergence/kl_max": [(1, 0.5), (2, 0.25), (3, 1.0)]},
        {"score/greedy": [(0, 0.5), (2, 1.0)]},
    ]
    text = comparison(runs, curves, ["score/greedy", "divergence/kl_max"], blocks="_.-~=+*#")
    rows = [line.split() for line in text.splitlines()]
    assert rows[0] == ["score/greedy,", "steps", "0", "to", "4"]
    assert rows[1] == ["run", "start", "end", "highest", "curve"]
    assert rows[2] == ["ppo_clip", "(aaaaaaaa)", "0.5", "0.25", "0.75", "--++_"]
    assert rows[3] == ["token_is", "(bbbbbbbb)", "RUNNING", "0.5", "1", "1", "--#"]
    assert rows[6] == ["run", "start", "end", "lowest", "curve"]
    assert rows[7][:5] == ["ppo_clip", "(aaaaaaaa)", "0.5", "1", "0.25"]
    assert rows[8] == ["token_is", "(bbbbbbbb)", "RUNNING"]


def test_mean_of_an_arm_covers_steps_that_every_seed_has_finished():
    first = [evaluate_entry(0, 0.25), train_entry(1), evaluate_entry(2, 0.5), train_entry(2)]
    second = [evaluate_entry(0, 0.75), train_entry(1, offset=1.0), evaluate_entry(2, 1.0)]  # step 2 is not finished
    means = arm_means([first, second])
    assert [(entry.step, entry.kind) for entry in means] == [(0, "evaluate"), (1, "train")]
    assert means[0].metrics == {"score/greedy": 0.5}
    assert means[1].metrics["family/quantity_0"] == pytest.approx(first[1].metrics["family/quantity_0"] + 0.5)
    longer = arm_means([first, [*second, train_entry(2)]])
    assert longer[: len(means)] == means  # what has been sent stays as it is
    assert arm_means([]) == []
