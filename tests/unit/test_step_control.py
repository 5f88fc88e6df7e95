"""Step control: a step is taken whole, shrunk by halves, or undone."""

import math

import pytest
import torch
from torch import nn

from tests.unit.test_module import fit, rollouts_of, small_config
from trm_repro.measurement import mean_divergence, measure
from trm_repro.step_control import bound_step, copy_parameters


class Point(nn.Module):
    """One weight whose divergence is its square; the step went from 0 to 8."""

    def __init__(self, value: float = 8.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value]))

    def divergence(self) -> float:
        return float(self.weight.detach() ** 2)


def bound(point: Point, *, limit: float, before: float = 0.0, halvings: int = 6):
    old = [torch.tensor([before])]
    return bound_step(point, old, point.divergence, divergence_before=before**2, limit=limit, max_halvings=halvings)


def test_a_step_within_the_limit_is_left_alone():
    point = Point()
    outcome = bound(point, limit=64.0)
    assert (outcome.scale, outcome.proposed, outcome.taken, point.weight.item()) == (1.0, 64.0, 64.0, 8.0)


@pytest.mark.parametrize(("limit", "scale", "weight"), [(63.9, 0.5, 4.0), (15.9, 0.25, 2.0), (1.0, 0.125, 1.0)])
def test_a_step_beyond_the_limit_is_halved_until_it_is_within(limit: float, scale: float, weight: float):
    point = Point()
    outcome = bound(point, limit=limit)
    assert (outcome.scale, point.weight.item()) == (scale, weight)
    assert (outcome.proposed, outcome.taken) == (64.0, weight**2)


def test_a_step_that_no_halving_mends_is_undone_to_the_bit():
    point = Point(7.3)
    outcome = bound(point, limit=1e-9, before=0.1, halvings=3)
    assert outcome.scale == 0.0
    assert point.weight.item() == torch.tensor(0.1).item()


def test_a_stale_batch_may_grow_by_a_twentieth():
    # Before: 4.0 ** 2 = 16, far above the limit; 16 * 1.05 = 16.8 allows 4.0988 and not 4.1.
    for step_end, scale in ((4.09, 1.0), (4.11, 0.5)):
        assert bound(Point(step_end), limit=0.01, before=4.0).scale == scale


def test_a_divergence_that_is_not_finite_is_too_far():
    point = Point(math.nan)
    assert bound(point, limit=1e9).scale == 0.0
    assert point.weight.item() == 0.0


def test_training_with_a_limit_leaves_no_update_further_than_it():
    config = small_config("trm_avg_0.001", "update.learning_rate=200", "update.step_limit=0.01", "mask.avg_threshold=9")
    rollouts = rollouts_of(config)
    free, _ = fit(small_config("trm_avg_0.001", "update.learning_rate=200", "mask.avg_threshold=9"), rollouts)
    module, _ = fit(config, rollouts)
    assert all(record.step is None for record in free.records)
    for record in module.records:
        assert record.step is not None
        allowed = max(0.01, 1.05 * float(record.measurement.kl[record.batch.response_mask].mean()))
        assert record.step.taken <= allowed
    assert module.records[0].step.proposed > 0.01
    assert module.records[0].step.scale < 1.0
    last = module.records[-1]
    after = measure(module.policy, last.batch, temperature=1.0, tokens_per_micro_batch=10_000)
    assert mean_divergence(after, last.batch.response_mask) == pytest.approx(last.step.taken, rel=1e-5)


def test_copies_do_not_follow_the_module():
    point = Point(1.0)
    copy = copy_parameters(point)
    with torch.no_grad():
        point.weight.mul_(5)
    assert copy[0].item() == 1.0
