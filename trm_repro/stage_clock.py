"""Wall-clock time spent in each stage of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StageClock:
    """Adds up seconds per stage, and remembers when each began, until they are taken."""

    def __init__(self) -> None:
        """Start with no time spent."""
        self._seconds: dict[str, float] = {}
        self._spans: list[tuple[str, float, float]] = []

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Count the time inside the ``with`` block towards a stage."""
        wall, start = time.time(), time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self._seconds[stage] = self._seconds.get(stage, 0.0) + elapsed
            self._spans.append((stage, wall, wall + elapsed))

    def take(self) -> tuple[dict[str, float], list[tuple[str, float, float]]]:
        """Return seconds per stage and (stage, begin, end) spans in Unix time, and start again from nothing."""
        taken = self._seconds, self._spans
        self._seconds, self._spans = {}, []
        return taken
