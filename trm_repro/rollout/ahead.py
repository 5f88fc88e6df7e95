"""Rollouts of the next step, sampled in a thread while this step trains.

The engine is another process (placement server), so that the thread only waits for it. The engine has its weights
before the thread begins, and nothing else may sample until it has ended.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from trm_repro import ranks
from trm_repro.batch import Rollout


@dataclass(frozen=True, kw_only=True)
class Lag:
    """What sampling ahead saved, seconds.

    Attributes:
        sampling: the thread worked.
        waiting: training waited for it.
    """

    sampling: float = 0.0
    waiting: float = 0.0


class RolloutsAhead:
    """At most one step's rollouts in the making, on the first rank."""

    def __init__(self) -> None:
        """Begin with none."""
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollouts-ahead")
        self.step: int | None = None
        self.future: Future[tuple[list[Rollout], float]] | None = None
        self.has_taken = False
        self.waited = 0.0
        self.lag = Lag()
        """Of the step that was taken last."""

    def begin(self, step: int, sample: Callable[[], list[Rollout]]) -> None:
        """Sample a step's rollouts in the background; the other ranks only note that it is being done."""

        def timed() -> tuple[list[Rollout], float]:
            began = time.perf_counter()
            return sample(), time.perf_counter() - began

        self.step, self.waited = step, 0.0
        self.future = self.pool.submit(timed) if ranks.is_first() else None

    def wait(self) -> None:
        """Wait until the engine is free again."""
        if self.future is not None:
            began = time.perf_counter()
            self.future.result()
            self.waited += time.perf_counter() - began

    def take(self, step: int) -> list[Rollout] | None:
        """Take a step's rollouts.

        Args:
            step: index of the step.

        Returns:
            Its rollouts, on the first rank. `has_taken` says whether there were any in the making.
        """
        self.lag = Lag()
        self.has_taken = self.step == step
        rollouts = None
        if self.has_taken and self.future is not None:
            self.wait()
            rollouts, sampling = self.future.result()
            self.lag = Lag(sampling=sampling, waiting=self.waited)
        self.step = self.future = None
        return rollouts
