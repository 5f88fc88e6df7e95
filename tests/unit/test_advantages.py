import math
import statistics

import pytest
import torch

from trm_repro.advantages import grpo_advantages, kept_advantages


def test_one_right_of_four_by_hand():
    advantages = grpo_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.long), 1e-4)
    deviation = math.sqrt(0.25 * 0.75)
    expected = [0.75 / (deviation + 1e-4)] + [-0.25 / (deviation + 1e-4)] * 3
    assert advantages.tolist() == pytest.approx(expected, rel=1e-5)


def test_groups_are_standardised_one_by_one_in_any_order():
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.25, 0.0, 0.75, 1.0])
    groups = torch.tensor([4, 9, 4, 9, 4, 9, 4])
    epsilon = 0.1
    expected = []
    for reward, group in zip(rewards.tolist(), groups.tolist(), strict=True):
        members = [r for r, g in zip(rewards.tolist(), groups.tolist(), strict=True) if g == group]
        expected.append((reward - statistics.fmean(members)) / (statistics.pstdev(members) + epsilon))
    assert grpo_advantages(rewards, groups, epsilon).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_a_group_of_equal_rewards_gets_exactly_zero(reward):
    # The mean of seven times 0.1 is not 0.1 in float32, so that a centred reward alone would not be zero.
    rewards = torch.tensor([reward] * 7 + [0.0, 1.0])
    groups = torch.tensor([0] * 7 + [1, 1])
    advantages = grpo_advantages(rewards, groups)
    assert advantages[:7].tolist() == [0.0] * 7
    assert advantages[7:].tolist() == pytest.approx([-0.9998, 0.9998], abs=1e-5)  # 0.5 / (0.5 + 1e-4)


def test_a_group_of_one_gets_zero():
    assert grpo_advantages(torch.tensor([1.0, 0.3]), torch.tensor([0, 1])).tolist() == [0.0, 0.0]


def test_each_group_has_mean_zero_and_deviation_one_as_epsilon_vanishes():
    generator = torch.Generator().manual_seed(0)
    rewards, groups = torch.rand(48, generator=generator), torch.arange(48) % 6
    advantages = grpo_advantages(rewards, groups, 1e-9)
    for group in range(6):
        members = advantages[groups == group].double()
        assert members.mean().item() == pytest.approx(0.0, abs=1e-6)
        assert members.std(correction=0).item() == pytest.approx(1.0, abs=1e-5)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"rewards \(2,\) and groups \(3,\) differ"):
        grpo_advantages(torch.zeros(2), torch.zeros(3, dtype=torch.long))


def test_rejected_sequences_do_not_vote_by_hand():
    # Group 0 keeps rewards 1, 0, 0: mean 1/3, deviation sqrt(2)/3, so (2/3) / (sqrt(2)/3) = sqrt(2) and -1/sqrt(2).
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    keep = torch.tensor([True, True, False, True, True, True])
    advantages = kept_advantages(rewards, groups, keep, 1e-9)
    half = 2**-0.5
    assert advantages.tolist() == pytest.approx([2 * half, -half, 0.0, -half, 1.0, -1.0], abs=1e-6)
    keep_all = torch.ones(6, dtype=torch.bool)
    assert torch.equal(kept_advantages(rewards, groups, keep_all), grpo_advantages(rewards, groups))


def test_a_group_with_fewer_than_two_kept_or_equal_kept_rewards_gets_exactly_zero():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    keep = torch.tensor([True, False, False, False, True, False])
    assert kept_advantages(rewards, groups, keep).tolist() == [0.0] * 6
    agree = kept_advantages(
        torch.tensor([1.0, 1.0, 0.0]), torch.zeros(3, dtype=torch.long), torch.tensor([True, True, False])
    )
    assert agree.tolist() == [0.0] * 3


def test_the_mask_must_have_a_decision_for_each_reward():
    with pytest.raises(ValueError, match=r"rewards .* and keep .* differ"):
        kept_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.long), torch.ones(3, dtype=torch.bool))
