import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trm_repro.divergence import (
    MAX_LOG_RATIO,
    exact_kl_divergence,
    exact_total_variation,
    importance_ratio,
    k1_divergence,
    k2_divergence,
    k3_divergence,
    log_ratio,
    masked_mean,
    perplexity_gap,
)

LOG_2 = math.log(2.0)
DISTRIBUTIONS = st.lists(st.floats(-4, 4), min_size=6, max_size=6)


def log_softmax(logits):
    return torch.log_softmax(torch.tensor(logits, dtype=torch.float64), dim=-1)


def kl_by_hand(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def test_the_log_ratio_is_policy_over_rollout():
    policy, rollout = torch.tensor([[-1.0]]), torch.tensor([[-3.0]])
    assert log_ratio(policy, rollout).item() == 2.0
    assert importance_ratio(log_ratio(policy, rollout)).item() == pytest.approx(math.e**2)


def test_log_probs_of_different_shapes_are_refused_with_both_shapes():
    with pytest.raises(ValueError, match=r"policy \(2, 3\), rollout \(2, 1\)"):
        log_ratio(torch.zeros(2, 3), torch.zeros(2, 1))


def test_estimators_by_hand_at_a_ratio_of_two():
    ratio = torch.tensor([LOG_2], dtype=torch.float64)
    assert importance_ratio(ratio).item() == pytest.approx(2.0)
    assert k1_divergence(ratio).item() == pytest.approx(-LOG_2)
    assert k2_divergence(ratio).item() == pytest.approx(LOG_2**2 / 2)
    assert k3_divergence(ratio).item() == pytest.approx(2.0 - 1.0 - LOG_2)


def test_estimators_are_zero_where_the_policies_agree():
    same = torch.zeros(1)
    assert importance_ratio(same).item() == 1.0
    assert k1_divergence(same).item() == k2_divergence(same).item() == k3_divergence(same).item() == 0.0


def test_k2_of_a_log_ratio_of_0_316_is_a_divergence_of_0_05():
    assert k2_divergence(torch.tensor(math.sqrt(0.1))).item() == pytest.approx(0.05)


@settings(deadline=None)
@given(rollout=DISTRIBUTIONS, policy=DISTRIBUTIONS)
def test_the_means_of_k1_and_k3_under_the_rollout_policy_are_the_exact_kl(rollout, policy):
    log_p, log_q = log_softmax(rollout), log_softmax(policy)
    p, q = log_p.exp(), log_q.exp()
    exact = kl_by_hand(p.tolist(), q.tolist())
    assert (p * k1_divergence(log_q - log_p)).sum().item() == pytest.approx(exact, abs=1e-9)
    assert (p * k3_divergence(log_q - log_p)).sum().item() == pytest.approx(exact, abs=1e-9)
    assert exact_kl_divergence(log_p, log_q).item() == pytest.approx(exact, abs=1e-12)


def test_the_mean_of_k2_is_the_exact_kl_only_to_second_order():
    def relative_bias(distance):
        log_p = log_softmax([0.0, 1.0, 2.0])
        log_q = log_softmax([distance, 1.0 - distance, 2.0])
        exact = kl_by_hand(log_p.exp().tolist(), log_q.exp().tolist())
        return abs((log_p.exp() * k2_divergence(log_q - log_p)).sum().item() / exact - 1.0)

    assert relative_bias(1.0) > 0.05
    assert relative_bias(0.01) < 0.01


@settings(deadline=None)
@given(value=st.floats(-50, 50))
def test_k3_is_never_negative_and_k2_is_symmetric(value):
    ratio = torch.tensor([value])
    assert k3_divergence(ratio).item() >= 0.0
    assert k2_divergence(ratio).item() == k2_divergence(-ratio).item() >= 0.0


def test_k3_of_nearly_equal_policies_keeps_its_digits_in_float32():
    # r - 1 - log r = x^2/2 + x^3/6 + ... with x = 1e-3
    assert k3_divergence(torch.tensor(1e-3)).item() == pytest.approx(5.00167e-7, rel=1e-3)


@pytest.mark.parametrize("value", [-15.0, -19.0, 15.0, 19.0])
def test_k3_of_a_large_log_ratio_is_its_formula(value):
    exact = math.exp(value) - 1.0 - value
    assert k3_divergence(torch.tensor(value, dtype=torch.float64)).item() == pytest.approx(exact)


def test_k3_below_5e8_is_left_as_it_is_by_the_clamp():
    assert k3_divergence(torch.tensor(-30.0)).item() == pytest.approx(29.0)  # e^-30 - 1 + 30


def test_ratios_are_clamped_before_they_overflow():
    far = torch.tensor([-1000.0, 1000.0])
    expected = [math.exp(-MAX_LOG_RATIO), math.exp(MAX_LOG_RATIO)]
    assert importance_ratio(far).tolist() == pytest.approx(expected)
    assert k3_divergence(torch.tensor(1000.0)).isfinite()


def test_non_finite_log_ratios_stay_visible():
    for estimator in (importance_ratio, k1_divergence, k2_divergence, k3_divergence):
        assert estimator(torch.tensor(math.nan)).isnan()
    for estimator in (k1_divergence, k2_divergence):
        assert estimator(torch.tensor(-math.inf)).isinf()


@pytest.mark.parametrize("function", [importance_ratio, k1_divergence, k2_divergence, k3_divergence])
def test_gradients_agree_with_finite_differences(function):
    values = torch.tensor([-3.0, -0.4, 0.1, 2.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (values,))


def test_the_gradient_of_the_ratio_is_the_ratio_and_zero_beyond_the_clamp():
    values = torch.tensor([LOG_2, MAX_LOG_RATIO + 1.0, -MAX_LOG_RATIO - 1.0], requires_grad=True)
    importance_ratio(values).sum().backward()
    assert values.grad.tolist() == [pytest.approx(2.0), 0.0, 0.0]


def test_exact_divergences_by_hand():
    rollout, policy = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    assert exact_kl_divergence(rollout, policy).item() == pytest.approx(0.5 * math.log(4 / 3))
    assert exact_kl_divergence(policy, rollout).item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert exact_total_variation(rollout, policy).item() == pytest.approx(0.25)


def test_a_routing_flip_by_hand():
    rollout, policy = torch.tensor([0.9, 0.1]).log(), torch.tensor([0.001, 0.999]).log()
    expected = 0.9 * math.log(900.0) + 0.1 * math.log(0.1 / 0.999)
    assert exact_kl_divergence(rollout, policy).item() == pytest.approx(expected, rel=1e-5)
    assert exact_total_variation(rollout, policy).item() == pytest.approx(0.899)


def test_divergences_of_a_distribution_from_itself_are_zero():
    distribution = torch.log_softmax(torch.randn(50, 11, generator=torch.Generator().manual_seed(0)), dim=-1)
    assert exact_kl_divergence(distribution, distribution).tolist() == [0.0] * 50
    assert exact_total_variation(distribution, distribution).tolist() == [0.0] * 50


def test_rounding_never_makes_the_exact_kl_negative():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(500, 200, generator=generator)
    nearly = logits + 1e-6 * torch.randn(500, 200, generator=generator)
    rollout, policy = torch.log_softmax(logits, dim=-1), torch.log_softmax(nearly, dim=-1)
    unclamped = (rollout.exp() * (rollout - policy)).sum(dim=-1)
    assert bool((unclamped < 0).any())
    assert bool((exact_kl_divergence(rollout, policy) >= 0).all())


def test_a_token_the_rollout_policy_never_samples_adds_nothing():
    rollout = torch.tensor([0.5, 0.5, 0.0]).log()
    assert exact_kl_divergence(rollout, torch.tensor([0.25, 0.5, 0.25]).log()).item() == pytest.approx(0.5 * LOG_2)
    assert exact_kl_divergence(rollout, torch.tensor([0.5, 0.5, 0.0]).log()).item() == 0.0


def test_a_token_only_the_rollout_policy_samples_makes_the_kl_infinite():
    rollout, policy = torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0]).log()
    assert exact_kl_divergence(rollout, policy).item() == math.inf
    assert exact_total_variation(rollout, policy).item() == pytest.approx(0.5)


