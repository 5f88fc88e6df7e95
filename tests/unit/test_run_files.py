"""What a run leaves in its folder, whatever moment it was killed at."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from pipelines.recorder import StepRecorder
from pipelines.run_directory import RunDirectory
from pipelines.spool import read_spool
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
    monkeypatch.setattr(recorder, "evaluate", lambda trainer, version, is_last: done.append("evaluate"))
    trainer = SimpleNamespace(current_epoch=0, datamodule=SimpleNamespace(take_snapshot=lambda version: None))
    module = TRMModule.__new__(TRMModule)
    module.__dict__ |= {"records": [], "free_device": lambda: done.append("free")}
    recorder.on_train_epoch_end(trainer, module)
    assert done == ["free", "evaluate"]


def test_the_evaluation_after_the_last_step_answers_more_problems_and_says_so_beside_the_curve(tmp_path, monkeypatch):
    settings = ["evaluation.num_problems=2", "evaluation.num_sampled_problems=1", "evaluation.num_samples=2"]
    config = load_config(overrides=[f"output.dir={tmp_path}", *settings, "evaluation.num_final_problems=4"])
    engine = SimpleNamespace(sync=lambda weights, run, version: None, engine=None)
    recorder = StepRecorder(config, RunDirectory(config), SimpleNamespace(engine=engine, tokenizer=None))

    def answers(engine, tokenizer, task, questions, *, num_samples, settings, seed=0):
        # Of four problems the third alone is solved.
        return [
            SimpleNamespace(problem_id=problem.id, reward=float(problem.id == "2"))
            for problem, _ in questions
            for _ in range(num_samples)
        ]

    monkeypatch.setattr("pipelines.recorder.score_problems", answers)
    monkeypatch.setattr("pipelines.recorder.lead", lambda engine, work: work())
    monkeypatch.setattr("pipelines.recorder.encode_prompt", lambda prompt, tokenizer, limit: (1,))
    problems = [SimpleNamespace(id=str(index), prompt="") for index in range(4)]
    data = SimpleNamespace(
        sampler=SimpleNamespace(held_out=problems, held_out_task=None), snapshots=[(7, {})], ahead=None, run_name="r"
    )
    trainer = SimpleNamespace(datamodule=data)
    recorder.evaluate(trainer, version=7)
    data.snapshots = [(8, {})]
    recorder.evaluate(trainer, version=8, is_last=True)
    during, last = read_spool(recorder.directory.spool_file)
    assert during.metrics == {"score/greedy": 0.0, "score/avg_at_k": 0.0}
    assert last.metrics == during.metrics | {"score/final_greedy": 0.25, "score/final_avg_at_k": 0.25}
    assert (len(during.problem_scores["greedy"]), len(during.problem_scores["avg_at_k"])) == (2, 1)
    assert last.problem_scores == {"greedy": [0.0, 0.0, 1.0, 0.0], "avg_at_k": [0.0, 0.0, 1.0, 0.0]}
