"""Tracking with a real MLflow on SQLite: nothing lost, nothing twice, damaged files named or mended."""

import dataclasses
import json
from pathlib import Path

import pytest

from pipelines.run_directory import RunDirectory
from pipelines.spool import MetricsSpool, SpoolEntry
from pipelines.tracking import (
    ExperimentReplay,
    Tracker,
    read_histories,
    read_state,
    select_runs,
)
from pipelines.tracking import tracker as tracker_module
from pipelines.tracking.replay import batches
from tests.tracked import STAGES, evaluate_entry, experiment_config, fill, run_directory, train_entry
from trm_repro.config import RunConfig, derive_seed, load_config
from trm_repro.errors import InputError

ARMS, SEEDS = ("ppo_clip", "token_is"), (1, 2)


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a new database: making its tables takes MLflow seconds."""
    folder = tmp_path_factory.mktemp("store")
    Tracker(load_config(overrides=[f"output.dir={folder}", "tracking.experiment=made elsewhere"]))
    return (folder / "mlflow.db").read_bytes()


@pytest.fixture
def config(tmp_path: Path, empty_store: bytes) -> RunConfig:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mlflow.db").write_bytes(empty_store)
    return load_config(overrides=[f"output.dir={tmp_path / 'runs'}"])


def prepared(config: RunConfig, arm: str = "ppo_clip") -> RunDirectory:
    directory = RunDirectory(dataclasses.replace(config, arm=arm))
    directory.prepare()
    return directory


def entry(step: int, value: float) -> SpoolEntry:
    return SpoolEntry(step=step, kind="train", time=1000.0 + step, metrics={"score/greedy": value})


def history(tracker: Tracker, run_id: str, metric: str = "score/greedy") -> list[tuple[int, float, int]]:
    points = tracker.client.get_metric_history(run_id, metric)
    return [(point.step, point.value, point.timestamp) for point in points]


def test_points_are_replayed_once_with_the_time_they_were_measured(config: RunConfig):
    directory = prepared(config)
    spool = MetricsSpool(directory.spool_file)
    tracker = Tracker(config)
    run_id = tracker.open_run(directory)
    spool.append(entry(1, 0.25))
    assert tracker.replay(directory) == 1
    assert tracker.replay(directory) == 0
    spool.append(entry(2, 0.5))
    later = Tracker(config)  # another process
    assert later.open_run(directory) == run_id
    assert later.replay(directory) == 1
    assert history(later, run_id) == [(1, 0.25, 1001000), (2, 0.5, 1002000)]


def test_points_whose_answer_was_lost_are_not_sent_again(config: RunConfig, monkeypatch: pytest.MonkeyPatch):
    directory = prepared(config)
    spool = MetricsSpool(directory.spool_file)
    for step in (1, 2, 3):
        spool.append(entry(step, step / 4))
    tracker = Tracker(config)
    run_id = tracker.open_run(directory)
    send = tracker_module.send

    def lost_answer(client, run_id, metrics):
        send(client, run_id, metrics[:2])  # the server got two points, and then the cable was cut
        raise OSError("connection lost")

    monkeypatch.setattr(tracker_module, "send", lost_answer)
    with pytest.raises(OSError, match="connection lost"):
        tracker.replay(directory)
    state = read_state(directory.path / "mlflow.json")
    assert (state.replayed, state.sending) == (0, 3)
    sent = []
    monkeypatch.setattr(tracker_module, "send", lambda client, run, metrics: sent.extend(metrics) or [])
    Tracker(config).replay(directory)
    assert [metric.step for metric in sent] == [3]
    state = read_state(directory.path / "mlflow.json")
    assert (state.replayed, state.sending) == (3, 3)
    assert [step for step, _, _ in history(tracker, run_id)] == [1, 2]


def test_a_run_whose_making_was_not_answered_is_found_and_not_made_twice(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
):
    directory = prepared(config)
    tracker = Tracker(config)
    made = []
    create = tracker.client.create_run

    def lost_answer(*args, **settings):
        made.append(create(*args, **settings).info.run_id)
        raise OSError("connection lost")

    monkeypatch.setattr(tracker.client, "create_run", lost_answer)
    with pytest.raises(OSError, match="connection lost"):
        tracker.open_run(directory)
    assert [Tracker(config).open_run(directory)] == made


def test_a_refused_metric_costs_no_other_metric(config: RunConfig):
    directory = prepared(config)
    metrics = {f"family/quantity_{number}": float(number) for number in range(5)} | {"no @ allowed": 1.0, "z/last": 2.0}
    MetricsSpool(directory.spool_file).append(SpoolEntry(step=1, kind="train", time=5.0, metrics=metrics))
    tracker = Tracker(config)
    run_id = tracker.open_run(directory)
    tracker.replay(directory)
    assert set(tracker.client.get_run(run_id).data.metrics) == set(metrics) - {"no @ allowed"}
    assert read_state(directory.path / "mlflow.json").rejected == ["no @ allowed"]
    assert tracker.replay(directory) == 0


def test_a_run_deleted_in_mlflow_is_made_anew_with_every_point(config: RunConfig):
    replay = ExperimentReplay(config, is_experiment=False)
    directory = prepared(config)
    spool = MetricsSpool(directory.spool_file)
    spool.append(entry(1, 0.25))
    replay.expect(directory)
    replay.work()
    first = read_state(directory.path / "mlflow.json").run_id
    replay.tracker.client.delete_run(first)
    spool.append(entry(2, 0.5))
    replay.work()
    second = read_state(directory.path / "mlflow.json").run_id
    assert second != first
    assert [step for step, _, _ in history(replay.tracker, second)] == [1, 2]


def test_a_damaged_run_note_makes_a_new_run_with_every_point(config: RunConfig):
    directory = prepared(config)
    tracker = Tracker(config)
    parent = tracker.open_parent(config)
    run_ids = [tracker.open_run(directory, parent)]
    MetricsSpool(directory.spool_file).append(entry(1, 0.25))
    tracker.replay(directory)
    for content in (b"", b"[]", b"{}", b"\x00" * 8, b'{"uri": 1, "run_id": 2, "replayed": "x"}'):
        (directory.path / "mlflow.json").write_bytes(content)
        assert read_state(directory.path / "mlflow.json") is None, content
    run_ids.append(tracker.open_run(directory, parent))
    assert tracker.replay(directory) == 1
    assert history(tracker, run_ids[-1]) == [(1, 0.25, 1001000)]
    assert len(set(run_ids)) == 2
    found = tracker.client.search_runs([tracker.experiment_id], f"tags.experiment_run = '{parent}'")
    assert [run.info.run_id for run in found] == run_ids[1:]  # the forgotten run is no longer the experiment's


def test_batches_hold_whole_entries_in_order_and_no_more_than_mlflow_takes():
    entries = [train_entry(step, num_metrics=300) for step in range(1, 8)]
    grouped = list(batches(entries))
    assert [done for done, _ in grouped] == [3, 6, 7]
    assert [len(metrics) for _, metrics in grouped] == [900, 900, 300]
    assert [metric.step for _, metrics in grouped for metric in metrics[::300]] == [1, 2, 3, 4, 5, 6, 7]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory, empty_store: bytes) -> ExperimentReplay:
    """Two arms with two seeds in MLflow, to their end; treat it as read-only."""
    folder = tmp_path_factory.mktemp("experiment")
    (folder / "runs").mkdir()
    (folder / "runs" / "mlflow.db").write_bytes(empty_store)
    replay = ExperimentReplay(experiment_config(folder, ARMS, SEEDS), is_experiment=True, seeds=SEEDS)
    for arm in ARMS:
        for seed in SEEDS:
            directory = run_directory(folder, arm, seed)
            fill(directory, 4, offset=0.1 * seed)
            directory.policy.mkdir()
            (directory.policy / "model.safetensors").write_bytes(b"weights")
            replay.expect(directory, "FINISHED")
    replay.work()
    (folder / "figure_1.png").write_bytes(b"png")
    replay.close("FINISHED", [folder / "figure_1.png"])
    replay.work()  # a second time changes nothing
    return replay


def runs_by_name(replay: ExperimentReplay) -> dict:
    runs = replay.tracker.client.search_runs([replay.tracker.experiment_id], max_results=100)
    assert len(runs) == len({run.info.run_name for run in runs})
    return {run.info.run_name: run for run in runs}


def test_experiment_arm_and_seed_are_nested_and_tagged(experiment: ExperimentReplay):
    runs = runs_by_name(experiment)
    assert len(runs) == 1 + 2 + 4
    assert (experiment.is_complete, experiment.is_closed) == (True, True)
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    arm, seed = runs["ppo_clip"].data.tags, runs["ppo_clip/seed_1"].data.tags
    assert arm["mlflow.parentRunId"] == experiment.parent_run
    assert seed["mlflow.parentRunId"] == runs["ppo_clip"].info.run_id
    expected = {"kind": "run", "arm": "ppo_clip", "seed": "1", "experiment_run": experiment.parent_run}
    assert expected.items() <= seed.items()
    assert {"figure_1", "figure_2"} <= set(seed["figure"].split(", "))
    assert {"git_commit", "config_hash"} <= set(seed)
    files = experiment.tracker.client.list_artifacts(experiment.parent_run, "report")
    assert [file.path for file in files] == ["report/figure_1.png"]


def test_an_arm_shows_the_mean_over_its_seeds(experiment: ExperimentReplay):
    arm = runs_by_name(experiment)["ppo_clip"]
    assert arm.data.tags["seeds"] == "1, 2"
    mean = 0.5 + 0.15  # seeds end at 0.5 + 0.1 and 0.5 + 0.2
    assert history(experiment.tracker, arm.info.run_id)[-1] == (4, pytest.approx(mean), 1_700_000_049_500)
    assert [point[0] for point in history(experiment.tracker, arm.info.run_id, "family/quantity_1")] == [1, 2, 3, 4]


def test_every_step_has_one_trace_with_its_stages_at_their_times(experiment: ExperimentReplay):
    run_id = runs_by_name(experiment)["ppo_clip/seed_1"].info.run_id
    tracker = experiment.tracker
    traces = tracker.client.search_traces(locations=[tracker.experiment_id], run_id=run_id)
    assert sorted(trace.info.tags["mlflow.traceName"] for trace in traces) == [f"step {n}" for n in (1, 2, 3, 4)]
    first = next(trace for trace in traces if trace.info.tags["step"] == "1")
    begin, second = 1_700_000_010 * 10**9, 10**9
    spans = [(span.name, span.start_time_ns - begin, span.end_time_ns - begin) for span in first.data.spans]
    stages = [(stage, number * second, (number + 1) * second) for number, stage in enumerate(STAGES)]
    assert spans == [("step 1", 0, 6 * second), *stages]


def test_data_sets_are_inputs_whose_digest_follows_the_seed(experiment: ExperimentReplay):
    inputs = [
        {put.tags[0].value: put.dataset for put in run.inputs.dataset_inputs}
        for name, run in sorted(runs_by_name(experiment).items())
        if name in ("ppo_clip/seed_1", "ppo_clip/seed_2", "token_is/seed_1")
    ]
    assert all(set(found) == {"training", "evaluation"} for found in inputs)
    assert {found["training"].name for found in inputs} == {"chain_arithmetic"}
    for context in ("training", "evaluation"):
        digests = [found[context].digest for found in inputs]
        assert digests[0] == digests[2] != digests[1]


def test_final_policies_are_versions_of_their_arm_in_the_registry(experiment: ExperimentReplay):
    versions = experiment.tracker.client.search_model_versions("name = 'miniature.ppo_clip'")
    assert sorted(version.tags["seed"] for version in versions) == ["1", "2"]
    for version in versions:
        source = Path(version.source.removeprefix("file://"))
        assert (source / "model.safetensors").read_bytes() == b"weights"


def test_runs_are_found_by_id_and_by_name(experiment: ExperimentReplay):
    uri, name = experiment.tracker.uri, experiment.config.tracking.experiment
    ids = {name: run.info.run_id for name, run in runs_by_name(experiment).items()}
    wanted = ["ppo_clip", "token_is/seed_2", ids["token_is"], ids["ppo_clip/seed_1"][:8]]
    found = select_runs(uri, name, wanted)
    assert [run.name for run in found] == ["ppo_clip", "token_is/seed_2", "token_is", "ppo_clip/seed_1"]
    curves = read_histories(uri, found[1], ["score/greedy", "not there"])
    assert curves == {"score/greedy": [(0, 0.5), (2, 0.6), (4, 0.7)]}
    with pytest.raises(InputError, match=r"no run 'trm' in MLflow at sqlite:.*one of ppo_clip, ppo_clip/seed_1"):
        select_runs(uri, name, ["trm"])
    with pytest.raises(InputError, match="no experiment 'else'"):
        select_runs(uri, "else", ["ppo_clip"])


def test_an_arm_with_another_seed_gets_a_mean_over_all_of_them(config: RunConfig, tmp_path: Path):
    runs = {seed: run_directory(tmp_path, "ppo_clip", seed) for seed in (1, 2)}
    fill(runs[1], 2, offset=0.1)
    fill(runs[2], 2, offset=0.3)
    for seeds in ([1], [1, 2]):
        replay = ExperimentReplay(experiment_config(tmp_path, ["ppo_clip"], seeds), is_experiment=True, seeds=seeds)
        for seed in seeds:
            replay.expect(runs[seed], "FINISHED")
        replay.work()
    condition = "tags.kind = 'arm'"
    arms = replay.tracker.client.search_runs([replay.tracker.experiment_id], condition)
    assert [run.data.tags["seeds"] for run in arms] == ["1, 2"]  # the mean over one seed is deleted
    assert arms[0].data.metrics["score/greedy"] == pytest.approx(0.7)


def test_credentials_in_a_tracking_uri_are_stored_nowhere(config: RunConfig, tmp_path: Path):
    secret = "hunter2"
    uri = f"sqlite:///{tmp_path / 'other.db'}?password={secret}"
    config = dataclasses.replace(config, tracking=dataclasses.replace(config.tracking, uri=uri))
    (tmp_path / "other.db").write_bytes((tmp_path / "runs" / "mlflow.db").read_bytes())
    directory = prepared(config)
    fill(directory, 2)
    location = (tmp_path / "artifacts").as_uri()
    public = dataclasses.replace(config, tracking=dataclasses.replace(config.tracking, uri=uri.partition("?")[0]))
    Tracker(public).client.create_experiment("trm-repro 2", location)
    tracking = dataclasses.replace(config.tracking, uri=uri.partition("?")[0], experiment="trm-repro 2")
    tracker = Tracker(dataclasses.replace(config, tracking=tracking))
    parent = tracker.open_parent(config)
    tracker.open_run(directory, parent, tracker.open_arm(config, parent, [config.seed]))
    tracker.replay(directory)
    tracker.close_run(directory, "FINISHED")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "config.yaml" and "artifacts" in path.parts for path in files)
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


def test_a_file_that_is_no_database_is_named_and_left_alone(tmp_path: Path):
    config = load_config(overrides=[f"output.dir={tmp_path}"])
    store = tmp_path / "mlflow.db"
    store.write_bytes(b"precious notes")
    with pytest.raises(InputError, match=r"mlflow\.db: is no SQLite database; move it away"):
        Tracker(config)
    assert store.read_bytes() == b"precious notes"
    store.unlink()
    store.mkdir()
    with pytest.raises(InputError, match="is in the way"):
        Tracker(config)


@pytest.mark.parametrize("uri", ["nonsense://x", "nonsense://user:hunter2@x/y"])
def test_a_tracking_uri_that_no_store_can_have_is_one_line(config: RunConfig, uri: str):
    tracking = dataclasses.replace(config.tracking, uri=uri)
    with pytest.raises(InputError, match=r"tracking\.uri=nonsense://x") as raised:
        Tracker(dataclasses.replace(config, tracking=tracking))
    assert "\n" not in str(raised.value)
    assert "hunter2" not in str(raised.value)


def test_a_damaged_spool_is_an_error_of_its_run_alone(config: RunConfig):
    directories = [prepared(config, arm) for arm in ("ppo_clip", "token_is")]
    replay = ExperimentReplay(config, is_experiment=False)
    for directory in directories:
        MetricsSpool(directory.spool_file).append(evaluate_entry(0, 0.5))
        replay.expect(directory, "FINISHED")
    directories[0].spool_file.write_text("damaged\n")
    replay.work()
    assert set(replay.damaged) == {"ppo_clip/seed_101"}
    assert replay.sent == {"token_is/seed_101": 1}
    assert "line 1 is no metrics entry" in replay.damaged["ppo_clip/seed_101"]


def test_the_seeds_of_a_run_are_among_its_files(experiment: ExperimentReplay):
    run_id = runs_by_name(experiment)["ppo_clip/seed_2"].info.run_id
    stored = json.loads(Path(experiment.tracker.client.download_artifacts(run_id, "setup/seeds.json")).read_text())
    assert stored["seed"] == 2
    assert stored["sources"]["rollout"]["seeds"][3] == derive_seed(2, "rollout", 3, 0, 0)


def test_state_of_a_run_is_json_without_more_than_it_says(config: RunConfig):
    directory = prepared(config)
    Tracker(config).open_run(directory)
    state = json.loads((directory.path / "mlflow.json").read_bytes())
    assert set(state) == {"uri", "key", "run_id", "replayed", "sending", "rejected", "seeds"}
