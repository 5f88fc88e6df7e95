"""The command line: quick help, one-line errors, exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.cli import COMMANDS, main
from tests.conftest import ROOT

HEAVY = {"torch", "vllm", "mlflow", "transformers", "lightning", "pandas", "matplotlib", "scipy"}


def imported_by(commands: list[list[str]]) -> tuple[set[str], str]:
    """Run commands one after another in a fresh process; return the modules it has then, and what it printed."""
    code = (
        "import sys\nfrom pipelines.cli import main\n"
        f"for words in {commands!r}:\n    try:\n        main(words)\n    except SystemExit:\n        pass\n"
        "sys.stderr.write(' '.join(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stderr.split()), done.stdout


def test_help_imports_nothing_heavy():
    modules, said = imported_by([["--help"]])
    assert not modules & (HEAVY | {"numpy", "omegaconf"})
    assert all(name in said for name in COMMANDS)


def test_the_help_of_every_command_and_the_bounds_import_no_heavy_library():
    modules, _ = imported_by([*([command, "--help"] for command in COMMANDS), ["bounds"]])
    assert not modules & HEAVY


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: trm-repro {command}" in capsys.readouterr().out


def test_unknown_command_ends_with_code_2(capsys: pytest.CaptureFixture[str]):
    assert main(["trian"]) == 2
    error = capsys.readouterr().err
    assert "trian" in error
    assert error.count("\n") == 1


def test_wrong_arguments_of_a_command_get_one_line_and_code_2(capsys: pytest.CaptureFixture[str]):
    for words in ([], ["train", "--nope"], ["bounds", "--length", "x"], ["mask"]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("trm-repro: ")
        assert error.endswith("--help\n")
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "nowhere.yaml"], "nowhere.yaml: no such configuration file"),
        (["train", "num_stepz=3"], "did you mean 'num_steps'"),
        (["train", "--arm", "nothing"], "unknown arm 'nothing'"),
        (["train", "conf"], "neither a .yaml file nor key=value"),
        (
            ["train", "--arm", "random_as_trm_avg_0.001", "output.dir=/tmp/trm-no-such-run"],
            "run it first: trm-repro train",
        ),
        (["reproduce", "reproduce.arms=[token_iz]"], "did you mean 'token_is'"),
        (["reproduce", "reproduce.arms=[random_as_trm_avg_0.001]"], "add trm_avg_0.001 to reproduce.arms"),
        (["report", "output.dir=/tmp/trm-no-such-run"], "run trm-repro reproduce first"),
        (["mask", "--in", "nowhere.parquet"], "nowhere.parquet: no such file"),
        (["update", "--in", "README.md", "--out", "/tmp/x"], "README.md: is not a readable Parquet file"),
        (["rollout", "--in", "nowhere.ckpt"], "nowhere.ckpt: no such file"),
        (["evaluate", "--task", "aime25", "evaluation.file=none.jsonl"], "none.jsonl: no such file; expected problems"),
        (["evaluate", "--regrade", "nowhere"], "nowhere/settings.json: no such file; expected a folder that"),
        (["evaluate", "--regrade", "nowhere", "--limit", "3"], "--regrade samples nothing, so it takes no --limit"),
        (["evaluate", "--task", "aime25", "--data", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["evaluate", "--data", "x.jsonl"], "--data goes with --task"),
        (["evaluate", "--limit", "0"], "--limit must be >= 1"),
    ],
)
def test_bad_input_gets_one_line_and_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_unwritable_output_gets_one_line_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("not a folder")
    assert main(["reproduce", "conf/smoke.yaml", f"output.dir={tmp_path / 'file' / 'runs'}"]) == 2
    error = capsys.readouterr().err
    assert "file" in error
    assert error.count("\n") == 1


def test_missing_vllm_names_the_two_ways_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from trm_repro.config_sections import RolloutConfig
    from trm_repro.errors import InputError
    from trm_repro.rollout import start_engine

    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(InputError, match=r"install it \(make setup\) or set rollout\.engine=transformers"):
        start_engine(RolloutConfig(), tmp_path, 64)
