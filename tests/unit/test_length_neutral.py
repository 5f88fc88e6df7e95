import math

import pytest
import torch

from trm_repro.bounds import Divergences, adaptive_hybrid_bound
from trm_repro.masks.length_neutral import (
    future_weights,
    ln_trm_mask,
    mean_ratio_deviation,
    ratio_deviation,
    ser_mask,
    weighted_ratio_deviation,
)
from trm_repro.masks.trust_region import max_divergence_mask

EPSILON, DELTA = 0.1, 0.02  # sqrt(delta / 2) = 0.1 too


def batch(*rows):
    """Pad rows of log-ratios with NaN, which no function may look at."""
    length = max(len(row) for row in rows)
    log_ratio = torch.tensor([list(row) + [math.nan] * (length - len(row)) for row in rows])
    response_mask = torch.tensor([[t < len(row) for t in range(length)] for row in rows])
    return log_ratio, response_mask


def loop_weighted(row, epsilon, delta):
    """W / Z by the formula, one token at a time."""
    length = len(row)
    weights = [min(1.0, (length - t) * epsilon, math.sqrt((length - t) * delta / 2)) for t in range(1, length + 1)]
    total = sum(weights)
    deviations = [abs(math.exp(value) - 1) for value in row]
    return sum(w * d for w, d in zip(weights, deviations, strict=True)) / total if total else 0.0


def test_the_weights_of_a_hand_case():
    # T = 5: (T - t) eps = 0.4, 0.3, 0.2, 0.1, 0; the roots 0.2, 0.173, 0.141, 0.1, 0 are never above.
    weights = future_weights(torch.ones(1, 5, dtype=torch.bool), epsilon=EPSILON, delta=DELTA)
    expected = torch.tensor([[0.1 * math.sqrt(4), 0.1 * math.sqrt(3), 0.1 * math.sqrt(2), 0.1, 0.0]])
    torch.testing.assert_close(weights, expected)


def test_weights_are_linear_near_the_end_then_a_root_then_one():
    # Crossover at T - t = delta / (2 eps^2) = 25, cap at T - t = 2 / delta = 2500.
    weights = future_weights(torch.ones(1, 4001, dtype=torch.bool), epsilon=0.004, delta=8e-4)[0].flip(0)
    assert weights[0] == 0
    torch.testing.assert_close(weights[1:26], 0.004 * torch.arange(1.0, 26.0))
    torch.testing.assert_close(weights[26:2500], (torch.arange(26.0, 2500.0) * 4e-4).sqrt())
    assert (weights[2501:] == 1).all()


def test_the_sum_of_the_weights_is_that_of_the_adaptive_bound():
    for length, epsilon, delta in ((1, 0.1, 0.02), (7, 0.05, 0.01), (600, 0.01, 1e-3)):
        weights = future_weights(torch.ones(1, length, dtype=torch.bool), epsilon=epsilon, delta=delta)
        bound = adaptive_hybrid_bound(Divergences.at_most(length, delta, epsilon=epsilon, mean_tv=epsilon / 2))
        assert 4 * epsilon / 2 * float(weights.sum()) == pytest.approx(float(bound), rel=1e-5)


def test_an_unknown_delta_leaves_the_linear_weights():
    weights = future_weights(torch.ones(1, 4, dtype=torch.bool), epsilon=0.5, delta=math.inf)
    assert weights.tolist() == [[1.0, 1.0, 0.5, 0.0]]


def test_the_weighted_mean_of_a_hand_case():
    # Ratios 1.5, 1, 3 with weights 0.1 sqrt(2), 0.1, 0: the last token does not count.
    log_ratio, mask = batch([math.log(1.5), 0.0, math.log(3.0)])
    value = weighted_ratio_deviation(log_ratio, mask, epsilon=EPSILON, delta=DELTA)
    assert float(value) == pytest.approx(0.5 * math.sqrt(2) / (math.sqrt(2) + 1), rel=1e-6)


def test_the_plain_mean_of_a_hand_case():
    log_ratio, mask = batch([math.log(1.5), 0.0, math.log(0.5)], [math.log(1.1)])
    torch.testing.assert_close(mean_ratio_deviation(log_ratio, mask), torch.tensor([1 / 3, 0.1]))


