"""`trm-repro study --report`: figures and tables of a study from its CSV files alone.

A document has a line ``<!-- study: NAME -->`` and, below, ``<!-- end of study: NAME -->``; what is between them is
replaced by the table or figure of that name.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.environment import ROOT
from pipelines.run_directory import write_atomically
from pipelines.study_plan import Cell
from pipelines.study_results import read_lengths, read_results
from trm_repro.errors import InputError

if TYPE_CHECKING:
    from evaluation.document import Block
    from evaluation.outcomes import RunOutcome
    from evaluation.study_runs import StudyRun

EXPECTED_FILE = "expected.json"
SHIPPED_EXPECTATION = ROOT / "docs" / "study" / EXPECTED_FILE
UNCOMPARED = ("evaluation", "output", "tracking", "reproduce", "claims", "name", "arm", "seed", "num_threads")
"""Sections and keys in which the study's runs may differ from those of `reproduce` and still tell what to expect."""


def write_study_report(folder: Path, document: Path, *, cells: Sequence[Cell]) -> list[Path]:
    """Draw the figures, write expected.json and fill the document.

    Args:
        folder: holds runs.csv, points.csv and lengths.csv; figures go below it.
        document: Markdown with marked tables.
        cells: of the study, for their hypotheses.

    Returns:
        The files written.

    Raises:
        InputError: if a file is missing or not as expected, or the document marks a table that there is not.
    """
    from evaluation.study_figures import STUDY_FIGURES
    from evaluation.study_runs import study_runs
    from evaluation.study_tables import NOTHING
    from evaluation.themes import light_and_dark

    if not document.is_file():
        raise InputError(f"{document}: no such file; --document names a Markdown file with marked tables")
    try:
        text = document.read_text(encoding="utf-8")
    except ValueError as error:
        raise InputError(f"{document}: cannot be read as UTF-8 text ({error}); expected Markdown") from None
    runs = study_runs(*read_results(folder))
    drawn = {folder / "figures" / f"{name}.svg": draw(runs) for name, draw in STUDY_FIGURES.items()}
    pictures = {
        file.stem: NOTHING if figure is None else f"![{file.stem}]({os.path.relpath(file, document.parent)})"
        for file, figure in drawn.items()
    }
    filled = fill(text, study_tables(runs, cells, folder) | pictures, source=str(document))
    written = []
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for file, figure in drawn.items():
        if figure is None:
            file.unlink(missing_ok=True)
            continue
        partial = file.with_name(f"{file.name}.partial")
        partial.write_bytes(light_and_dark(figure)[0])
        partial.replace(file)
        written.append(file)
    write_atomically(folder / EXPECTED_FILE, json.dumps(shipped_runs(runs, cells), indent=1) + "\n")
    write_atomically(document, filled)
    return [*written, folder / EXPECTED_FILE, document]


def study_tables(runs: "Sequence[StudyRun]", cells: Sequence[Cell], folder: Path) -> dict[str, str]:
    """Make every table of a study, Markdown by name.

    Args:
        runs: finished ones.
        cells: of the study.
        folder: holds lengths.csv.

    Returns:
        Tables by the name that a document marks them with.
    """
    from evaluation import study_tables as tables
    from evaluation.hypotheses import hypotheses_table, judge_hypotheses
    from evaluation.study_runs import cells_of, outcomes_of
    from trm_repro.config_sections.claims import ClaimThresholds

    thresholds = ClaimThresholds()
    by_cell = cells_of(runs)
    outcomes = {name: outcomes_of(members) for name, members in by_cell.items()}
    verdicts = []
    for cell in cells:
        if cell.hypotheses:
            rows = judge_hypotheses(cell.hypotheses, outcomes.get(cell.name, []), thresholds, elsewhere=outcomes)
            verdicts.append(f"{cell.name}:\n\n{hypotheses_table(rows)}")
    return {
        "hypotheses": "\n\n".join(verdicts) or tables.NOTHING,
        "arms": tables.arms_table(runs, thresholds),
        "differences": tables.differences_table(runs, thresholds),
        "rates": tables.rates_table(runs),
        "prediction": tables.prediction_table(runs),
        "bound": tables.bound_table(runs),
        "horizon": tables.horizon_table(runs),
        "lengths": _lengths(folder),
    }


