"""What a run leaves in its folder, whatever moment it was killed at."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from pipelines.recorder import StepRecorder
from pipelines.run_directory import RunDirectory
from tests.unit.builders import make_rollout
from trm_repro.config import load_config
from trm_repro.datamodule import RolloutDataModule, shard_name
from trm_repro.module import TRMModule
from trm_repro.shards import write_rollouts


class NeverSamples:
    """A sampler that must not be asked."""


def test_a_run_killed_after_its_last_checkpoint_samples_nothing_more(tmp_path):
    config = load_config(overrides=["num_steps=3"])
    data = RolloutDataModule(config, NeverSamples(), run_name="r", shard_dir=tmp_path)
    data.trainer = SimpleNamespace(current_epoch=3)
    assert len(data.train_dataloader()) == 0
    assert list(tmp_path.iterdir()) == []


class Killed(BaseException):
    """Stands for a kill."""


def test_old_shards_are_gone_before_the_checkpoint_says_that_the_step_is_done(tmp_path, monkeypatch):
    config = load_config(
        overrides=[f"output.dir={tmp_path}", "output.keep_shards_every=10", "evaluation.every_steps=9"]
    )
    directory = RunDirectory(config)
    for step in (0, 4, 5):
        write_rollouts(directory.shards / shard_name(step), [replace(make_rollout(2), weight_version=0)], step)
    recorder = StepRecorder(config, directory, session=None)
    entry = SimpleNamespace(metrics={"rollout/num_tokens": 1.0})
    monkeypatch.setattr(recorder, "describe", lambda step, records: entry)
    monkeypatch.setattr(recorder, "timings", lambda *arguments: ({}, []))
    monkeypatch.setattr(recorder, "spool", SimpleNamespace(append=lambda entry: None))
    monkeypatch.setattr("pipelines.recorder.replace", lambda entry, **changes: entry)

    def killed(trainer):
        raise Killed

    monkeypatch.setattr(recorder, "save_checkpoint", killed)
    trainer = SimpleNamespace(current_epoch=5, datamodule=SimpleNamespace(take_snapshot=lambda version: None))
    module = TRMModule.__new__(TRMModule)
    module.__dict__["records"] = []
    with pytest.raises(Killed):
        recorder.on_train_epoch_end(trainer, module)
    assert sorted(file.name for file in directory.shards.iterdir()) == [shard_name(0), shard_name(5)]


def test_an_evaluation_finds_the_device_free_of_the_steps_gradients(tmp_path, monkeypatch):
    config = load_config(overrides=[f"output.dir={tmp_path}", "evaluation.every_steps=1", "num_steps=9"])
    recorder = StepRecorder(config, RunDirectory(config), session=None)
    monkeypatch.setattr(recorder, "describe", lambda step, records: None)
    monkeypatch.setattr(recorder, "save_checkpoint", lambda trainer: None)
    done = []
    monkeypatch.setattr(recorder, "evaluate", lambda trainer, version: done.append("evaluate"))
    trainer = SimpleNamespace(current_epoch=0, datamodule=SimpleNamespace(take_snapshot=lambda version: None))
    module = TRMModule.__new__(TRMModule)
    module.__dict__ |= {"records": [], "free_device": lambda: done.append("free")}
    recorder.on_train_epoch_end(trainer, module)
    assert done == ["free", "evaluate"]
