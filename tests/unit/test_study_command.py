"""`trm-repro study`: reading a study, its commands, and the tables it collects."""

import csv
import dataclasses
import json
from pathlib import Path

import pytest

from pipelines import study_plan
from pipelines.cli import main
from pipelines.spool import MetricsSpool, SpoolEntry
from trm_repro.config import CONF_DIR, load_config

CELL = "{name: a, stage: screen, arms: [ppo_clip], seeds: [3], settings: [num_steps=2]}"


HYPOTHESIS = "{text: it lasts, parts: [{quantity: final score, arm: ppo_clip}]}"


def study_against(arm: str, cell: str, *, seed: int) -> str:
    """Write a study whose first cell, of seed 5, is compared with an arm of another one, of the given seed."""
    part = f"{{quantity: final score, arm: trm_max_0.05, against: {arm}, against_cell: {cell}}}"
    hypotheses = f"[{{text: t, parts: [{part}]}}]"
    first = f"{{name: a, stage: confirm, arms: [trm_max_0.05], seeds: [5], hypotheses: {hypotheses}}}"
    return f"cells: [{first}, {{name: b, stage: screen, arms: [ppo_clip], seeds: [{seed}]}}]"


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "study.yaml"
    file.write_text(text)
    return file


def test_every_run_of_the_shipped_study_has_a_valid_configuration(tmp_path: Path):
    cells = study_plan.read_study(CONF_DIR / "study.yaml")
    for cell in cells:
        assert list(study_plan.cell_runs(dataclasses.replace(cell, seeds=cell.seeds[:1]), tmp_path))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("cells: 3", "expected the keys settings and cells"),
        ("cells: [{name: a}]", "cell 1: expected the keys"),
        ("cells: [{name: a, stage: maybe, arms: [x], seeds: [1]}]", "stage must be screen or confirm"),
        ("cells: [{name: a, stage: screen, arms: [x], seeds: []}]", "seeds must be a list"),
        ("cells: [{name: a, stage: screen, arms: [x], seeds: [true]}]", "seeds must be a list"),
        (
            "cells: [{name: a, stage: screen, arms: [x], seeds: [1, 1]}]",
            "seeds must be a list of at least one, each once",
        ),
        ("cells: [{name: a, stage: screen, arms: [], seeds: [1]}]", "arms must be a list of at least one, each once"),
        ("cells: [{name: ../a, stage: screen, arms: [x], seeds: [1]}]", "name must be"),
        ("cells: [{name: a, stage: confirm, arms: [x], seeds: [1]}]", "needs its hypotheses"),
        (f"cells: [{CELL}, {CELL}]", "two cells have the same name"),
        ("cells: []", "has no cells; expected at least one"),
        (
            f"cells: [{CELL[:-1]}, hypotheses: [{HYPOTHESIS.replace('clip}', f'clip, threshold: {10**400}' + '}')}]}}]",
            "cell 1: hypothesis 1: ",
        ),
        ("cells: [", "cannot be read as YAML"),
        (f"cells: [{CELL[:-1]}, hypotheses: [it lasts]}}]", "expected a text and a list of parts"),
        (f"cells: [{CELL[:-1]}, hypotheses: [{{text: t, parts: [{{arm: x}}]}}]}}]", "a part has the keys"),
        (f"cells: [{CELL[:-1]}, hypotheses: [{HYPOTHESIS.replace('ppo_clip', 'gspo')}]}}]", "gspo is not among"),
        (study_against("ppo_clip", "c", seed=5), "cell 1: hypothesis 1: there is no cell c; the cells are a, b"),
        (study_against("gspo", "b", seed=5), "gspo is not among the cell's arms: ppo_clip"),
        (study_against("ppo_clip", "b", seed=6), "has no seed in common with b"),
        (f"cells: [{CELL[:-1]}, hypotheses: [{HYPOTHESIS.replace('final', 'best')}]}}]", "quantity must be one of"),
        ("cells: [{name: a, stage: screen, arms: [nobody], seeds: [1]}]", "unknown arm 'nobody'"),
        ("cells: [{name: a, stage: screen, arms: [ppo_clip], seeds: [1], settings: [no.key=1]}]", "unknown key"),
        (f"settings: [seed=0]\ncells: [{CELL}]", "settings: seed is not set here"),
        (f"cells: [{CELL.replace('num_steps=2', 'output.dir=x')}]", "cell 1: settings: output.dir is not set here"),
        (
            f"cells: [{CELL.replace('num_steps=2', 'reproduce.seeds=7')}]",
            "reproduce.seeds is not set here; a cell's name, arms, seeds and hypotheses set it",
        ),
    ],
)
def test_a_wrong_study_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, wanted: str
):
    code = main(["study", str(write(tmp_path, text)), "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert code == 2
    assert wanted in error
    assert not (tmp_path / "out").exists()


def test_collect_writes_a_row_a_run_and_a_row_a_step(tmp_path: Path):
    file = write(tmp_path, f"settings: [num_threads=1]\ncells: [{CELL}]")
    spool = MetricsSpool(tmp_path / "out" / "a" / "ppo_clip" / "seed_3" / "metrics.jsonl")
    spool.append(SpoolEntry(step=0, kind="evaluate", time=1.0, metrics={"score/greedy": 0.25}))
    spool.append(SpoolEntry(step=1, kind="train", time=2.0, metrics={"divergence/ppl_gap": 1 / 3, "other/thing": 1.0}))
    assert main(["study", str(file), "--out", str(tmp_path / "out"), "--collect"]) == 0
    with (tmp_path / "out" / "points.csv").open() as lines:
        points = list(csv.DictReader(lines))
    with (tmp_path / "out" / "runs.csv").open() as lines:
        runs = list(csv.DictReader(lines))
    by_step = {point["step"]: point for point in points}
    assert by_step["0"]["score/greedy"] == "0.25"
    assert (by_step["1"]["score/greedy"], by_step["1"]["divergence/ppl_gap"]) == ("", "0.33333")
    assert "other/thing" not in points[0]
    assert [(run["cell"], run["num_steps"], run["is_finished"]) for run in runs] == [("a", "1", "0")]
    assert runs[0]["settings"] == "num_threads=1 num_steps=2"
    assert (runs[0]["seconds"], runs[0]["optimizer"], runs[0]["max_operands"]) == ("1", "sgd", "14")


def test_collecting_from_a_folder_without_runs_leaves_what_was_written(tmp_path: Path, capsys):
    file = write(tmp_path, f"cells: [{CELL}]")
    (tmp_path / "runs.csv").write_text("kept")
    assert main(["study", str(file), "--out", str(tmp_path), "--collect"]) == 2
    assert "holds no run of a cell of" in capsys.readouterr().err
    assert (tmp_path / "runs.csv").read_text() == "kept"


def test_a_cells_command_is_a_reproduce_of_its_own(tmp_path: Path):
    cells = study_plan.read_study(write(tmp_path, f"settings: [num_threads=1]\ncells: [{CELL}]"))
    words = study_plan.cell_command(cells[0], Path("out"))
    assert words[3:] == [
        "reproduce",
        "num_threads=1",
        "num_steps=2",
        "name=a",
        "output.dir=out/a",
        "reproduce.arms=[ppo_clip]",
        "reproduce.seeds=[3]",
    ]
    assert json.dumps(words)


def test_what_is_expected_of_a_cell_goes_into_the_configuration_that_is_recorded_before_its_runs(tmp_path: Path):
    text = f"cells: [{CELL[:-1]}, hypotheses: [{HYPOTHESIS}]}}]"
    (cell,) = study_plan.read_study(write(tmp_path, text))
    words = study_plan.cell_command(cell, Path("out"))
    recorded = load_config([], words[4:]).reproduce.hypotheses
    assert recorded[0] == "it lasts [final score, ppo_clip > 0 (mean over seeds)]"
    assert "definition: collapse: score below 0.5 of its start at 4 evaluations running" in recorded
