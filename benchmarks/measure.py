"""What every benchmark shares: medians, the memory of a process, tables, goals, and the machine.

A script prints its Markdown table and, with ``--json PATH``, writes ``{"benchmark", "rows", "goals"}``.
"""

import argparse
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Self

from tqdm import tqdm

from pipelines.environment import describe_environment
from pipelines.run_directory import write_atomically

Row = Mapping[str, object]
MIB = 2**20
PATIENCE = 60.0
"""Seconds in which a process may end by itself, an engine among them."""


def median_seconds(
    forms: Mapping[str, Callable[[], object]], *, repeats: int = 5, warm_up: int = 1
) -> dict[str, float]:
    """Time several forms of the same work in turn, so that a busy moment meets all of them.

    Args:
        forms: what to time, by name.
        repeats: rounds that count.
        warm_up: rounds before them that do not.

    Returns:
        The median wall time of each form, seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(warm_up + repeats):
        for name, form in forms.items():
            begin = time.perf_counter()
            form()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def resident(field: Literal["VmRSS", "VmHWM"]) -> int:
    """Read this process's resident memory, bytes: now (VmRSS), or the largest since it began or was reset (VmHWM)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.split(f"{field}:")[1].split()[0])


def reset_peak() -> None:
    """Let VmHWM begin again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def in_turn(
    function: Callable[[Any], Iterator[Any]], arguments: Sequence[object], rounds: int, *, desc: str
) -> list[list[Any]]:
    """Ask a generator for one value after another, in a fresh process for each argument, all of them once a round.

    A machine whose speed changes from minute to minute so meets all arguments alike.

    Args:
        function: found by name in the other processes.
        arguments: one a process; all processes live until the end.
        rounds: values to take of each.
        desc: names the progress bar.

    Returns:
        The values of each argument.

    Raises:
        SystemExit: if a process died.
    """
    with ExitStack() as stack:
        processes = [stack.enter_context(_Process(function, argument)) for argument in arguments]
        found: list[list[Any]] = [[] for _ in arguments]
        for _ in tqdm(range(rounds), desc=desc):
            for process, values in zip(processes, found, strict=True):
                values.append(process.next())
    return found


class _Process:
    """A fresh process that says what a generator finds, one value each time it is asked; ended with it."""

    def __init__(self, function: Callable[[Any], Iterator[Any]], argument: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.what = f"{function.__name__}({argument})"
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, function, argument))
        self.process.start()
        theirs.close()

    def next(self) -> Any:  # noqa: ANN401
        try:
            self.connection.send("next")
            return self.connection.recv()
        except (EOFError, BrokenPipeError):
            self.process.join()
            raise SystemExit(f"{self.what}: the process ended with code {self.process.exitcode}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BrokenPipeError):
            self.connection.send("end")
        self.process.join(PATIENCE)
        self.process.kill()
        self.process.join()


def _serve(connection: Connection, function: Callable[[Any], Iterator[object]], argument: object) -> None:
    values = function(argument)
    while connection.recv() == "next":
        connection.send(next(values))


def goal(text: str, value: float, limit: float, direction: Literal["at_most", "at_least"]) -> dict[str, object]:
    """Compare a measurement with what it should be; NaN meets nothing."""
    is_met = value <= limit if direction == "at_most" else value >= limit
    return {"goal": text, "value": value, "limit": limit, "direction": direction, "met": bool(is_met)}


def markdown_table(rows: Sequence[Row]) -> str:
    """Write rows as a Markdown table; its columns are the keys of all rows, in the order they are met."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(column, "")) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def cell(value: object) -> str:
    """Write one value: whole numbers with separators, others with three digits that count."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def goal_rows(goals: Sequence[Row]) -> list[Row]:
    """Turn goals into rows of a table."""
    signs = {"at_most": "<=", "at_least": ">="}
    return [
        {
            "goal": found["goal"],
            "measured": found["value"],
            "wanted": f"{signs[str(found['direction'])]} {cell(found['limit'])}",
            "met": "yes" if found["met"] else "no",
        }
        for found in goals
    ]


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `python -m benchmarks` calls every script with."""
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write rows and goals there")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, about a minute; not for comparison")


def publish(
    name: str,
    rows: Sequence[Row],
    goals: Sequence[Row],
    path: Path | None,
    *,
    notes: Sequence[str] = (),
    skipped: str | None = None,
) -> None:
    """Print a benchmark's tables, and write them where a path is given.

    Args:
        name: of the benchmark.
        rows: what was measured.
        goals: as `goal` makes them.
        path: of the JSON file, or None.
        notes: lines that say under which settings.
        skipped: why nothing was measured, where nothing was.
    """
    parts = [*notes]
    parts += [markdown_table(rows)] if rows else []
    parts += [markdown_table(goal_rows(goals))] if goals else []
    parts += [f"not measured: {skipped}"] if skipped else []
    sys.stdout.write("\n\n".join(parts) + "\n")
    if path is not None:
        record: dict[str, object] = {"benchmark": name, "rows": list(rows), "goals": list(goals)}
        record |= {"notes": list(notes)} if notes else {}
        record |= {"skipped": skipped} if skipped else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(record, indent=2) + "\n")


def machine() -> dict[str, str]:
    """Describe the machine and the versions."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(": ")[2] for line in cpu if line.startswith("model name")), platform.processor())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": model,
        "usable cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory:.1f} GiB",
        **describe_environment(),
    }
