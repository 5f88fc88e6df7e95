"""`trm-repro reproduce`: every arm with every seed, then figures and report; goes on where it was.

Worker processes train; only a thread of this process writes to MLflow.
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from pipelines.arguments import add_config_arguments, split_settings
from pipelines.lengths import join_length_tables, seed_folder
from pipelines.progress import progress_bar
from pipelines.run_directory import RunDirectory
from pipelines.worker import Job, Outcome, worker_main
from trm_repro.config import RunConfig, load_arm, load_config
from trm_repro.errors import InputError
from trm_repro.file_locks import file_lock

if TYPE_CHECKING:
    from pipelines.tracking import BackgroundTracker, ExperimentReplay

HELP = "run every arm with every seed, then draw the figures and write the report"
POLL_SECONDS = 2.0
GRACE_SECONDS = 20.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from pipelines.tracking import BackgroundTracker, ExperimentReplay

    files, overrides = split_settings(arguments.settings)
    config = load_config(files, overrides)
    directories = plan_runs(config, files, overrides)
    folder = Path(config.output.dir)
    if config.policy.path is not None:
        from trm_repro.model_files import check_model_files

        check_model_files(config.policy.path)  # a wrong one is named before anything is written
    with file_lock(folder / "reproduce.lock", busy="another reproduce is running there; wait for it or stop it"):
        for directory in directories:
            directory.prepare()
        replay = ExperimentReplay(config, is_experiment=True, seeds=config.reproduce.seeds)
        with BackgroundTracker(replay, say=lambda line: tqdm.write(line, file=sys.stderr)) as tracking:
            failures = Pool(config, tracking, Schedule(directories)).run()
        for name, error in failures.items():
            sys.stderr.write(f"trm-repro: stopped: {name}: {error}\n")
        status = "FAILED" if failures else "FINISHED"
        join_length_tables(folder / "figures")
        conclude(replay, status, missing=tracking.failure, has_report=len(failures) < len(directories))
    return 1 if failures else 0


def conclude(replay: "ExperimentReplay", status: str, *, missing: str | None, has_report: bool) -> None:
    """Write the report and give the experiment its end in MLflow; without MLflow, say how to do both later.

    Args:
        replay: has brought MLflow up to date, unless something is missing.
        status: FINISHED or FAILED.
        missing: why MLflow does not hold everything, or None.
        has_report: whether there is anything to report.

    Raises:
        InputError: if the report cannot be written though MLflow answers.
    """
    from pipelines.report import REPORT_FILE, write_report
    from pipelines.tracking import TrackingUnreachable, how_to_browse, tracking_uri

    folder = Path(replay.config.output.dir)
    for name, why in replay.damaged.items():
        sys.stderr.write(f"trm-repro: {name} is not in MLflow: {why}\n")
    files: list[Path] = []
    if missing is None:
        try:
            files = _report_or_wait(replay, write_report) if has_report else []
            replay.close(status, files)
        except TrackingUnreachable as error:
            missing = str(error)
    if missing is not None:
        sys.stdout.write(
            f"MLflow cannot be reached ({missing}), so the report, which reads it, is not written. Every point is in "
            f"{folder}/*/seed_*/metrics.jsonl. When MLflow is back: trm-repro sync {folder}\n"
        )
        return
    if files:
        sys.stdout.write((folder / "summary.txt").read_text(encoding="utf-8"))
        sys.stdout.write(f"report: {(folder / REPORT_FILE).resolve().as_uri()}\n")
    sys.stdout.write(f"MLflow: {how_to_browse(tracking_uri(replay.config))}\n")


def _report_or_wait(replay: "ExperimentReplay", write_report: "Callable[[RunConfig], list[Path]]") -> list[Path]:
    try:
        return write_report(replay.config)
    except InputError:
        replay.work()  # says so where MLflow has gone meanwhile
        raise


def plan_runs(config: RunConfig, files: list[str], overrides: list[str]) -> list[RunDirectory]:
    """Load the configuration of each run, arm by arm and seed by seed.

    Args:
        config: names arms and seeds.
        files: configuration files, merged before the arm's.
        overrides: ``key=value``, merged last.

    Returns:
        The runs' folders.

    Raises:
        InputError: if an arm is unknown, or the arm that a control copies is not among the arms.
    """
    plain = [override for override in overrides if override.partition("=")[0] not in ("seed", "arm")]
    runs = [
        RunDirectory(load_arm(arm, files, [*plain, f"seed={seed}"]))
        for seed in config.reproduce.seeds
        for arm in config.reproduce.arms
    ]
    for directory in runs:
        reference = directory.config.mask.reference_arm
        if reference is not None and reference not in config.reproduce.arms:
            raise InputError(
                f"arm {directory.config.arm} copies the rate of {reference}; add {reference} to reproduce.arms"
            )
    return runs


class Schedule:
    """Which job can start next: warm starts first, a control after the arm it copies."""

    def __init__(self, directories: list[RunDirectory]) -> None:
        """Take stock of what is done already."""
        self.pending = [directory for directory in directories if not directory.is_finished]
        self.all = directories
        self.finished = {directory.name for directory in directories if directory.is_finished}
        first_arm = directories[0].config.arm
        self.lengths_of = [  # of each seed its first arm
            directory
            for directory in directories
            if directory.config.arm == first_arm
            and directory.config.evaluation.length_operands
            and not (seed_folder(directory.config) / "table_2.md").is_file()
        ]
        self.warm: set[int] = set()
        self.warming: set[int] = set()

    def next_job(self) -> tuple[Job, RunDirectory] | None:
        """Take the next job that can start now; None when nothing can, or nothing is left."""
        for directory in self.pending:
            seed = directory.config.seed
            if seed not in self.warm | self.warming and directory.config.policy.path is None:
                self.warming.add(seed)
                return Job(kind="warm_start", config=directory.config), directory
        for directory in self.pending:
            config = directory.config
            reference = config.mask.reference_arm
            waits = reference is not None and f"{reference}/seed_{config.seed}" not in self.finished
            if waits or (config.seed in self.warming):
                continue
            self.pending.remove(directory)
            return Job(kind="train", config=config), directory
        for directory in self.lengths_of if not self.pending else []:
            if directory.name in self.finished:
                self.lengths_of.remove(directory)
                return Job(kind="lengths", config=directory.config), directory
        return None

    def finish(self, job: Job, directory: RunDirectory) -> None:
        """Note that a job is done."""
        if job.kind == "warm_start":
            self.warming.discard(job.config.seed)
            self.warm.add(job.config.seed)
        elif job.kind == "train":
            self.finished.add(directory.name)

    def give_up(self, job: Job, directory: RunDirectory) -> list[RunDirectory]:
        """Note that a job cannot be done; returns the runs that therefore cannot either, itself first."""
        self.warming.discard(job.config.seed)
        lost = [directory]
        if job.kind == "lengths":
            return lost
        for other in list(self.pending):
            same_seed = other.config.seed == job.config.seed
            needs_it = job.kind == "warm_start" or other.config.mask.reference_arm == job.config.arm
            if same_seed and needs_it:
                self.pending.remove(other)
                if other is not directory:
                    lost.append(other)
        return lost


@dataclass
class Worker:
    """A worker process and what it is doing."""

    process: SpawnProcess
    connection: Connection
    job: Job | None = None
    directory: RunDirectory | None = None


class Pool:
    """Worker processes and a progress bar; says what MLflow should hold."""

    def __init__(self, config: RunConfig, tracking: "BackgroundTracker", schedule: Schedule) -> None:
        """Set up; processes start in `run`."""
        self.config = config
        self.tracking = tracking
        self.schedule = schedule
        self.failures: dict[str, str] = {}
        self.attempts: dict[str, int] = {}
        self.progress: dict[str, tuple[int, int]] = {}  # size of the spool when it was read, steps in it

    def run(self) -> dict[str, str]:
        """Work until nothing is left.

        Returns:
            Names of the runs that stopped, and why, in one line each.
        """
        total = sum(directory.config.num_steps for directory in self.schedule.all)
        for directory in self.schedule.all:
            if directory.is_finished:  # completes an interrupted replay
                self.tracking.track(directory, "FINISHED")
        bar: tqdm[Any]
        with progress_bar("reproduce", total, "step", smoothing=0.05) as bar:
            workers = [self._start(number) for number in range(self._num_workers())]
            try:
                while self._assign(workers):
                    busy = [worker for worker in workers if worker.job is not None]
                    ready = wait(
                        [worker.connection for worker in busy] + [worker.process.sentinel for worker in busy],
                        POLL_SECONDS,
                    )
                    for worker in busy:
                        if worker.connection in ready or worker.process.sentinel in ready:
                            self._collect(worker, workers, bar)
                    self._show(bar, workers)
            finally:
                for worker in workers:
                    self._stop(worker)
            self._show(bar, [])
        return self.failures

    def _num_workers(self) -> int:
        num_jobs = len(self.schedule.pending) + len(self.schedule.lengths_of)
        return min(self.config.reproduce.num_workers, num_jobs)

    def _start(self, number: int) -> Worker:
        os.environ["OMP_NUM_THREADS"] = str(self.config.num_threads)  # read once, when the process loads torch
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        log_file = Path(self.config.output.dir) / "logs" / f"worker_{number}.log"
        # A daemon could not start the ranks of a sharded policy; a worker ends with this process either way.
        is_daemon = not self.config.trainer.is_sharded
        process = context.Process(
            target=worker_main, args=(theirs, log_file), daemon=is_daemon, name=f"worker_{number}"
        )
        process.start()
        theirs.close()
        return Worker(process=process, connection=ours)

    def _stop(self, worker: Worker) -> None:
        """Let an idle worker end by itself, which gives back what it holds; kill a busy one."""
        worker.connection.close()
        if worker.job is None:
            worker.process.join(GRACE_SECONDS)
        worker.process.kill()

    def _assign(self, workers: list[Worker]) -> bool:
        """Give idle workers jobs; returns whether anything is being done."""
        for worker in workers:
            if worker.job is None and (assigned := self.schedule.next_job()) is not None:
                worker.job, worker.directory = assigned
                if worker.job.kind == "train":
                    self.tracking.track(worker.directory)
                worker.connection.send(worker.job)
        return any(worker.job is not None for worker in workers)

    def _collect(self, worker: Worker, workers: list[Worker], bar: "tqdm[Any]") -> None:
        """Hear how a job ended; a worker that died is started again and goes on at the last finished step."""
        assert worker.job is not None
        assert worker.directory is not None
        job, directory = worker.job, worker.directory
        try:
            outcome = worker.connection.recv() if worker.connection.poll() else None
        except (EOFError, OSError):
            outcome = None
        if outcome is None or outcome.error is not None:
            worker.process.join()
            number = workers.index(worker)
            worker = workers[number] = self._start(number)
        if outcome is None:
            attempts = self.attempts[directory.name] = self.attempts.get(directory.name, 0) + 1
            if attempts < self.config.reproduce.max_attempts:
                bar.write(f"a worker died during {directory.name}; going on from its last finished step")
                worker.job, worker.directory = job, directory
                worker.connection.send(job)
                return
            outcome = Outcome(error=f"its process died {attempts} times")
        worker.job = None
        if outcome.error is None:
            self.schedule.finish(job, directory)
        else:
            for lost in self.schedule.give_up(job, directory):
                reason = outcome.error if lost is directory else f"needs {directory.name}, which stopped"
                self.failures[lost.name] = reason
                bar.write(f"stopped: {lost.name}: {reason}")
        if job.kind == "train":
            self.tracking.track(directory, "FINISHED" if outcome.error is None else "FAILED")

    def _show(self, bar: "tqdm[Any]", workers: list[Worker]) -> None:
        from pipelines.spool import read_spool

        for directory in self.schedule.all:
            if directory.spool_file.is_file():
                size = directory.spool_file.stat().st_size
                if self.progress.get(directory.name, (0, 0))[0] != size:
                    num_steps = sum(entry.kind == "train" for entry in read_spool(directory.spool_file))
                    self.progress[directory.name] = (size, num_steps)
        done = sum(num_steps for _, num_steps in self.progress.values())
        doing = [
            f"{worker.job.kind.replace('_', ' ')} {worker.directory.name}"
            for worker in workers
            if worker.job is not None and worker.directory is not None
        ]
        bar.set_postfix_str("; ".join(doing), refresh=False)
        bar.update(done - bar.n)
