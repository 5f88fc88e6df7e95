"""`trm-repro study`: several experiments, each a cell of arms, seeds and settings; goes on where it was.

Every cell is a `trm-repro reproduce` in a folder of its own under the study's. What each run did is written to one CSV
file, a row a run and a point, from which figures and tables are drawn without the runs themselves.
"""

import argparse
import csv
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from pipelines.run_directory import RunDirectory
from pipelines.spool import read_spool
from trm_repro.config import CONF_DIR, load_arm
from trm_repro.config_sections import require_plain_name
from trm_repro.errors import InputError

HELP = "run the cells of a study, each a reproduce of its own, and collect what every run did"
CURVES = (
    "score/greedy",
    "score/avg_at_k",
    "divergence/ppl_gap",
    "divergence/kl_mean",
    "divergence/kl_max",
    "mask/kept_sequence_fraction",
    "rollout/reward_mean",
    "rollout/response_length_mean",
    "policy/entropy_mean",
    "router/agreement_fraction",
    "train/gradient_norm_mean",
    "train/num_skipped_updates",
    "control/scale_mean",
    "control/num_undone_steps",
    "bounds/unified_sharp",
    "bounds/trivial",
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One experiment of a study.

    Attributes:
        name: names its folder.
        stage: screen, on exploration seeds; confirm, on fresh seeds, of hypotheses written down before.
        settings: ``key=value`` of the configuration.
        arms: its arms.
        seeds: its seeds.
        hypotheses: what is expected, in words, before the cell is run.
    """

    name: str
    stage: Literal["screen", "confirm"]
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: tuple[str, ...] = ()
    hypotheses: tuple[str, ...] = field(default=())


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("study", type=Path, nargs="?", default=CONF_DIR / "study.yaml", help="default: conf/study.yaml")
    parser.add_argument("--cells", nargs="+", default=[], metavar="CELL", help="only these cells")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="folder of the cells; default: runs/study")
    parser.add_argument("--collect", action="store_true", help="run nothing, only write what finished runs did")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    shared, cells = read_study(arguments.study)
    unknown = sorted(set(arguments.cells) - {cell.name for cell in cells})
    if unknown:
        raise InputError(f"{arguments.study} has no cell {unknown[0]!r}; it has {', '.join(c.name for c in cells)}")
    chosen = [cell for cell in cells if not arguments.cells or cell.name in arguments.cells]
    failed = []
    for cell in chosen:
        list(cell_runs(cell, shared, arguments.out))  # a wrong setting is named before anything is run
    for number, cell in enumerate([] if arguments.collect else chosen, start=1):
        sys.stderr.write(f"cell {number} of {len(chosen)}: {cell.name}\n")
        if subprocess.run(cell_command(cell, shared, arguments.out), check=False).returncode:
            failed.append(cell.name)
        collect(cells, shared, arguments.out)
    if arguments.collect:
        collect(cells, shared, arguments.out)
    sys.stdout.write(f"{arguments.out / 'runs.csv'}\n{arguments.out / 'points.csv'}\n")
    for name in failed:
        sys.stderr.write(f"trm-repro: cell {name} did not finish; the same command goes on with it\n")
    return 1 if failed else 0


def read_study(file: Path) -> tuple[tuple[str, ...], list[Cell]]:
    """Read a study.

    Args:
        file: YAML with ``settings`` that all cells share and a list of ``cells``.

    Returns:
        The shared settings and the cells.

    Raises:
        InputError: if the file cannot be read or has another form.
    """
    if not file.is_file():
        raise InputError(f"{file}: no such file; expected a study such as conf/study.yaml")
    try:
        text = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InputError(f"{file}: cannot be read as YAML ({str(error).splitlines()[0]})") from None
    if not isinstance(text, dict) or not isinstance(text.get("cells"), list) or set(text) - {"settings", "cells"}:
        raise InputError(f"{file}: expected the keys settings and cells, the second a list")
    cells = [_cell(entry, f"{file}: cell {number}") for number, entry in enumerate(text["cells"], start=1)]
    names = [cell.name for cell in cells]
    if len(set(names)) < len(names):
        raise InputError(f"{file}: two cells have the same name")
    return _texts(text.get("settings", []), f"{file}: settings"), cells


def _cell(entry: Any, where: str) -> Cell:  # noqa: ANN401 - whatever YAML holds
    known = set(Cell.__dataclass_fields__)
    if not isinstance(entry, dict) or not {"name", "stage", "arms", "seeds"} <= set(entry) <= known:
        raise InputError(f"{where}: expected the keys {', '.join(sorted(known))}, got {str(entry)[:100]}")
    seeds = entry["seeds"]
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise InputError(f"{where}: seeds must be a list of whole numbers >= 0, got {seeds!r}")
    if entry["stage"] not in ("screen", "confirm"):
        raise InputError(f"{where}: stage must be screen or confirm, got {entry['stage']!r}")
    if entry["stage"] == "confirm" and not entry.get("hypotheses"):
        raise InputError(f"{where}: a cell that confirms needs its hypotheses written down")
    try:
        require_plain_name("name", str(entry["name"]))
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None
    return Cell(
        name=str(entry["name"]),
        stage=entry["stage"],
        arms=_texts(entry["arms"], f"{where}: arms"),
        seeds=tuple(seeds),
        settings=_texts(entry.get("settings", []), f"{where}: settings"),
        hypotheses=_texts(entry.get("hypotheses", []), f"{where}: hypotheses"),
    )


def _texts(value: Any, where: str) -> tuple[str, ...]:  # noqa: ANN401 - whatever YAML holds
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InputError(f"{where} must be a list of texts, got {str(value)[:100]}")
    return tuple(value)


def cell_settings(cell: Cell, shared: tuple[str, ...], folder: Path) -> list[str]:
    """List the settings of a cell's runs, its folder and experiment among them."""
    return [*shared, *cell.settings, f"name={cell.name}", f"output.dir={folder / cell.name}"]


def cell_command(cell: Cell, shared: tuple[str, ...], folder: Path) -> list[str]:
    """Write the command of a cell."""
    arms, seeds = ", ".join(cell.arms), ", ".join(map(str, cell.seeds))
    settings = [*cell_settings(cell, shared, folder), f"reproduce.arms=[{arms}]", f"reproduce.seeds=[{seeds}]"]
    return [sys.executable, "-m", "pipelines.cli", "reproduce", *settings]


def cell_runs(cell: Cell, shared: tuple[str, ...], folder: Path) -> Iterator[RunDirectory]:
    """Name the runs of a cell.

    Raises:
        InputError: if a setting or an arm is wrong.
    """
    settings = cell_settings(cell, shared, folder)
    for arm in cell.arms:
        for seed in cell.seeds:
            yield RunDirectory(load_arm(arm, [], [*settings, f"seed={seed}"]))


def collect(cells: list[Cell], shared: tuple[str, ...], folder: Path) -> None:
    """Write runs.csv (a row a run) and points.csv (a row a measured value) from every run's spool."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        (folder / "runs.csv.partial").open("w", newline="", encoding="utf-8") as runs_file,
        (folder / "points.csv.partial").open("w", newline="", encoding="utf-8") as points_file,
    ):
        runs, points = csv.writer(runs_file), csv.writer(points_file)
        runs.writerow(["cell", "stage", "arm", "seed", "num_steps", "is_finished", "settings"])
        points.writerow(["cell", "arm", "seed", "metric", "step", "value"])
        for cell in cells:
            for directory in cell_runs(cell, shared, folder):
                if not directory.spool_file.is_file():
                    continue
                config, last = directory.config, 0
                for entry in read_spool(directory.spool_file):
                    last = max(last, entry.step)
                    for metric in CURVES:
                        if metric in entry.metrics:
                            value = f"{entry.metrics[metric]:.6g}"
                            points.writerow([cell.name, config.arm, config.seed, metric, entry.step, value])
                settings = " ".join([*shared, *cell.settings])
                runs.writerow(
                    [cell.name, cell.stage, config.arm, config.seed, last, int(directory.is_finished), settings]
                )
    for name in ("runs.csv", "points.csv"):
        (folder / f"{name}.partial").replace(folder / name)
