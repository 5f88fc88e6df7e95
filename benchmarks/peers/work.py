"""The work that every system is given, and how its process talks to the one that measures.

A system's module has ``run(connection, work)``. It gets ready, calls `Reporter.start`, which waits until every worker
is ready, and `Reporter.step` after each step until it is ended from outside.
"""

import os
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

STEPS_WITHOUT_END = 10_000


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one worker does again and again.

    Attributes:
        model: directory of the policy.
        num_prompts: per step.
        group_size: responses per prompt.
        response_tokens: of every response; none ends earlier.
        num_updates: optimizer steps per step, on disjoint minibatches.
        num_threads: of the worker.
        folder: for what the worker writes.
        engine: trl_grpo: ``vllm`` (colocated) or ``own``.
        overrides: ours: further settings ``key=value``.
    """

    model: Path
    num_prompts: int
    group_size: int
    response_tokens: int
    num_updates: int
    num_threads: int
    folder: Path
    engine: str = "vllm"
    overrides: tuple[str, ...] = ()

    @property
    def num_sequences(self) -> int:
        """Responses per step."""
        return self.num_prompts * self.group_size

    @property
    def num_tokens(self) -> int:
        """Response tokens per step."""
        return self.num_sequences * self.response_tokens


class Reporter:
    """Tells the measuring process when steps end."""

    def __init__(self, connection: Connection) -> None:
        """Take the pipe to it."""
        self.connection = connection

    def start(self) -> None:
        """Wait until every worker is ready."""
        self.connection.send("ready")
        self.connection.recv()
        self.wall, self.processor = time.perf_counter(), time.process_time()

    def step(self, stages: Mapping[str, float] | None = None) -> None:
        """Report a step.

        Args:
            stages: seconds of its stages, where they are known.
        """
        wall, processor = time.perf_counter(), time.process_time()
        self.connection.send(
            {"wall": wall - self.wall, "processor": processor - self.processor, "stages": dict(stages or {})}
        )
        self.wall, self.processor = wall, processor


def enter(work: Work) -> None:
    """Set the process up as every worker: threads, where its chatter goes.

    Call it before torch is imported.
    """
    os.environ |= {"OMP_NUM_THREADS": str(work.num_threads), "TOKENIZERS_PARALLELISM": "false"}
    work.folder.mkdir(parents=True, exist_ok=True)
    log = os.open(work.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    from pipelines.session import set_threads
    from pipelines.worker import die_with_parent

    die_with_parent()
    set_threads(work.num_threads)


def share_of_digits(text: str) -> float:
    """Reward text for its digits: every response is graded, and a group hardly ever agrees."""
    return sum(letter.isdigit() for letter in text) / max(len(text), 1)


def prompts(count: int) -> list[str]:
    """Draw prompts of the miniature's task."""
    from trm_repro.tasks import ChainArithmetic

    return [problem.prompt for problem in ChainArithmetic(8, 14).sample(count, random.Random(0))]
