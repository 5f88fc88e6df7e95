"""Writes one experiment to MLflow: parent, arm and seed runs, filled from spools.

Everything here may be called again after it failed half-way, or in another process: what is there is found, not made
twice.
"""

import contextlib
import dataclasses
import time
import uuid
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from mlflow.entities import RunStatus
from mlflow.exceptions import MlflowException
from mlflow.tracing.client import TracingClient

from evaluation.figures import FIGURES
from pipelines.credentials import public_config, without_credentials
from pipelines.environment import describe_environment
from pipelines.run_directory import RunDirectory
from pipelines.spool import SpoolEntry, read_spool
from pipelines.tracking.arm_means import arm_means
from pipelines.tracking.records import log_datasets, log_problem_scores, log_profiles, log_setup, register_policy
from pipelines.tracking.replay import batches, points_there, send, to_metrics, without
from pipelines.tracking.state import STATE_FILE, RunState, read_state
from pipelines.tracking.store import TrackingUnreachable, connect, ensure_sqlite_store, reason, tracking_uri
from pipelines.tracking.traces import send_traces
from trm_repro.config import RunConfig, config_hash
from trm_repro.file_locks import file_lock

PARENT_TAG = "mlflow.parentRunId"
EXPERIMENT_TAG = "experiment_run"
"""On arm and seed runs: the parent run of the experiment they belong to."""
RUNNING = RunStatus.to_string(RunStatus.RUNNING)
NOT_FOUND = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")


