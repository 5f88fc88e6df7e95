"""Several processes train one policy: the same masks and losses as one process, and going on with another number."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipelines.spool import SpoolEntry, read_spool
from tests.conftest import SMOKE, run_command

ARM = "trm_avg_0.001"
RUN = Path(ARM) / "seed_101"
NOT_COMPARED = ("time/", "throughput/")
TOLERANCE = 1e-4  # relative; the ranks add the same float32 numbers up in another order


def train(output: Path, *overrides: str) -> list[SpoolEntry]:
    done = run_command(
        *("train", SMOKE, "--arm", ARM, "rollout.engine=transformers", "evaluation.every_steps=100"),
        *(f"output.dir={output}", f"output.warm_start_dir={output.parent / 'warm_starts'}"),
        *overrides,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return list(read_spool(output / RUN / "metrics.jsonl"))


def assert_same(here: list[SpoolEntry], there: list[SpoolEntry]) -> None:
    assert [(entry.step, entry.kind) for entry in here] == [(entry.step, entry.kind) for entry in there]
    for one, other in zip(here, there, strict=True):
        assert one.num_kept == other.num_kept
        assert one.rejected_lengths == other.rejected_lengths
        for name, value in one.metrics.items():
            if not name.startswith(NOT_COMPARED):
                assert other.metrics[name] == pytest.approx(value, rel=TOLERANCE, abs=1e-5), name


@pytest.mark.slow
def test_two_ranks_train_as_one_process_and_either_number_goes_on_from_the_other(tmp_path: Path):
    two = train(tmp_path / "two", "num_steps=2", "trainer.devices=2")
    shutil.copytree(tmp_path / "two", tmp_path / "two_then_one")
    config = tmp_path / "two_then_one" / RUN / "config.yaml"
    alone = train(tmp_path / "one", "num_steps=3")
    train_steps = [entry for entry in two if entry.kind == "train"]
    assert_same([entry for entry in alone if entry.kind == "train"][:2], train_steps)
    assert any(0 < sum(entry.num_kept) < 16 for entry in train_steps)  # some sequences of 16 are rejected

    assert config.is_file()
    went_on = train(tmp_path / "two_then_one", "num_steps=3", "trainer.strategy=fsdp2")
    assert_same(alone[-2:], went_on[-2:])
    ours, theirs = (load_file(tmp_path / name / RUN / "policy/model.safetensors") for name in ("one", "two_then_one"))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in ours)
