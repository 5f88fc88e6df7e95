import argparse
import contextlib
import io
import json
import os
import pty
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import grade as command
from tests.conftest import ROOT
from trm_repro.errors import InputError

COMMAND = [sys.executable, "-m", "pipelines.cli", "grade"]
LINE = '{"gold": "70", "response": "Answer: 70"}\n'
RIGHT = {"correct": True, "answer": "70", "reason": "correct"}


def run(*arguments):
    """Run the command in this process and give back what it printed."""
    parser = argparse.ArgumentParser()
    command.configure(parser)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert command.run(parser.parse_args([str(argument) for argument in arguments])) == 0
    return [json.loads(line) for line in printed.getvalue().splitlines()]


def write(folder, *rows):
    path = folder / "responses.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def test_uncontested_cases_are_graded_through_the_command(cli, test_data):
    cases = test_data / "grading_cases.jsonl"
    done = cli("grade", cases)
    assert (done.returncode, done.stderr) == (0, "")
    expected = [json.loads(line) for line in cases.read_text(encoding="utf-8").splitlines()]
    graded = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(graded) == len(expected)
    for case, grade in zip(expected, graded, strict=True):
        assert set(grade) == {"correct", "answer", "reason"}
        if not case["contested"]:
            assert grade["correct"] == case["expected"], case["tag"]


def test_each_line_gets_an_answer_and_a_reason(tmp_path):
    rows = [
        {"gold": 70, "response": r"\boxed{70}", "id": 1},
        {"gold": "70", "response": "no idea"},
        {"gold": "70", "response": r"\boxed{70 or 49}"},
    ]
    assert run(write(tmp_path, *rows)) == [
        RIGHT,
        {"correct": False, "answer": None, "reason": "no marked answer"},
        {"correct": False, "answer": "70 or 49", "reason": "not one integer"},
    ]


def test_verl_mode_grades_as_verl_does(tmp_path):
    path = write(
        tmp_path,
        LINE,
        {"gold": "70", "response": r"\boxed{70}"},
        {"gold": r"\frac12", "response": r"Answer: $\frac{1}{2}$"},
    )
    assert [row["correct"] for row in run(path, "--mode", "verl")] == [True, False, True]


def test_a_second_opinion_is_added_and_decides_nothing(tmp_path):
    pytest.importorskip("math_verify")
    path = write(
        tmp_path, LINE, {"gold": "70", "response": r"\boxed{140/2}"}, {"gold": r"336^\circ", "response": "Answer: 336"}
    )
    graded = run(path, "--second-opinion")
    assert [row["correct"] for row in graded] == [True, False, True]
    assert [row["second_opinion"] for row in graded] == ["agree", "disagree", "agree"]


def test_blank_lines_and_carriage_returns_and_a_byte_order_mark_are_no_matter(tmp_path):
    path = tmp_path / "responses.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + LINE.strip().encode() + b"\r\n\r\n\n" + LINE.strip().encode())
    assert run(path) == [RIGHT, RIGHT]


def test_a_line_separator_inside_a_response_does_not_end_the_line(tmp_path):
    path = tmp_path / "responses.jsonl"
    path.write_text('{"gold": "70", "response": "a\u2028b\u0085 Answer: 70"}\n', encoding="utf-8")
    assert run(path) == [RIGHT]


def test_an_empty_file_prints_nothing(tmp_path):
    assert run(write(tmp_path)) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json\n", "is not a JSON object"),
        ('{"gold": "70"\n', "is not a JSON object"),
        ("[" * 200_000 + "\n", "is not a JSON object"),
        ('{"gold": ' + "7" * 5000 + ', "response": ""}\n', "is not a JSON object"),
        ("[70]\n", "expected an object with gold and response, got list"),
        ('{"response": "Answer: 70"}\n', "under gold, got nothing"),
        ('{"gold": 70.5, "response": ""}\n', "under gold, got 70.5"),
        ('{"gold": true, "response": ""}\n', "under gold, got True"),
        ('{"gold": null, "response": ""}\n', "under gold, got None"),
        ('{"gold": "70"}\n', "expected text under response, got nothing"),
        ('{"gold": "70", "response": ["Answer: 70"]}\n', "under response, got ['Answer: 70']"),
        ('{"gold": "seventy", "response": ""}\n', "gold: the right answer must be an integer, got 'seventy'"),
        ('{"gold": "", "response": ""}\n', "gold: the right answer must be an integer, got ''"),
    ],
)
def test_a_bad_line_is_named_after_the_lines_before_it_are_printed(tmp_path, capsys, line, message):
    path = write(tmp_path, LINE, "\n", line, LINE)
    arguments = argparse.Namespace(file=str(path), mode="strict", second_opinion=False)
    with pytest.raises(InputError) as error:
        command.run(arguments)
    assert str(error.value).startswith(f"{path}: line 3: ")
    assert message in str(error.value)
    assert [json.loads(row) for row in capsys.readouterr().out.splitlines()] == [RIGHT]


