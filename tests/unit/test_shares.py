"""Ranks: who computes which sequence, and measurements put together again."""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.unit.builders import make_batch, make_rollout, tiny_policy
from trm_repro import ranks
from trm_repro.batch import RolloutBatch
from trm_repro.config import load_config
from trm_repro.datamodule import RolloutDataModule
from trm_repro.measurement import measure
from trm_repro.shares import Share, divide, measure_shared, merge_measurements, move

LENGTHS = [(2, 3), (4, 9), (1, 5), (3, 7), (2, 8), (5, 1)]
OPTIONS = {"temperature": 1.0, "tokens_per_micro_batch": 64}


def rows(batch, wanted: list[int]):
    return batch.select(torch.tensor([index in wanted for index in range(batch.num_sequences)]))


def test_sequences_are_dealt_out_by_length_and_every_one_once():
    batch = make_batch(LENGTHS)  # 5, 13, 6, 10, 10 and 6 tokens
    first, second = rows(batch, [0, 1, 2]), rows(batch, [3, 4, 5])
    # first: 13 to rank 0, 6 and 5 to rank 1 and back; second: 10, 10 and 6 likewise
    assert divide([first, second], 2) == [[1, 3], [0, 2, 4, 5]]
    assert sorted(itertools.chain(*divide([first, second], 3))) == [0, 1, 2, 3, 4, 5]


def test_measurements_of_the_parts_are_the_measurement_of_the_whole():
    policy, batch = tiny_policy("moe"), make_batch(LENGTHS, experts=True)
    whole = measure(policy, batch, **OPTIONS)
    parts = [rows(batch, [0, 2, 5]), rows(batch, [1, 3, 4])]
    pieces = [(part.sequence_ids, measure(policy, part, **OPTIONS)) for part in parts]
    merged = merge_measurements(batch.sequence_ids, batch.response_mask.shape[1], pieces)
    for name in ("policy_logprobs", "log_ratio", "entropy", "kl", "total_variation"):
        torch.testing.assert_close(getattr(merged, name), getattr(whole, name), atol=1e-6, rtol=0)
    assert torch.equal(merged.is_flipped, whole.is_flipped)
    assert merged.kl_interval is None


def test_a_share_of_everything_measures_as_one_process_does():
    policy, batch = tiny_policy(), make_batch(LENGTHS)
    alone = measure_shared(policy, batch, Share(), **OPTIONS)
    shared = measure_shared(policy, batch, Share(batch), **OPTIONS)
    torch.testing.assert_close(shared.kl, alone.kl, atol=1e-6, rtol=0)


def test_a_part_has_the_advantages_of_the_batch_and_the_distributions_of_the_share():
    batch = make_batch(LENGTHS)
    share = Share(rows(batch, [1, 2, 4]))
    bare = replace(batch, rollout_log_distribution=None, advantages=10.0 + torch.arange(6.0))
    part = share.part(rows(bare, [0, 2, 4]))
    assert part.sequence_ids.tolist() == [2, 4]
    assert part.advantages.tolist() == [12.0, 14.0]
    assert part.rollout_log_distribution.shape[0] == 5 + 8  # response tokens
    assert share.part(rows(bare, [0, 3])) is None


def test_a_share_in_the_order_of_lengths_measures_the_same():
    policy = tiny_policy()
    rollouts = [make_rollout(length, prompt_length=2, seed=length) for length in (9, 3, 7, 1)]
    batch = replace(RolloutBatch.from_rollouts(rollouts), advantages=torch.arange(4.0))
    order = [3, 1, 2, 0]
    by_length = RolloutBatch.from_rollouts([rollouts[index] for index in order])
    share = Share(replace(by_length, sequence_ids=torch.tensor(order)))
    assert share.part(batch).advantages.tolist() == [3.0, 1.0, 2.0, 0.0]
    shared = measure_shared(policy, batch, share, **OPTIONS)
    torch.testing.assert_close(shared.kl, measure(policy, batch, **OPTIONS).kl, atol=1e-6, rtol=0)


def test_the_data_module_lays_a_ranks_sequences_in_the_order_of_their_lengths(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranks, "num_ranks", lambda: 2)
    monkeypatch.setattr(ranks, "rank", lambda: 0)
    monkeypatch.setattr(ranks, "broadcast", lambda item: item)
    monkeypatch.setattr(ranks, "deal", lambda make: make(0))
    rollouts = [make_rollout(length, seed=length) for length in (9, 3, 7, 1, 5, 8, 2, 4)]
    config = load_config([], ["rollout.num_prompts=2", "rollout.group_size=4", "update.num_updates_per_rollout=2"])
    data = RolloutDataModule(config, None, run_name="t", stored=rollouts)
    batches = data._divided(rollouts, 0)
    assert len(batches) == 2
    lengths = data.share.sequences.response_lengths.tolist()
    assert len(lengths) == 4
    assert lengths == sorted(lengths)
    assert lengths == [len(rollouts[index].response_ids) for index in data.share.sequences.sequence_ids.tolist()]


def test_the_filler_is_the_shortest_sequence():
    share = Share(make_batch(LENGTHS))
    assert share.filler().sequence_ids.tolist() == [0]  # 2 + 3 tokens


def test_a_share_without_a_sequence_of_the_batch_makes_no_pass_of_its_own():
    batch = make_batch(LENGTHS)
    parts, num_fillers = Share(rows(batch, [0])).passes(rows(batch, [1]), 64, packed=False)
    assert parts == []
    assert num_fillers == 0  # the busiest rank is this one, alone


def test_moving_a_measurement_keeps_what_is_missing_missing():
    measurement = measure(tiny_policy(), make_batch(LENGTHS), **OPTIONS)
    moved = move(measurement, lambda tensor: tensor.double())
    assert moved.kl.dtype == torch.float64
    assert moved.is_flipped is None
