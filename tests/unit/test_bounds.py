import time

import numpy as np
import pytest

from trm_repro.bounds import (
    BOUNDS,
    PAPER_UNIFIED,
    Divergences,
    KnownLimits,
    adaptive_hybrid_bound,
    adaptive_kl_bound,
    adaptive_tv_bound,
    classical_bound,
    coupling_bound,
    every_bound,
    largest_delta,
    largest_length,
    mixed_kl_bound,
    mixed_tv_bound,
    pinsker_marginal_kl_bound,
    pinsker_marginal_tv_bound,
    pinsker_tv,
    prefix_adaptive_bound,
    simplified_pinsker_marginal_kl_bound,
    simplified_pinsker_marginal_tv_bound,
    trivial_bound,
    unified_bound,
)

KL_ONLY = Divergences.at_most(4096, 1e-4, kl_seq=0.01)
KL_AND_TV = Divergences.at_most(4096, 1e-4, kl_seq=0.01, epsilon=5e-3, tv_seq=0.05)

# sqrt(delta/2) = 0.1 = epsilon, so that every sum can be done by hand.
THREE_TOKENS = Divergences.at_most(
    3, 0.02, epsilon=0.1, kl_seq=0.02, tv_seq=0.15, mean_tv=[0.1, 0.05, 0.02], mean_kl=[0.02, 0.005, 0.001]
)


@pytest.mark.parametrize(
    ("name", "kl_only", "kl_and_tv"),
    [
        ("classical", "1677", "839"),
        ("coupling", "113.8", "79.9"),
        ("simplified_pinsker_marginal_kl", "35.0", "35.0"),
        ("simplified_pinsker_marginal_tv", "35.0", "24.7"),
        ("mixed_kl", "8.2", "8.2"),
        ("mixed_tv", "8.2", "4.1"),
        ("unified", "8.2", "4.1"),
    ],
)
def test_table_1_is_met_to_the_printed_digits(name, kl_only, kl_and_tv):
    for divergences, printed in ((KL_ONLY, kl_only), (KL_AND_TV, kl_and_tv)):
        decimals = len(printed.partition(".")[2])
        assert f"{every_bound(divergences)[name]:.{decimals}f}" == printed


def test_the_worst_case_of_adaptive_stays_within_table_1():
    assert adaptive_hybrid_bound(KL_ONLY) <= 35.0
    assert adaptive_hybrid_bound(KL_AND_TV) <= 24.7 + 0.05  # printed to one decimal
    assert int(classical_bound(KL_ONLY) / unified_bound(KL_AND_TV)) == 409


@pytest.mark.parametrize(
    ("bound", "by_hand"),
    [
        (classical_bound, 2 * 3 * 2 * 0.1**2),
        (coupling_bound, 4 * 0.1 * (0 + 0.1 + 0.2)),
        (pinsker_marginal_kl_bound, 4 * 0.1 * (0 + 0.1 + 0.1 * 2**0.5)),
        (pinsker_marginal_tv_bound, 4 * 0.1 * (0 + 0.1 + 0.1 * 2**0.5)),
        (simplified_pinsker_marginal_kl_bound, 4 / 3 * 3**1.5 * 0.02),
        (simplified_pinsker_marginal_tv_bound, 8 / 3 * 3**1.5 * 0.1 * 0.1),
        (mixed_kl_bound, 2 * 3 * (0.02 * 0.02) ** 0.5),
        (mixed_tv_bound, 4 * 3 * 0.1 * 0.15),
        (adaptive_kl_bound, 4 * (0.1 * 0.1 * 2**0.5 + 0.05 * 0.1)),
        (adaptive_tv_bound, 4 * (0.1 * 0.2 + 0.05 * 0.1)),
        (adaptive_hybrid_bound, 4 * (0.1 * 0.1 * 2**0.5 + 0.05 * 0.1)),
        # TV of the contexts at t = 1, 2, 3: 0; 0.1; the smallest of sqrt(KL_seq/2) = 0.1, TV_seq = 0.15, 0.1 + 0.05.
        (prefix_adaptive_bound, 4 * 0.1 * (0 + 0.1 + 0.1)),
    ],
)
def test_three_tokens_by_hand(bound, by_hand):
    assert bound(THREE_TOKENS) == pytest.approx(by_hand, rel=1e-14)
    assert bound(THREE_TOKENS, constants="sharp") == pytest.approx(by_hand / 2, rel=1e-14)


