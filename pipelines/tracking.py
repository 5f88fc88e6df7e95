"""MLflow: the only module that talks to it. Fills runs from their spools, so that it can fail without harm.

A point keeps the time at which it was measured. What has been replayed is remembered beside the spool; a point
sent twice is the same row in MLflow, not a second one.
"""

import dataclasses
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # a server that is not there is said within seconds
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunStatus, RunTag
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from pipelines.environment import describe_environment, lock_file
from pipelines.run_directory import RunDirectory, write_atomically
from pipelines.spool import read_spool
from trm_repro.config import RunConfig, config_hash, to_yaml
from trm_repro.errors import InputError
from trm_repro.file_locks import file_lock

MAX_BATCH = 1000  # MLflow takes at most this many metrics in one request
MAX_PARAMS = 100  # and this many params
SQLITE_HEADER = b"SQLite format 3\x00"
STORE_ERRORS = (MlflowException, SQLAlchemyError, ModuleNotFoundError, OSError)

for name in ("alembic", "mlflow", "mlflow.store.db.utils", "sqlalchemy"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Tracker:
    """Writes runs to one MLflow experiment."""

    def __init__(self, config: RunConfig) -> None:
        """Connect, making the experiment where it is not there.

        Raises:
            InputError: if the tracking URI cannot be used.
        """
        self.uri = tracking_uri(config)
        self.folder = Path(config.output.dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.replayed_sizes: dict[Path, int] = {}  # bytes of each spool that are in MLflow
        try:
            if config.tracking.uri is None:
                ensure_sqlite_store(self.folder / "mlflow.db")
            mlflow.set_tracking_uri(self.uri)
            self.client = MlflowClient(tracking_uri=self.uri)
            experiment = self.client.get_experiment_by_name(config.tracking.experiment)
            if experiment is not None:
                self.experiment_id = experiment.experiment_id
            else:
                location = None if config.tracking.uri else (self.folder / "mlartifacts").resolve().as_uri()
                self.experiment_id = self.client.create_experiment(config.tracking.experiment, location)
        except STORE_ERRORS as error:
            raise InputError(f"tracking.uri={self.uri}: MLflow cannot use it ({_first_line(error)})") from None

    def open_parent(self, config: RunConfig) -> str:
        """Return the run that holds an experiment's runs as children, making it where it is not there."""
        state_file = self.folder / "mlflow.json"
        run_id = self._known_run(state_file)
        if run_id is None:
            run_id = self._create(config, name=config.name, tags={"kind": "experiment"})
            self._write_state(state_file, run_id, 0)
        return run_id

    def open_run(self, directory: RunDirectory, parent_run_id: str | None = None) -> str:
        """Return the MLflow run of a training run, making it where it is not there."""
        config = directory.config
        run_id = self._known_run(directory.path / "mlflow.json")
        if run_id is not None and parent_run_id is not None:
            self.client.set_tag(run_id, "mlflow.parentRunId", parent_run_id)
        if run_id is None:
            tags = {"kind": "run", "arm": config.arm, "seed": str(config.seed)}
            if parent_run_id is not None:
                tags["mlflow.parentRunId"] = parent_run_id
            run_id = self._create(config, name=directory.name, tags=tags)
            self._write_state(directory.path / "mlflow.json", run_id, 0)
        return run_id

    def replay(self, directory: RunDirectory) -> int:
        """Send the spool's entries that have not been sent.

        Args:
            directory: of a run that `open_run` has opened.

        Returns:
            Number of entries sent.
        """
        if not directory.spool_file.is_file():
            return 0
        size = directory.spool_file.stat().st_size
        if self.replayed_sizes.get(directory.spool_file) == size:
            return 0
        state_file = directory.path / "mlflow.json"
        state = read_state(state_file)
        assert state is not None
        entries = list(read_spool(directory.spool_file))[state["replayed"] :]
        metrics = [
            Metric(name, value, round(entry.time * 1000), entry.step)
            for entry in entries
            for name, value in entry.metrics.items()
        ]
        for start in range(0, len(metrics), MAX_BATCH):
            self.client.log_batch(state["run_id"], metrics=metrics[start : start + MAX_BATCH])
        if entries:
            self._write_state(state_file, state["run_id"], state["replayed"] + len(entries))
        self.replayed_sizes[directory.spool_file] = size
        return len(entries)

    def close_run(self, directory: RunDirectory, status: str) -> None:
        """Give a run its end: FINISHED, FAILED or KILLED."""
        state = read_state(directory.path / "mlflow.json")
        assert state is not None
        if self.client.get_run(state["run_id"]).info.status != status:
            self._log_profiles(state["run_id"], directory)
        self._close(state["run_id"], status)

    def close_parent(self, run_id: str, status: str) -> None:
        """Give the parent run its end."""
        self._close(run_id, status)

    def log_files(self, run_id: str, files: list[Path], folder: str) -> None:
        """Store files as artifacts of a run."""
        for file in files:
            self.client.log_artifact(run_id, str(file), folder)

    def _log_profiles(self, run_id: str, directory: RunDirectory) -> None:
        """Store expected divergence by position, step by step, as one artifact."""
        if not directory.spool_file.is_file():
            return
        profiles = {entry.step: entry.profiles for entry in read_spool(directory.spool_file) if entry.profiles}
        if profiles:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "divergence_by_position.json"
                file.write_text(json.dumps(profiles), encoding="utf-8")
                self.log_files(run_id, [file], "profiles")

    def _close(self, run_id: str, status: str) -> None:
        if self.client.get_run(run_id).info.status != status:
            self.client.set_terminated(run_id, status)

    def _known_run(self, state_file: Path) -> str | None:
        state = read_state(state_file)
        if state is None or state["uri"] != self.uri:
            return None
        try:
            run: Run = self.client.get_run(state["run_id"])
        except MlflowException:
            return None
        if run.info.lifecycle_stage != "active":
            return None
        if run.info.status != RunStatus.to_string(RunStatus.RUNNING):
            self.client.update_run(run.info.run_id, status=RunStatus.to_string(RunStatus.RUNNING))
        return str(run.info.run_id)

    def _write_state(self, state_file: Path, run_id: str, replayed: int) -> None:
        write_atomically(state_file, json.dumps({"uri": self.uri, "run_id": run_id, "replayed": replayed}))

    def _create(self, config: RunConfig, name: str, tags: dict[str, str]) -> str:
        environment = describe_environment()
        tags = tags | {"git_commit": environment["git_commit"], "config_hash": config_hash(config)}
        run = self.client.create_run(self.experiment_id, tags=tags, run_name=name, start_time=round(time.time() * 1000))
        run_id = str(run.info.run_id)
        params = [Param(key, str(value)) for key, value in flatten(dataclasses.asdict(config))]
        for start in range(0, len(params), MAX_PARAMS):
            self.client.log_batch(run_id, params=params[start : start + MAX_PARAMS])
        self.client.log_batch(run_id, tags=[RunTag(f"environment.{key}", value) for key, value in environment.items()])
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
            (Path(folder) / "environment.json").write_text(json.dumps(environment, indent=2), encoding="utf-8")
            self.log_files(run_id, [Path(folder) / "config.yaml", Path(folder) / "environment.json"], "setup")
        if lock_file().is_file():
            self.log_files(run_id, [lock_file()], "setup")
        return run_id


def ensure_sqlite_store(path: Path) -> None:
    """Make the SQLite store whole or not at all: MLflow killed while it makes its tables leaves a file it cannot use.

    Args:
        path: the database.

    Raises:
        InputError: if something that is no database is in the way.
    """
    with file_lock(path.with_name("mlflow.lock")):
        if path.is_file():
            if path.stat().st_size and path.read_bytes()[: len(SQLITE_HEADER)] != SQLITE_HEADER:
                raise InputError(f"{path}: is no SQLite database; move it away, it is filled again from metrics.jsonl")
            if path.stat().st_size:
                return
            path.unlink()
        if path.exists():
            raise InputError(f"{path}: is in the way of MLflow's database; move it away")
        partial = path.with_name(f"{path.name}.partial")
        partial.unlink(missing_ok=True)
        MlflowClient(tracking_uri=f"sqlite:///{partial.resolve()}").search_experiments(max_results=1)
        os.replace(partial, path)


def read_state(path: Path) -> dict[str, Any] | None:
    """Read which MLflow run a folder belongs to; a damaged file counts as none.

    Args:
        path: an ``mlflow.json``.

    Returns:
        uri, run_id and the number of spool entries replayed, or None.
    """
    try:
        state = json.loads(path.read_bytes())
        is_state = isinstance(state["uri"], str) and isinstance(state["run_id"], str)
        return dict(state) if is_state and isinstance(state["replayed"], int) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def tracking_uri(config: RunConfig) -> str:
    """Return the tracking URI: the configured one, or SQLite in the output folder."""
    if config.tracking.uri is not None:
        return config.tracking.uri
    return f"sqlite:///{(Path(config.output.dir) / 'mlflow.db').resolve()}"


def read_points(config: RunConfig, metric_names: list[str]) -> list[dict[str, Any]]:
    """Read metric points of an experiment's runs from MLflow alone.

    Args:
        config: gives tracking URI, experiment and the parent run's folder.
        metric_names: metrics to read.

    Returns:
        One dictionary a point: arm, seed, run_id, metric, step, value; ordered by step within a metric.

    Raises:
        InputError: if there is no such experiment or it has no finished or running runs.
    """
    state_file = Path(config.output.dir) / "mlflow.json"
    state = read_state(state_file)
    if state is None:
        raise InputError(f"{state_file}: no such file; run trm-repro reproduce first")
    tracker, parent = Tracker(config), state["run_id"]
    runs = tracker.client.search_runs(
        [tracker.experiment_id], f"tags.`mlflow.parentRunId` = '{parent}'", max_results=10_000
    )
    if not runs:
        raise InputError(f"MLflow at {tracker.uri} has no runs under parent run {parent}")
    points = []
    for run in runs:
        identity = {"arm": run.data.tags["arm"], "seed": int(run.data.tags["seed"]), "run_id": run.info.run_id}
        for metric in metric_names:
            history = tracker.client.get_metric_history(run.info.run_id, metric)
            points += [
                identity | {"metric": metric, "step": point.step, "value": point.value}
                for point in sorted(history, key=lambda point: point.step)
            ]
    return points


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values under dotted keys."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, prefix=f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
