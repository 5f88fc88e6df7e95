"""A tracking store whose disk is full: SQLite's own error, and what training and MLflow have after it."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlalchemy.pool import Pool

from pipelines.run_directory import RunDirectory
from pipelines.spool import MetricsSpool
from pipelines.tracking import BackgroundTracker, ExperimentReplay, Tracker, background, read_state
from tests.tracked import train_entry
from trm_repro.config import load_config


class Disk:
    """What SQLite may write; a full one makes it raise its own "database or disk is full"."""

    def __init__(self) -> None:
        self.max_pages = 2**30

    def limit(self, connection, record, proxy) -> None:
        connection.execute(f"PRAGMA max_page_count = {self.max_pages}")  # never below what the file has already


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    event.listen(Pool, "checkout", disk.limit)
    yield disk
    event.remove(Pool, "checkout", disk.limit)


def test_a_full_disk_of_the_store_stops_nothing_and_loses_nothing(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(background, "REPLAY_SECONDS", 0.05)
    monkeypatch.setattr(background, "LONGEST_PAUSE_SECONDS", 0.05)
    config = load_config(overrides=[f"output.dir={tmp_path}"])
    directory = RunDirectory(config)
    directory.prepare()
    spool, said = MetricsSpool(directory.spool_file), []
    replay = ExperimentReplay(config, is_experiment=False)

    def write(steps: range) -> None:
        for step in steps:
            spool.append(train_entry(step, num_metrics=100))

    with BackgroundTracker(replay, said.append) as tracking:
        tracking.track(directory)
        write(range(1, 4))
        wait_until(lambda: replay.sent.get(directory.name) == 3)
        disk.max_pages = 1
        write(range(4, 20))  # training goes on
        wait_until(lambda: tracking.failure is not None)
        disk.max_pages = 2**30
        write(range(20, 23))
        tracking.track(directory, "FINISHED")
        assert tracking.finish() is None
    assert "database or disk is full" in said[0]
    assert "training goes on, its points wait in metrics.jsonl" in said[0]
    assert said[1:] == ["MLflow answers again; the points that waited are there"]
    run_id = read_state(directory.path / "mlflow.json").run_id
    for number in (0, 99):
        name = f"family/quantity_{number}"
        expected = [train_entry(step, num_metrics=100) for step in range(1, 23)]
        points = Tracker(config).client.get_metric_history(run_id, name)
        assert [(point.step, point.value, point.timestamp) for point in points] == [
            (entry.step, entry.metrics[name], round(entry.time * 1000)) for entry in expected
        ]
    assert read_state(directory.path / "mlflow.json").rejected == []


def wait_until(is_so: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "did not become so"
        time.sleep(0.02)
