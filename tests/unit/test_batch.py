from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.builders import VOCAB_SIZE, make_batch, make_rollout
from trm_repro.batch import Rollout, RolloutBatch

LENGTHS = [(2, 3), (4, 1), (1, 5), (3, 2)]  # (prompt, response)


def assert_same(left, right):
    for field in fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        assert (a is None) == (b is None), field.name
        if a is not None:
            assert torch.equal(a, b), field.name


def test_prompt_and_response_stand_side_by_side_and_padding_is_zero():
    rollouts = [
        Rollout(group=0, prompt_ids=(7, 8), response_ids=(9,), logprobs=torch.tensor([-1.0])),
        Rollout(group=3, prompt_ids=(5,), response_ids=(6, 4, 3), logprobs=torch.tensor([-0.5, -0.25, -2.0])),
    ]
    batch = RolloutBatch.from_rollouts(rollouts)
    assert batch.input_ids.tolist() == [[7, 8, 9, 0], [5, 6, 4, 3]]
    assert batch.response_ids.tolist() == [[9, 0, 0], [6, 4, 3]]
    assert batch.response_mask.tolist() == [[True, False, False], [True, True, True]]
    assert batch.rollout_logprobs.tolist() == [[-1.0, 0.0, 0.0], [-0.5, -0.25, -2.0]]
    assert batch.prompt_lengths.tolist() == [2, 1]
    assert batch.response_lengths.tolist() == [1, 3]
    assert batch.groups.tolist() == [0, 3]
    assert batch.sequence_ids.tolist() == [0, 1]


def test_the_example_of_the_docstring_has_the_shapes_it_states():
    batch = make_batch([(5, 9), (7, 15)])
    assert batch.input_ids.shape == (2, 22)
    assert batch.response_mask.shape == (2, 15)
    assert batch.response_mask.sum(dim=-1).tolist() == [9, 15]
    assert batch.rollout_log_distribution.shape == (24, VOCAB_SIZE)


def test_flat_distributions_follow_the_order_of_the_response_mask():
    batch = make_batch(LENGTHS)
    chosen = batch.rollout_log_distribution.gather(-1, batch.response_ids[batch.response_mask][:, None])[:, 0]
    assert torch.equal(batch.dense(chosen), batch.rollout_logprobs)


def test_dense_then_mask_gives_the_flat_values_back():
    batch = make_batch(LENGTHS)
    flat = torch.arange(1.0, 12.0)  # 3 + 1 + 5 + 2 tokens
    dense = batch.dense(flat, fill=-1.0)
    assert torch.equal(dense[batch.response_mask], flat)
    assert dense[~batch.response_mask].tolist() == [-1.0] * 9  # 4 x 5 cells, 11 of them tokens


def test_dense_passes_the_gradient_to_each_token():
    batch = make_batch([(1, 2), (1, 1)])
    flat = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (batch.dense(flat) * torch.tensor([[10.0, 20.0], [30.0, 99.0]])).sum().backward()
    assert flat.grad.tolist() == [10.0, 20.0, 30.0]


@pytest.mark.parametrize("keep", [[0], [1, 3], [0, 1, 2, 3], [3]])
def test_selecting_equals_batching_only_the_selected_rollouts(keep):
    rollouts = [make_rollout(r, prompt_length=p, seed=i, experts=True) for i, (p, r) in enumerate(LENGTHS)]
    mask = torch.zeros(4, dtype=torch.bool)
    mask[keep] = True
    selected = RolloutBatch.from_rollouts(rollouts).select(mask)
    assert selected.sequence_ids.tolist() == keep
    again = RolloutBatch.from_rollouts([rollouts[index] for index in keep])
    assert_same(selected, replace(again, sequence_ids=selected.sequence_ids))


def test_selecting_no_sequence_is_refused():
    with pytest.raises(ValueError, match="no sequence"):
        make_batch(LENGTHS).select(torch.zeros(4, dtype=torch.bool))


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=8),
    max_tokens=st.integers(1, 40),
)
def test_micro_batches_hold_every_sequence_once_in_order_within_the_budget(lengths, max_tokens):
    batch = make_batch(lengths)
    parts = list(batch.split(max_tokens))
    assert [index for part in parts for index in part.sequence_ids.tolist()] == list(range(len(lengths)))
    for part in parts:
        assert part.input_ids.numel() <= max_tokens or part.num_sequences == 1
    assert torch.equal(torch.cat([part.rollout_log_distribution for part in parts]), batch.rollout_log_distribution)
    responses = [ids for part in parts for ids in part.response_ids[part.response_mask].tolist()]
    assert responses == batch.response_ids[batch.response_mask].tolist()


def test_a_micro_batch_is_filled_as_far_as_the_budget_goes():
    batch = make_batch([(2, 2), (2, 3), (2, 2), (1, 1)])  # 4, 5, 4 and 2 tokens
    assert [part.num_sequences for part in batch.split(10)] == [2, 2]  # 2 x 5, then 2 x 4
    assert [part.num_sequences for part in batch.split(15)] == [3, 1]  # 3 x 5
    assert [part.num_sequences for part in batch.split(3)] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_ids": ()}, "got 2 and 0 tokens"),
        ({"prompt_ids": ()}, "got 0 and 3 tokens"),
        ({"logprobs": torch.zeros(2)}, "logprobs has 2 rows, the response has 3"),
        ({"log_distribution": torch.zeros(4, VOCAB_SIZE)}, "log_distribution has 4 rows"),
        ({"experts": torch.zeros(1, 2, 2)}, "experts has 1 rows"),
    ],
)
def test_a_rollout_whose_lengths_disagree_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(make_rollout(3), **change)


def test_a_batch_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one rollout"):
        RolloutBatch.from_rollouts([])


@pytest.mark.parametrize("name", ["log_distribution", "experts"])
def test_an_optional_tensor_must_be_there_for_all_rollouts_or_none(name):
    rollouts = [make_rollout(experts=True), replace(make_rollout(experts=True), **{name: None})]
    with pytest.raises(ValueError, match=f"{name} is present in 1 of 2"):
        RolloutBatch.from_rollouts(rollouts)


def test_moving_to_a_device_moves_every_tensor():
    moved = make_batch(LENGTHS, experts=True).to("meta")
    tensors = [value for field in fields(moved) if (value := getattr(moved, field.name)) is not None]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