class Tracker:
    """Writes runs to one MLflow experiment."""

    def __init__(self, config: RunConfig) -> None:
        """Connect, making the experiment where it is not there.

        Raises:
            InputError: if the tracking URI cannot be used.
            TrackingUnreachable: if what is there does not answer as MLflow does.
        """
        self.config = config
        self.uri = tracking_uri(config)
        self.folder = Path(config.output.dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.opened: dict[Path, str] = {}  # state files whose run this object has seen open
        self.replayed_sizes: dict[Path, tuple[str, int]] = {}  # run and bytes of each spool that are in MLflow
        self.resumed: set[Path] = set()  # state files whose run it has marked as running
        self.environment = describe_environment()
        if config.tracking.uri is None:
            ensure_sqlite_store(self.folder / "mlflow.db")
        self.client = connect(self.uri)
        try:
            self.experiment_id = self._find_experiment(config)
        except MlflowException as error:
            raise TrackingUnreachable(reason(error, self.uri)) from None

    def _find_experiment(self, config: RunConfig) -> str:
        name = config.tracking.experiment
        experiment = self.client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        location = None if config.tracking.uri else (self.folder / "mlartifacts").resolve().as_uri()
        try:
            # The kind makes the UI open the experiment at its runs.
            tags = {"mlflow.experimentKind": "custom_model_development"}
            return str(self.client.create_experiment(name, location, tags=tags))
        except MlflowException:
            experiment = self.client.get_experiment_by_name(name)  # another process was first
            if experiment is None:
                raise
            return str(experiment.experiment_id)

    def open_parent(self, config: RunConfig) -> str:
        """Return the run that holds an experiment's arms as children, making it where it is not there."""
        return self._open(self.folder / STATE_FILE, config, config.name, {"kind": "experiment"})

    def open_arm(self, config: RunConfig, parent_run_id: str, seeds: Sequence[int]) -> str:
        """Return the run that holds an arm's seeds as children and their mean as its curves.

        Args:
            config: of one of its seeds.
            parent_run_id: of the experiment.
            seeds: whose mean it is; with other seeds than before it is a new run.
        """
        state_file = self._arm_state(config)
        state = read_state(state_file)
        if state is not None and state.seeds != list(seeds):
            if state.run_id and state.uri == without_credentials(self.uri):
                with contextlib.suppress(MlflowException):
                    self.client.delete_run(state.run_id)
            state_file.unlink()
            self.opened.pop(state_file, None)
        tags = arm_tags(config) | {
            "kind": "arm",
            "seeds": ", ".join(map(str, seeds)),
            PARENT_TAG: parent_run_id,
            EXPERIMENT_TAG: parent_run_id,
            "mlflow.note.content": f"Curves are means over seeds {', '.join(map(str, seeds))}, of the steps all have.",
        }
        return self._open(state_file, config, config.arm, tags, seeds=seeds)

    def open_run(self, directory: RunDirectory, parent_run_id: str | None = None, arm_run_id: str | None = None) -> str:
        """Return the MLflow run of a training run, making it where it is not there.

        Args:
            directory: of the training run.
            parent_run_id: of the experiment it belongs to, where it belongs to one.
            arm_run_id: of its arm.
        """
        config = directory.config
        tags = arm_tags(config) | {"kind": "run", "seed": str(config.seed)}
        if parent_run_id is not None:
            tags |= {EXPERIMENT_TAG: parent_run_id, PARENT_TAG: arm_run_id or parent_run_id}
        return self._open(directory.path / STATE_FILE, config, directory.name, tags)

    def replay(self, directory: RunDirectory) -> int:
        """Send the spool's entries that have not been sent, as metrics and traces.

        Args:
            directory: of a run that `open_run` has opened.

        Returns:
            Number of entries sent.
        """
        if not directory.spool_file.is_file():
            return 0
        state_file = directory.path / STATE_FILE
        size = directory.spool_file.stat().st_size
        if self.replayed_sizes.get(state_file) == (self._run_id(state_file), size):
            return 0
        with file_lock(directory.path / "tracking.lock"):  # `sync` may be doing the same
            sent, state = self._send(state_file, read_spool(directory.spool_file))
            if sent:
                send_traces(
                    TracingClient(self.uri),
                    sent,
                    experiment_id=self.experiment_id,
                    run_id=state.run_id,
                    tags={"arm": directory.config.arm, "seed": str(directory.config.seed)},
                )
                self._note(state_file, state, replayed=state.sending)
        self.replayed_sizes[state_file] = (state.run_id, size)
        return len(sent)

    def replay_arm(self, directories: Sequence[RunDirectory]) -> int:
        """Send the mean over an arm's seeds of the steps that all of them have.

        Args:
            directories: of the arm's runs; `open_arm` has opened its run.

        Returns:
            Number of entries sent.
        """
        spools = [list(read_spool(directory.spool_file)) for directory in directories if directory.spool_file.is_file()]
        if len(spools) < len(directories):
            return 0
        state_file = self._arm_state(directories[0].config)
        with file_lock(state_file.with_name("tracking.lock")):
            sent, state = self._send(state_file, arm_means(spools))
            if sent:
                self._note(state_file, state, replayed=state.sending)
        return len(sent)

    def close_run(self, directory: RunDirectory, status: str) -> None:
        """Give a run its end, FINISHED, FAILED or KILLED; a finished one registers its policy."""
        run_id = self._run_id(directory.path / STATE_FILE)
        if self.client.get_run(run_id).info.status != status:
            log_profiles(self.client, run_id, directory)
            log_problem_scores(self.client, run_id, directory)
            if status == "FINISHED":
                tags = {"arm": directory.config.arm, "seed": str(directory.config.seed)}
                tags |= {key: self._identity(directory.config)[key] for key in ("git_commit", "config_hash")}
                register_policy(self.client, run_id, directory, tags)
        self._close(run_id, status)

    def close_arm(self, config: RunConfig, status: str) -> None:
        """Give an arm's run its end."""
        self._close(self._run_id(self._arm_state(config)), status)

    def close_parent(self, run_id: str, status: str) -> None:
        """Give the parent run its end."""
        self._close(run_id, status)

    def log_files(self, run_id: str, files: list[Path], folder: str) -> None:
        """Store files as artifacts of a run."""
        for file in files:
            self.client.log_artifact(run_id, str(file), folder)

    def _send(self, state_file: Path, entries: Iterable[SpoolEntry]) -> tuple[list[SpoolEntry], RunState]:
        """Send the metrics of the entries that have not been sent; the caller notes them as replayed."""
        state = read_state(state_file)
        assert state is not None
        waiting = list(islice(entries, state.replayed, None))  # a long run's others are not held
        if not waiting:
            return [], state
        unsure = waiting[: max(0, state.sending - state.replayed)]
        there = points_there(self.client, state.run_id, {name for entry in unsure for name in entry.metrics})
        known = {
            (metric.key, metric.step, metric.timestamp) for entry in unsure for metric in to_metrics(entry)
        } & there
        if state_file not in self.resumed:
            self.resume(state.run_id)
            self.resumed.add(state_file)
        state = self._note(state_file, state, sending=state.replayed + len(waiting))
        rejected: list[str] = []
        for _, metrics in batches(waiting):
            rejected += send(self.client, state.run_id, without(metrics, known))
        if rejected:
            state = self._note(state_file, state, rejected=sorted({*state.rejected, *rejected}))
        return waiting, state

    def _note(self, state_file: Path, state: RunState, **changes: object) -> RunState:
        state = dataclasses.replace(state, **changes)  # type: ignore[arg-type]
        state.save(state_file)
        return state

    def _open(
        self, state_file: Path, config: RunConfig, name: str, tags: dict[str, str], *, seeds: Sequence[int] = ()
    ) -> str:
        """Find the run that a state file names, or make it; it is running afterwards and has these tags."""
        state = read_state(state_file)
        public_uri = without_credentials(self.uri)
        if state is None or state.uri != public_uri or not self._is_active(state):
            state = RunState(uri=public_uri, key=uuid.uuid4().hex, seeds=list(seeds))
            state.save(state_file)  # before the run is made: should the answer be lost, the key finds the run
            self.opened.pop(state_file, None)
        if not state.run_id:
            run_id = self._find_by_key(state.key) or self._create(config, name, tags | {"key": state.key})
            log_setup(self.client, run_id, config, self.environment)
            if tags["kind"] == "run":
                log_datasets(self.client, run_id, config)
                self._supersede(run_id, tags)
            state = self._note(state_file, state, run_id=run_id)
        if self.opened.get(state_file) != state.run_id:
            there = self.client.get_run(state.run_id).data.tags
            for key in (PARENT_TAG, EXPERIMENT_TAG):
                if key in tags and there.get(key) != tags[key]:
                    self.client.set_tag(state.run_id, key, tags[key])
            self.opened[state_file] = state.run_id
        return state.run_id

    def resume(self, run_id: str) -> None:
        """Mark a run as running again, where it has ended."""
        if self.client.get_run(run_id).info.status != RUNNING:
            self.client.update_run(run_id, status=RUNNING)

    def is_closed(self, run_id: str) -> bool:
        """Whether a run has ended."""
        return bool(self.client.get_run(run_id).info.status != RUNNING)

    def _is_active(self, state: RunState) -> bool:
        """Whether a known run is still there; one that was never made counts as there."""
        if not state.run_id:
            return True
        try:
            return bool(self.client.get_run(state.run_id).info.lifecycle_stage == "active")
        except MlflowException as error:
            if error.error_code in NOT_FOUND:
                return False
            raise

    def _find_by_key(self, key: str) -> str | None:
        found = self.client.search_runs([self.experiment_id], f"tags.key = '{key}'", max_results=1)
        return str(found[0].info.run_id) if found else None

    def _create(self, config: RunConfig, name: str, tags: dict[str, str]) -> str:
        tags = tags | self._identity(config)
        run = self.client.create_run(self.experiment_id, tags=tags, run_name=name, start_time=round(time.time() * 1000))
        return str(run.info.run_id)

    def _identity(self, config: RunConfig) -> dict[str, str]:
        return {"git_commit": self.environment["git_commit"], "config_hash": config_hash(public_config(config))}

    def _supersede(self, run_id: str, tags: dict[str, str]) -> None:
        """Take an older run of the same arm and seed out of the experiment: its folder has forgotten it."""
        if EXPERIMENT_TAG not in tags:
            return
        condition = (
            f"tags.{EXPERIMENT_TAG} = '{tags[EXPERIMENT_TAG]}' AND tags.arm = '{tags['arm']}' "
            f"AND tags.seed = '{tags['seed']}'"
        )
        for run in self.client.search_runs([self.experiment_id], condition):
            if run.info.run_id != run_id:
                self.client.set_tag(run.info.run_id, "superseded_by", run_id)
                self.client.delete_tag(run.info.run_id, EXPERIMENT_TAG)
                self.client.delete_tag(run.info.run_id, PARENT_TAG)

    def _arm_state(self, config: RunConfig) -> Path:
        return self.folder / config.arm / STATE_FILE

    def _run_id(self, state_file: Path) -> str:
        state = read_state(state_file)
        assert state is not None
        return state.run_id

    def _close(self, run_id: str, status: str) -> None:
        if self.client.get_run(run_id).info.status != status:
            self.client.set_terminated(run_id, status)


def arm_tags(config: RunConfig) -> dict[str, str]:
    """Return the tags that say which arm a run is of, and in which of the paper's figures that arm is."""
    figures = [plan.name for plan in FIGURES if config.arm in plan.arms]
    return {"arm": config.arm, "figure": ", ".join(figures) or "none"}
