"""`trm-repro compare RUN RUN ...`: curves of runs side by side in the terminal, from any MLflow store."""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trm_repro.config import RunConfig
from trm_repro.errors import InputError

if TYPE_CHECKING:
    from pipelines.tracking import TrackedRun

HELP = "print runs' curves side by side, with start, end and best"
DEFAULT_METRICS = (
    "score/greedy",
    "score/avg_at_k",
    "rollout/reward_mean",
    "mask/kept_sequence_fraction",
    "divergence/ppl_gap",
    "divergence/kl_max",
    "policy/entropy_mean",
    "time/step_seconds",
)
HIGHER_IS_BETTER = ("score/", "rollout/reward", "throughput/")
LOWER_IS_BETTER = ("divergence/", "time/")
BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN_BLOCKS = "_.-~=+*#"
CURVE_WIDTH = 24

Curve = list[tuple[int, float]]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run id, ARM/seed_N, or ARM for the mean over its seeds")
    parser.add_argument("--uri", help="tracking URI (default: the miniature's store)")
    parser.add_argument("--experiment", default=RunConfig().tracking.experiment, help="MLflow experiment")
    parser.add_argument("--metric", action="append", metavar="NAME", help="metric to show; may be given again")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from pipelines.tracking import check_store, read_histories, select_runs, tracking_uri

    uri = arguments.uri or tracking_uri(RunConfig())
    check_store(uri)  # SQLite would make an empty one
    runs = select_runs(uri, arguments.experiment, arguments.runs)
    there = {name for run in runs for name in run.metrics}
    unknown = [name for name in arguments.metric or [] if name not in there]
    if unknown:
        raise InputError(f"no run has the metric {unknown[0]!r}; they have {', '.join(sorted(there)) or 'none'}")
    metrics = arguments.metric or [name for name in DEFAULT_METRICS if name in there] or sorted(there)
    curves = [read_histories(uri, run, metrics) for run in runs]
    sys.stdout.write(comparison(runs, curves, metrics, blocks=_printable_blocks()))
    return 0


def comparison(
    runs: "Sequence[TrackedRun]", curves: Sequence[dict[str, Curve]], metrics: Sequence[str], *, blocks: str = BLOCKS
) -> str:
    """Write one table a metric, one row a run; the curves of a table share their axes.

    Args:
        runs: to compare.
        curves: of each run, by metric.
        metrics: in the order to show.
        blocks: characters of a curve, low to high.

    Returns:
        Lines of text.
    """
    labels = [f"{run.name} ({run.run_id[:8]})" + ("" if run.status == "FINISHED" else f" {run.status}") for run in runs]
    width = max(map(len, labels))
    lines: list[str] = []
    for metric in metrics:
        best = "highest" if metric.startswith(HIGHER_IS_BETTER) else "lowest"
        has_best = metric.startswith((*HIGHER_IS_BETTER, *LOWER_IS_BETTER))
        shown = [curve.get(metric, []) for curve in curves]
        points = [point for curve in shown for point in curve if math.isfinite(point[1])]
        title = f"{metric}, steps {min(p[0] for p in points)} to {max(p[0] for p in points)}" if points else metric
        lines += [title, f"  {'run':{width}}  {'start':>9}  {'end':>9}  {best if has_best else '':>9}  curve"]
        for label, curve in zip(labels, shown, strict=True):
            finite = [value for _, value in curve if math.isfinite(value)]
            extreme = (max if best == "highest" else min)(finite) if finite and has_best else None
            start, end = (curve[0][1], curve[-1][1]) if curve else (None, None)
            numbers = "  ".join(f"{_number(value):>9}" for value in (start, end, extreme))
            lines.append(f"  {label:{width}}  {numbers}  {sparkline(curve, points, blocks)}".rstrip())
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def sparkline(curve: Curve, axes: Sequence[tuple[int, float]], blocks: str = BLOCKS, width: int = CURVE_WIDTH) -> str:
    """Draw a curve as a line of characters.

    Args:
        curve: (step, value) by step.
        axes: points whose ranges are the axes.
        blocks: characters, low to high.
        width: in characters, unless there are fewer steps.

    Returns:
        For each stretch of steps the mean of its values, or what was there before; ``!`` where one is not finite.
    """
    if not curve or not axes:
        return ""
    steps, values = [point[0] for point in axes], [point[1] for point in axes]
    first, num_steps = min(steps), max(steps) - min(steps) + 1
    low, high = min(values), max(values)
    width = min(width, num_steps)
    cells: list[list[float]] = [[] for _ in range(width)]
    for step, value in curve:
        if first <= step < first + num_steps:
            cells[(step - first) * width // num_steps].append(value)
    drawn = ""
    for cell in cells[: (curve[-1][0] - first) * width // num_steps + 1]:  # a curve ends where it ends
        drawn += _cell(cell, low, high, blocks) if cell else drawn[-1:] or " "
    return drawn


def _cell(values: list[float], low: float, high: float, blocks: str) -> str:
    if not all(map(math.isfinite, values)):
        return "!"
    share = 0.0 if high == low else (sum(values) / len(values) - low) / (high - low)
    return blocks[min(int(share * len(blocks)), len(blocks) - 1)]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _printable_blocks() -> str:
    try:
        BLOCKS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return PLAIN_BLOCKS
    return BLOCKS
