"""Bad input through the real command line: one clear line, exit code 2, no traceback, nothing half-written left."""

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.cli import main
from tests.conftest import ROOT
from trm_repro.config import RunConfig

pytestmark = [pytest.mark.slow]
LONGEST_LINE = 600


def fails_in_one_line(capsys: pytest.CaptureFixture[str], words: list[str], wanted: str = "") -> None:
    code = main(words)
    captured = capsys.readouterr()
    assert code == 2, (words, captured.err[-300:])
    assert captured.err.startswith("trm-repro: ")
    assert captured.err.count("\n") == 1, captured.err
    assert len(captured.err) < LONGEST_LINE
    assert "Traceback" not in captured.err
    assert wanted in captured.err, captured.err


def leaves(section: type, prefix: str = "") -> Iterator[tuple[str, object]]:
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from leaves(kind, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", kind


def wrong_values(kind: object) -> list[str]:
    """Values that no key of this type may take."""
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return ["nonsense", "7", "[a]", "null"]
    if origin is tuple:
        return ["abc", "7", "{a: 1}", "null", "[[1]]"]
    if origin is dict:
        return ["abc", "7", "[1]", "{a: b}"]
    if origin in (types.UnionType, typing.Union):
        members = [member for member in typing.get_args(kind) if member is not type(None)]
        return [value for member in members for value in wrong_values(member) if value != "null"]
    wrong = {
        bool: ["maybe", "[true]", "3.5", "1", "0", "'true'"],
        int: ["abc", "1.5", "nan", "[1]", "-9999999", "1e99", "null", "{a: 1}"],
        float: ["abc", "nan", "[1]", "-1e9", "null"],
        str: ["null", "[a]", "{a: 1}", "''"],
    }
    return wrong[typing.cast(type, kind)]


CASES = [(key, value) for key, kind in leaves(RunConfig) for value in wrong_values(kind)]


@pytest.mark.parametrize("section", sorted({key.partition(".")[0] for key, _ in CASES}))
def test_every_key_refuses_every_wrong_value(section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    cases = [(key, value) for key, value in CASES if key.partition(".")[0] == section]
    for key, value in cases:
        fails_in_one_line(capsys, ["config", f"output.dir={tmp_path / 'out'}", f"{key}={value}"])
    assert not (tmp_path / "out").exists()


def test_there_are_more_than_two_hundred_cases():
    assert len(CASES) > 600


def files(tmp_path: Path) -> dict[str, Path]:
    """Make one file of each kind of damage."""
    made = {name: tmp_path / name for name in ("empty", "binary", "folder", "utf16", "list.yaml", "deep.yaml")}
    made["empty"].write_bytes(b"")
    made["binary"].write_bytes(bytes(range(256)) * 20)
    made["folder"].mkdir()
    made["utf16"].write_text('{"gold": "1", "response": "x"}\n', encoding="utf-16")
    made["list.yaml"].write_text("[1, 2]\n")
    made["deep.yaml"].write_text("a: " + "[" * 5000 + "\n")
    table = pa.table({"unrelated": [1, 2, 3]})
    made["other.parquet"] = tmp_path / "other.parquet"
    pq.write_table(table, made["other.parquet"])
    made["cut.parquet"] = tmp_path / "cut.parquet"
    made["cut.parquet"].write_bytes(made["other.parquet"].read_bytes()[:-30])
    made["model"] = tmp_path / "model"
    made["model"].mkdir()
    (made["model"] / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 10}))
    made["code"] = tmp_path / "code"
    made["code"].mkdir()
    text = {"model_type": "evil", "auto_map": {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}}
    (made["code"] / "config.json").write_text(json.dumps(text))
    (made["code"] / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    return made


COMMANDS_ON_FILES: dict[str, Callable[[str, str], list[str]]] = {
    "config file": lambda file, out: ["train", file if file.endswith(".yaml") else f"{file}.yaml"],
    "mask": lambda file, out: ["mask", "--in", file, "--out", f"{out}/masks.parquet"],
    "update": lambda file, out: ["update", "--in", file, "--out", out],
    "rollout": lambda file, out: ["rollout", "--in", file, "--out", out],
    "lengths": lambda file, out: ["lengths", "--in", file, "--out", out],
    "grade": lambda file, out: ["grade", file],
    "study": lambda file, out: ["study", file, "--out", out],
    "evaluate data": lambda file, out: ["evaluate", "--task", "aime25", "--data", file, "--out", out],
    "evaluate model": lambda file, out: ["evaluate", "--in", file, "--out", out],
    "policy": lambda file, out: ["train", f"policy.path={file}", f"output.dir={out}"],
    "plan": lambda file, out: ["plan", f"policy.path={file}/nothing", "policy.vocab_size=null"],
}
DAMAGES = ("empty", "binary", "folder", "utf16", "list.yaml", "deep.yaml", "other.parquet", "cut.parquet", "missing")


@pytest.mark.parametrize("command", COMMANDS_ON_FILES)
def test_every_command_refuses_every_damaged_file(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made = files(tmp_path)
    for damage in (*DAMAGES, "model", "code"):
        if command == "grade" and damage == "empty":
            continue  # no responses, no grades: nothing is wrong with it
        out = tmp_path / f"out_{damage}"
        fails_in_one_line(capsys, COMMANDS_ON_FILES[command](str(made.get(damage, tmp_path / damage)), str(out)))
        left = [path for path in out.rglob("*") if path.is_file() and path.name != "lock"] if out.exists() else []
        assert left == [], (command, damage)
    assert not (tmp_path / "ran").exists(), "code that came with a model was run"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["train", "arm=../../x"], "arm must be letters"),
        (["train", "name=/etc/passwd"], "name must be letters"),
        (["train", "--arm", "../arms/ppo_clip"], "unknown arm"),
        (["train", "task.nme=x"], "did you mean 'task.name'"),
        (["train", "num_steps"], "neither a .yaml file nor key=value"),
        (["train", "=3"], "expected key=value"),
        (["train", "seed=${oc.env:HOME}"], "are not supported"),
        (["train", "task=3"], "task is a section"),
        (["train", "mask.criterion=random"], "mask.reference_arm"),
        (["train", "rollout.top_p=0.9"], "1 in training"),
        (["train", "rollout.distribution=sampled", "mask.criterion=trm_max"], "rollout.distribution"),
        (["train", "update.num_updates_per_rollout=7"], "a divisor of the 128 sequences"),
        (["train", "policy.max_position_embeddings=8"], "policy.max_position_embeddings"),
        (["train", "policy.num_key_value_heads=3"], "a multiple of policy.num_key_value_heads"),
        (["reproduce", "reproduce.arms=[]"], "at least one arm"),
        (["reproduce", "reproduce.seeds=[1,1]"], "without repeats"),
        (["reproduce", "reproduce.seeds=[-1]"], ">= 0"),
        (["bounds", "--length", "0"], ""),
        (["bounds", "--delta", "-1"], ""),
        (["bounds", "--delta", "nan"], ""),
        (["bounds", "--epsilon", "2"], ""),
        (["bounds", "--verify", "-3"], ""),
        (["plan", "--gpus", "-1"], "--gpus must be >= 1"),
        (["plan", "--gpu", "abacus"], "invalid choice"),
        (["evaluate", "--limit", "-3"], "--limit must be >= 1"),
        (["report", "output.dir=/nowhere/at/all"], ""),
        (["report", "output.dir=/dev/null/x"], ""),
        (["grade", "/dev/null/x"], ""),
    ],
)
def test_each_wrong_setting_is_named(words: list[str], wanted: str, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.chdir(ROOT)
    fails_in_one_line(capsys, words, wanted)