def _lengths(folder: Path) -> str:
    from evaluation.study_tables import NOTHING, markdown
    from pipelines.lengths import GATES

    if not (folder / "lengths.csv").is_file():
        return NOTHING
    heads = ["cell", "seed", "operands", "responses", "mean length", "tokens above", "1-(1-p)^T", *GATES]
    rows = [
        [
            row["cell"],
            str(row["seed"]),
            f"{row['num_operands']:.0f}",
            f"{row['num_sequences']:.0f}",
            f"{row['mean_length']:.0f}",
            f"{row['token_violation_fraction']:.4f}",
            *(f"{row[name]:.2f}" for name in ("predicted_rejection", *GATES)),
        ]
        for row in read_lengths(folder).to_dict("records")
    ]
    return markdown(heads, rows)


def fill(text: str, tables: Mapping[str, str], *, source: str) -> str:
    """Put each table between its marks.

    Args:
        text: the document.
        tables: by name.
        source: names the document in errors.

    Returns:
        The document with its marked tables replaced.

    Raises:
        InputError: if it marks no table, one that there is not or one twice, or the end of one is missing.
    """
    names = re.findall(r"^<!-- study: (.*) -->$", text, re.MULTILINE)
    if not names:
        raise InputError(f"{source}: marks no table; expected lines <!-- study: NAME -->, NAME of {', '.join(tables)}")
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{source}: marks the table {name!r} {names.count(name)} times; mark it once")
        if name not in tables:
            raise InputError(f"{source}: marks a table {name!r}; there are {', '.join(tables)}")
        begin, end = f"<!-- study: {name} -->", f"<!-- end of study: {name} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise InputError(f"{source}: the line {begin} has no line {end} below it")
        text = f"{before}{begin}\n\n{tables[name]}\n\n{end}{after}"
    return text


def shipped_runs(runs: "Sequence[StudyRun]", cells: Sequence[Cell]) -> dict[str, object]:
    """Collect the runs of confirmed cells at the default settings: what `reproduce` can be expected to show."""
    from evaluation.expected import studied_runs
    from evaluation.study_runs import outcomes_of
    from trm_repro.config import load_config

    default = comparable(asdict(load_config()))
    names = [
        cell.name
        for cell in cells
        if cell.stage == "confirm" and comparable(asdict(load_config([], cell.settings))) == default
    ]
    return {"cells": names, "runs": studied_runs(outcomes_of([run for run in runs if run.cell in names]))}


def expected_of(
    settings: Mapping[str, str], outcomes: "Sequence[RunOutcome]", file: Path = SHIPPED_EXPECTATION
) -> "list[Block]":
    """Set what the study saw at the default settings beside what runs at these settings did.

    Args:
        settings: of the runs, key to text, as recorded.
        outcomes: of the runs.
        file: an expected.json.

    Returns:
        Blocks of the report; none where the runs have other settings or the study has not run these.

    Raises:
        InputError: if the file holds something else.
    """
    from evaluation.expected import expected_blocks, parse_studied_runs
    from pipelines.tracking.state import flatten
    from trm_repro.config import load_config

    default = {key: str(value) for key, value in flatten(comparable(asdict(load_config())))}
    if not file.is_file() or any(settings.get(key) != value for key, value in default.items()):
        return []
    try:
        return expected_blocks(parse_studied_runs(json.loads(file.read_bytes())), outcomes)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InputError(f"{file}: is no table of what to expect; trm-repro study --report writes it again") from None


def comparable(config: Mapping[str, object]) -> dict[str, object]:
    """Leave out of a configuration what does not change what a run does."""
    return {key: value for key, value in config.items() if key not in UNCOMPARED}