def test_nan_in_a_distribution_makes_its_kl_nan_and_no_other():
    rollout = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    policy = torch.tensor([[math.nan, -1.0], [math.log(0.25), math.log(0.75)]])
    assert exact_kl_divergence(rollout, policy).isnan().tolist() == [True, False]


@settings(deadline=None)
@given(rollout=DISTRIBUTIONS, policy=DISTRIBUTIONS)
def test_pinsker_holds_and_the_total_variation_is_symmetric(rollout, policy):
    log_p, log_q = log_softmax(rollout), log_softmax(policy)
    total_variation = exact_total_variation(log_p, log_q).item()
    assert total_variation <= math.sqrt(exact_kl_divergence(log_p, log_q).item() / 2) + 1e-7  # rounding, at equality
    assert total_variation == pytest.approx(exact_total_variation(log_q, log_p).item(), abs=1e-15)
    overlap = sum(min(a, b) for a, b in zip(log_p.exp().tolist(), log_q.exp().tolist(), strict=True))
    assert total_variation == pytest.approx(1.0 - overlap, abs=1e-12)


def test_the_gradient_of_the_exact_kl_in_the_logits_is_policy_minus_rollout():
    generator = torch.Generator().manual_seed(2)
    log_p = torch.log_softmax(torch.randn(5, 7, generator=generator, dtype=torch.float64), dim=-1)
    logits = torch.randn(5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    exact_kl_divergence(log_p, torch.log_softmax(logits, dim=-1)).sum().backward()
    assert torch.allclose(logits.grad, torch.softmax(logits.detach(), dim=-1) - log_p.exp(), atol=1e-12)


def test_the_masked_mean_by_hand():
    values = torch.tensor([[1.0, 2.0, 100.0], [4.0, 100.0, 100.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert masked_mean(values, mask, dim=-1).tolist() == [1.5, 4.0]
    assert masked_mean(values, mask).item() == pytest.approx(7 / 3)


def test_the_masked_mean_of_nothing_is_zero():
    mask = torch.tensor([[False, False], [True, False]])
    assert masked_mean(torch.ones(2, 2), mask, dim=-1).tolist() == [0.0, 1.0]
    assert masked_mean(torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.bool)).item() == 0.0


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_the_masked_mean_ignores_garbage_outside_the_mask(garbage):
    values, mask = torch.tensor([[3.0, garbage]]), torch.tensor([[True, False]])
    assert masked_mean(values, mask, dim=-1).tolist() == [3.0]
    assert masked_mean(values, mask).item() == 3.0


def test_the_gradient_of_the_masked_mean_is_shared_by_the_kept_values():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    masked_mean(values, torch.tensor([True, False, True])).backward()
    assert values.grad.tolist() == [0.5, 0.0, 0.5]


def test_the_perplexity_gap_averages_before_it_takes_the_absolute_value():
    policy = torch.tensor([[-1.0, -3.0, math.nan], [-2.0, -4.0, -6.0], [-1.0, math.nan, math.nan]])
    rollout = torch.tensor([[-2.0, -2.0, 0.0], [-1.0, -2.0, -3.0], [-1.5, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
    # The log-ratios are 1 and -1; -1, -2 and -3; and 0.5 alone.
    assert perplexity_gap(policy, rollout, mask).tolist() == [0.0, 2.0, 0.5]
