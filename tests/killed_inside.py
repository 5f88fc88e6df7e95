"""A run in a process of its own that is killed inside a stage of its choice, at a moment drawn beforehand.

Processes are forked from one that has imported everything, so that a start costs what the run costs.
"""

import functools
import importlib
import json
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STAGES = {
    "opening the run in MLflow": ("pipelines.tracking.tracker", "Tracker", "open_run"),
    "weight sync": ("trm_repro.rollout.synced_engine", "SyncedEngine", "sync"),
    "rollout": ("trm_repro.rollout.sampler", "RolloutSampler", "sample_step"),
    "mask": ("trm_repro.module", "TRMModule", "measure"),
    "optimizer step": ("trm_repro.module", "TRMModule", "step_optimizer"),
    "evaluation": ("pipelines.recorder", "StepRecorder", "evaluate"),
    "checkpoint": ("pipelines.recorder", "StepRecorder", "save_checkpoint"),
    "MLflow write": ("mlflow", "MlflowClient", "log_batch"),
    "final policy": ("pipelines.training", "", "save_policy"),
}
"""The function whose call is the stage: module, class or nothing, name."""
PRELOADED = ("pipelines.train", "pipelines.training", "pipelines.tracking", "trm_repro.rollout.transformers_engine")
REPLAY_SECONDS = 0.1
"""Between two looks at the spool; in a run of seconds the usual pause would leave nothing to interrupt."""


@dataclass(frozen=True)
class Kill:
    """When to die: in the call of a stage that follows ``skip`` others, ``seconds`` after it began."""

    stage: str
    skip: int
    seconds: float


@dataclass
class Stages:
    """The stages of this process: how long each took, and the kill inside one of them."""

    kill: Kill | None
    report: Path
    entered: threading.Event = field(default_factory=threading.Event)
    num_calls: int = 0
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def inside(self, stage: str) -> Iterator[None]:
        """Be in a stage; one that takes less time than was drawn ends with the kill."""
        is_last = False
        if self.kill is not None and self.kill.stage == stage:
            self.num_calls += 1
            is_last = self.num_calls > self.kill.skip
        if is_last:
            self.entered.set()
        began = time.perf_counter()
        yield
        self.seconds[stage].append(time.perf_counter() - began)
        if is_last:
            self.die()

    def wait_and_kill(self) -> None:
        """Kill this process when it has been in the chosen stage for as long as was drawn."""
        assert self.kill is not None
        self.entered.wait()
        time.sleep(self.kill.seconds)
        self.die()

    def die(self) -> None:
        """Note the stage, and be killed."""
        assert self.kill is not None
        self.report.write_text(self.kill.stage)
        os.kill(os.getpid(), signal.SIGKILL)


def start(words: list[str], log_file: Path, report: Path, kill: Kill | None = None) -> Any:
    """Start `trm-repro` with these words in a forked process.

    Args:
        words: of the command line.
        log_file: where everything printed goes.
        report: written at the end: the stage of the kill, or the usual seconds of each stage.
        kill: when to die, or None to live.

    Returns:
        The process.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, __name__])
    process = context.Process(target=_run, args=(words, log_file, report, kill))
    process.start()
    return process


def _run(words: list[str], log_file: Path, report: Path, kill: Kill | None) -> None:
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.setswitchinterval(0.0002)
    stages = Stages(kill, report)
    for stage, (module, owner, name) in STAGES.items():
        _mark(stages, stage, module, owner, name)
    if kill is not None:
        threading.Thread(target=stages.wait_and_kill, daemon=True).start()
    background = importlib.import_module("pipelines.tracking.background")
    background.REPLAY_SECONDS = REPLAY_SECONDS  # type: ignore[attr-defined]
    code = importlib.import_module("pipelines.cli").main(words)
    usual = {stage: statistics.median(seconds) for stage, seconds in stages.seconds.items()}
    report.write_text(json.dumps(usual))
    sys.exit(code)


def _mark(stages: Stages, stage: str, module: str, owner: str, name: str) -> None:
    holder = importlib.import_module(module)
    holder = getattr(holder, owner) if owner else holder
    original: Callable[..., Any] = getattr(holder, name)

    @functools.wraps(original)
    def marked(*arguments: Any, **named: Any) -> Any:
        with stages.inside(stage):
            return original(*arguments, **named)

    setattr(holder, name, marked)
