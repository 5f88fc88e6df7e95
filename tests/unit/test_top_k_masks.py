"""Masks from stored top log-probs: never against exact KL, undecided where they do not settle it."""

import dataclasses

import pytest
import torch

from tests.unit.builders import make_rollout, tiny_policy
from trm_repro.batch import RolloutBatch
from trm_repro.config import load_config
from trm_repro.config_sections import MaskConfig
from trm_repro.errors import InputError
from trm_repro.measurement import measure
from trm_repro.steps import certified_decision, gate

EXACT = MaskConfig(criterion="trm_max_avg", max_threshold=2.0, avg_threshold=1.0, avg_estimator="exact")


def batches(num_top: int) -> tuple[RolloutBatch, RolloutBatch]:
    """The same rollouts with whole distributions, and with their largest log-probs only."""
    full = [make_rollout(3 + seed % 5, seed=seed) for seed in range(40)]
    truncated = []
    for rollout in full:
        assert rollout.log_distribution is not None
        top = rollout.log_distribution.topk(num_top)
        truncated.append(
            dataclasses.replace(rollout, log_distribution=None, top_ids=top.indices.int(), top_logprobs=top.values)
        )
    return RolloutBatch.from_rollouts(full), RolloutBatch.from_rollouts(truncated)


def measured(batch: RolloutBatch, tokens: int = 64):
    return measure(tiny_policy(), batch, temperature=1.0, tokens_per_micro_batch=tokens)


@pytest.mark.parametrize("num_top", [2, 6, 12, 17])
def test_certified_masks_never_contradict_exact_ones(num_top: int):
    full, truncated = batches(num_top)
    exact = gate(measured(full), full.response_mask, EXACT)
    assert exact.any()
    assert not exact.all()
    decision = certified_decision(measured(truncated), truncated.response_mask, EXACT)
    assert decision is not None
    assert not (decision.accepted & ~exact).any()
    assert not (decision.rejected & exact).any()


def test_undecided_share_falls_to_nothing_as_more_is_stored():
    shares = []
    for num_top in (2, 6, 12, 17):
        _, truncated = batches(num_top)
        decision = certified_decision(measured(truncated), truncated.response_mask, EXACT)
        assert decision is not None
        shares.append(float(decision.undecided.float().mean()))
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.2
    assert shares[-1] == 0.0


def test_undecided_sequences_are_rejected_or_accepted_as_configured():
    _, truncated = batches(2)
    measurement = measured(truncated)
    decision = certified_decision(measurement, truncated.response_mask, EXACT)
    assert decision is not None
    assert torch.equal(gate(measurement, truncated.response_mask, EXACT), decision.accepted)
    lenient = dataclasses.replace(EXACT, undecided="accept")
    assert torch.equal(gate(measurement, truncated.response_mask, lenient), ~decision.rejected)


def test_interval_holds_exact_kl_token_by_token_in_any_micro_batching():
    full, truncated = batches(4)
    exact, interval = measured(full).kl, measured(truncated, tokens=10_000).kl_interval
    assert exact is not None
    assert interval is not None
    mask = full.response_mask
    assert (interval.low[mask] <= exact[mask] + 1e-6).all()
    assert (interval.high[mask] >= exact[mask] - 1e-6).all()
    assert (interval.high[mask] > interval.low[mask]).any()


def test_exact_average_needs_many_stored_log_probs():
    with pytest.raises(InputError, match=r"rollout\.num_top_logprobs must be >= 1024 for exact TRM-Avg"):
        load_config(overrides=["rollout.distribution=top_k", "mask.avg_estimator=exact"])
    assert load_config(overrides=["rollout.distribution=top_k", "mask.criterion=trm_max"])