def test_both_averages_equal_a_loop_on_random_batches():
    generator = torch.Generator().manual_seed(0)
    for trial in range(60):
        lengths = torch.randint(1, 40, (8,), generator=generator).tolist()
        rows = [(torch.randn(n, generator=generator) * 0.3).tolist() for n in lengths]
        log_ratio, mask = batch(*rows)
        epsilon, delta = 0.02 * (trial % 50 + 1), 0.001 * 3.0 ** (trial % 7)
        weighted = weighted_ratio_deviation(log_ratio, mask, epsilon=epsilon, delta=delta)
        plain = mean_ratio_deviation(log_ratio, mask)
        for index, row in enumerate(rows):
            assert float(weighted[index]) == pytest.approx(loop_weighted(row, epsilon, delta), rel=1e-5, abs=1e-7)
            expected = sum(abs(math.exp(value) - 1) for value in row) / len(row)
            assert float(plain[index]) == pytest.approx(expected, rel=1e-5, abs=1e-7)
        kept = ln_trm_mask(log_ratio, mask, epsilon=epsilon, delta=delta, threshold=0.2)
        assert kept.tolist() == [loop_weighted(row, epsilon, delta) <= 0.2 for row in rows]


def test_a_constant_deviation_is_its_own_average_at_every_length():
    rows = [[math.log(1.05)] * length for length in (2, 3, 50, 400)]
    log_ratio, mask = batch(*rows)
    expected = torch.full((4,), 0.05)
    torch.testing.assert_close(weighted_ratio_deviation(log_ratio, mask, epsilon=EPSILON, delta=DELTA), expected)
    torch.testing.assert_close(mean_ratio_deviation(log_ratio, mask), expected)


def test_equal_policies_are_kept_at_any_threshold():
    log_ratio, mask = batch([0.0] * 9, [0.0])
    assert ln_trm_mask(log_ratio, mask, epsilon=EPSILON, delta=DELTA, threshold=1e-12).all()
    assert ser_mask(log_ratio, mask, 1e-12).all()


def test_a_value_at_the_threshold_is_kept():
    log_ratio, mask = batch([math.log(2.0)] * 3)
    assert ser_mask(log_ratio, mask, float(mean_ratio_deviation(log_ratio, mask))).all()
    assert not ser_mask(log_ratio, mask, float(mean_ratio_deviation(log_ratio, mask)) * 0.999).any()


def test_a_single_token_is_kept_by_ln_trm_when_its_ratio_is_finite():
    log_ratio, mask = batch([5.0], [-5.0], [math.inf], [-math.inf], [math.nan])
    kept = ln_trm_mask(log_ratio, mask, epsilon=EPSILON, delta=DELTA, threshold=0.01)
    assert kept.tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_that_is_not_finite_rejects_its_sequence_whatever_the_threshold(bad):
    for place in range(3):
        row = [0.0, 0.0, 0.0]
        row[place] = bad
        log_ratio, mask = batch(row, [0.0, 0.0, 0.0])
        assert ser_mask(log_ratio, mask, math.inf).tolist() == [False, True]
        kept = ln_trm_mask(log_ratio, mask, epsilon=EPSILON, delta=DELTA, threshold=math.inf)
        assert kept.tolist() == [False, True]


def test_padding_is_ignored_whatever_stands_there():
    log_ratio, mask = batch([0.1, 0.2], [0.1, 0.2, 0.3, 0.4])
    for garbage in (0.0, 1e30, math.inf, math.nan):
        filled = torch.where(mask, log_ratio, garbage)
        assert torch.equal(ratio_deviation(filled, mask), ratio_deviation(log_ratio, mask))
        weighted = weighted_ratio_deviation(filled, mask, epsilon=EPSILON, delta=DELTA)
        assert float(weighted[0]) == pytest.approx(loop_weighted([0.1, 0.2], EPSILON, DELTA), rel=1e-5)


