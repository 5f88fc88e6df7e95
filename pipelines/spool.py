"""The spool: a run's metrics as lines of JSON on disk, the only thing a training process writes them to.

MLflow is filled from it by `pipelines.tracking`, so that tracking can fail without stopping a run.
"""

import errno
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trm_repro.errors import InputError


@dataclass(frozen=True, kw_only=True)
class SpoolEntry:
    """What one step (kind train) or one evaluation (kind evaluate) measured.

    Attributes:
        step: number of training steps done.
        kind: train or evaluate.
        time: Unix time, seconds.
        metrics: by name.
        num_kept: kept sequences of each update of the step.
        rejected_lengths: response lengths of the rejected sequences of each update, tokens; None in spools without.
        problem_scores: of an evaluation: by name, the score of each held-out problem, in the order of the problems.
        spans: (stage, begin, end) in Unix time, seconds.
        profiles: expected divergence by position: mean_tv and mean_kl, one value for each response position.
    """

    step: int
    kind: str
    time: float
    metrics: dict[str, float]
    num_kept: list[int] = field(default_factory=list)
    rejected_lengths: list[list[int]] | None = None
    problem_scores: dict[str, list[float]] = field(default_factory=dict)
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    profiles: dict[str, list[float]] = field(default_factory=dict)


class MetricsSpool:
    """Appends entries, one line each; an entry that is there already is not written twice."""

    def __init__(self, path: Path) -> None:
        """Open the spool, dropping a last line that was cut short."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = list(read_spool(path)) if path.is_file() else []
        self.written = {(entry.step, entry.kind) for entry in entries}
        if path.is_file():
            complete = path.read_bytes().rpartition(b"\n")[0]
            with path.open("r+b") as file:
                file.truncate(len(complete) + 1 if complete else 0)

    def append(self, entry: SpoolEntry) -> None:
        """Write an entry through to the disk, unless that step's is there from before an interruption."""
        if (entry.step, entry.kind) in self.written:
            return
        line = f"{json.dumps(asdict(entry))}\n".encode()
        with self.path.open("ab", buffering=0) as file:
            begin = file.tell()
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
                os.fsync(file.fileno())
            except OSError:
                file.truncate(begin)  # half a line would swallow the next one
                raise
        self.written.add((entry.step, entry.kind))


def read_spool(path: Path) -> Iterator[SpoolEntry]:
    """Read the complete lines of a spool.

    Args:
        path: a ``metrics.jsonl``.

    Yields:
        Its entries, in the order written; of a step and kind that is there twice, the first.

    Raises:
        InputError: if the file is missing or a complete line is no entry.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file; expected the metrics of a run")
    seen: set[tuple[int, str]] = set()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                entry = SpoolEntry(**json.loads(line))
                is_entry = _is_entry(entry)
            except (ValueError, TypeError, AttributeError, RecursionError):
                is_entry = False
            if not is_entry:
                raise InputError(f"{path}: line {number} is no metrics entry; the file is damaged")
            if (entry.step, entry.kind) not in seen:
                seen.add((entry.step, entry.kind))
                yield entry


def _is_entry(entry: SpoolEntry) -> bool:
    """Whether the values that JSON gave are of the kinds an entry has."""
    profiles = [*entry.profiles.values(), *entry.problem_scores.values()]
    return (
        type(entry.step) is int
        and entry.step >= 0
        and isinstance(entry.kind, str)
        and _are_numbers([entry.time, *entry.metrics.values()])
        and _are_numbers(entry.num_kept)
        and all(_are_numbers(lengths) for lengths in entry.rejected_lengths or [])
        and all(isinstance(values, list) and _are_numbers(values) for values in profiles)
        and all(isinstance(stage, str) and _are_numbers([begin, end]) for stage, begin, end in entry.spans)
    )


def _are_numbers(values: Sequence[object]) -> bool:
    return all(isinstance(value, float | int) and not isinstance(value, bool) for value in values)
