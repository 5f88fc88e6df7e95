"""One worker process of `trm-repro reproduce`: an engine of its own, runs one after another.

It writes to the run's folder only. The parent hears through a pipe when a job has ended.
"""

import multiprocessing
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from trm_repro.config import RunConfig
from trm_repro.errors import FaultError, InputError
from trm_repro.parent_death import end_with_parent


@dataclass(frozen=True, kw_only=True)
class Job:
    """One thing for a worker to do.

    Attributes:
        kind: warm_start trains the seed's starting policy, train the run itself; lengths measures rejection against
            length on the run's checkpoint.
        config: the run.
    """

    kind: str
    config: RunConfig


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended: done, or why not in one line."""

    error: str | None = None


def worker_main(connection: Connection, log_file: Path) -> None:
    """Do jobs until one fails or the parent closes the pipe.

    Args:
        connection: receives jobs, sends outcomes.
        log_file: where everything printed goes.
    """
    die_with_parent()
    _redirect_output(log_file)
    session = None
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            session = _do(job, session)
            connection.send(Outcome())
        except (FaultError, InputError) as error:
            connection.send(Outcome(error=str(error)))
            return  # the engine may be in the middle of something; the parent starts another process
        except Exception as error:
            # The edge of a process: the parent gets one line, the log the rest.
            traceback.print_exc()
            connection.send(Outcome(error=f"{type(error).__name__}: {error} (see {log_file})"))
            return


def _do(job: Job, session: object) -> object:
    from pipelines.launch import train_ranks
    from pipelines.lengths import seed_folder, write_length_table
    from pipelines.run_directory import RunDirectory
    from pipelines.session import Session, open_session, set_threads
    from pipelines.training import reference_updates, starting_policy, train_run

    set_threads(job.config.num_threads)
    model_path = starting_policy(job.config)
    if job.kind == "warm_start":
        return session
    if job.kind == "lengths":
        write_length_table(job.config, RunDirectory(job.config).checkpoint, seed_folder(job.config))
        return None
    reference = reference_updates(job.config)
    if job.config.trainer.is_sharded:
        train_ranks(job.config, model_path, reference)
        return None
    if session is None:
        session = open_session(job.config, model_path)
    assert isinstance(session, Session)
    train_run(job.config, session, model_path, reference)
    return session


def die_with_parent() -> None:
    """End when the parent does, however it ends: two generations of workers must never write to one run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    end_with_parent(parent.pid)


def _redirect_output(log_file: Path) -> None:
    log_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
