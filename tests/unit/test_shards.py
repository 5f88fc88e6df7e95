import json
import math
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.unit.builders import make_rollout
from trm_repro import shards
from trm_repro.errors import InputError
from trm_repro.shards import (
    MASK_SCHEMA,
    ROLLOUT_SCHEMA,
    MaskRow,
    read_masks,
    read_rollouts,
    write_masks,
    write_rollouts,
)

SCALARS = ("group", "prompt_ids", "response_ids", "finished", "reward", "advantage", "weight_version")


def bits(tensor):
    if tensor is None:
        return None
    return tensor.dtype, tensor.shape, (tensor.view(torch.int32) if tensor.is_floating_point() else tensor).tolist()


def assert_same_to_the_bit(left, right):
    for name in SCALARS:
        assert getattr(left, name) == getattr(right, name), name
    for name in ("logprobs", "log_distribution", "experts"):
        assert bits(getattr(left, name)) == bits(getattr(right, name)), name


@pytest.mark.parametrize("experts", [True, False])
@pytest.mark.parametrize("distribution", [True, False])
def test_rollouts_come_back_to_the_bit(tmp_path, experts, distribution):
    rollouts = [
        replace(
            make_rollout(length, prompt_length=index + 1, seed=index, experts=experts),
            group=index // 2,
            finished=index % 2 == 0,
            reward=0.25 * index,
            advantage=-1.5 + index,
            weight_version=3,
        )
        for index, length in enumerate((3, 1, 7))
    ]
    if not distribution:
        rollouts = [replace(rollout, log_distribution=None) for rollout in rollouts]
    path = tmp_path / "folder" / "step.parquet"
    write_rollouts(path, rollouts, 12)
    read, step = read_rollouts(path)
    assert step == 12
    assert len(read) == 3
    for written, again in zip(rollouts, read, strict=True):
        assert_same_to_the_bit(written, again)


def test_infinities_nan_and_negative_zero_come_back_to_the_bit(tmp_path):
    rollout = make_rollout(3)
    rollout.log_distribution[0, 0] = -math.inf
    rollout.log_distribution[1, 2] = -0.0
    rollout = replace(rollout, logprobs=torch.tensor([-0.0, -math.inf, math.nan]))
    write_rollouts(tmp_path / "step.parquet", [rollout], 0)
    assert_same_to_the_bit(rollout, read_rollouts(tmp_path / "step.parquet")[0][0])


def test_masks_come_back_to_the_bit(tmp_path):
    rows = [
        MaskRow(
            update=1,
            sequence_id=5,
            kept=True,
            policy_logprobs=torch.tensor([-0.1, -math.inf]),
            token_kl=torch.tensor([1e-9, math.inf]),
        ),
        MaskRow(update=0, sequence_id=2, kept=False, policy_logprobs=torch.tensor([-3.5]), token_kl=None),
    ]
    write_masks(tmp_path / "masks.parquet", rows, 4)
    read = read_masks(tmp_path / "masks.parquet")
    for written, again in zip(rows, read, strict=True):
        assert (again.update, again.sequence_id, again.kept) == (written.update, written.sequence_id, written.kept)
        assert bits(again.policy_logprobs) == bits(written.policy_logprobs)
        assert bits(again.token_kl) == bits(written.token_kl)


def test_a_file_is_replaced_whole_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "step.parquet"
    write_rollouts(path, [make_rollout(2)] * 5, 0)
    write_rollouts(path, [make_rollout(2)], 1)
    rollouts, step = read_rollouts(path)
    assert (len(rollouts), step) == (1, 1)
    assert [file.name for file in tmp_path.iterdir()] == ["step.parquet"]


