"""A run's checkpoints on disk: rotation, atomic replacement, and falling back from a damaged one."""

import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from pipelines.checkpoint_files import METADATA, find_checkpoint, older, replace_checkpoint
from trm_repro.errors import InputError


def write_file(path: Path, num_steps: int) -> None:
    weights = {"policy.w": torch.full((2,), float(num_steps))}
    snapshots = [(num_steps, {"w": torch.zeros(2)})]
    torch.save({"epoch": num_steps - 1, "state_dict": weights, "RolloutDataModule": {"snapshots": snapshots}}, path)


def write_folder(path: Path, text: str) -> None:
    save({"w": torch.ones(3), "optimizer": {"lr": 0.1}}, checkpoint_id=path, no_dist=True)
    torch.save({"epoch": 1}, path / "meta.pt")
    (path / "name").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_checkpoints_are_kept_and_no_more(tmp_path: Path, keep: int):
    path, partial = tmp_path / "checkpoint.ckpt", tmp_path / "checkpoint.partial"
    for number in range(5):
        partial.write_text(str(number))
        replace_checkpoint(partial, path, keep=keep)
    assert [older(path, age).read_text() for age in range(keep)] == ["4", "3", "2"][:keep]
    assert len(names(tmp_path)) == keep


def test_folders_rotate_as_files_do(tmp_path: Path):
    path, partial = tmp_path / "checkpoint.ckpt", tmp_path / "checkpoint.partial"
    for text in ("first", "second", "third"):
        write_folder(partial, text)
        replace_checkpoint(partial, path, keep=2)
    assert (path / "name").read_text() == "third"
    assert (older(path, 1) / "name").read_text() == "second"
    assert names(tmp_path) == ["checkpoint.1.ckpt", "checkpoint.ckpt"]


@pytest.mark.parametrize("keep", [1, 2])
def test_at_every_moment_of_a_replacement_some_checkpoint_is_whole(
    tmp_path: Path, keep: int, monkeypatch: pytest.MonkeyPatch
):
    from pipelines import checkpoint_files

    class KilledError(Exception):
        pass

    real = checkpoint_files.os.replace
    for moment in range(3):
        folder = tmp_path / str(moment)
        folder.mkdir()
        path, partial = folder / "checkpoint.ckpt", folder / "checkpoint.partial"
        for number in (1, 2):
            write_file(partial, number)
            replace_checkpoint(partial, path, keep=keep)
        calls = 0

        def replace(source: Path, target: Path, moment: int = moment) -> None:
            nonlocal calls
            if calls == moment:
                raise KilledError
            calls += 1
            real(source, target)

        write_file(partial, 3)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_files.os, "replace", replace)
            if moment <= keep:
                with pytest.raises(KilledError):
                    replace_checkpoint(partial, path, keep=keep)
            else:
                replace_checkpoint(partial, path, keep=keep)
        found = find_checkpoint(path, is_sharded=False)
        assert found is not None
        assert torch.load(found, weights_only=True)["epoch"] in (1, 2)


@pytest.mark.parametrize("damage", ["cut", "empty", "text"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_with_a_warning(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "checkpoint.ckpt"
    write_file(older(path, 1), 6)
    write_file(path, 7)
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "text": b"not a checkpoint"}[damage])
    assert find_checkpoint(path, is_sharded=False) == older(path, 1)
    error = capsys.readouterr().err
    assert "checkpoint.ckpt: is damaged" in error
    assert "going on from the one before it" in error
    older(path, 1).write_bytes(b"")
    with pytest.raises(InputError, match=r"checkpoint\.ckpt: is damaged.*so are the 1 before it"):
        find_checkpoint(path, is_sharded=False)


def test_other_files_beside_the_checkpoints_are_left_alone(tmp_path: Path):
    path = tmp_path / "checkpoint.ckpt"
    write_file(path, 3)
    for name in ("checkpoint.1x.ckpt", "checkpoint.1.old.ckpt", "checkpoint.ckpt.bak"):
        (tmp_path / name).write_bytes(b"mine")
    assert find_checkpoint(path, is_sharded=False) == path


def test_a_folder_without_its_metadata_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "checkpoint.ckpt"
    write_folder(older(path, 1), "before")
    write_folder(path, "now")
    assert find_checkpoint(path, is_sharded=True) == path
    (path / METADATA).unlink()
    assert find_checkpoint(path, is_sharded=True) == older(path, 1)
    assert "going on from the one before it" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_begins(tmp_path: Path):
    assert find_checkpoint(tmp_path / "checkpoint.ckpt", is_sharded=False) is None


def test_a_checkpoint_of_the_other_kind_is_refused(tmp_path: Path):
    path = tmp_path / "checkpoint.ckpt"
    write_folder(path, "shards")
    with pytest.raises(InputError, match=r"set trainer.strategy=fsdp2, with any number of processes"):
        find_checkpoint(path, is_sharded=False)
    shutil.rmtree(path)
    write_file(path, 1)
    with pytest.raises(InputError, match=r"written by one process with trainer.strategy=auto"):
        find_checkpoint(path, is_sharded=True)
