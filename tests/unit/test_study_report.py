"""`trm-repro study --report`: tables, figures and what to expect, from CSV files alone."""

import csv
import dataclasses
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from evaluation.expected import StudiedRun, expected_blocks, parse_studied_runs
from evaluation.study_figures import STUDY_FIGURES
from evaluation.study_tables import arms_table, by_surroundings, horizon_table, rates_table
from evaluation.study_tables import differences_table as differences
from evaluation.study_tables import prediction_table as prediction
from pipelines import study_report
from pipelines.cli import main
from pipelines.study_plan import read_study
from pipelines.study_results import read_results
from pipelines.tracking.state import flatten
from tests.unit.test_outcomes import outcome
from tests.unit.test_study_runs import study_run
from trm_repro.config import CONF_DIR, load_config
from trm_repro.config_sections.claims import ClaimThresholds
from trm_repro.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
SUMMARIES = ROOT / "docs" / "study"


def test_the_committed_document_holds_what_the_committed_summaries_say(tmp_path: Path):
    folder, document = tmp_path / "study", tmp_path / "miniature.md"
    folder.mkdir()
    shutil.copy(ROOT / "docs" / "miniature.md", document)
    for name in ("runs.csv", "points.csv", "lengths.csv"):
        shutil.copy(SUMMARIES / name, folder)
    cells = read_study(CONF_DIR / "study.yaml")
    study_report.write_study_report(folder, document, cells=cells)
    assert document.read_text() == (ROOT / "docs" / "miniature.md").read_text()
    assert (folder / "expected.json").read_text() == (SUMMARIES / "expected.json").read_text()
    drawn = sorted(file.name for file in (folder / "figures").glob("*.svg"))
    assert drawn == sorted(file.name for file in (SUMMARIES / "figures").glob("*.svg"))
    for name in drawn:
        assert f"(study/figures/{name})" in document.read_text()


def test_a_document_is_filled_between_its_marks_and_nowhere_else():
    text = "before\n<!-- study: a -->\nold\n<!-- end of study: a -->\nafter\n"
    filled = study_report.fill(text, {"a": "| new |", "b": "unused"}, source="x.md")
    assert filled == "before\n<!-- study: a -->\n\n| new |\n\n<!-- end of study: a -->\nafter\n"
    assert study_report.fill(filled, {"a": "| new |"}, source="x.md") == filled


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<!-- study: z -->\n", "marks a table 'z'"),
        ("<!-- study: a -->\n", "no line <!-- end of study: a -->"),
        ("# nothing\n", "x.md: marks no table; expected lines <!-- study: NAME -->, NAME of a"),
        ("<!-- study: a -->\n<!-- end of study: a -->\n" * 2, "marks the table 'a' 2 times"),
    ],
)
def test_a_document_with_wrong_marks_is_refused(text: str, wanted: str):
    with pytest.raises(InputError, match=wanted):
        study_report.fill(text, {"a": ""}, source="x.md")


@pytest.mark.parametrize(
    ("runs", "wanted"),
    [
        (None, "no such file"),
        ("a,b\n1,2\n", "has no column 'cell'"),
        ("", "cannot be read as CSV"),
    ],
)
def test_wrong_summaries_are_refused_and_the_document_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], runs: str | None, wanted: str
):
    document = tmp_path / "document.md"
    document.write_text("<!-- study: arms -->\n<!-- end of study: arms -->\n")
    if runs is not None:
        (tmp_path / "runs.csv").write_text(runs)
    assert main(["study", "--report", str(tmp_path), "--document", str(document)]) == 2
    assert wanted in capsys.readouterr().err
    assert document.read_text() == "<!-- study: arms -->\n<!-- end of study: arms -->\n"


def test_a_number_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("runs.csv", "points.csv", "lengths.csv"):
        shutil.copy(SUMMARIES / name, tmp_path)
    lines = (tmp_path / "points.csv").read_text().splitlines()
    (tmp_path / "points.csv").write_text("\n".join([*lines[:1], lines[1].replace(",0,", ",zero,", 1)]))
    shutil.copy(ROOT / "docs" / "miniature.md", tmp_path)
    code = main(["study", "--report", str(tmp_path), "--document", str(tmp_path / "miniature.md")])
    assert (code, "column step must hold whole numbers" in capsys.readouterr().err) == (2, True)