def test_the_trivial_bound_adds_the_shift_and_the_token_divergences():
    assert trivial_bound(THREE_TOKENS) == pytest.approx(0.15 + 0.1 + 0.05 + 0.02)
    # Without the profile: the token divergences sum to at most T sqrt(delta/2) = 0.3 and sqrt(T KL_seq / 2) = 0.173.
    without_profile = Divergences.at_most(3, 0.02, kl_seq=0.02, tv_seq=0.1)
    assert trivial_bound(without_profile) == pytest.approx(0.1 + 0.03**0.5)


def test_the_paper_unified_bound_is_the_smallest_of_its_six():
    for divergences in (KL_ONLY, KL_AND_TV, THREE_TOKENS):
        assert unified_bound(divergences) == min(BOUNDS[name](divergences) for name in PAPER_UNIFIED)


def test_the_sharp_unified_bound_takes_ours_into_the_minimum():
    short_and_far = Divergences.at_most(4, 2.0, epsilon=0.9)
    bounds = every_bound(short_and_far, constants="sharp")
    assert bounds["unified"] == bounds["trivial"] < min(bounds[name] for name in PAPER_UNIFIED)
    bounds = every_bound(KL_AND_TV, constants="sharp")
    assert bounds["unified"] == bounds["prefix_adaptive"] < bounds["mixed_tv"]


def direct_sums(length, epsilon, delta, tv_seq, kl_seq):
    """The bounds without profiles, term by term as the formulas are written."""
    k = np.arange(length)
    root = min(1, np.sqrt(delta / 2))
    token_tv = min(epsilon, root)
    linear, roots = np.minimum(1, k * epsilon), np.minimum(1, np.sqrt(k * delta / 2))
    prefix = np.minimum(min(tv_seq, np.sqrt(kl_seq / 2)), np.minimum(k * token_tv, roots))
    return {
        "classical": 2 * length * (length - 1) * epsilon**2,
        "coupling": 4 * epsilon * linear.sum(),
        "pinsker_marginal_kl": 4 * root * roots.sum(),
        "pinsker_marginal_tv": 4 * epsilon * roots.sum(),
        "mixed_kl": 4 * length * root * min(1, np.sqrt(kl_seq / 2)),
        "mixed_tv": 4 * length * epsilon * tv_seq,
        "adaptive_kl": 4 * token_tv * roots.sum(),
        "adaptive_tv": 4 * token_tv * linear.sum(),
        "adaptive_hybrid": 4 * token_tv * np.minimum(linear, roots).sum(),
        "prefix_adaptive": 4 * token_tv * prefix.sum(),
        "trivial": tv_seq + min(length * token_tv, np.sqrt(length * kl_seq / 2)),
    }


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 66, 1000, 1_000_000])
@pytest.mark.parametrize("limits", [(1e-4, 3e-2), (1e-3, 1e-5), (0.3, 0.01), (1.0, 5.0), (0.0, 0.0), (1e-6, 1e-3)])
def test_closed_forms_equal_sums_over_positions(length, limits):
    epsilon, delta = limits
    kl_seq = 0.3 * length * delta
    tv_seq = 0.7 * min(1, length * min(epsilon, np.sqrt(delta / 2)))
    divergences = Divergences.at_most(length, delta, epsilon=epsilon, kl_seq=kl_seq, tv_seq=tv_seq)
    found = every_bound(divergences)
    for name, expected in direct_sums(length, epsilon, delta, tv_seq, kl_seq).items():
        assert found[name] == pytest.approx(expected, rel=1e-11, abs=1e-15), name


