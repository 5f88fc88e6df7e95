"""Tracking beside training: a thread that fills MLflow from the spools, and never stops a run.

It knows what MLflow should hold and works towards it, again and again. Whatever goes wrong is said once, and tried
again later; what is still missing at the end is in the spools, for `trm-repro sync`.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.credentials import public_config, without_credentials
from pipelines.run_directory import RunDirectory, write_atomically
from pipelines.tracking.store import (
    STORE_ERRORS,
    TrackingUnreachable,
    connect,
    ensure_sqlite_store,
    is_rejection,
    reason,
    tracking_uri,
)
from pipelines.tracking.tracker import Tracker
from trm_repro.config import RunConfig, to_yaml
from trm_repro.errors import InputError

EXPERIMENT_FILE = "experiment.yaml"
"""In the output folder: the configuration of `reproduce`, from which `sync` knows arms and seeds."""
REPLAY_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 60.0
LAST_ATTEMPT_SECONDS = 180.0
"""How long the end of a run waits for a store that takes its time."""


@dataclass
class Target:
    """One run that MLflow should hold.

    Attributes:
        directory: of the run.
        status: its end, once it has one: FINISHED or FAILED.
        is_done: whether MLflow holds it to its end.
    """

    directory: RunDirectory
    status: str | None = None
    is_done: bool = False


class ExperimentReplay:
    """Brings MLflow to hold an experiment's runs as far as their spools go."""

    def __init__(self, config: RunConfig, *, is_experiment: bool, seeds: Sequence[int] = ()) -> None:
        """Take note of what to hold; nothing is sent yet.

        Args:
            config: of the experiment, or of a run that stands alone.
            is_experiment: whether runs have a parent and arms.
            seeds: of every arm.
        """
        self.config = config
        self.is_experiment = is_experiment
        self.seeds = list(seeds)
        self.targets: dict[str, Target] = {}
        self.tracker: Tracker | None = None
        self.parent_run: str | None = None
        self.sent: dict[str, int] = {}  # spool entries sent, by run
        self.arm_progress: dict[str, list[tuple[int, bool]]] = {}  # of its runs, when an arm was last sent
        self.damaged: dict[str, str] = {}  # runs that cannot be sent, and why

    def expect(self, directory: RunDirectory, status: str | None = None) -> None:
        """Note a run that MLflow should hold, and its end where it has one."""
        known = self.targets.get(directory.name)
        if known is None or known.status != status:
            self.targets = self.targets | {directory.name: Target(directory, status)}

    @property
    def is_complete(self) -> bool:
        """Whether MLflow holds every run of the experiment to its end."""
        plan = self.config.reproduce
        done = {name for name, target in self.targets.items() if target.is_done} - set(self.damaged)
        return {f"{arm}/seed_{seed}" for arm in plan.arms for seed in plan.seeds} <= done

    @property
    def is_closed(self) -> bool:
        """Whether the experiment has its end in MLflow; `work` has been called."""
        assert self.tracker is not None
        assert self.parent_run is not None
        return self.tracker.is_closed(self.parent_run)

    def work(self) -> None:
        """Send everything that is there to be sent.

        Raises:
            InputError: if the store cannot be used.
            TrackingUnreachable: if it does not answer.
        """
        try:
            if self.tracker is None:
                self.tracker = Tracker(self.config)
            if self.is_experiment:
                self.parent_run = self.tracker.open_parent(self.config)
            for target in [target for target in self.targets.values() if not target.is_done]:
                self._work_on(self.tracker, target)
            if self.parent_run is not None:
                self._work_on_arms(self.tracker, self.parent_run)
                if not all(target.is_done for target in self.targets.values()):
                    self.tracker.resume(self.parent_run)
        except STORE_ERRORS as error:
            self.tracker = None
            raise TrackingUnreachable(reason(error, tracking_uri(self.config))) from None

    def _work_on(self, tracker: Tracker, target: Target) -> None:
        directory, status, arm_run = target.directory, target.status, None
        try:
            if self.parent_run is not None:
                arm_run = tracker.open_arm(directory.config, self.parent_run, self.seeds)
            tracker.open_run(directory, self.parent_run, arm_run)
            self.sent[directory.name] = self.sent.get(directory.name, 0) + tracker.replay(directory)
        except InputError as error:  # a damaged spool: the other runs go on
            self.damaged[directory.name] = str(error)
            target.is_done = True
            return
        except STORE_ERRORS as error:
            if not is_rejection(error):
                raise
            self.damaged[directory.name] = reason(error, tracker.uri)
            target.is_done = True
            return
        if status is not None:
            tracker.close_run(directory, status)
            target.is_done = True

    def _work_on_arms(self, tracker: Tracker, parent_run: str) -> None:
        arms: dict[str, list[Target]] = {}
        for target in self.targets.values():
            arms.setdefault(target.directory.config.arm, []).append(target)
        for targets in arms.values():
            directories = [target.directory for target in targets]
            if {directory.name for directory in directories} & set(self.damaged):
                continue
            if sorted(directory.config.seed for directory in directories) != sorted(self.seeds):
                continue
            config = directories[0].config
            progress = [(self.sent.get(target.directory.name, 0), target.is_done) for target in targets]
            if self.arm_progress.get(config.arm) == progress:
                continue
            tracker.open_arm(config, parent_run, self.seeds)
            tracker.replay_arm(directories)
            if all(target.is_done for target in targets):
                has_failed = any(target.status != "FINISHED" for target in targets)
                tracker.close_arm(config, "FAILED" if has_failed else "FINISHED")
            self.arm_progress[config.arm] = progress

    def close(self, status: str, files: Sequence[Path]) -> None:
        """Give the experiment its end, with its report and figures.

        Raises:
            TrackingUnreachable: if the store does not answer.
        """
        assert self.tracker is not None
        assert self.parent_run is not None
        try:
            self.tracker.log_files(self.parent_run, [file for file in files if file.is_file()], "report")
            self.tracker.close_parent(self.parent_run, status)
        except STORE_ERRORS as error:
            raise TrackingUnreachable(reason(error, self.tracker.uri)) from None


