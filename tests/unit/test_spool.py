"""The spool: one entry a step and kind, whole lines only, whatever happens to the process or the disk."""

import json
import os
from pathlib import Path

import pytest

from pipelines.run_directory import RunDirectory
from pipelines.spool import MetricsSpool, SpoolEntry, read_spool
from trm_repro.config import load_config
from trm_repro.errors import InputError


def entry(step: int, value: float) -> SpoolEntry:
    return SpoolEntry(step=step, kind="train", time=1000.0 + step, metrics={"score/greedy": value})


def test_spool_keeps_one_entry_a_step_and_forgets_a_line_cut_short(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    MetricsSpool(path).append(entry(1, 0.25))
    with path.open("a") as file:
        file.write('{"step": 2, "kind": "tr')
    spool = MetricsSpool(path)
    spool.append(entry(1, 0.75))  # measured again after an interruption
    spool.append(entry(2, 0.5))
    assert [(e.step, e.metrics["score/greedy"]) for e in read_spool(path)] == [(1, 0.25), (2, 0.5)]


def test_a_step_that_is_there_twice_is_read_once(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    MetricsSpool(path).append(entry(1, 0.25))
    path.write_bytes(2 * path.read_bytes())
    MetricsSpool(path).append(entry(2, 0.5))
    assert [(e.step, e.metrics["score/greedy"]) for e in read_spool(path)] == [(1, 0.25), (2, 0.5)]


def test_an_entry_that_the_disk_did_not_take_leaves_no_half_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "metrics.jsonl"
    spool = MetricsSpool(path)
    spool.append(entry(1, 0.25))

    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            spool.append(entry(2, 0.5))
    spool.append(entry(2, 0.75))  # there is space again
    assert [(e.step, e.metrics["score/greedy"]) for e in read_spool(path)] == [(1, 0.25), (2, 0.75)]


@pytest.mark.parametrize("line", ["{}", "3", '{"step": "x", "kind": "train", "time": 1, "metrics": {}}', "nonsense"])
def test_a_damaged_spool_is_named_with_its_line(tmp_path: Path, line: str):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl: line 1 is no metrics entry"):
        list(read_spool(path))


def prepared(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(load_config(overrides=[f"output.dir={tmp_path}"]))
    directory.prepare()
    return directory


@pytest.mark.parametrize("content", ["", "x", "-1"])
def test_a_damaged_end_mark_counts_as_none(tmp_path: Path, content: str):
    directory = prepared(tmp_path)
    directory.finished_file.write_text(content)
    assert not directory.is_finished


def test_a_run_is_held_by_one_process_at_a_time(tmp_path: Path):
    directory = prepared(tmp_path)
    with (
        directory.locked(),
        pytest.raises(InputError, match="another process is training this run"),
        directory.locked(),
    ):
        pass
    with directory.locked():
        pass


@pytest.mark.parametrize(
    "changes",
    [
        {"time": "x"},
        {"spans": [1, 2]},
        {"spans": [["rollout", 1.0, "x"]]},
        {"num_kept": ["x"]},
        {"profiles": {"mean_kl": 3}},
        {"problem_scores": {"greedy": ["x"]}},
        {"rejected_lengths": [["x"]]},
        {"step": True},
        {"step": -1},
        {"kind": 3},
        {"metrics": {"score/greedy": "x"}},
    ],
)
def test_an_entry_of_other_kinds_of_values_is_named_by_its_line(tmp_path: Path, changes: dict[str, object]):
    path = tmp_path / "metrics.jsonl"
    MetricsSpool(path).append(entry(1, 0.25))
    row = {"step": 2, "kind": "train", "time": 1.0, "metrics": {}} | changes
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(InputError, match="line 2 is no metrics entry"):
        list(read_spool(path))
