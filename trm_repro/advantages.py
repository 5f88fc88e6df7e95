"""Advantages from rewards."""

import torch
from torch import Tensor


def grpo_advantages(rewards: Tensor, groups: Tensor, epsilon: float = 1e-4) -> Tensor:
    """Standardise rewards within each group of responses to one prompt (GRPO).

    Computes (R - mean) / (population deviation + epsilon). A group in which all rewards are equal gets
    exactly 0. Every sequence given votes in the mean and the deviation; `kept_advantages` leaves rejected ones out.

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


def kept_advantages(rewards: Tensor, groups: Tensor, keep: Tensor, epsilon: float = 1e-4) -> Tensor:
    """Standardise rewards within what is kept of each group: rejected sequences do not vote in the baseline.

    The kept sequences of a group get the advantages of `grpo_advantages` as if the rejected ones had not been
    sampled. A group with fewer than two kept sequences has nothing to compare with: its advantages are exactly 0, as
    are those of a group whose kept rewards are all equal, although the whole group's may differ.

    Args:
        rewards: ``[B]`` float32 in [0, 1].
        groups: ``[B]`` int64; sequences with the same number share a prompt.
        keep: ``[B]`` bool.
        epsilon: > 0, in units of reward.

    Returns:
        ``[B]`` float32, dimensionless; 0 where rejected.

    Raises:
        ValueError: if the shapes differ.
    """
    if keep.shape != rewards.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and keep {tuple(keep.shape)} differ in shape")
    advantages = torch.zeros_like(rewards)
    advantages[keep] = grpo_advantages(rewards[keep], groups[keep], epsilon)
    return advantages