class BackgroundTracker:
    """Runs an `ExperimentReplay` in a thread; use as a context manager."""

    def __init__(self, replay: ExperimentReplay, say: Callable[[str], None]) -> None:
        """Check that the tracking URI can be used at all.

        Args:
            replay: what to work on.
            say: prints one line.

        Raises:
            InputError: if it cannot.
        """
        self.replay = replay
        self.say = say
        self.failure: str | None = None
        self._wake = threading.Event()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
        config = replay.config
        Path(config.output.dir).mkdir(parents=True, exist_ok=True)
        if replay.is_experiment:
            write_atomically(Path(config.output.dir) / EXPERIMENT_FILE, to_yaml(public_config(config)))
        if config.tracking.uri is None:
            ensure_sqlite_store(Path(config.output.dir) / "mlflow.db")
        with contextlib.suppress(TrackingUnreachable):  # said by the thread
            connect(tracking_uri(config))

    def __enter__(self) -> "BackgroundTracker":
        """Start."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop, after a last attempt where nothing went wrong."""
        if error[0] is None:
            self.finish()

    def track(self, directory: RunDirectory, status: str | None = None) -> None:
        """Have MLflow hold a run, and its end where it has one."""
        self.replay.expect(directory, status)

    def finish(self) -> str | None:
        """Send what is left and stop.

        Returns:
            Why MLflow does not hold everything, in one line; None when it does.
        """
        self._is_ending = True
        self._wake.set()
        self._thread.join(LAST_ATTEMPT_SECONDS)
        if self._thread.is_alive():
            self.failure = self.failure or f"no answer within {LAST_ATTEMPT_SECONDS:g} s"
        damaged = "; ".join(f"{name}: {why}" for name, why in self.replay.damaged.items())
        return self.failure or damaged or None

    def _run(self) -> None:
        pause = REPLAY_SECONDS
        while True:
            is_last = self._is_ending
            failure = self._attempt()
            if failure is not None and self.failure is None:
                uri = without_credentials(tracking_uri(self.replay.config))
                self.say(f"MLflow at {uri}: {failure}; training goes on, its points wait in metrics.jsonl")
            elif failure is None and self.failure is not None:
                self.say("MLflow answers again; the points that waited are there")
            self.failure = failure
            if is_last:
                return
            pause = REPLAY_SECONDS if failure is None else min(2 * pause, LONGEST_PAUSE_SECONDS)
            self._wake.wait(pause)

    def _attempt(self) -> str | None:
        try:
            self.replay.work()
        except (TrackingUnreachable, InputError) as error:
            return str(error)
        except Exception as error:
            # The edge of a thread: tracking must not end a run, whatever a store or its driver raises.
            self.replay.tracker = None
            return reason(error, tracking_uri(self.replay.config))
        return None
