"""The plan of a study: its cells, their arms, seeds, settings and hypotheses, read from YAML."""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from evaluation.hypotheses import OUTCOME_DEFINITIONS, Hypothesis, HypothesisPart
from pipelines.run_directory import RunDirectory
from trm_repro.config import load_arm
from trm_repro.config_sections import require_plain_name
from trm_repro.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One experiment of a study.

    Attributes:
        name: names its folder.
        stage: screen, on exploration seeds; confirm, on fresh seeds, of hypotheses written down before.
        settings: ``key=value`` of the configuration, those that all cells of the study share among them.
        arms: its arms.
        seeds: its seeds.
        hypotheses: what is expected, in words and numbers, before the cell is run.
    """

    name: str
    stage: Literal["screen", "confirm"]
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: tuple[str, ...] = ()
    hypotheses: tuple[Hypothesis, ...] = field(default=())


OWN_KEYS = ("arm", "seed", "name", "output.dir")
"""What a cell sets by its arms, seeds and name, as it sets all of `reproduce`; no setting of it may."""


def read_study(file: Path) -> list[Cell]:
    """Read a study.

    Args:
        file: YAML with ``settings`` that all cells share and a list of ``cells``.

    Returns:
        The cells.

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
    if not text["cells"]:
        raise InputError(f"{file}: has no cells; expected at least one")
    shared = _settings(text.get("settings", []), f"{file}: settings")
    cells = [_cell(entry, shared, f"{file}: cell {number}") for number, entry in enumerate(text["cells"], start=1)]
    names = [cell.name for cell in cells]
    if len(set(names)) < len(names):
        raise InputError(f"{file}: two cells have the same name")
    for number, cell in enumerate(cells, start=1):
        _check_arms(cell, {other.name: other for other in cells}, f"{file}: cell {number}")
    return cells


def cell_settings(cell: Cell, folder: Path) -> list[str]:
    """List the settings of a cell's runs, its folder and experiment among them."""
    return [*cell.settings, f"name={cell.name}", f"output.dir={folder / cell.name}"]


def cell_command(cell: Cell, folder: Path) -> list[str]:
    """Write the command of a cell; what is expected of it goes along and is recorded before its first step."""
    arms, seeds = ", ".join(cell.arms), ", ".join(map(str, cell.seeds))
    settings = [*cell_settings(cell, folder), f"reproduce.arms=[{arms}]", f"reproduce.seeds=[{seeds}]"]
    if cell.hypotheses:
        settings.append(f"reproduce.hypotheses={json.dumps(recorded_texts(cell))}")
    return [sys.executable, "-m", "pipelines.cli", "reproduce", *settings]


def recorded_texts(cell: Cell) -> list[str]:
    """List what is recorded with a cell: its hypotheses, each with its test, then how its outcomes are defined."""
    definitions = [f"definition: {name}: {text}" for name, text in OUTCOME_DEFINITIONS.items()]
    return [hypothesis.describe() for hypothesis in cell.hypotheses] + definitions


def cell_runs(cell: Cell, folder: Path) -> Iterator[RunDirectory]:
    """Name the runs of a cell.

    Raises:
        InputError: if a setting or an arm is wrong.
    """
    settings = cell_settings(cell, folder)
    for arm in cell.arms:
        for seed in cell.seeds:
            yield RunDirectory(load_arm(arm, [], [*settings, f"seed={seed}"]))


def _cell(entry: Any, shared: tuple[str, ...], where: str) -> Cell:  # noqa: ANN401 - whatever YAML holds
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
    arms = _texts(entry["arms"], f"{where}: arms")
    for key, values in (("arms", arms), ("seeds", seeds)):
        if not values or len(set(values)) < len(values):
            raise InputError(f"{where}: {key} must be a list of at least one, each once, got {list(values)}")
    hypotheses = entry.get("hypotheses", [])
    if not isinstance(hypotheses, list):
        raise InputError(f"{where}: hypotheses must be a list, got {str(hypotheses)[:100]}")
    return Cell(
        name=str(entry["name"]),
        stage=entry["stage"],
        arms=arms,
        seeds=tuple(seeds),
        settings=shared + _settings(entry.get("settings", []), f"{where}: settings"),
        hypotheses=tuple(
            _hypothesis(item, f"{where}: hypothesis {number}") for number, item in enumerate(hypotheses, start=1)
        ),
    )


def _check_arms(cell: Cell, cells: Mapping[str, Cell], where: str) -> None:
    """Refuse hypotheses about arms that do not run, or not with the cell's seeds."""
    for number, hypothesis in enumerate(cell.hypotheses, start=1):
        here = f"{where}: hypothesis {number}"
        for part in hypothesis.parts:
            name = part.against_cell or cell.name
            if name not in cells:
                raise InputError(f"{here}: there is no cell {name}; the cells are {', '.join(cells)}")
            other = cells[name]
            for arm, arms in ((part.arm, cell.arms), (part.against, other.arms)):
                if arm is not None and arm not in arms:
                    raise InputError(f"{here}: {arm} is not among the cell's arms: {', '.join(arms)}")
            if not set(cell.seeds) & set(other.seeds):
                raise InputError(f"{here}: has no seed in common with {name}; arms are compared seed by seed")


def _hypothesis(entry: Any, where: str) -> Hypothesis:  # noqa: ANN401 - whatever YAML holds
    is_whole = isinstance(entry, dict) and set(entry) == {"text", "parts"} and isinstance(entry["text"], str)
    if not is_whole or not isinstance(entry["parts"], list) or not entry["parts"]:
        raise InputError(f"{where}: expected a text and a list of parts, got {str(entry)[:100]}")
    return Hypothesis(text=entry["text"], parts=tuple(_part(part, where) for part in entry["parts"]))


def _part(entry: Any, where: str) -> HypothesisPart:  # noqa: ANN401 - whatever YAML holds
    known = set(HypothesisPart.__dataclass_fields__)
    if not isinstance(entry, dict) or not {"quantity", "arm"} <= set(entry) <= known:
        raise InputError(f"{where}: a part has the keys {', '.join(sorted(known))}, got {str(entry)[:100]}")
    texts = [entry["quantity"], entry["arm"], entry.get("against", ""), entry.get("against_cell", "")]
    threshold = entry.get("threshold", 0)
    if not all(isinstance(text, str) for text in texts) or type(threshold) not in (int, float):
        raise InputError(f"{where}: quantity, arms and cell are texts, threshold a number, got {str(entry)[:100]}")
    if not isinstance(entry.get("every_seed", False), bool):
        raise InputError(f"{where}: every_seed must be true or false, got {entry['every_seed']!r}")
    try:
        return HypothesisPart(**entry)
    except (ValueError, OverflowError) as error:
        raise InputError(f"{where}: {error}") from None


def _settings(value: Any, where: str) -> tuple[str, ...]:  # noqa: ANN401 - whatever YAML holds
    settings = _texts(value, where)
    for setting in settings:
        key = setting.partition("=")[0].strip()
        if key in OWN_KEYS or key.split(".")[0] == "reproduce":
            raise InputError(f"{where}: {key} is not set here; a cell's name, arms, seeds and hypotheses set it")
    return settings


def _texts(value: Any, where: str) -> tuple[str, ...]:  # noqa: ANN401 - whatever YAML holds
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InputError(f"{where} must be a list of texts, got {str(value)[:100]}")
    return tuple(value)
