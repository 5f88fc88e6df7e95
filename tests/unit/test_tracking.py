"""Tracking with a real MLflow on SQLite: nothing lost, nothing twice, damaged files named or mended."""

import dataclasses
from pathlib import Path

import pytest

from pipelines.run_directory import RunDirectory
from pipelines.spool import MetricsSpool, SpoolEntry, read_spool
from pipelines.tracking import Tracker, read_points, read_state
from trm_repro.config import RunConfig, load_config
from trm_repro.errors import InputError


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config(overrides=[f"output.dir={tmp_path / 'runs'}"])


def prepared(config: RunConfig, arm: str = "ppo_clip") -> RunDirectory:
    directory = RunDirectory(dataclasses.replace(config, arm=arm))
    directory.prepare()
    return directory


def entry(step: int, value: float) -> SpoolEntry:
    return SpoolEntry(step=step, kind="train", time=1000.0 + step, metrics={"score/greedy": value})


def history(tracker: Tracker, run_id: str) -> list[tuple[int, float, int]]:
    points = tracker.client.get_metric_history(run_id, "score/greedy")
    return sorted((point.step, point.value, point.timestamp) for point in points)


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


def test_replaying_again_after_a_crash_before_it_was_noted_adds_nothing(config: RunConfig):
    directory = prepared(config)
    tracker = Tracker(config)
    run_id = tracker.open_run(directory)
    MetricsSpool(directory.spool_file).append(entry(1, 0.25))
    before = (directory.path / "mlflow.json").read_bytes()
    tracker.replay(directory)
    (directory.path / "mlflow.json").write_bytes(before)
    again = Tracker(config)
    again.open_run(directory)
    assert again.replay(directory) == 1
    assert history(again, run_id) == [(1, 0.25, 1001000)]


def test_a_damaged_run_note_makes_a_new_run_with_every_point(config: RunConfig):
    directory = prepared(config)
    tracker = Tracker(config)
    run_ids = [tracker.open_run(directory)]
    MetricsSpool(directory.spool_file).append(entry(1, 0.25))
    tracker.replay(directory)
    for content in (b"", b"{", b"[]", b"{}", b"\x00" * 8, b'{"uri": 1, "run_id": 2, "replayed": "x"}'):
        (directory.path / "mlflow.json").write_bytes(content)
        assert read_state(directory.path / "mlflow.json") is None, content
        again = Tracker(config)
        run_ids.append(again.open_run(directory))
        assert again.replay(directory) == 1, content
        assert history(again, run_ids[-1]) == [(1, 0.25, 1001000)], content
    assert len(set(run_ids)) == 7


def test_a_lost_parent_note_gives_the_children_a_new_parent(config: RunConfig):
    directory = prepared(config)
    tracker = Tracker(config)
    tracker.open_run(directory, tracker.open_parent(config))
    MetricsSpool(directory.spool_file).append(entry(1, 0.25))
    tracker.replay(directory)
    (Path(config.output.dir) / "mlflow.json").unlink()
    again = Tracker(config)
    again.open_run(directory, again.open_parent(config))
    points = read_points(config, ["score/greedy"])
    assert [(point["arm"], point["step"], point["value"]) for point in points] == [("ppo_clip", 1, 0.25)]


def test_a_store_left_half_made_by_a_killed_process_is_made_anew(config: RunConfig):
    folder = Path(config.output.dir)
    folder.mkdir(parents=True)
    (folder / "mlflow.db.partial").write_bytes(b"half")
    (folder / "mlflow.db").write_bytes(b"")
    assert Tracker(config).open_parent(config)
    assert not (folder / "mlflow.db.partial").exists()


def test_a_file_that_is_no_database_is_named_and_left_alone(config: RunConfig):
    store = Path(config.output.dir) / "mlflow.db"
    store.parent.mkdir(parents=True)
    store.write_bytes(b"precious notes")
    with pytest.raises(InputError, match=r"mlflow\.db: is no SQLite database; move it away"):
        Tracker(config)
    assert store.read_bytes() == b"precious notes"
    store.unlink()
    store.mkdir()
    with pytest.raises(InputError, match="is in the way"):
        Tracker(config)


@pytest.mark.parametrize("uri", ["postgresql://nobody@127.0.0.1:9/none", "nonsense://x"])
def test_a_tracking_uri_that_cannot_be_used_is_one_line(config: RunConfig, uri: str):
    tracking = dataclasses.replace(config.tracking, uri=uri)
    with pytest.raises(InputError) as raised:
        Tracker(dataclasses.replace(config, tracking=tracking))
    assert uri in str(raised.value)
    assert "\n" not in str(raised.value)


def test_report_of_a_folder_without_runs_creates_nothing(config: RunConfig):
    with pytest.raises(InputError, match="run trm-repro reproduce first"):
        read_points(config, ["score/greedy"])
    assert not Path(config.output.dir).exists()


def test_spool_keeps_one_entry_a_step_and_forgets_a_line_cut_short(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    MetricsSpool(path).append(entry(1, 0.25))
    with path.open("a") as file:
        file.write('{"step": 2, "kind": "tr')
    spool = MetricsSpool(path)
    spool.append(entry(1, 0.75))  # measured again after an interruption
    spool.append(entry(2, 0.5))
    assert [(e.step, e.metrics["score/greedy"]) for e in read_spool(path)] == [(1, 0.25), (2, 0.5)]


@pytest.mark.parametrize("line", ["{}", "3", '{"step": "x", "kind": "train", "time": 1, "metrics": {}}', "nonsense"])
def test_a_damaged_spool_is_named_with_its_line(tmp_path: Path, line: str):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl: line 1 is no metrics entry"):
        list(read_spool(path))


@pytest.mark.parametrize("content", ["", "x", "-1"])
def test_a_damaged_end_mark_counts_as_none(config: RunConfig, content: str):
    directory = prepared(config)
    directory.finished_file.write_text(content)
    assert not directory.is_finished


def test_a_run_is_held_by_one_process_at_a_time(config: RunConfig):
    directory = prepared(config)
    with (
        directory.locked(),
        pytest.raises(InputError, match="another process is training this run"),
        directory.locked(),
    ):
        pass
    with directory.locked():
        pass
