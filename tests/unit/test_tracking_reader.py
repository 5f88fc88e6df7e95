"""An experiment read back from a real MLflow on SQLite."""

import dataclasses
import shlex
from pathlib import Path

import pytest

from evaluation.experiment import find_warnings
from pipelines.cli import main
from pipelines.tracking import Tracker, flatten
from pipelines.tracking_reader import read_artifact, read_experiment, rerun_command
from tests.experiments import ARMS, store_experiment
from trm_repro.config import RunConfig, load_config
from trm_repro.errors import InputError


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return store_experiment(tmp_path_factory.mktemp("made") / "runs", seeds=(1,), num_steps=2)


def test_runs_points_and_settings_come_back_as_they_were_stored(stored: RunConfig):
    experiment, points = read_experiment(stored, ["divergence/kl_max", "score/greedy", "no/such"])
    assert {(run.arm, run.seed, run.status, run.num_steps) for run in experiment.runs} == {
        (arm, 1, "FINISHED", 2) for arm in ARMS
    }
    assert experiment.planned == [(arm, 1) for arm in ARMS]
    assert len(points) == 3 * 2 * 2
    kl = [point for point in points if point["metric"] == "divergence/kl_max" and point["arm"] == "ppo_clip"]
    assert [(point["seed"], point["step"]) for point in kl] == [(1, 1), (1, 2)]
    assert kl[1]["value"] == pytest.approx(20 * 1e-3 * 10**2 * 1.02)
    assert experiment.parent.settings["num_steps"] == "2"
    assert "loss.name" in experiment.arm_settings
    assert "update.learning_rate" not in experiment.arm_settings
    assert not [text for text in find_warnings(experiment) if "commit" not in text]


def test_an_experiment_is_found_by_its_name_where_the_output_folder_has_no_note(stored: RunConfig, tmp_path: Path):
    uri = f"sqlite:///{stored.output.dir}/mlflow.db"
    elsewhere = load_config(overrides=[f"output.dir={tmp_path}", f"tracking.uri={uri}", "name=made"])
    here, _ = read_experiment(stored, [])
    there, _ = read_experiment(elsewhere, [])
    assert there.parent.run_id == here.parent.run_id
    assert len(there.runs) == 3
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="no experiment named 'other'"):
        read_experiment(dataclasses.replace(elsewhere, name="other"), [])


def test_an_artifact_that_is_not_there_is_none(stored: RunConfig):
    experiment, _ = read_experiment(stored, [])
    parent = experiment.parent.run_id
    content = read_artifact(stored, parent, "setup/config.yaml")
    assert content is not None
    assert b"name: made" in content
    assert read_artifact(stored, parent, "report/table_2.json") is None


def test_the_command_to_run_again_gives_the_same_configuration():
    words = [
        "name=other",
        "num_steps=7",
        "reproduce.seeds=[3,4]",
        "reproduce.arms=[ppo_clip]",
        "evaluation.length_operands=[]",
        "rollout.prefix_caching=true",
        "update.learning_rate=1e-6",
    ]
    config = load_config(overrides=words)
    settings = {key: str(value) for key, value in flatten(dataclasses.asdict(config))}
    command = shlex.split(rerun_command(settings))
    assert command[:2] == ["trm-repro", "reproduce"]
    assert len(command) == 2 + len(words)
    assert load_config(overrides=command[2:]) == config


def test_a_report_without_a_store_is_refused_in_one_line_and_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["report", f"output.dir={tmp_path / 'none'}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "mlflow.db: no such file; run trm-repro reproduce first" in error
    assert not (tmp_path / "none").exists()


def test_a_server_that_is_not_there_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    address = "http://user:secret@127.0.0.1:9"
    assert main(["report", f"output.dir={tmp_path}", f"tracking.uri={address}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "MLflow cannot be read" in error
    assert "secret" not in error


def test_a_store_without_runs_is_named(stored: RunConfig, tmp_path: Path):
    uri = f"sqlite:///{stored.output.dir}/mlflow.db"
    words = [f"output.dir={tmp_path}", f"tracking.uri={uri}", "tracking.experiment=empty"]
    config = load_config(overrides=words)
    with pytest.raises(InputError, match="has no experiment 'empty'"):
        read_experiment(config, [])
    tracker = Tracker(config)
    with pytest.raises(InputError, match="no experiment named"):
        read_experiment(config, [])
    tracker.open_parent(config)
    with pytest.raises(InputError, match="no runs under parent run"):
        read_experiment(config, [])
