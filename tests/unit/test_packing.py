"""Packed sequences: the same numbers as padded ones, and no room for padding."""

import pytest
import torch

from tests.unit.builders import make_batch, tiny_policy
from trm_repro.packing import pack

LENGTHS = [(3, 9), (5, 4), (2, 17), (7, 1)]  # prompt and response tokens


def test_a_packed_batch_lays_sequences_one_after_another():
    batch = make_batch([(2, 2), (1, 3)])
    packed = pack(batch)
    first, second = batch.input_ids[0, :4].tolist(), batch.input_ids[1, :4].tolist()
    assert packed.input_ids.tolist() == [first + second]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert packed.predicting.tolist() == [1, 2, 4, 5, 6]  # one before each response token


@pytest.mark.parametrize("architecture", ["dense", "moe"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packing_changes_neither_scores_nor_routing_nor_gradients(architecture: str, attention: str):
    policy = tiny_policy(architecture)
    policy.model.set_attn_implementation(attention)
    batch = make_batch(LENGTHS, experts=architecture == "moe")
    results = []
    for policy.is_packing in (False, True):
        policy.zero_grad()
        policy(batch).logprobs.square().sum().backward()
        gradients = [weight.grad.clone() for weight in policy.parameters() if weight.grad is not None]
        with torch.no_grad():
            results.append((policy(batch, measure=True), gradients))
    (padded, padded_gradients), (packed, packed_gradients) = results
    torch.testing.assert_close(packed.logprobs, padded.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(packed.kl, padded.kl, atol=1e-5, rtol=0)
    torch.testing.assert_close(packed.entropy, padded.entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(packed_gradients, padded_gradients, atol=1e-4, rtol=1e-4)
    if architecture == "moe":
        assert torch.equal(packed.experts, padded.experts)


def test_no_sequence_of_a_pack_sees_another():
    policy = tiny_policy()
    policy.is_packing = True
    batch = make_batch(LENGTHS)
    together = policy(batch, measure=True).logprobs
    alone = [policy(batch.select(torch.arange(4) == index), measure=True).logprobs for index in range(4)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=0)


def test_a_budget_of_packed_tokens_counts_no_padding_and_none_of_what_was_rejected():
    batch = make_batch([(1, 9), (1, 1), (1, 1), (1, 5)])  # 10, 2, 2 and 6 tokens
    assert batch.spans(14, packed=True) == [(0, 3), (3, 4)]
    assert batch.spans(14) == [(0, 1), (1, 3), (3, 4)]  # padded, the first two would take 20 tokens
    kept = batch.select(torch.tensor([True, False, True, False]))
    assert pack(kept).input_ids.shape == (1, 12)


def test_a_sequence_above_the_budget_has_a_pass_of_its_own():
    batch = make_batch([(1, 1), (1, 9), (1, 1)])
    assert batch.spans(4, packed=True) == [(0, 1), (1, 2), (2, 3)]
    assert batch.spans(4) == [(0, 1), (1, 2), (2, 3)]
