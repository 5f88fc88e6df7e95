"""`python -m benchmarks`: what it runs, what it does not run again, and how results become one table."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks import growth
from benchmarks.measure import cell, goal, in_turn, markdown_table, median_seconds, publish
from tests.conftest import ROOT


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the scripts run, in order; each is replaced by one that takes no time, and ``broken`` fails."""
    names: list[str] = []

    def run(name: str, path: Path, *, quick: bool, state: dict[str, str]) -> dict[str, object]:
        names.append(name)
        goals = [goal(f"{name} is fast", 2.0, 1.0, "at_most")]
        record = {"benchmark": name, "rows": [{"quick": quick}], "goals": goals, "state": state}
        record |= {
            "began": 0.0,
            "seconds": 1.0,
            "commit": "c",
            **({"failed": "exit code 3"} if name == "broken" else {}),
        }
        path.write_text(json.dumps(record))
        return record

    monkeypatch.setattr(bench, "run_script", run)
    monkeypatch.setattr(bench, "scripts", lambda: {"broken": Path("b"), "steady": Path("s")})
    return names


def test_a_damaged_result_is_left_out_and_said(measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for text in ("{", "[]", "{}", "\xff"):
        (tmp_path / "broken.json").write_text(text)
        assert bench.main(["--only", "steady", "--out", str(tmp_path)]) == 0
        assert "broken.json: left out, is no result" in capsys.readouterr().err


def test_an_output_folder_that_is_a_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--out", str(tmp_path / "file")])
    assert "expected a folder that can be written to" in capsys.readouterr().err


def test_a_script_that_has_finished_with_this_code_is_not_run_again(measured: list[str], tmp_path: Path):
    arguments = ["--only", "steady", "--out", str(tmp_path)]
    assert bench.main(arguments) == 0
    assert bench.main(arguments) == 0
    assert measured == ["steady"]
    assert bench.main([*arguments, "--again"]) == 0
    assert measured == ["steady", "steady"]


def test_changed_code_is_measured_again(measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    arguments = ["--only", "steady", "--out", str(tmp_path)]
    bench.main(arguments)
    monkeypatch.setattr(bench, "code_digest", lambda: "other")
    bench.main(arguments)
    assert measured == ["steady", "steady"]


def test_a_script_that_fails_stops_no_other_and_is_run_again(measured: list[str], tmp_path: Path):
    assert bench.main(["--out", str(tmp_path)]) == 1
    assert bench.main(["--out", str(tmp_path)]) == 1
    assert measured == ["broken", "steady", "broken"]
    assert "failed: exit code 3" in (tmp_path / "bench.md").read_text()


def test_quick_results_stand_apart_from_those_for_comparison(measured: list[str], tmp_path: Path):
    bench.main(["--only", "steady", "--out", str(tmp_path)])
    bench.main(["--only", "steady", "--out", str(tmp_path), "--quick"])
    for folder, is_quick in ((tmp_path, False), (tmp_path / "quick", True)):
        assert json.loads((folder / "steady.json").read_text())["rows"] == [{"quick": is_quick}]


def test_the_table_says_machine_versions_and_goals_that_are_not_met(measured: list[str], tmp_path: Path):
    bench.main(["--only", "steady", "--out", str(tmp_path)])
    text = (tmp_path / "bench.md").read_text()
    facts = json.loads((tmp_path / "bench.json").read_text())["machine"]
    assert {"cpu", "usable cores", "memory", "system", "python", "torch", "transformers", "git_commit"} <= set(facts)
    assert facts["cpu"] in text
    assert "| steady | steady is fast | 2 | <= 1 | no |" in text


def test_a_script_that_cannot_be_started_is_recorded_as_failed(tmp_path: Path):
    record = bench.run_script("there_is_no_such_script", tmp_path / "x.json", quick=False, state={})
    assert record["failed"] == "exit code 1"
    assert json.loads((tmp_path / "x.json").read_text())["failed"] == "exit code 1"


def test_every_script_takes_what_it_is_called_with():
    found = bench.scripts()
    assert {"acceptance", "audit", "growth", "startup", "vocabulary"} <= set(found)
    for name, path in found.items():
        text = path.read_text()
        assert "add_report_arguments(" in text or ('"--json"' in text and '"--quick"' in text), name


def test_the_digest_of_the_code_follows_its_files(tmp_path: Path):
    (tmp_path / "benchmarks").mkdir()
    file = tmp_path / "benchmarks" / "a.py"
    file.write_text("1")
    first = bench.code_digest(tmp_path)
    assert bench.code_digest(tmp_path) == first
    (tmp_path / "README.md").write_text("not code")
    assert bench.code_digest(tmp_path) == first
    file.write_text("2")
    assert bench.code_digest(tmp_path) != first


def test_a_published_result_is_what_was_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [{"form": "a", "s": 0.12345}, {"form": "b", "tokens": 12_345}]
    publish("sizes", rows, [goal("small", 1.0, 1.0, "at_most")], tmp_path / "sizes.json")
    printed = capsys.readouterr().out
    assert "| form | s | tokens |\n|---|---|---|\n| a | 0.123 |  |\n| b |  | 12,345 |" in printed
    assert "| small | 1 | <= 1 | yes |" in printed
    written = json.loads((tmp_path / "sizes.json").read_text())
    assert written == {
        "benchmark": "sizes",
        "rows": rows,
        "goals": [{"goal": "small", "value": 1.0, "limit": 1.0, "direction": "at_most", "met": True}],
    }


@pytest.mark.parametrize(
    ("value", "direction", "met"), [(1.0, "at_least", True), (0.9, "at_least", False), (math.nan, "at_most", False)]
)
def test_goals_are_met_on_their_own_side(value: float, direction: str, met: bool):
    assert goal("g", value, 1.0, direction)["met"] is met


def test_numbers_are_written_with_the_digits_that_count():
    assert [cell(value) for value in (True, "a", 1_234_567, 1234.5, 0.000123456, math.inf)] == [
        *("True", "a", "1,234,567", "1,234", "0.000123", "inf")
    ]
    assert markdown_table([{"a": 1}]) == "| a |\n|---|\n| 1 |"


def test_forms_are_timed_in_turn_and_the_first_round_does_not_count():
    calls: list[str] = []
    seconds = median_seconds({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=5)
    assert calls == ["a", "b"] * 6
    assert set(seconds) == {"a", "b"}


def log_turns(arguments: tuple[Path, str, int]) -> Iterator[tuple[int, int]]:
    """Write down every turn; fall over after some."""
    log, name, most = arguments
    for turn in range(most):
        with log.open("a") as file:
            file.write(name)
        yield os.getpid(), turn
    os._exit(3)


def test_generators_take_turns_in_processes_of_their_own(tmp_path: Path):
    log = tmp_path / "log"
    found = in_turn(log_turns, [(log, "a", 9), (log, "b", 9)], 3, desc="turns")
    assert log.read_text() == "ababab"
    assert [[turn for _, turn in values] for values in found] == [[0, 1, 2]] * 2
    assert len({pid for values in found for pid, _ in values} | {os.getpid()}) == 3


def test_the_death_of_a_process_that_takes_turns_is_reported(tmp_path: Path):
    with pytest.raises(SystemExit, match=r"log_turns.*: the process ended with code 3"):
        in_turn(log_turns, [(tmp_path / "a", "a", 9), (tmp_path / "b", "b", 1)], 2, desc="turns")


def test_medians_leave_out_the_round_that_warms_up():
    runs = [{"mask, s": float(value), "peak, MiB": float(value)} for value in (90, 1, 2, 60, 4, 5)]
    assert growth.medians(runs) == {"mask, s": 4.0, "peak, MiB": 5.0}


def test_slopes_are_local_and_missing_where_there_is_nothing_to_compare():
    rows = growth.with_slopes(
        [{"size": 1, "s": 1.0}, {"size": 10, "s": 10.0}, {"size": 100, "s": 1000.0}], "size", ["s"]
    )
    assert rows[0]["slope of s"] == ""
    assert [row["slope of s"] for row in rows[1:]] == pytest.approx([1.0, 2.0])


def test_the_documented_folder_is_the_one_written_to():
    assert str(bench.FOLDER) in (ROOT / "docs" / "performance.md").read_text()