def test_a_constant_profile_equals_the_number():
    limits = {"epsilon": 0.2, "kl_seq": 0.1, "tv_seq": 0.2}
    as_number = Divergences.at_most(50, 0.05, mean_tv=0.01, mean_kl=0.003, **limits)
    as_profile = Divergences.at_most(50, 0.05, mean_tv=np.full(50, 0.01), mean_kl=np.full(50, 0.003), **limits)
    one_of_each = Divergences.at_most(50, 0.05, mean_tv=0.01, mean_kl=np.full(50, 0.003), **limits)
    for name, expected in every_bound(as_profile).items():
        assert every_bound(as_number)[name] == pytest.approx(expected, rel=1e-12), name
        assert every_bound(one_of_each)[name] == pytest.approx(expected, rel=1e-12), name


def test_adaptive_becomes_pinsker_marginal_and_coupling_at_worst_case_profiles():
    rng = np.random.default_rng(0)
    for _ in range(50):
        length, epsilon = int(rng.integers(1, 300)), rng.uniform(0, 1)
        delta = 2 * epsilon**2 * rng.uniform(0.1, 1.0)
        kl_case = Divergences.at_most(length, delta, epsilon=epsilon, mean_tv=np.full(length, np.sqrt(delta / 2)))
        assert adaptive_kl_bound(kl_case) == pytest.approx(pinsker_marginal_kl_bound(kl_case), rel=1e-12)
        tv_case = Divergences.at_most(length, epsilon=epsilon, mean_tv=np.full(length, epsilon))
        assert adaptive_tv_bound(tv_case) == pytest.approx(coupling_bound(tv_case), rel=1e-12)


def test_the_hybrid_weight_crosses_over_at_delta_over_two_epsilon_squared():
    epsilon, delta = 0.01, 0.002  # crossover at T - t = 10
    for remaining, expected in ((9, 9 * epsilon), (10, 10 * epsilon), (11, np.sqrt(11 * delta / 2))):
        profile = np.zeros(remaining + 1)
        profile[0] = epsilon
        divergences = Divergences.at_most(remaining + 1, delta, epsilon=epsilon, mean_tv=profile)
        assert adaptive_hybrid_bound(divergences) == pytest.approx(4 * epsilon * expected)


def random_divergences(rng):
    length = int(rng.integers(1, 40))
    epsilon, delta = rng.uniform(0, 1), 10 ** rng.uniform(-4, 1)
    mean_tv = rng.uniform(0, min(epsilon, np.sqrt(delta / 2)), length)
    mean_kl = rng.uniform(0, delta, length)
    tv_seq, kl_seq = rng.uniform(0, min(1, mean_tv.sum())), rng.uniform(0, mean_kl.sum())
    return Divergences.at_most(
        length, delta, epsilon=epsilon, kl_seq=kl_seq, tv_seq=tv_seq, mean_tv=mean_tv, mean_kl=mean_kl
    )


def test_orderings_hold_for_any_consistent_numbers():
    rng = np.random.default_rng(1)
    for _ in range(300):
        bounds = every_bound(random_divergences(rng))
        slack = 1 + 1e-12
        for looser in ("coupling", "pinsker_marginal_kl", "pinsker_marginal_tv", "mixed_kl", "mixed_tv"):
            assert bounds["prefix_adaptive"] <= bounds[looser] * slack, looser
        assert bounds["adaptive_hybrid"] <= min(bounds["adaptive_kl"], bounds["adaptive_tv"]) * slack
        assert bounds["adaptive_kl"] <= bounds["pinsker_marginal_kl"] * slack
        assert bounds["adaptive_tv"] <= bounds["coupling"] * slack
        assert bounds["coupling"] <= bounds["classical"] * slack
        for form in ("kl", "tv"):
            assert bounds[f"pinsker_marginal_{form}"] <= bounds[f"simplified_pinsker_marginal_{form}"] * slack


def test_sharp_is_half_of_paper_for_every_bound_with_a_constant():
    rng = np.random.default_rng(2)
    for _ in range(50):
        divergences = random_divergences(rng)
        for name, bound in BOUNDS.items():
            assert bound(divergences, constants="sharp") == pytest.approx(bound(divergences) / 2, rel=1e-14), name