@pytest.mark.parametrize(
    ("name", "change", "wanted"),
    [
        ("runs.csv", lambda row: [row | {"seed": "1.5"}], "column seed must hold whole numbers"),
        ("runs.csv", lambda row: [row | {"seed": "9" * 30}], "column seed must hold whole numbers"),
        ("runs.csv", lambda row: [row | {"num_steps": "inf"}], "column num_steps must hold whole numbers"),
        ("points.csv", lambda row: [row | {"step": ""}], "column step must hold whole numbers"),
        ("runs.csv", lambda row: [row | {"stage": "x"}], "stage must be screen or confirm, got x"),
        ("runs.csv", lambda row: [row, row], "has two rows of cell "),
        ("points.csv", lambda row: [row, row], "has two rows of cell "),
    ],
)
def test_rows_that_collect_does_not_write_are_refused(tmp_path: Path, name: str, change, wanted: str):
    for file in ("runs.csv", "points.csv"):
        shutil.copy(SUMMARIES / file, tmp_path)
    with (tmp_path / name).open(newline="") as lines:
        first = next(csv.DictReader(lines))
    with (tmp_path / name).open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(first))
        writer.writeheader()
        writer.writerows(change(first))
    with pytest.raises(InputError, match=wanted):
        read_results(tmp_path)


def test_a_document_that_is_no_text_is_refused(tmp_path: Path):
    (tmp_path / "document.md").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"document\.md: cannot be read as UTF-8 text"):
        study_report.write_study_report(tmp_path, tmp_path / "document.md", cells=[])


def test_an_arm_is_stable_up_to_the_rate_below_its_first_collapse():
    runs = [study_run(rate=rate, collapse_step=5 if rate in (0.5, 2.0) else None) for rate in (0.25, 0.5, 1.0, 2.0)]
    (line,) = rates_table(runs).splitlines()[2:]
    assert line == "| sgd, weights 4 steps old, bfloat16 | a | 0.25, 0.5, 1, 2 | 0.25 | 0.5 |"
    assert rates_table(runs[:1]) == "Nothing of this has been run."  # one rate is no range
    assert by_surroundings(runs[:1]) == {}


def test_arms_have_an_interval_from_five_seeds_and_their_range_below():
    five = [study_run(seed=seed, final=0.1 * seed) for seed in range(1, 6)]
    row = arms_table(five, ClaimThresholds()).splitlines()[2].split(" | ")
    mean, _, ends = row[4].partition(" ")
    low, high = (float(end) for end in ends.strip("()").split(" to "))
    assert mean == "0.30"
    assert 0.1 < low < 0.3 < high < 0.5
    assert arms_table(five[:2], ClaimThresholds()).splitlines()[2].split(" | ")[4] == "0.15 (0.10 to 0.20)"


def test_differences_are_those_of_cells_that_confirm():
    runs = [study_run(arm=arm, seed=s, stage="confirm") for arm in ("ppo_clip", "trm_avg_0.001") for s in range(5)]
    assert "| c | final score | trm_avg_0.001 | ppo_clip | +0 (+0 to +0, 5 seeds) | 1.000 (1.000) |" in differences(
        runs, ClaimThresholds()
    )
    assert differences([study_run()], ClaimThresholds()) == "Nothing of this has been run."


def test_a_prediction_without_both_kinds_says_so():
    assert "| all runs | 2 | 0 | 1 | cannot say |" in prediction([study_run(gaps=[0.1, 0.1])])


