import math
from typing import get_args

import pytest
import torch

from trm_repro.config_sections import LossName
from trm_repro.divergence import MAX_LOG_RATIO
from trm_repro.losses import (
    OBJECTIVES,
    ClipRange,
    cispo,
    gspo,
    is_clipped,
    ppo_clip,
    reduce_objective,
    token_importance_sampling,
    token_tis,
)

CLIP = ClipRange(low=0.2, high=0.3)


NEEDS_NO_DERIVATIVE = {"token_tis", "cispo"}  # their gradient is a weight that is held fixed


def value_of(objective, log_ratio, advantages, clip=CLIP):
    """The objective where every token is a response token."""
    return objective(log_ratio, torch.ones_like(log_ratio, dtype=torch.bool), advantages, clip)


def log_of(*ratios):
    return torch.tensor(ratios, dtype=torch.float64).log()[:, None]  # one sequence per ratio, one token each


# (ratio, advantage, objective, gradient in the log-ratio, whether the clip removed the gradient)
PPO_CASES = [
    (1.5, 2.0, 1.3 * 2.0, 0.0, True),  # above the range, advantage positive: clipped
    (1.5, -2.0, 1.5 * -2.0, 1.5 * -2.0, False),  # above, negative: not clipped
    (900.0, -1.0, -900.0, -900.0, False),  # a routing flip with negative advantage: not clipped
    (900.0, 1.0, 1.3, 0.0, True),
    (0.5, 2.0, 0.5 * 2.0, 0.5 * 2.0, False),  # below, positive: not clipped
    (0.5, -2.0, 0.8 * -2.0, 0.0, True),  # below, negative: clipped
    (1.1, 2.0, 1.1 * 2.0, 1.1 * 2.0, False),  # inside: the plain objective
    (0.9, -2.0, 0.9 * -2.0, 0.9 * -2.0, False),
    (1.0, 3.0, 3.0, 3.0, False),
    (1.5, 0.0, 0.0, 0.0, False),  # no advantage: nothing to clip
    (0.5, 0.0, 0.0, 0.0, False),
]


@pytest.mark.parametrize(("ratio", "advantage", "objective", "gradient", "clipped"), PPO_CASES)
def test_the_ppo_clip_by_hand(ratio, advantage, objective, gradient, clipped):
    log_ratio = log_of(ratio).requires_grad_()
    advantages = torch.tensor([advantage], dtype=torch.float64)
    value = value_of(ppo_clip, log_ratio, advantages)
    value.sum().backward()
    assert value.item() == pytest.approx(objective)
    assert log_ratio.grad.item() == pytest.approx(gradient)
    assert is_clipped(log_ratio, advantages, CLIP).item() is clipped


