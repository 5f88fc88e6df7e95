"""Statistics against hand cases, exact enumeration and simulated data."""

import math
from itertools import combinations, product

import numpy as np
import pytest

from evaluation import figures, statistics
from evaluation.statistics import (
    MAX_EXACT_PAIRS,
    average_at_k_interval,
    bootstrap_mean,
    compare_paired,
    holm,
    majority_at_k,
    mean_interval,
    pass_at_k,
    sign_flip_p_value,
)


def rng(seed=0):
    return np.random.default_rng(seed)


# --- pass@k ---


@pytest.mark.parametrize("num_samples", [1, 2, 5, 7])
def test_pass_at_k_equals_the_share_of_subsets_with_a_right_answer(num_samples):
    for num_correct in range(num_samples + 1):
        answers = [1] * num_correct + [0] * (num_samples - num_correct)
        for k in range(1, num_samples + 1):
            subsets = list(combinations(answers, k))
            expected = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(num_correct, num_samples, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_by_hand():
    # 2 of 4 right, k = 2: of 6 pairs one has none, so 5/6.
    assert pass_at_k([0, 2, 4], 4, 2).tolist() == pytest.approx([0.0, 5 / 6, 1.0])
    assert pass_at_k([1, 3], [2, 6], 1).tolist() == pytest.approx([0.5, 0.5])  # k = 1 is the mean


def test_pass_at_k_is_exact_where_no_right_answer_or_too_few_wrong_ones():
    assert pass_at_k(0, 1000, 1000) == 0.0
    assert pass_at_k(1, 32, 32) == 1.0
    assert pass_at_k(29, 32, 4) == 1.0  # three wrong answers cannot fill four places


def test_pass_at_k_keeps_its_digits_where_binomials_overflow():
    # One right answer of n: a subset of k has it with chance k / n.
    assert pass_at_k(1, 10**9, 10) == pytest.approx(1e-8, rel=1e-12)
    assert pass_at_k(1, 100_000, 50_000) == pytest.approx(0.5)


def test_pass_at_k_is_unbiased():
    chance, num_samples, k = 0.3, 10, 4
    counts = rng(1).binomial(num_samples, chance, size=200_000)
    assert pass_at_k(counts, num_samples, k).mean() == pytest.approx(1 - (1 - chance) ** k, abs=0.004)


@pytest.mark.parametrize(
    ("num_correct", "num_samples", "k", "message"),
    [
        (1, 4, 5, "k must be from 1"),
        (1, 4, 0, "k must be from 1"),
        (5, 4, 1, "num_correct must be from 0"),
        (-1, 4, 1, "num_correct must be from 0"),
        (0.5, 4, 1, "whole"),
        (float("nan"), 4, 1, "finite"),
    ],
)
def test_pass_at_k_refuses_counts_that_cannot_be(num_correct, num_samples, k, message):
    with pytest.raises(ValueError, match=message):
        pass_at_k(num_correct, num_samples, k)


# --- maj@k ---


def test_the_majority_is_graded():
    answers = [["7", "7", "8"], ["8", "7", "8"]]
    assert majority_at_k(answers, [[1, 1, 0], [0, 1, 0]]).tolist() == [1.0, 0.0]


def test_a_tie_scores_the_mean_of_its_answers_in_any_order():
    answers, rewards = ["7", "8", "7", "8", "9"], [1.0, 0.0, 1.0, 0.0, 0.0]
    assert majority_at_k([answers], [rewards]).tolist() == [0.5]
    assert majority_at_k([answers[::-1]], [rewards[::-1]]).tolist() == [0.5]
    assert majority_at_k([["a", "b", "c"]], [[1, 0, 0]]).tolist() == pytest.approx([1 / 3])


def test_no_answer_does_not_vote_and_without_votes_the_score_is_0():
    assert majority_at_k([[None, None, "7"]], [[0, 0, 1]]).tolist() == [1.0]
    assert majority_at_k([[None, None]], [[0, 0]]).tolist() == [0.0]


def test_an_answer_scores_its_best_sample():
    assert majority_at_k([["7", "7"]], [[0, 1]]).tolist() == [1.0]  # one of the two was cut off


def test_majority_refuses_shapes_that_differ():
    with pytest.raises(ValueError, match="alike"):
        majority_at_k([["7", "8"], ["7"]], [[1, 0], [1, 0]])


# --- bootstrap ---


def test_the_bootstrap_draws_every_resample_with_its_chance():
    # Two seeds, 0 and 1: resampled means are 0, 1/2, 1 with chance 1/4, 1/2, 1/4.
    interval = bootstrap_mean([0.0, 1.0], rng(), confidence=0.4)
    assert (interval.estimate, interval.low, interval.high) == (0.5, 0.5, 0.5)  # quantiles 0.3 and 0.7
    wide = bootstrap_mean([0.0, 1.0], rng(), confidence=0.6)  # quantiles 0.2 and 0.8
    assert (wide.low, wide.high) == (0.0, 1.0)


def test_a_curve_is_resampled_by_whole_seeds():
    values = rng(3).normal(size=6)
    curve = bootstrap_mean(np.stack([values, 10 * values + 1]), rng())
    assert curve.low[1] == pytest.approx(10 * curve.low[0] + 1)
    alone = bootstrap_mean(values, rng())
    assert (alone.low, alone.high) == (curve.low[0], curve.high[0])


def test_the_same_generator_gives_the_same_interval():
    values = rng(2).normal(size=9)
    assert bootstrap_mean(values, rng(5)) == bootstrap_mean(values, rng(5))
    assert bootstrap_mean(values, rng(5)) != bootstrap_mean(values, rng(6))


def test_one_seed_gives_a_point():
    assert bootstrap_mean([0.3], rng()) == (0.3, 0.3, 0.3)


def test_figures_take_their_band_from_here():
    assert figures.mean_interval is mean_interval


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")], 3.0])
def test_the_bootstrap_refuses_what_has_no_mean(values):
    with pytest.raises(ValueError, match="values must"):
        bootstrap_mean(values, rng())


@pytest.mark.parametrize(("keyword", "value"), [("confidence", 1.0), ("confidence", 0.0), ("num_resamples", 0)])
def test_the_bootstrap_refuses_settings_out_of_range(keyword, value):
    with pytest.raises(ValueError, match=keyword):
        bootstrap_mean([1.0, 2.0], rng(), **{keyword: value})


def coverage(draw_interval, truth, *, num_trials):
    intervals = [draw_interval(np.random.default_rng(trial)) for trial in range(num_trials)]
    return np.mean([interval.low <= truth <= interval.high for interval in intervals])


@pytest.mark.parametrize(("num_seeds", "expected"), [(5, 0.835), (20, 0.93), (60, 0.94)])
def test_intervals_hold_the_mean_as_often_as_documented(num_seeds, expected):
    def draw(generator):
        return bootstrap_mean(generator.normal(2.0, 3.0, size=num_seeds), generator, num_resamples=300)

    assert coverage(draw, 2.0, num_trials=600) == pytest.approx(expected, abs=0.06)


def clustered_rewards(generator):
    chances = generator.beta(0.5, 0.5, size=(40, 1))  # problems are mostly easy or mostly hard
    return (generator.random((40, 16)) < chances).astype(float)


def test_intervals_by_problem_hold_the_mean_and_intervals_by_answer_do_not():
    def by_problem(generator):
        return average_at_k_interval(clustered_rewards(generator), generator, num_resamples=300)

    def by_answer(generator):
        return bootstrap_mean(clustered_rewards(generator).ravel(), generator, num_resamples=300)

    assert coverage(by_problem, 0.5, num_trials=300) > 0.88
    assert coverage(by_answer, 0.5, num_trials=100) < 0.7


def test_average_at_k_is_the_mean_and_problems_that_agree_give_a_point():
    interval = average_at_k_interval([[1, 0], [1, 0], [0, 1]], rng())
    assert interval == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match=r"\[problems, answers\]"):
        average_at_k_interval([1.0, 0.0], rng())


