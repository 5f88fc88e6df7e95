"""Tables of arms: every mean with its ends and its number of seeds, comparisons on what two arms share."""

import dataclasses
import math
from itertools import product

import numpy as np
import pytest

from evaluation.arm_summaries import QUANTITIES, compare_arms, pairs_of, summarise_arms
from evaluation.claims import ClaimThresholds
from evaluation.report_tables import arms_table, pairs_table
from tests.unit.test_outcomes import outcome

THRESHOLDS = ClaimThresholds(num_resamples=2000)


def finals(arm, values, **others):
    return [outcome(arm, seed=seed, final=value, **others) for seed, value in enumerate(values)]


def summary(runs, quantity="final score"):
    (row,) = [row for row in summarise_arms(runs, THRESHOLDS) if row.quantity == quantity]
    return row


def test_few_seeds_have_a_range_and_one_seed_stands_alone():
    three = summary(finals("ppo_clip", [0.5, 0.6, 0.7]))
    assert (three.mean, three.low, three.high) == (pytest.approx(0.6), 0.5, 0.7)
    assert str(three) == "0.6 (range 0.5 to 0.7, n = 3)"
    assert str(summary(finals("ppo_clip", [0.5]))) == "0.5"


def test_five_seeds_have_the_bootstraps_interval():
    values = [0.0, 0.0, 0.0, 0.0, 1.0]
    row = summary(finals("ppo_clip", values))
    # Of all 5^5 resamples, ones are binomial(5, 1/5): 0.3277, 0.4096, 0.2048, 0.0512, 0.0064, 0.0003.
    assert (row.kind, row.mean, row.low, row.high) == ("interval", pytest.approx(0.2), 0.0, pytest.approx(0.6))
    assert str(row) == "0.2 (0 to 0.6, n = 5)"


def test_seeds_without_a_value_are_counted_beside_the_others():
    runs = [*finals("ppo_clip", [0.5, 0.6]), outcome(seed=7, final=0.1, gap=0.0)]
    assert str(summary(runs, "log10 PPL gap, last quarter")) == "-2 (range -2 to -2, n = 2, 1 without)"
    assert str(summary(runs, "lasting collapse")) == "cannot say"
    known = [outcome(seed=1, has_collapsed=True, collapse_step=5), outcome(seed=2, has_collapsed=False)]
    assert str(summary(known, "lasting collapse")) == "0.5 (range 0 to 1, n = 2)"


def test_the_table_has_a_line_an_arm_and_no_bare_mean_of_several_seeds():
    runs = finals("trm_avg_0.001", [0.5, 0.6]) + finals("ppo_clip", [0.5])
    table = arms_table(runs, THRESHOLDS)
    assert table.columns == ["arm", *QUANTITIES]
    assert [row[0] for row in table.rows] == ["ppo_clip", "trm_avg_0.001"]
    one_seed, two_seeds = table.rows
    assert len(one_seed) == len(two_seeds) == len(table.columns)
    assert all("(" in cell or cell == "cannot say" for cell in two_seeds[1:])
    assert not any("(" in cell for cell in one_seed[1:])
    assert "without brackets is that of one seed" in table.caption


def compared(runs, quantity="final score", **others):
    return [row for row in compare_arms(runs, THRESHOLDS, **others) if row.quantity == quantity]


def test_arms_are_compared_on_the_seeds_they_share():
    runs = finals("trm_avg_0.001", [0.6, 0.7, 0.8, 0.6, 0.9, 0.9]) + finals("ppo_clip", [0.5, 0.5, 0.5, 0.5, 0.5])
    (row,) = compared(runs)
    assert (row.first, row.second, row.num_seeds, row.over) == ("ppo_clip", "trm_avg_0.001", 5, "seeds")
    assert row.mean_difference == pytest.approx(-0.22)  # seed 5 has one arm only
    assert row.p_value == pytest.approx(2 / 32)  # all five differ the same way, two-sided
    assert row.low < -0.22 < row.high < 0


def test_holm_runs_over_the_pairs_of_a_quantity():
    runs = [run for arm, value in (("a", 0.1), ("b", 0.2), ("c", 0.3)) for run in finals(arm, [value] * 5)]
    rows = compared(runs)
    assert [(row.first, row.second) for row in rows] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert [row.adjusted_p_value for row in rows] == pytest.approx([3 / 16] * 3)
    assert [row.adjusted_p_value for row in compared(runs, pairs=[("a", "b")])] == pytest.approx([1 / 16])