def test_tokens_marked_as_clipped_are_those_without_gradient():
    generator = torch.Generator().manual_seed(0)
    log_ratio = torch.randn(30, 20, generator=generator, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(30, generator=generator, dtype=torch.float64)
    value_of(ppo_clip, log_ratio, advantages).sum().backward()
    marked = is_clipped(log_ratio, advantages, CLIP)
    assert 0 < int(marked.sum()) < marked.numel()
    assert torch.equal(marked, log_ratio.grad == 0.0)


def test_an_endless_clip_range_gives_importance_sampling():
    generator = torch.Generator().manual_seed(1)
    log_ratio, advantages = torch.randn(5, 4, generator=generator), torch.randn(5, generator=generator)
    endless = ClipRange(low=1.0, high=math.inf)
    assert torch.equal(
        value_of(ppo_clip, log_ratio, advantages, endless),
        value_of(token_importance_sampling, log_ratio, advantages, endless),
    )


def test_the_clipped_objective_is_never_above_the_unclipped_one():
    generator = torch.Generator().manual_seed(2)
    log_ratio, advantages = torch.randn(50, 20, generator=generator), torch.randn(50, generator=generator)
    clipped = value_of(ppo_clip, log_ratio, advantages)
    plain = value_of(token_importance_sampling, log_ratio, advantages)
    assert bool((clipped <= plain).all())
    assert bool((clipped < plain).any())


def test_importance_sampling_is_ratio_times_advantage_and_so_is_its_gradient():
    log_ratio = torch.tensor([[math.log(2.0), math.log(0.5)], [0.0, math.log(3.0)]], requires_grad=True)
    value = value_of(token_importance_sampling, log_ratio, torch.tensor([0.5, -1.0]))
    value.sum().backward()
    expected = [[pytest.approx(1.0), pytest.approx(0.25)], [pytest.approx(-1.0), pytest.approx(-3.0)]]
    assert value.tolist() == expected
    assert log_ratio.grad.tolist() == expected  # d r A / d log r = r A


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_where_the_policies_agree_every_objective_and_its_gradient_is_the_advantage(name):
    log_ratio = torch.zeros(3, 2, requires_grad=True)
    advantages = torch.tensor([1.5, 0.0, -2.0])
    value = value_of(OBJECTIVES[name], log_ratio, advantages)
    value.sum().backward()
    assert value.tolist() == [[1.5, 1.5], [0.0, 0.0], [-2.0, -2.0]]
    assert log_ratio.grad.tolist() == value.tolist()


@pytest.mark.parametrize("name", sorted(set(OBJECTIVES) - NEEDS_NO_DERIVATIVE))
def test_gradients_agree_with_finite_differences(name):
    log_ratio = torch.tensor([[-2.0, -0.3, 0.05], [0.1, 0.5, 2.0]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -0.5], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda value: value_of(OBJECTIVES[name], value, advantages), (log_ratio,))


@pytest.mark.parametrize("name", sorted(set(OBJECTIVES) - NEEDS_NO_DERIVATIVE))
def test_an_overflowing_ratio_gives_a_finite_objective_without_gradient(name):
    log_ratio = torch.tensor([[500.0]], requires_grad=True)
    value = value_of(OBJECTIVES[name], log_ratio, torch.tensor([-1.0]))
    value.sum().backward()
    assert value.item() == pytest.approx(-math.exp(MAX_LOG_RATIO))
    assert log_ratio.grad.item() == 0.0


def test_the_reduction_sums_tokens_and_divides_by_all_sequences_and_the_constant():
    objective = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert reduce_objective(objective, mask, denominator=2).item() == pytest.approx(-(1 + 2 + 8) / 2)
    loss = reduce_objective(objective, mask, denominator=5, length_normalizer=10.0)
    assert loss.item() == pytest.approx(-11 / 50)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_the_reduction_ignores_garbage_on_padding(garbage):
    objective, mask = torch.tensor([[1.0, garbage]]), torch.tensor([[True, False]])
    assert reduce_objective(objective, mask, denominator=1).item() == -1.0


def test_the_gradient_of_the_reduction_is_equal_for_every_response_token():
    objective = torch.zeros(2, 2, requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    reduce_objective(objective, mask, denominator=4, length_normalizer=5.0).backward()
    assert objective.grad.tolist() == [[pytest.approx(-0.05)] * 2, [pytest.approx(-0.05), 0.0]]


def test_every_loss_that_can_be_configured_has_an_objective():
    assert set(OBJECTIVES) == set(get_args(LossName))


def test_capped_weights_keep_the_gradient_of_the_tokens_they_cap():
    log_ratio = torch.tensor([[math.log(0.5), 0.0, math.log(4.0)]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([-2.0], dtype=torch.float64)
    value_of(token_tis, log_ratio, advantages, ClipRange(low=0.2, high=1.0)).sum().backward()
    assert log_ratio.grad.tolist() == [[pytest.approx(-1.0), pytest.approx(-2.0), pytest.approx(-4.0)]]  # min(rho, 2) A
    log_ratio.grad = None
    value_of(cispo, log_ratio, advantages, ClipRange(low=0.2, high=0.28)).sum().backward()
    assert log_ratio.grad.tolist() == [[pytest.approx(-1.6), pytest.approx(-2.0), pytest.approx(-2.56)]]


def test_gspo_clips_the_geometric_mean_of_a_sequences_ratios_and_ignores_padding():
    log_ratio = torch.tensor([[math.log(2.0), math.log(0.5), math.nan], [0.3, 0.5, 0.1]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    value = gspo(log_ratio, mask, torch.tensor([1.5, 2.0]), CLIP)
    # s = sqrt(2 x 0.5) = 1; s = exp(0.3) = 1.35 > 1.3: clipped
    assert value[0, :2].tolist() == [pytest.approx(1.5)] * 2
    assert value[1].tolist() == [pytest.approx(2.6)] * 3
    torch.where(mask, value, 0.0).sum().backward()
    assert log_ratio.grad[0, :2].tolist() == [pytest.approx(1.5)] * 2  # s A for each token
    assert log_ratio.grad[1].tolist() == [0.0] * 3
