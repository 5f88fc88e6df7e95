import math

import pytest
import torch

from trm_repro.certified import KLInterval, TopLogprobs, certified_kl_interval, certified_mask
from trm_repro.divergence import exact_kl_divergence
from trm_repro.masks.trust_region import sequence_mask


def stored(logprobs, num_top, sampled_ids=None):
    """Keep of ``[N, V]`` log-probs what an engine stores; the likeliest token is sampled unless said."""
    values, ids = logprobs.topk(num_top, dim=-1)
    sampled_ids = ids[:, 0] if sampled_ids is None else sampled_ids
    sampled_logprobs = logprobs.gather(-1, sampled_ids[:, None])[:, 0]
    return TopLogprobs(ids=ids, logprobs=values, sampled_ids=sampled_ids, sampled_logprobs=sampled_logprobs)


def kl(rollout, policy):
    """Exact KL in float64 from ``[N, V]`` logits."""
    return exact_kl_divergence(rollout.double().log_softmax(dim=-1), policy.double().log_softmax(dim=-1))


# The decision


def dense(low, high):
    return KLInterval(torch.tensor(low), torch.tensor(high)), torch.ones(len(low), len(low[0]), dtype=torch.bool)


def test_the_max_criterion_decides_a_hand_case():
    interval, mask = dense(
        [[0.01, 0.02], [0.01, 0.04], [0.01, 0.06]],
        [[0.02, 0.05], [0.02, 0.08], [0.02, 0.09]],
    )
    decision = certified_mask(interval, mask, max_threshold=0.05)
    assert decision.accepted.tolist() == [True, False, False]
    assert decision.undecided.tolist() == [False, True, False]
    assert decision.rejected.tolist() == [False, False, True]


def test_the_mean_criterion_decides_a_hand_case():
    interval, mask = dense(
        [[0.0, 0.01], [0.0, 0.02], [0.03, 0.04]],
        [[0.01, 0.03], [0.02, 0.06], [0.06, 0.06]],
    )
    decision = certified_mask(interval, mask, avg_threshold=0.03)
    assert decision.accepted.tolist() == [True, False, False]
    assert decision.undecided.tolist() == [False, True, False]
    assert decision.rejected.tolist() == [False, False, True]


def test_with_both_criteria_one_failure_rejects_and_both_must_be_sure_to_accept():
    interval, mask = dense(
        [[0.0, 0.02], [0.0, 0.06], [0.0, 0.02], [0.02, 0.02]],
        [[0.0, 0.03], [0.0, 0.07], [0.0, 0.07], [0.03, 0.06]],
    )
    decision = certified_mask(interval, mask, max_threshold=0.05, avg_threshold=0.04)
    assert decision.accepted.tolist() == [True, False, False, False]
    assert decision.rejected.tolist() == [False, True, False, False]
    assert decision.undecided.tolist() == [False, False, True, True]


def test_a_decision_never_contradicts_exact_kl_and_is_one_of_three():
    generator = torch.Generator().manual_seed(0)
    num_decided = 0
    for trial in range(60):
        lengths = torch.randint(0, 12, (16,), generator=generator)
        mask = torch.arange(12) < lengths[:, None]
        logits = torch.randn(16, 12, 30, generator=generator) * 4
        noise = 0.02 * 2.0 ** (torch.rand(16, 1, 1, generator=generator) * 7)
        policy = logits + noise * torch.randn(16, 12, 30, generator=generator)
        truth = kl(logits, policy)
        entry = stored(logits.flatten(0, 1).log_softmax(dim=-1), 3 + trial % 20)
        interval = certified_kl_interval(entry, policy.flatten(0, 1).log_softmax(dim=-1))
        interval = KLInterval(*(end.view(16, 12) for end in interval))
        for thresholds in (
            {"max_threshold": 0.05},
            {"avg_threshold": 0.02},
            {"max_threshold": 0.1, "avg_threshold": 0.01},
        ):
            decision = certified_mask(interval, mask, **thresholds)
            assert (decision.accepted.int() + decision.rejected.int() + decision.undecided.int() == 1).all()
            exact = sequence_mask(truth, mask, **thresholds)
            assert exact[decision.accepted].all()
            assert not exact[decision.rejected].any()
            num_decided += int((decision.accepted | decision.rejected)[lengths > 0].sum())
    assert num_decided > 800


def test_an_exact_interval_decides_as_the_exact_mask_does():
    generator = torch.Generator().manual_seed(0)
    divergence = torch.rand(200, 6, generator=generator) * 0.1
    mask = torch.arange(6) < torch.randint(0, 7, (200, 1), generator=generator)
    for thresholds in ({"max_threshold": 0.07}, {"avg_threshold": 0.05}):
        decision = certified_mask(KLInterval(divergence, divergence), mask, **thresholds)
        assert not decision.undecided.any()
        assert torch.equal(decision.accepted, sequence_mask(divergence, mask, **thresholds))


def test_an_empty_response_is_accepted_and_padding_is_ignored():
    garbage = torch.tensor([[math.nan, math.inf], [0.01, math.nan]])
    mask = torch.tensor([[False, False], [True, False]])
    for thresholds in ({"max_threshold": 0.05}, {"avg_threshold": 0.05}):
        assert certified_mask(KLInterval(garbage, garbage), mask, **thresholds).accepted.all()


@pytest.mark.parametrize("thresholds", [{"max_threshold": 0.05}, {"avg_threshold": 0.05}, {"max_threshold": math.inf}])
def test_a_nan_at_either_end_rejects(thresholds):
    interval, mask = dense([[math.nan, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, math.nan]])
    decision = certified_mask(interval, mask, **thresholds)
    assert decision.rejected.all()
    assert not decision.accepted.any()


def test_an_infinite_low_end_rejects_and_an_infinite_high_end_leaves_undecided():
    interval, mask = dense([[math.inf, 0.0], [0.0, 0.0]], [[math.inf, 0.0], [math.inf, 0.0]])
    for thresholds in ({"max_threshold": 0.05}, {"avg_threshold": 0.05}):
        decision = certified_mask(interval, mask, **thresholds)
        assert decision.rejected.tolist() == [True, False]
        assert decision.undecided.tolist() == [False, True]


def test_thresholds_and_shapes_of_a_decision_are_checked():
    interval, mask = dense([[0.0]], [[0.1]])
    with pytest.raises(ValueError, match="give max_threshold"):
        certified_mask(interval, mask)
    for threshold in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="must be > 0"):
            certified_mask(interval, mask, max_threshold=threshold)
        with pytest.raises(ValueError, match="must be > 0"):
            certified_mask(interval, mask, avg_threshold=threshold)
    with pytest.raises(ValueError, match="differ in shape"):
        certified_mask(interval, mask.expand(2, 1), max_threshold=0.1)
