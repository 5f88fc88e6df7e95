import math

import numpy as np
import pytest

from trm_repro.intervals import empirical_bernstein_interval, no_event_upper_bound, rule_of_three


def test_the_interval_of_a_hand_case():
    # Samples 0, 1: mean 0.5, variance 0.5; a thousand of each make it 0.25 * 2000 / 1999.
    interval = empirical_bernstein_interval([0.0, 1.0] * 1000, confidence=0.96)
    log_term = math.log(100)  # 4 / 0.04
    half_width = math.sqrt(2 * 0.25 * 2000 / 1999 * log_term / 2000) + 7 * log_term / (3 * 1999)
    assert interval.mean == 0.5
    assert interval.low == pytest.approx(0.5 - half_width, abs=1e-12)
    assert interval.high == pytest.approx(0.5 + half_width, abs=1e-12)


def test_the_variance_is_the_papers_average_over_pairs():
    samples = np.random.default_rng(0).random(200) * 0.02
    pairs = sum((a - b) ** 2 for i, a in enumerate(samples) for b in samples[:i]) / (200 * 199)
    log_term = math.log(4 / 0.05)
    half_width = math.sqrt(2 * pairs * log_term / 200) + 7 * log_term / (3 * 199)
    assert empirical_bernstein_interval(samples).high == pytest.approx(samples.mean() + half_width, abs=1e-12)


def test_without_variance_only_the_range_term_is_left():
    interval = empirical_bernstein_interval(np.full(101, 0.5))
    assert interval.high - interval.mean == pytest.approx(7 * math.log(80) / 300, abs=1e-12)


def test_the_interval_scales_and_shifts_with_the_samples():
    samples = np.random.default_rng(1).random(500)
    unit = empirical_bernstein_interval(samples)
    scaled = empirical_bernstein_interval(3 * samples - 1, smallest=-1.0, largest=2.0)
    for end, scaled_end in zip(unit, scaled, strict=True):
        assert scaled_end == pytest.approx(3 * end - 1, abs=1e-12)


def test_leading_axes_are_independent_intervals():
    samples = np.random.default_rng(2).random((3, 2, 50))
    together = empirical_bernstein_interval(samples)
    assert together.low.shape == (3, 2)
    alone = empirical_bernstein_interval(samples[2, 1])
    assert (together.mean[2, 1], together.low[2, 1], together.high[2, 1]) == alone


def test_one_sample_or_few_give_the_whole_range():
    for samples in ([0.3], [0.3, 0.4]):
        interval = empirical_bernstein_interval(samples)
        assert (interval.low, interval.high) == (0.0, 1.0)


@pytest.mark.parametrize("shape", [(0.02, 2.0), (1.0, 1.0), (0.5, 0.5)])
def test_the_interval_holds_the_expectation_at_least_as_often_as_stated(shape):
    alpha, beta = shape
    samples = np.random.default_rng(3).beta(alpha, beta, size=(4000, 100))
    interval = empirical_bernstein_interval(samples, confidence=0.8)
    holds = (interval.low <= alpha / (alpha + beta)) & (alpha / (alpha + beta) <= interval.high)
    assert holds.mean() >= 0.8


def test_more_samples_narrow_the_interval_like_one_over_the_root():
    generator = np.random.default_rng(4)
    widths = []
    for num_samples in (10_000, 40_000, 160_000):
        interval = empirical_bernstein_interval(generator.random(num_samples))
        widths.append(float(interval.high - interval.low))
    assert widths[0] / widths[1] == pytest.approx(2, rel=0.1)
    assert widths[1] / widths[2] == pytest.approx(2, rel=0.1)


def test_a_small_variance_beats_hoeffding():
    samples = np.random.default_rng(5).random(2000) * 0.01
    interval = empirical_bernstein_interval(samples)
    assert interval.high - interval.mean < 0.5 * math.sqrt(math.log(2 / 0.05) / (2 * 2000))


def test_rounding_beyond_the_range_is_forgiven_and_more_is_refused():
    assert empirical_bernstein_interval([1.0000002, -1e-9]).mean == 0.5
    for bad in ([1.01, 0.0], [-0.1, 0.0], [math.nan, 0.0]):
        with pytest.raises(ValueError, match="samples must be in"):
            empirical_bernstein_interval(bad)


def test_arguments_out_of_range_are_refused():
    for samples in ([], 0.5, np.zeros((3, 0))):
        with pytest.raises(ValueError, match="at least one sample"):
            empirical_bernstein_interval(samples)
    for smallest, largest in ((1.0, 0.0), (0.0, math.inf), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="smallest must be below largest"):
            empirical_bernstein_interval([0.5], smallest=smallest, largest=largest)
    for confidence in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="confidence must be between"):
            empirical_bernstein_interval([0.5], confidence=confidence)
        with pytest.raises(ValueError, match="confidence must be between"):
            no_event_upper_bound(3, confidence=confidence)
    for function in (no_event_upper_bound, rule_of_three):
        with pytest.raises(ValueError, match="num_samples must be >= 0"):
            function(-1)


def test_at_the_upper_bound_no_event_has_the_remaining_probability():
    for num_samples in (1, 2, 32, 512, 10**9):
        bound = no_event_upper_bound(num_samples)
        assert num_samples * math.log1p(-bound) == pytest.approx(math.log(0.05), rel=1e-12)


def test_hand_values_of_the_two_bounds():
    assert no_event_upper_bound(1) == pytest.approx(0.95)
    assert no_event_upper_bound(2, confidence=0.75) == pytest.approx(0.5)
    assert rule_of_three(300) == pytest.approx(0.01)
    assert no_event_upper_bound(0) == rule_of_three(0) == rule_of_three(2) == 1.0


def test_the_rule_of_three_is_above_the_exact_bound_and_close_to_it():
    for num_samples in (1, 3, 10, 100, 10_000):
        assert no_event_upper_bound(num_samples) <= rule_of_three(num_samples)
    assert rule_of_three(1000) == pytest.approx(no_event_upper_bound(1000), rel=0.01)