def test_an_empty_response_is_kept():
    log_ratio, mask = torch.full((2, 3), math.nan), torch.zeros(2, 3, dtype=torch.bool)
    assert ln_trm_mask(log_ratio, mask, epsilon=EPSILON, delta=DELTA, threshold=0.1).all()
    assert ser_mask(log_ratio, mask, 0.1).all()
    assert ser_mask(log_ratio[:, :0], mask[:, :0], 0.1).all()
    assert ln_trm_mask(log_ratio[:, :0], mask[:, :0], epsilon=EPSILON, delta=DELTA, threshold=0.1).all()


def test_small_ratios_keep_their_digits():
    log_ratio, mask = batch([1e-9] * 4)
    assert float(mean_ratio_deviation(log_ratio, mask)) == pytest.approx(1e-9, rel=1e-6)


def test_longer_responses_are_not_rejected_more_where_the_max_criterion_rejects_all():
    # Independent tokens, one in a hundred with ratio 3: max rejects 1 - 0.99^T, the averages stay near 0.02.
    generator = torch.Generator().manual_seed(0)
    rejected = {"max": [], "ser": [], "ln_trm": []}
    for length in (100, 400, 1600):
        jumps = torch.rand(400, length, generator=generator) < 0.01
        log_ratio = jumps * math.log(3.0)
        mask = torch.ones_like(jumps)
        rejected["max"].append(float((~max_divergence_mask(0.5 * log_ratio**2, mask, 0.05)).float().mean()))
        rejected["ser"].append(float((~ser_mask(log_ratio, mask, 0.1)).float().mean()))
        kept = ln_trm_mask(log_ratio, mask, epsilon=0.02, delta=0.05, threshold=0.1)
        rejected["ln_trm"].append(float((~kept).float().mean()))
    assert rejected["max"] == pytest.approx([1 - 0.99**100, 1 - 0.99**400, 1.0], abs=0.08)
    assert max(rejected["ser"]) <= 0.05
    assert max(rejected["ln_trm"]) <= 0.05


def test_the_masks_carry_no_gradient():
    log_ratio = torch.zeros(2, 3, requires_grad=True)
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert not mean_ratio_deviation(log_ratio, mask).requires_grad
    assert not weighted_ratio_deviation(log_ratio, mask, epsilon=EPSILON, delta=DELTA).requires_grad


def test_arguments_out_of_range_are_refused():
    log_ratio, mask = batch([0.0, 0.0])
    for threshold in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="the threshold must be > 0"):
            ser_mask(log_ratio, mask, threshold)
        with pytest.raises(ValueError, match="the threshold must be > 0"):
            ln_trm_mask(log_ratio, mask, epsilon=EPSILON, delta=DELTA, threshold=threshold)
    for epsilon in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match="epsilon must be in"):
            ln_trm_mask(log_ratio, mask, epsilon=epsilon, delta=DELTA, threshold=0.1)
    for delta in (0.0, math.nan):
        with pytest.raises(ValueError, match="delta must be > 0"):
            ln_trm_mask(log_ratio, mask, epsilon=EPSILON, delta=delta, threshold=0.1)
    with pytest.raises(ValueError, match="differ in shape"):
        ser_mask(log_ratio, mask[:, :1], 0.1)
    with pytest.raises(ValueError, match="differ in shape"):
        ln_trm_mask(log_ratio, mask[:, :1], epsilon=EPSILON, delta=DELTA, threshold=0.1)


def test_a_response_mask_that_is_not_bool_is_refused():
    values, mask = torch.zeros(2, 3), torch.ones(2, 3)
    calls = [
        lambda: ser_mask(values, mask, 0.1),
        lambda: ln_trm_mask(values, mask, epsilon=0.1, delta=0.1, threshold=0.1),
        lambda: future_weights(mask, epsilon=0.1, delta=0.1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="response_mask must be bool"):
            call()


def test_without_any_token_every_sequence_is_kept():
    values, mask = torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)
    assert ser_mask(values, mask, 0.1).tolist() == [True, True]
    assert ln_trm_mask(values, mask, epsilon=0.1, delta=0.1, threshold=0.1).tolist() == [True, True]