def test_few_seeds_are_compared_over_their_held_out_problems():
    runs = finals("a", [0.75]) + finals("b", [0.25])
    scores = {("a", 0): [1.0, 1.0, 1.0, 0.0], ("b", 0): [1.0, 0.0, 0.0, 0.0]}
    (row,) = compared(runs, final_scores=scores)
    assert (row.over, row.num_problems, row.num_seeds, row.p_value) == ("problems of the seeds", 4, 1, None)
    # All 4^4 resamples of the differences 0, 1, 1, 0.
    means = np.sort([np.mean(drawn) for drawn in product([0.0, 1.0, 1.0, 0.0], repeat=4)])
    assert (row.low, row.high) == tuple(np.quantile(means, [0.025, 0.975]))
    assert row.mean_difference == pytest.approx(0.5)


def test_without_problem_scores_few_seeds_have_a_range_and_one_has_none():
    (row,) = compared(finals("a", [0.75, 0.7]) + finals("b", [0.15, 0.3]))
    assert (row.over, row.low, row.high) == ("range of the seeds", pytest.approx(0.4), pytest.approx(0.6))
    assert row.p_value == pytest.approx(0.5)  # two seeds get no smaller
    assert str(row) == "+0.5 (+0.4 to +0.6, range)"
    (alone,) = compared([*finals("a", [0.75]), *finals("b", [0.25])])
    assert (str(alone), alone.p_value, math.isnan(alone.low)) == ("+0.5", None, True)


def test_a_shared_seed_without_a_value_is_counted_beside_the_others():
    runs = [*finals("a", [0.5, 0.5], gap=0.1), outcome("b", seed=0, gap=0.01), outcome("b", seed=1, gap=0.0)]
    (row,) = compared(runs, "log10 PPL gap, last quarter")
    assert (row.num_seeds, row.num_missing, row.mean_difference) == (1, 1, pytest.approx(1.0))
    table = pairs_table(runs, "b", THRESHOLDS)
    assert table is not None
    assert [line[4] for line in table.rows if line[0] == row.quantity] == ["1 (1 without)"]


def test_arms_that_share_no_seed_are_not_compared():
    runs = [*finals("a", [0.5]), dataclasses.replace(finals("b", [0.5])[0], seed=9)]
    (row,) = compared(runs)
    assert (row.num_seeds, row.p_value) == (0, None)
    assert str(row) == "not measured"
    assert pairs_table(runs, "b", THRESHOLDS) is None


def test_a_report_compares_every_arm_with_one_and_with_its_own_controls():
    arms = ["trm_avg_0.001", "random_as_trm_avg_0.001", "ppo_clip", "length_as_trm_avg_0.001"]
    assert pairs_of(arms, "ppo_clip") == [
        ("trm_avg_0.001", "ppo_clip"),
        ("random_as_trm_avg_0.001", "ppo_clip"),
        ("length_as_trm_avg_0.001", "ppo_clip"),
        ("trm_avg_0.001", "random_as_trm_avg_0.001"),
        ("trm_avg_0.001", "length_as_trm_avg_0.001"),
    ]
    assert pairs_of(arms[:1], "ppo_clip") == []
    assert pairs_of(["ppo_clip", "ppo_clip_bounded_step"], "ppo_clip") == [("ppo_clip_bounded_step", "ppo_clip")]
    variants = ["trm_max_0.1", "trm_max_0.1_avg_0.002", "trm_max_0.10"]
    assert pairs_of(variants, "ppo_clip") == [("trm_max_0.1", "trm_max_0.1_avg_0.002")]


def test_a_table_of_pairs_shows_the_raw_p_and_holms():
    runs = finals("trm_avg_0.001", [0.6] * 5) + finals("ppo_clip", [0.5] * 5) + finals("token_is", [0.5] * 5)
    table = pairs_table(runs, "ppo_clip", THRESHOLDS)
    assert table is not None
    line = next(row for row in table.rows if row[:3] == ["final score", "trm_avg_0.001", "ppo_clip"])
    assert line[3:] == ["+0.1 (+0.1 to +0.1, 5 seeds)", "5", "0.062 (0.125)"]