def refusal(read, path):
    with pytest.raises(InputError) as raised:
        read(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def write_raw(path, changes, *, metadata='{"kind": "rollouts", "shapes": {"log_distribution": [2]}}'):
    row = {
        "step": 0,
        "group": 0,
        "prompt_ids": [1],
        "response_ids": [2, 3],
        "rollout_logprobs": [-1.0, -1.0],
        "rollout_log_distribution": [-1.0] * 4,
        "rollout_experts": None,
        "finished": True,
        "reward": 0.0,
        "advantage": 0.0,
        "weight_version": 0,
    }
    schema = ROLLOUT_SCHEMA.with_metadata({"trm_repro": metadata})
    pq.write_table(pa.Table.from_pylist([row | changes], schema=schema), path)


def test_the_row_that_the_next_tests_damage_is_sound_by_itself(tmp_path):
    write_raw(tmp_path / "step.parquet", {})
    rollout = read_rollouts(tmp_path / "step.parquet")[0][0]
    assert rollout.log_distribution.tolist() == [[-1.0, -1.0], [-1.0, -1.0]]


@pytest.mark.parametrize(
    "changes",
    [
        {"response_ids": []},
        {"prompt_ids": []},
        {"response_ids": [2, 3, 4]},
        {"rollout_logprobs": [-1.0]},
        {"rollout_log_distribution": [-1.0] * 3},
        {"rollout_log_distribution": [-1.0] * 6},
        {"prompt_ids": None},
        {"response_ids": None},
        {"rollout_logprobs": None},
        {"reward": None},
        {"group": None},
        {"finished": None},
    ],
    ids=str,
)
def test_a_row_that_is_no_rollout_is_named(tmp_path, changes):
    write_raw(tmp_path / "step.parquet", changes)
    assert refusal(read_rollouts, tmp_path / "step.parquet").startswith("row 0 is no rollout (")


def test_a_shard_that_does_not_name_its_step_is_refused(tmp_path):
    write_raw(tmp_path / "step.parquet", {"step": None})
    refusal(read_rollouts, tmp_path / "step.parquet")


@pytest.mark.parametrize("metadata", ['{"kind": "rollouts"}', '{"kind": "rollouts", "shapes": 3}', "[]", "no json"])
def test_metadata_that_does_not_say_what_the_file_holds_is_refused(tmp_path, metadata):
    write_raw(tmp_path / "step.parquet", {}, metadata=metadata)
    refusal(read_rollouts, tmp_path / "step.parquet")


@pytest.mark.parametrize("read", [read_rollouts, read_masks])
def test_files_that_are_no_shard_are_named(tmp_path, read):
    path = tmp_path / "file.parquet"
    assert refusal(read, path).startswith("no such file; expected ")
    path.write_text("hello")
    assert refusal(read, path).startswith("is not a readable Parquet file (")
    path.write_bytes(b"")
    assert refusal(read, path).startswith("is not a readable Parquet file (")
    pq.write_table(pa.table({"a": [1]}), path)
    assert refusal(read, path).startswith("holds something else with columns ['a']; expected ")


def test_a_shard_cut_short_is_named(tmp_path):
    path = tmp_path / "step.parquet"
    write_rollouts(path, [make_rollout(4)] * 3, 0)
    path.write_bytes(path.read_bytes()[:-100])
    assert refusal(read_rollouts, path).startswith("is not a readable Parquet file (")


def test_rollouts_and_masks_are_not_taken_for_one_another(tmp_path):
    rollouts, masks = tmp_path / "rollouts.parquet", tmp_path / "masks.parquet"
    write_rollouts(rollouts, [make_rollout(2)], 0)
    write_masks(masks, [MaskRow(update=0, sequence_id=0, kept=True, policy_logprobs=torch.zeros(1), token_kl=None)], 0)
    assert refusal(read_masks, rollouts).startswith("holds rollouts with columns")
    assert refusal(read_rollouts, masks).startswith("holds masks with columns")


def test_a_shard_without_rollouts_is_refused(tmp_path):
    path = tmp_path / "step.parquet"
    metadata = {"trm_repro": json.dumps({"kind": "rollouts", "shapes": {}})}
    pq.write_table(ROLLOUT_SCHEMA.with_metadata(metadata).empty_table(), path)
    assert refusal(read_rollouts, path) == "has no rollouts"


def test_a_mask_without_log_probs_is_refused_by_the_name_of_its_file(tmp_path):
    path = tmp_path / "masks.parquet"
    row = {"step": 0, "update": 0, "sequence_id": 0, "kept": True, "policy_logprobs": None, "token_kl": None}
    schema = MASK_SCHEMA.with_metadata({"trm_repro": '{"kind": "masks"}'})
    pq.write_table(pa.Table.from_pylist([row], schema=schema), path)
    refusal(read_masks, path)


def test_a_distribution_that_only_some_rollouts_carry_is_refused_and_not_lost(tmp_path):
    rollouts = [replace(make_rollout(2), log_distribution=None), make_rollout(2)]
    with pytest.raises(ValueError, match="log_distribution"):
        write_rollouts(tmp_path / "step.parquet", rollouts, 0)


def test_rollouts_are_written_and_read_a_group_of_bounded_size_at_a_time(tmp_path: Path, monkeypatch):
    # 3, 6, 5, 2 and 9 tokens: 4 bytes of log-prob and 2 * 4 of hidden state each, in groups of at most 100 bytes.
    rollouts = [
        replace(make_rollout(length, seed=length), log_distribution=None, hidden=torch.randn(length, 4).bfloat16())
        for length in (3, 6, 5, 2, 9)
    ]
    monkeypatch.setattr(shards, "GROUP_BYTES", 100)
    path = tmp_path / "shard.parquet"
    write_rollouts(path, rollouts, 3)
    file = pq.ParquetFile(path)
    assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [1, 1, 2, 1]
    at_once = []
    read = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda *args: at_once.append(read(*args).num_rows) or read(*args)
    )
    monkeypatch.setattr(pq, "read_table", None)
    found, step = read_rollouts(path)
    assert (step, at_once) == (3, [1, 1, 2, 1])
    for one, other in zip(found, rollouts, strict=True):
        assert one.response_ids == other.response_ids
        assert torch.equal(one.hidden, other.hidden)
