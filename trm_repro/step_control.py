"""Step control: what an accepted update may do to the policy, checked after the optimizer step (ours, not the paper's).

A mask decides what an update learns from; nothing in Algorithm 1 limits how far the update then goes. This measures the
new policy against the rollout policy on the sequences that were learned from, and shrinks the step while it is too far:
the backtracking line search of TRPO (Schulman et al., arXiv 1502.05477, appendix C) with the rollout policy as centre.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

GROWTH = 1.05
"""A batch that starts above the limit may grow by this factor: else a stale batch could never be learned from."""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What became of a step.

    Attributes:
        scale: share of the proposed step that was taken: 1, 1/2, 1/4, ...; 0 where it was undone.
        proposed: mean divergence after the whole step, nats per token.
        taken: the same after the scaled step.
    """

    scale: float
    proposed: float
    taken: float


def copy_parameters(module: nn.Module) -> list[Tensor]:
    """Copy a module's parameters, in the order of ``parameters()``."""
    return [weight.detach().clone() for weight in module.parameters()]


@torch.no_grad()
def bound_step(
    module: nn.Module,
    before: Sequence[Tensor],
    divergence: Callable[[], float],
    *,
    divergence_before: float,
    limit: float,
    max_halvings: int,
) -> StepOutcome:
    """Shrink the step just taken until the divergence is within the limit, or undo it.

    Step j tries ``before + 2^-j (after - before)``. It is taken when ``divergence() <= max(limit, GROWTH *
    divergence_before)``; a divergence that is not finite is too large. Optimizer states stay as the whole step left
    them.

    Args:
        module: holds the weights after the step.
        before: its parameters before the step, from `copy_parameters`.
        divergence: measures the module as it is now on the sequences learned from: mean per token, nats.
        divergence_before: what ``divergence`` gave before the step.
        limit: largest mean divergence that a step may leave, nats per token.
        max_halvings: halvings tried before the step is undone.

    Returns:
        What became of the step; the module holds the result.
    """
    allowed = max(limit, GROWTH * divergence_before)
    proposed = taken = divergence()
    if taken <= allowed:
        return StepOutcome(scale=1.0, proposed=proposed, taken=taken)
    steps = [weight.detach() - old for weight, old in zip(module.parameters(), before, strict=True)]
    scale = 1.0
    for _ in range(max_halvings):
        scale /= 2
        _set_parameters(module, before, steps, scale)
        taken = divergence()
        if taken <= allowed:
            return StepOutcome(scale=scale, proposed=proposed, taken=taken)
    _set_parameters(module, before, steps, 0.0)
    return StepOutcome(scale=0.0, proposed=proposed, taken=divergence_before)


def _set_parameters(module: nn.Module, before: Sequence[Tensor], steps: Sequence[Tensor], scale: float) -> None:
    for weight, old, step in zip(module.parameters(), before, steps, strict=True):
        weight.copy_(old if scale == 0.0 else old + scale * step)
