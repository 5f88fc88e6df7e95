"""`trm-repro study`: reading a study, its commands, and the tables it collects."""

import csv
import dataclasses
import json
from pathlib import Path

import pytest

from pipelines import study
from pipelines.cli import main
from pipelines.spool import MetricsSpool, SpoolEntry
from trm_repro.config import CONF_DIR

CELL = "{name: a, stage: screen, arms: [ppo_clip], seeds: [3], settings: [num_steps=2]}"


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "study.yaml"
    file.write_text(text)
    return file


def test_every_run_of_the_shipped_study_has_a_valid_configuration(tmp_path: Path):
    shared, cells = study.read_study(CONF_DIR / "study.yaml")
    for cell in cells:
        assert list(study.cell_runs(dataclasses.replace(cell, seeds=cell.seeds[:1]), shared, tmp_path))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("cells: 3", "expected the keys settings and cells"),
        ("cells: [{name: a}]", "cell 1: expected the keys"),
        ("cells: [{name: a, stage: maybe, arms: [x], seeds: [1]}]", "stage must be screen or confirm"),
        ("cells: [{name: a, stage: screen, arms: [x], seeds: []}]", "seeds must be a list"),
        ("cells: [{name: a, stage: screen, arms: [x], seeds: [true]}]", "seeds must be a list"),
        ("cells: [{name: ../a, stage: screen, arms: [x], seeds: [1]}]", "name must be"),
        ("cells: [{name: a, stage: confirm, arms: [x], seeds: [1]}]", "needs its hypotheses"),
        (f"cells: [{CELL}, {CELL}]", "two cells have the same name"),
        ("cells: [", "cannot be read as YAML"),
        ("cells: [{name: a, stage: screen, arms: [nobody], seeds: [1]}]", "unknown arm 'nobody'"),
        ("cells: [{name: a, stage: screen, arms: [ppo_clip], seeds: [1], settings: [no.key=1]}]", "unknown key"),
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


def test_collect_writes_a_row_a_run_and_a_row_a_value(tmp_path: Path):
    file = write(tmp_path, f"settings: [seed=0]\ncells: [{CELL}]")
    spool = MetricsSpool(tmp_path / "out" / "a" / "ppo_clip" / "seed_3" / "metrics.jsonl")
    spool.append(SpoolEntry(step=0, kind="evaluate", time=1.0, metrics={"score/greedy": 0.25}))
    spool.append(SpoolEntry(step=1, kind="train", time=2.0, metrics={"divergence/ppl_gap": 1 / 3, "other/thing": 1.0}))
    assert main(["study", str(file), "--out", str(tmp_path / "out"), "--collect"]) == 0
    with (tmp_path / "out" / "points.csv").open() as lines:
        points = list(csv.reader(lines))
    with (tmp_path / "out" / "runs.csv").open() as lines:
        runs = list(csv.DictReader(lines))
    assert points[1:] == [
        ["a", "ppo_clip", "3", "score/greedy", "0", "0.25"],
        ["a", "ppo_clip", "3", "divergence/ppl_gap", "1", "0.333333"],
    ]
    assert [(run["cell"], run["num_steps"], run["is_finished"]) for run in runs] == [("a", "1", "0")]
    assert runs[0]["settings"] == "seed=0 num_steps=2"


def test_a_cells_command_is_a_reproduce_of_its_own(tmp_path: Path):
    shared, cells = study.read_study(write(tmp_path, f"settings: [num_threads=1]\ncells: [{CELL}]"))
    words = study.cell_command(cells[0], shared, Path("out"))
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