def test_arrays_give_what_single_numbers_give():
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 500, (4, 1))
    deltas = 10 ** rng.uniform(-6, 1, 5)
    together = every_bound(Divergences.at_most(lengths, deltas, epsilon=0.3))
    for i, j in np.ndindex(4, 5):
        alone = every_bound(Divergences.at_most(lengths[i, 0], deltas[j], epsilon=0.3))
        for name, values in together.items():
            assert np.broadcast_to(values, (4, 5))[i, j] == pytest.approx(alone[name], rel=1e-12), name


@pytest.mark.parametrize(
    ("bound", "order"),
    [(classical_bound, 2.0), (pinsker_marginal_kl_bound, 1.5), (mixed_kl_bound, 1.0), (mixed_tv_bound, 1.0)],
)
def test_the_order_in_the_length_is_as_stated(bound, order):
    small, large = (Divergences.at_most(length, 1e-9, kl_seq=1e-6) for length in (20_000, 80_000))
    assert np.log(bound(large) / bound(small)) / np.log(4) == pytest.approx(order, abs=1e-2)


def test_coupling_grows_linearly_once_epsilon_times_length_exceeds_one():
    epsilon = 0.01
    at_1000, at_2000 = (coupling_bound(Divergences.at_most(length, epsilon=epsilon)) for length in (1000, 2000))
    assert at_2000 - at_1000 == pytest.approx(4 * epsilon * 1000)


def test_one_token_has_no_error_and_equal_policies_have_none():
    assert unified_bound(Divergences.at_most(1)) == 0
    assert all(value == 0 for value in every_bound(Divergences.at_most(5000, 0.0)).values())


def test_only_tv_forms_remain_when_delta_is_infinite():
    bounds = every_bound(Divergences.at_most(100, np.inf, epsilon=1e-4, tv_seq=1e-3))
    assert bounds["coupling"] == pytest.approx(2 * 100 * 99 * 1e-8)
    assert bounds["pinsker_marginal_kl"] == 4 * 99
    assert bounds["mixed_kl"] == 400
    assert bounds["unified"] == min(bounds["coupling"], bounds["mixed_tv"])


def test_unknown_numbers_are_filled_with_the_largest_that_the_known_allow():
    filled = Divergences.at_most(4096, 1e-4)
    assert filled.epsilon == pytest.approx(0.00707, abs=5e-6)
    assert filled.kl_seq == pytest.approx(0.4096)
    assert filled.tv_seq == pytest.approx(0.4525, abs=5e-5)
    assert Divergences.at_most(10, epsilon=0.02).tv_seq == pytest.approx(0.2)
    with_profile = Divergences.at_most(2, 1.0, mean_kl=[0.5, 0.25])
    assert with_profile.kl_seq == pytest.approx(0.75)