def test_text_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "responses.jsonl"
    path.write_bytes(LINE.encode() + b'{"gold": "70", "response": "\xff"}\n')
    with pytest.raises(InputError, match="line 2: is not UTF-8 text"):
        run(path)


def test_an_empty_gold_is_refused_in_verl_mode(tmp_path):
    with pytest.raises(InputError, match="line 1: gold: the right answer must not be empty"):
        run(write(tmp_path, {"gold": " ", "response": ""}), "--mode", "verl")


def test_the_command_line_says_what_is_wrong_in_one_line(cli, tmp_path):
    done = cli("grade", write(tmp_path, LINE, "{}\n"))
    assert done.returncode == 2
    assert done.stderr.startswith("trm-repro: ")
    assert "line 2: expected text or an integer under gold" in done.stderr
    assert json.loads(done.stdout) == RIGHT
    missing = cli("grade", tmp_path / "nowhere.jsonl")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "nowhere.jsonl: no such file" in missing.stderr
    assert cli("grade", tmp_path).returncode == 2


def test_standard_input_is_graded_line_by_line_as_it_comes():
    with subprocess.Popen(
        [*COMMAND, "-"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for _ in range(3):
            process.stdin.write(LINE)
            process.stdin.flush()
            assert json.loads(process.stdout.readline()) == RIGHT  # before the input ends
        out, err = process.communicate("[]\n", timeout=60)
    assert (process.returncode, out) == (2, "")
    assert "standard input: line 4: expected an object" in err


def test_a_reader_that_goes_away_ends_the_command_quietly(tmp_path):
    path = write(tmp_path, *[LINE] * 5000)
    with subprocess.Popen(
        [*COMMAND, path], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert json.loads(process.stdout.readline()) == RIGHT
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 1


def read_terminal(terminal: int) -> str:
    """Read what is drawn until the other end is closed; a terminal gives a few thousand bytes at a time."""
    drawn = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # Linux's way of saying that the other end is closed
            part = b""
        if not part:
            os.close(terminal)
            return drawn.decode()
        drawn += part


def test_a_progress_bar_is_drawn_on_a_terminal_and_stays_out_of_the_output(tmp_path):
    path = write(tmp_path, *[LINE] * 20)
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 80))
    process = subprocess.Popen([*COMMAND, path], cwd=ROOT, stdout=subprocess.PIPE, stderr=end, text=True)
    os.close(end)
    drawn = read_terminal(terminal)
    output, _ = process.communicate(timeout=60)
    assert [json.loads(line) for line in output.splitlines()] == [RIGHT] * 20
    assert "grade" in drawn
    assert "100%" in drawn


@pytest.mark.parametrize("mode", ["strict", "verl"])
@settings(max_examples=60, deadline=None)
@given(responses=st.lists(st.text(alphabet=st.characters(exclude_categories=()), max_size=30), max_size=4))
def test_any_responses_are_graded_one_line_each(mode, responses):
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"gold": "70", "response": f"{response}\nAnswer: {response}"} for response in responses]
        graded = run(write(Path(folder), *rows), "--mode", mode)
    assert len(graded) == len(responses)
    assert all(isinstance(row["correct"], bool) and isinstance(row["reason"], str) for row in graded)


@pytest.mark.parametrize("mode", ["strict", "verl"])
def test_huge_and_deep_responses_take_seconds_at_most(tmp_path, mode):
    responses = ["\\boxed{" * 100_000, "{" * 500_000, "Answer: " + "9^" * 200_000, "\0" * 500_000, "\ud800" * 200_000]
    began = time.perf_counter()
    graded = run(write(tmp_path, *[{"gold": "70", "response": response} for response in responses]), "--mode", mode)
    assert time.perf_counter() - began < 5.0
    assert [row["correct"] for row in graded] == [False] * 5
