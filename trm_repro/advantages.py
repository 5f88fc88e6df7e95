"""Advantages from rewards."""

import torch
from torch import Tensor


def grpo_advantages(rewards: Tensor, groups: Tensor, epsilon: float = 1e-4) -> Tensor:
    """Standardise rewards within each group of responses to one prompt (GRPO).

    Computes (R - mean) / (population deviation + epsilon). A group in which all rewards are equal gets
    exactly 0. Rejected sequences are counted in the mean and the deviation; the paper leaves that open.

    Args:
        rewards: ``[B]`` float32 in [0, 1].
        groups: ``[B]`` int64; sequences with the same number share a prompt.
        epsilon: > 0, in units of reward.

    Returns:
        ``[B]`` float32, dimensionless.

    Raises:
        ValueError: if the shapes differ.
    """
    if rewards.shape != groups.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} differ in shape")
    advantages = torch.zeros_like(rewards)
    for group in groups.unique():
        members = groups == group  # [B]
        centred = rewards[members] - rewards[members].mean()
        if bool((rewards[members] != rewards[members][0]).any()):
            advantages[members] = centred / (rewards[members].std(correction=0) + epsilon)
    return advantages
