"""What the runs of a study did, as three CSV files: a row a run, a row a step, a row a size of problem."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.lengths import GATES
from pipelines.run_directory import RunDirectory
from pipelines.spool import SpoolEntry, read_spool
from pipelines.study_plan import Cell, cell_runs
from trm_repro.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

LENGTH_COLUMNS = (
    "cell",
    "seed",
    "num_operands",
    "num_sequences",
    "mean_length",
    "token_violation_fraction",
    "predicted_rejection",
    *GATES,
)
LARGEST_WHOLE = 2**62
"""No seed or count of these files is larger."""


def collect(cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Write runs.csv, points.csv and lengths.csv from what the runs left in the study's folder.

    Args:
        cells: of the study.
        folder: of the study; each cell has a folder there.

    Returns:
        The files written; none where the folder holds no run, so that what an earlier call wrote stays.
    """
    from evaluation.study_runs import POINT_COLUMNS, RUN_COLUMNS

    runs: list[list[object]] = []
    points: list[list[object]] = []
    lengths: list[list[object]] = []
    for cell in cells:
        for directory in cell_runs(cell, folder):
            if not directory.spool_file.is_file():
                continue
            entries = list(read_spool(directory.spool_file))
            runs.append(_run_row(cell, directory, entries))
            points += _point_rows(cell, directory, entries)
        lengths += _length_rows(cell, folder / cell.name / "figures" / "lengths")
    if not runs:
        return []
    return [
        _write(folder / "runs.csv", RUN_COLUMNS, runs),
        _write(folder / "points.csv", POINT_COLUMNS, points),
        _write(folder / "lengths.csv", LENGTH_COLUMNS, lengths),
    ]


def _run_row(cell: Cell, directory: RunDirectory, entries: Sequence[SpoolEntry]) -> list[object]:
    config = directory.config
    times = [entry.time for entry in entries]
    return [
        cell.name,
        cell.stage,
        config.arm,
        config.seed,
        max((entry.step for entry in entries), default=0),
        int(directory.is_finished),
        round(max(times) - min(times)) if times else 0,
        config.update.optimizer,
        f"{config.update.learning_rate:g}",
        config.rollout.staleness_steps,
        config.rollout.precision,
        config.task.max_operands,
        f"{config.update.max_gradient_norm:g}",
        config.update.num_updates_per_rollout * config.update.num_epochs,
        " ".join(cell.settings),
    ]


def _point_rows(cell: Cell, directory: RunDirectory, entries: Sequence[SpoolEntry]) -> Iterator[list[object]]:
    from evaluation.study_runs import CURVES

    steps: dict[int, dict[str, float]] = {}
    for entry in entries:
        steps.setdefault(entry.step, {}).update(entry.metrics)
    for step, metrics in sorted(steps.items()):
        values = [f"{metrics[name]:.5g}" if name in metrics else "" for name in CURVES]
        yield [cell.name, directory.config.arm, directory.config.seed, step, *values]


def _length_rows(cell: Cell, folder: Path) -> Iterator[list[object]]:
    from pipelines.lengths import read_length_rows

    for file in sorted(folder.glob("seed_*/table_2.json")):
        for row in read_length_rows(file):
            measured = [row.mean_length, row.token_violation_fraction, row.predicted_rejection]
            shares = [row.rejection.get(gate, float("nan")) for gate in GATES]
            values = [f"{value:.5g}" for value in (*measured, *shares)]
            yield [cell.name, row.seed, row.num_operands, row.num_sequences, *values]


def _write(file: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    partial = file.with_name(f"{file.name}.partial")
    with partial.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
    partial.replace(file)
    return file


def read_results(folder: Path) -> "tuple[pd.DataFrame, pd.DataFrame]":
    """Read runs.csv and points.csv.

    Args:
        folder: that holds them.

    Returns:
        The two frames.

    Raises:
        InputError: if a file is missing, cannot be read, or has other columns or values than `collect` writes.
    """
    from evaluation.study_runs import POINT_COLUMNS, RUN_COLUMNS

    texts = ("cell", "stage", "arm", "optimizer", "precision", "settings")
    runs = _read(folder / "runs.csv", RUN_COLUMNS, texts)
    for column, values in (("is_finished", [0, 1]), ("stage", ["screen", "confirm"])):
        wrong = runs[column][~runs[column].isin(values)]
        if len(wrong):
            wanted = " or ".join(map(str, values))
            raise InputError(
                f"{folder / 'runs.csv'}: {column} must be {wanted}, got {str(wrong.iloc[0])[:40]}; write it again with "
                "study --collect"
            )
    points = _read(folder / "points.csv", POINT_COLUMNS, texts)
    _require_once(folder / "runs.csv", runs, ["cell", "arm", "seed"])
    _require_once(folder / "points.csv", points, ["cell", "arm", "seed", "step"])
    return runs, points


def _require_once(file: Path, frame: "pd.DataFrame", keys: list[str]) -> None:
    again = frame[frame.duplicated(keys)]
    if len(again):
        which = ", ".join(f"{key} {again.iloc[0][key]}" for key in keys)
        raise InputError(f"{file}: has two rows of {which}; write it again with study --collect")


def read_lengths(folder: Path) -> "pd.DataFrame":
    """Read lengths.csv; see `read_results`."""
    return _read(folder / "lengths.csv", LENGTH_COLUMNS, ("cell",))


def _read(file: Path, columns: Sequence[str], texts: Sequence[str]) -> "pd.DataFrame":
    import pandas as pd

    if not file.is_file():
        raise InputError(f"{file}: no such file; trm-repro study --collect writes it")
    try:
        frame = pd.read_csv(file, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read as CSV ({str(error).splitlines()[0]})") from None
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise InputError(f"{file}: has no column {missing[0]!r}; write it again with study --collect")
    whole = ("seed", "step", "num_steps", "is_finished", "staleness_steps", "max_operands", "num_updates_per_rollout")
    for column in columns:
        if column in texts:
            continue
        try:
            frame[column] = pd.to_numeric(frame[column].replace("", float("nan")))
            if column in whole:
                if not (frame[column].abs().astype(float) < LARGEST_WHOLE).all() or (frame[column] % 1 != 0).any():
                    raise ValueError("one is missing, too large or not whole")
                frame[column] = frame[column].astype(int)
        except (ValueError, TypeError, OverflowError) as error:
            numbers = "whole numbers" if column in whole else "numbers"
            raise InputError(f"{file}: column {column} must hold {numbers} ({error})") from None
    return frame
