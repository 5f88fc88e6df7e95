"""The command line of `trm-repro evaluate`, as far as it goes without an engine."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from evaluation.generations import Generation, write_generations
from pipelines.cli import main
from pipelines.evaluation_folder import EvaluationFolder


def scores_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert main([str(word) for word in arguments]) == 0
    *numbers, last = capsys.readouterr().out.splitlines()
    assert len(numbers) < 12  # the terminal gets the scores; all the rest is in the file
    assert numbers[0].startswith("avg@2")
    return json.loads(Path(last.removeprefix("scores: ")).read_text())


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(word) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_saved_answers_are_graded_again_by_either_rule_without_the_policy(tmp_path: Path, capsys):
    folder = EvaluationFolder(tmp_path)
    folder.prepare({"task": "aime25", "num_samples": 2}, {"policy": "a/policy", "data": "30 rows"})
    answer = Generation(
        problem_id="p", prompt="?", gold="70", sample=0, seed=1, response="", num_tokens=9, finished=True
    )
    write_generations(
        folder.generations,
        [
            replace(answer, response="So \\boxed{070}."),
            replace(answer, sample=1, response="Answer: 70"),
            replace(answer, problem_id="q", response="Answer: 70", finished=False),
            replace(answer, problem_id="q", sample=1, response="Answer: 7"),
        ],
    )
    strict = scores_of(capsys, "evaluate", "--regrade", tmp_path)
    verl = scores_of(capsys, "evaluate", "--regrade", tmp_path, "evaluation.grading=verl")
    assert (strict["grading"], strict["avg_at_k"]["mean"], strict["policy"]) == ("strict", 2 / 4, "a/policy")
    assert (verl["grading"], verl["avg_at_k"]["mean"]) == ("verl", 2 / 4)
    rewards = {name: list(pd.read_parquet(tmp_path / f"{name}.parquet").reward) for name in ("answers", "answers_verl")}
    assert rewards == {"answers": [1.0, 1.0, 0.0, 0.0], "answers_verl": [0.0, 1.0, 1.0, 0.0]}
    scores = json.loads((tmp_path / "scores.json").read_text())
    (first,) = (row for row in scores["problems"] if row["problem_id"] == "p")
    assert (first["num_correct"], first["majority"], first["gold"]) == (2, "70", "70")
    elsewhere = tmp_path / "elsewhere"
    scores_of(capsys, "evaluate", "--regrade", tmp_path, "--out", elsewhere)
    assert (elsewhere / "scores.json").read_text() == (tmp_path / "scores.json").read_text()


def test_a_folder_without_answers_is_refused(tmp_path: Path, capsys):
    EvaluationFolder(tmp_path).prepare({"task": "aime25"}, {})
    assert "has no finished problem to grade" in refusal(capsys, "evaluate", "--regrade", tmp_path)
    EvaluationFolder(tmp_path / "other").prepare({"task": "poetry"}, {})
    assert "has no task of ours" in refusal(capsys, "evaluate", "--regrade", tmp_path / "other")


@pytest.mark.parametrize(("option", "value"), [("--in", "x"), ("--task", "aime25"), ("--data", "x"), ("--limit", "1")])
def test_regrading_takes_no_setting_of_the_sampling(tmp_path: Path, capsys, option, value):
    message = refusal(capsys, "evaluate", "--regrade", tmp_path, option, value)
    assert f"--regrade samples nothing, so it takes no {option}" in message


def test_without_a_hub_one_line_says_how_to_read_a_file(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refusal(capsys, "evaluate", "--task", "aime25", "evaluation.revision=main", "--limit", "1")
    assert "math-ai/aime25@main (test): cannot be read from the hub" in message
    assert (
        "unset HF_HUB_OFFLINE, or read a local .jsonl or .parquet file: --data FILE or evaluation.file=FILE" in message
    )


def test_a_folder_given_as_data_is_read_like_a_hub_repository(tmp_path: Path, capsys):
    (tmp_path / "test.jsonl").write_text('{"problem": "a", "answer": "x"}\n')
    message = refusal(capsys, "evaluate", "--task", "aime25", "--data", tmp_path)
    assert f"{tmp_path} (test): row 1: expected an integer" in message