def test_pinsker_clamps_both_ends():
    assert pinsker_tv([-1e-15, 0.02, 2.0, np.inf]).tolist() == pytest.approx([0, 0.1, 1, 1])


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"length": 0}, "length must be a whole number >= 1, got 0"),
        ({"length": 2.5}, "length must be a whole number >= 1, got 2.5"),
        ({"length": 4, "delta": -1}, "delta must be >= 0, got -1"),
        ({"length": 4, "delta": np.nan}, "delta must be >= 0, got nan"),
        ({"length": 4, "epsilon": 1.5}, "epsilon must be <= 1, got 1.5"),
        ({"length": 4, "epsilon": -0.5}, "epsilon must be >= 0, got -0.5"),
        ({"length": 4, "tv_seq": 1.01}, "tv_seq must be <= 1, got 1.01"),
        ({"length": 4, "delta": 0.1, "kl_seq": 0.5}, r"kl_seq must be <= length \* delta = 0.4, got 0.5"),
        ({"length": 4, "epsilon": 0.1, "tv_seq": 0.5}, r"tv_seq must be <= length \* epsilon = 0.4, got 0.5"),
        ({"length": 2, "epsilon": 0.1, "mean_tv": [0.1, 0.3]}, "mean_tv must be <= epsilon = 0.1, got 0.3"),
        ({"length": 2, "delta": 0.1, "mean_kl": [0.1, 0.3]}, "mean_kl must be <= delta = 0.1, got 0.3"),
        ({"length": 2, "mean_tv": [0.1, 0.2], "tv_seq": 0.4}, "tv_seq must be <= the sum of mean_tv = 0.3, got 0.4"),
        ({"length": 2, "mean_kl": [0.1, 0.2], "kl_seq": 0.4}, "kl_seq must be <= the sum of mean_kl = 0.3, got 0.4"),
        ({"length": 3, "mean_tv": [0.1, 0.2]}, "mean_tv must have 1 or length = 3 values, got 2"),
        ({"length": 3, "mean_tv": [0.1, np.nan, 0.1]}, "mean_tv must be >= 0, got nan"),
    ],
)
def test_impossible_numbers_are_refused(numbers, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Divergences.at_most(**numbers)


def test_unknown_constants_are_refused():
    with pytest.raises(ValueError, match="constants must be paper or sharp, got half"):
        coupling_bound(KL_ONLY, constants="half")


def test_rounding_is_forgiven():
    mean_tv = np.full(100_000, 0.1)
    Divergences.at_most(100_000, epsilon=np.nextafter(0.1, 0), mean_tv=mean_tv, tv_seq=np.nextafter(1.0, 2))
    Divergences.at_most(10, 0.1, mean_kl=np.full(10, 0.1), kl_seq=1 + 1e-13)
    barely_negative = Divergences.at_most(10, -1e-16, kl_seq=0.0)
    assert unified_bound(barely_negative) == 0


def test_the_thresholds_of_a_bound_below_one_are_found():
    nothing = KnownLimits()
    assert largest_length(0.05, nothing) == 6
    assert largest_length(0.05, nothing, constants="sharp") == 10
    # In the simplified form 4/3 T^1.5 delta = 1 gives 2.861e-6; the sum is a little smaller.
    assert largest_delta(4096, nothing) == pytest.approx(0.75 / 4096**1.5, rel=3e-4)
    assert largest_delta(4096, nothing, constants="sharp") == pytest.approx(1.5 / 4096**1.5, rel=3e-4)


@pytest.mark.parametrize("constants", ["paper", "sharp"])
@pytest.mark.parametrize("limits", [{}, {"epsilon": 1e-3}, {"kl_seq": 0.01}, {"tv_seq": 3e-3, "epsilon": 0.5}])
def test_the_unified_bound_crosses_one_exactly_where_found(limits, constants):
    known = KnownLimits(**limits)
    delta = largest_delta(500, known, constants=constants)
    if np.isfinite(delta):
        below, above = unified_bound(known.at(500, [delta * (1 - 1e-9), delta * (1 + 1e-9)]), constants=constants)
        assert below < 1 < above
    length = largest_length(1e-3, known, constants=constants)
    at, beyond = unified_bound(known.at([length, length + 1], 1e-3), constants=constants)
    assert at < 1 <= beyond


def test_no_threshold_is_infinity():
    assert largest_delta(1, KnownLimits()) == np.inf
    assert largest_delta(100, KnownLimits(epsilon=1e-3)) == np.inf
    assert largest_length(0.0, KnownLimits()) == np.inf


def test_delta_0_05_says_nothing_at_8192_tokens():
    divergences = Divergences.at_most(8192, 0.05)
    assert f"{pinsker_marginal_kl_bound(divergences):.0f}" == "5172"
    assert f"{pinsker_marginal_kl_bound(divergences, constants='sharp'):.0f}" == "2586"


def test_a_million_tokens_take_milliseconds():
    length = 1_000_000
    profile = np.random.default_rng(0).uniform(0, 1e-3, length)
    start = time.process_time()
    every_bound(Divergences.at_most(length, 1e-6))
    closed_form = time.process_time() - start
    every_bound(Divergences.at_most(length, 1.0, epsilon=1e-3, mean_tv=profile, mean_kl=profile))
    with_profiles = time.process_time() - start - closed_form
    assert closed_form < 0.05
    assert with_profiles < 1.0  # twelve bounds, 10 to 20 ms each