def test_lengths_are_compared_at_the_settings_of_the_longer_cells():
    assert horizon_table([study_run()]) == "Nothing of this has been run."
    setting = dataclasses.replace(study_run().setting, max_operands=30)
    longer = dataclasses.replace(study_run(cell="long"), setting=setting)
    rows = horizon_table([study_run(), study_run(rate=0.1), study_run(arm="b"), longer]).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| 14", "| 30"]  # not the other rate, not the other arm
    assert STUDY_FIGURES["length_figure"]([study_run(), longer]) is not None


def test_every_figure_is_left_out_without_its_runs_and_drawn_with_them():
    few = [study_run()]
    assert [draw(few) for draw in STUDY_FIGURES.values()] == [None] * len(STUDY_FIGURES)
    arms = ("ppo_clip", "trm_avg_0.001", "trm_avg_0.001_bounded_step", r"a$\frac$")
    many = [study_run(arm=a, seed=s, stage="confirm", rate=rate) for a in arms for s in (1, 2) for rate in (1, 2)]
    drawn = {name: draw(many) for name, draw in STUDY_FIGURES.items() if name != "length_figure"}
    for figure in drawn.values():
        assert figure is not None
        figure.canvas.draw()


STUDIED = [
    StudiedRun(arm="ppo_clip", seed=301, start_score=0.4, final_score=0.1, verdict="collapsed"),
    StudiedRun(arm="ppo_clip", seed=302, start_score=0.4, final_score=0.6, verdict="improved"),
    StudiedRun(arm="token_is", seed=301, start_score=0.4, final_score=0.4, verdict="level"),
]


def test_what_to_expect_counts_the_study_and_stands_beside_what_happened():
    heading, _, table = expected_blocks(STUDIED, [outcome("ppo_clip", final=0.8)])
    assert heading.text == "What to expect"
    assert [list(row) for row in table.rows] == [["ppo_clip", "2", "1", "0", "0", "1", "0.10 to 0.60", "1 improved"]]
    assert expected_blocks(STUDIED, [outcome("gspo")]) == []


def test_what_to_expect_is_read_back_as_it_is_written():
    content = json.loads(json.dumps({"cells": ["c"], "runs": [asdict(run) for run in STUDIED]}))
    assert parse_studied_runs(content) == STUDIED


def test_what_to_expect_is_shown_for_runs_at_the_default_settings_only(tmp_path: Path):
    settings = {key: str(value) for key, value in flatten(asdict(load_config()))}
    file = tmp_path / "expected.json"
    assert study_report.expected_of(settings, [outcome("ppo_clip")], file) == []
    file.write_text(json.dumps({"cells": ["c"], "runs": [asdict(run) for run in STUDIED]}))
    blocks = study_report.expected_of(settings, [outcome("ppo_clip")], file)
    assert blocks[0].text == "What to expect"
    other = settings | {"update.learning_rate": "0.1"}
    assert study_report.expected_of(other, [outcome("ppo_clip")], file) == []
    apart = settings | {"evaluation.every_steps": "7", "reproduce.seeds": "[9]"}
    assert study_report.expected_of(apart, [outcome("ppo_clip")], file) == blocks
    file.write_text("[]")
    with pytest.raises(InputError, match="no table of what to expect"):
        study_report.expected_of(settings, [outcome("ppo_clip")], file)


def test_only_confirmed_cells_at_the_default_settings_say_what_to_expect(tmp_path: Path):
    rest = "arms: [a], seeds: [1], hypotheses: [{text: t, parts: [{quantity: final score, arm: a}]}]"
    file = tmp_path / "study.yaml"
    file.write_text(
        "cells:\n"
        f"  - {{name: same, stage: confirm, settings: [evaluation.every_steps=5], {rest}}}\n"
        f"  - {{name: other, stage: confirm, settings: [update.learning_rate=0.1], {rest}}}\n"
        "  - {name: screened, stage: screen, arms: [a], seeds: [1]}\n"
    )
    cells = read_study(file)
    runs = [study_run(cell=name, seed=seed) for seed, name in enumerate(("same", "other", "screened"))]
    shipped = study_report.shipped_runs(runs, cells)
    assert shipped["cells"] == ["same"]
    assert [run["seed"] for run in shipped["runs"]] == [0]