# --- paired tests ---


def enumerated_p_value(differences, alternative):
    observed = np.mean(differences)
    extreme = 0
    for signs in product([1, -1], repeat=len(differences)):
        mean = np.mean(np.multiply(signs, differences))
        extreme += {
            "two-sided": abs(mean) >= abs(observed) - 1e-12,
            "greater": mean >= observed - 1e-12,
            "less": mean <= observed + 1e-12,
        }[alternative]
    return extreme / 2 ** len(differences)


@pytest.mark.parametrize("alternative", ["two-sided", "greater", "less"])
@pytest.mark.parametrize("num_pairs", [1, 2, 5, 8])
def test_the_sign_flip_test_equals_its_enumeration(num_pairs, alternative):
    for seed in range(3):
        differences = rng(seed).normal(0.3, 1.0, size=num_pairs).round(1)  # rounded: with ties
        expected = enumerated_p_value(differences, alternative)
        assert sign_flip_p_value(differences, rng(), alternative=alternative) == expected


def test_five_pairs_that_agree_reach_one_in_thirty_two():
    assert sign_flip_p_value([0.1, 0.2, 0.1, 0.3, 0.1], rng(), alternative="greater") == 1 / 32
    assert sign_flip_p_value([0.1, 0.2, 0.1, 0.3, 0.1], rng()) == 1 / 16


def test_equal_arms_have_a_p_value_of_1():
    for alternative in ("two-sided", "greater", "less"):
        assert sign_flip_p_value([0.0] * 6, rng(), alternative=alternative) == 1.0


