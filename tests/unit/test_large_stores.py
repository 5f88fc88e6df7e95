import shutil
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch

from pipelines.audit.own_shards import find_dumps
from tests.unit.builders import make_rollout
from trm_repro.heads import remove_unused_heads, write_head
from trm_repro.shards import MaskRow, write_masks, write_rollouts

NUM_STEPS = 300


@pytest.fixture
def store(tmp_path):
    shards, masks = tmp_path / "shards", tmp_path / "masks"
    write_rollouts(shards / "step_00000.parquet", [make_rollout(2)], 0)
    row = MaskRow(update=0, sequence_id=0, kept=True, policy_logprobs=-torch.ones(2), token_kl=None)
    write_masks(masks / "step_00000.parquet", [row], 0)
    for folder in (shards, masks):
        for step in range(1, NUM_STEPS):
            shutil.copy(folder / "step_00000.parquet", folder / f"step_{step:05d}.parquet")
    return tmp_path


@pytest.fixture
def opened(monkeypatch):
    """Files whose schema or rows were read, in order."""
    files = []
    for name in ("read_schema", "read_table"):
        original = getattr(pq, name)

        def counted(path, *arguments, original=original, **named):
            files.append(path)
            return original(path, *arguments, **named)

        monkeypatch.setattr(pq, name, counted)
    return files


def test_a_store_is_listed_by_opening_one_file_of_each_folder(store, opened):
    assert find_dumps([str(store)]) == [store / "shards" / f"step_{step:05d}.parquet" for step in range(NUM_STEPS)]
    assert len(opened) == 2


def test_a_damaged_first_shard_does_not_hide_the_others_and_is_listed_itself(store, opened):
    (store / "shards" / "step_00000.parquet").write_bytes(b"PAR1")
    assert len(find_dumps([str(store)])) == NUM_STEPS
    assert len(opened) == 3


def test_masks_beside_their_shards_are_left_out(store):
    for step in range(3):
        masks = store / "masks" / f"step_{step:05d}.parquet"
        shutil.copy(masks, store / "shards" / f"step_{step:05d}.masks.parquet")
        shutil.copy(masks, store / "shards" / f"masks_step_{step:05d}.parquet")
    assert len(find_dumps([str(store / "shards")])) == NUM_STEPS


def test_which_heads_are_needed_is_read_from_a_shard_once(store, opened):
    shards = store / "shards"
    for version in (0, 1):
        write_head(shards, version, torch.zeros(3, 2))
    remove_unused_heads(shards)
    assert len(opened) == NUM_STEPS
    assert len(list(shards.glob("head_*"))) == 2  # the newer one may be of the next shard
    write_rollouts(shards / "step_00301.parquet", [replace(make_rollout(2), weight_version=2)], 301)
    remove_unused_heads(shards)
    assert len(opened) == NUM_STEPS + 1
    assert [file.name for file in shards.glob("head_*")] == ["head_00000.safetensors"]
