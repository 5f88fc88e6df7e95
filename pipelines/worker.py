"""One worker process of `trm-repro reproduce`: an engine of its own, runs one after another.

It writes to the run's folder only. The parent hears through a pipe when a job has ended.
"""

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from trm_repro.config import RunConfig
from trm_repro.errors import FaultError, InputError

if TYPE_CHECKING:
    from trm_repro.steps import ReferenceUpdate  # brings torch

PR_SET_PDEATHSIG = 1  # of Linux's prctl


@dataclass(frozen=True, kw_only=True)
class Job:
    """One thing for a worker to do.

    Attributes:
        kind: warm_start trains the seed's starting policy, train the run itself; lengths measures rejection against
            length on the run's checkpoint.
        config: the run.
        reference: for a control: what the arm that it copies did, by step, update by update.
    """

    kind: str
    config: RunConfig
    reference: "Mapping[int, Sequence[ReferenceUpdate]] | None" = None


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
    from pipelines.train import starting_policy, train_run

    set_threads(job.config.num_threads)
    model_path = starting_policy(job.config)
    if job.kind == "warm_start":
        return session
    if job.kind == "lengths":
        write_length_table(job.config, RunDirectory(job.config).checkpoint, seed_folder(job.config))
        return None
    if job.config.trainer.is_sharded:
        train_ranks(job.config, model_path, job.reference)
        return None
    if session is None:
        session = open_session(job.config, model_path)
    assert isinstance(session, Session)
    train_run(job.config, session, model_path, job.reference)
    return session


def die_with_parent() -> None:
    """End when the parent does, however it ends: two generations of workers must never write to one run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _redirect_output(log_file: Path) -> None:
    log_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