def test_many_pairs_are_tested_by_drawn_patterns_and_never_reach_0():
    differences = np.r_[np.ones(MAX_EXACT_PAIRS), np.ones(10)]
    assert sign_flip_p_value(differences, rng(), num_resamples=999) == 1 / 1000
    mixed = rng(4).normal(0.3, 1.0, size=MAX_EXACT_PAIRS)
    exact = sign_flip_p_value(mixed, rng())
    drawn = sign_flip_p_value(np.r_[mixed, np.zeros(1)], rng(), num_resamples=40_000)  # a zero changes no sum
    assert drawn == pytest.approx(exact, abs=0.015)


def test_p_values_are_uniform_where_nothing_differs():
    p_values = [sign_flip_p_value(rng(trial).normal(size=7), rng(), alternative="greater") for trial in range(1000)]
    assert np.mean(np.array(p_values) <= 0.05) <= 0.05 + 0.025
    assert np.mean(np.array(p_values) <= 0.5) == pytest.approx(0.5, abs=0.08)


def test_two_arms_are_compared_pair_by_pair():
    # Seeds differ by far more than arms; every pair says +0.1.
    second = np.array([0.1, 0.9, 0.5, 0.3, 0.7])
    result = compare_paired(second + 0.1, second, rng(), alternative="greater")
    assert result.num_pairs == 5
    assert (result.mean_difference, result.low, result.high) == pytest.approx((0.1, 0.1, 0.1))
    assert result.p_value == 1 / 32


def test_the_documented_example_of_a_comparison():
    result = compare_paired([0.6, 0.7], [0.5, 0.5], rng())
    assert (result.num_pairs, result.p_value) == (2, 0.5)
    assert (result.mean_difference, result.low, result.high) == pytest.approx((0.15, 0.1, 0.2))


@pytest.mark.parametrize(("first", "second"), [([1.0], [1.0, 2.0]), ([], []), ([np.nan], [1.0]), ([[1.0]], [[1.0]])])
def test_arms_that_do_not_pair_are_refused(first, second):
    with pytest.raises(ValueError, match="must"):
        compare_paired(first, second, rng())


def test_an_unknown_alternative_is_refused():
    with pytest.raises(ValueError, match="alternative must be"):
        sign_flip_p_value([1.0], rng(), alternative="more")


# --- Holm ---


def test_holm_by_hand_in_the_order_given():
    # Sorted 0.01, 0.02, 0.03 times 3, 2, 1: 0.03, 0.04, 0.03, and no later one is below an earlier one.
    assert holm([0.03, 0.01, 0.02]).tolist() == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.5, 0.9]).tolist() == [1.0, 1.0]
    assert holm([0.2]).tolist() == [0.2]
    assert holm([]).tolist() == []


def test_holm_refuses_what_is_no_p_value():
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"\[0, 1\]"):
            holm([value])


def test_holm_keeps_the_chance_of_any_false_claim():
    draws = rng(7).random((4000, 6))
    false_claims = np.mean([holm(row).min() <= 0.05 for row in draws])
    assert false_claims == pytest.approx(1 - (1 - 0.05 / 6) ** 6, abs=0.02)


def test_every_public_function_names_its_source_or_what_it_uses():
    for name in (
        "bootstrap_mean",
        "average_at_k_interval",
        "pass_at_k",
        "majority_at_k",
        "sign_flip_p_value",
        "holm",
        "problem_comparison",
    ):
        assert "Source: " in getattr(statistics, name).__doc__


# --- few seeds, many problems ---


def test_two_stages_draw_seeds_whole_and_problems_within_them():
    """Seeds (0, 0) and (1, 3): means of two drawn seeds, each of two drawn problems, by enumeration."""
    one_seed = {0: [0.0], 1: [1.0, 2.0, 2.0, 3.0]}  # means of two drawn problems
    means = []
    for first in (0, 1):
        for second in (0, 1):
            means += [
                (a + b) / 2
                for a in one_seed[first] * (4 // len(one_seed[first]))
                for b in one_seed[second] * (4 // len(one_seed[second]))
            ]
    expected = np.quantile(means, [0.1, 0.9])
    found = statistics.problem_comparison([[0.0, 0.0], [1.0, 3.0]], rng(1), num_resamples=40_000, confidence=0.8)
    assert found == pytest.approx(tuple(expected), abs=1e-9)  # both ends are inside a step of the distribution


def test_one_seed_is_the_bootstrap_over_its_problems():
    values = rng(3).random(40)
    interval = statistics.bootstrap_mean(values, rng(4), num_resamples=20_000)
    found = statistics.problem_comparison([values], rng(5), num_resamples=20_000)
    assert found == pytest.approx((float(interval.low), float(interval.high)), abs=0.005)


@pytest.mark.parametrize("differences", [[], [[]], [[0.0], [math.nan]]])
def test_a_comparison_over_problems_refuses_what_has_no_mean(differences):
    with pytest.raises(ValueError, match="differences must"):
        statistics.problem_comparison(differences, rng(0))
