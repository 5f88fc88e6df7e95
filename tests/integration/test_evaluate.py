"""`trm-repro evaluate` on real AIME problems with Qwen3's tokenizer: killed, and gone on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from pipelines.cli import main
from tests.conftest import ROOT
from trm_repro.config import PolicyConfig
from trm_repro.policy import build_policy, save_policy

pytestmark = [pytest.mark.slow]
NUM_PROBLEMS = 3
START_SECONDS = 120


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory, qwen3_tokenizer) -> Path:
    """A Qwen3 of random weights that writes tokens of Qwen3's vocabulary."""
    path = tmp_path_factory.mktemp("policy")
    config = PolicyConfig(architecture="dense", hidden_size=32, num_layers=2, max_position_embeddings=2048)
    save_policy(build_policy(config, qwen3_tokenizer, seed=0), qwen3_tokenizer, path)
    return path


def words(policy: Path, data: Path, out: Path, *more: object) -> list[str]:
    settings = [
        "rollout.engine=transformers",
        "evaluation.prompt_template=dapo_chat",
        "evaluation.num_samples=2",
        "evaluation.max_response_tokens=24",
    ]
    return [
        *("evaluate", "--task", "aime25", "--data", str(data), "--in", str(policy), "--out", str(out)),
        *("--limit", str(NUM_PROBLEMS), *settings, *map(str, more)),
    ]


@pytest.fixture
def evaluate(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command in this process, which has the libraries loaded: exit code, standard output and error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(word) for word in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def scores_of(result: tuple[int, str, str]) -> dict:
    code, output, errors = result
    assert code == 0, errors
    return json.loads(Path(output.splitlines()[-1].removeprefix("scores: ")).read_text())


def files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "generations").glob("*.parquet")}


def kill_after_first_problem(arguments: list[str], out: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelines.cli", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + START_SECONDS
    while not files(out) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_an_evaluation_that_was_killed_goes_on_and_ends_like_one_that_was_not(
    policy: Path, test_data: Path, tmp_path: Path, evaluate
):
    data = test_data / "aime25.jsonl"
    kill_after_first_problem(words(policy, data, tmp_path / "killed"), tmp_path / "killed")
    done = files(tmp_path / "killed")
    assert 0 < len(done) < NUM_PROBLEMS
    result = evaluate(*words(policy, data, tmp_path / "killed"))
    scores, said = scores_of(result), result[2]
    after = files(tmp_path / "killed")
    assert {name: after[name] for name in done} == done  # what was finished was not sampled again
    assert sorted(after) == ["aime25-I-01.parquet", "aime25-I-02.parquet", "aime25-I-03.parquet"]
    assert (scores["num_problems"], scores["k"], list(scores["pass_at_k"])) == (3, 2, ["1", "2"])
    assert scores["settings"]["prompt_template"] == "dapo_chat"
    assert "first prompt, evaluation.prompt_template=dapo_chat:\n<|im_start|>user\nSolve the following" in said
    assert "aime25-I-03" in said

    # The same problems in another order, one of them at a time, in a run that nobody disturbed.
    backward = tmp_path / "backward.jsonl"
    backward.write_text("".join(f"{line}\n" for line in data.read_text().splitlines()[:NUM_PROBLEMS][::-1]))
    scores_of(evaluate(*words(policy, backward, tmp_path / "whole", "--limit", 1)))
    others = scores_of(evaluate(*words(policy, backward, tmp_path / "whole")))
    assert others["avg_at_k"] == scores["avg_at_k"]
    first, second = (
        pd.read_parquet(tmp_path / name / "answers.parquet")
        .sort_values(["problem_id", "sample"])
        .reset_index(drop=True)
        for name in ("killed", "whole")
    )
    pd.testing.assert_frame_equal(first, second)

    before = files(tmp_path / "killed")
    code, _, refusal = evaluate(*words(policy, data, tmp_path / "killed", "evaluation.top_p=1"))
    assert code == 2
    assert "holds answers by other settings (top_p is 0.95 there and 1.0 here)" in refusal
    assert refusal.count("\n") == 1
    assert files(tmp_path / "killed") == before
