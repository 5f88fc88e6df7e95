"""A sharded checkpoint is read by torch as pickles: what would execute something is refused before that."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from pipelines.checkpoint_files import find_checkpoint
from pipelines.sharded_checkpoints import METADATA, IndexUnpickler, check_shards
from trm_repro.errors import InputError

WEIGHTS = {"policy": {"w": torch.arange(6.0).view(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16)}}


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint.ckpt"
    save(WEIGHTS | {"optimizer": {"lr": 0.1, "betas": (0.9, 0.95)}}, checkpoint_id=path, no_dist=True)
    torch.save({"epoch": 1}, path / "meta.pt")
    save(WEIGHTS, checkpoint_id=path / "snapshots", no_dist=True)
    return path


def test_what_training_writes_passes(folder: Path):
    check_shards(folder)
    assert find_checkpoint(folder, is_sharded=True) == folder


@pytest.mark.parametrize("where", [".", "snapshots"])
def test_a_payload_in_the_index_is_refused_and_not_executed(folder: Path, tmp_path: Path, where: str):
    mark = tmp_path / "executed"
    (folder / where / METADATA).write_bytes(pickle.dumps(Payload(mark)))
    with pytest.raises(InputError, match=r"its index asks for posix\.mkdir, which no index needs"):
        find_checkpoint(folder, is_sharded=True)
    assert not mark.exists()
    pickle.loads((folder / where / METADATA).read_bytes())  # as torch would
    assert mark.exists()


def test_a_payload_in_a_value_that_is_no_tensor_is_refused_and_not_executed(folder: Path, tmp_path: Path):
    mark = tmp_path / "executed"
    save(WEIGHTS | {"optimizer": {"lr": Payload(mark)}}, checkpoint_id=folder, no_dist=True)
    with pytest.raises(InputError, match="Weights only load failed"):
        find_checkpoint(folder, is_sharded=True)
    assert not mark.exists()
    load({"optimizer": {"lr": 0.0}}, checkpoint_id=folder, no_dist=True)  # as training would
    assert mark.exists()


@pytest.mark.parametrize("name", ["os", "pickle.loads", "Metadata.__init__"])
def test_names_that_an_index_class_s_module_merely_imports_are_refused(name: str):
    with pytest.raises(pickle.UnpicklingError):
        IndexUnpickler(open(os.devnull, "rb")).find_class("torch.distributed.checkpoint.metadata", name)  # noqa: SIM115


def test_a_shard_that_is_cut_short_missing_or_elsewhere_is_damage(folder: Path):
    shard = folder / "__0_0.distcp"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(InputError, match=r"__0_0\.distcp is shorter than its index says"):
        find_checkpoint(folder, is_sharded=True)
    shard.unlink()
    with pytest.raises(InputError, match="No such file"):
        find_checkpoint(folder, is_sharded=True)
    with (folder / METADATA).open("rb") as file:
        index = IndexUnpickler(file).load()
    for place in index.storage_data.values():
        place.relative_path = "../elsewhere"
    (folder / METADATA).write_bytes(pickle.dumps(index))
    with pytest.raises(InputError, match="which no training writes"):
        find_checkpoint(folder, is_sharded=True)
