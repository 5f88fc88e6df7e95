"""Several processes train one policy: the same masks and losses as one process, and going on with another number."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipelines.launch import train_ranks
from pipelines.run_directory import RunDirectory
from pipelines.session import open_session, set_threads
from pipelines.spool import SpoolEntry, read_spool
from pipelines.train import starting_policy, train_run
from tests.conftest import SMOKE
from tests.unit.builders import TOKENIZER, tiny_policy
from trm_repro.config import load_arm
from trm_repro.errors import InputError
from trm_repro.policy import save_policy

ARM = "trm_avg_0.001"
RUN = Path(ARM) / "seed_101"
NOT_COMPARED = ("time/", "throughput/")
TOLERANCE = 1e-4  # relative; the ranks add the same float32 numbers up in another order


def train(output: Path, *overrides: str) -> list[SpoolEntry]:
    fixed = ("rollout.engine=transformers", "evaluation.every_steps=100", "output.keep_shards_every=1")
    folders = (f"output.dir={output}", f"output.warm_start_dir={output.parent / 'warm_starts'}")
    config = load_arm(ARM, [SMOKE], [*fixed, *folders, *overrides])
    model_path = starting_policy(config)
    directory = RunDirectory(config)
    directory.prepare()
    if config.trainer.is_sharded:
        train_ranks(config, model_path)
    else:
        train_run(config, open_session(config, model_path), model_path)
    return list(read_spool(directory.spool_file))


def assert_same(here: list[SpoolEntry], there: list[SpoolEntry]) -> None:
    assert [(entry.step, entry.kind) for entry in here] == [(entry.step, entry.kind) for entry in there]
    for one, other in zip(here, there, strict=True):
        assert one.num_kept == other.num_kept
        assert one.rejected_lengths == other.rejected_lengths
        for name, value in one.metrics.items():
            if not name.startswith(NOT_COMPARED):
                assert other.metrics[name] == pytest.approx(value, rel=TOLERANCE, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_train_as_one_process_and_one_rank_goes_on_from_two(tmp_path: Path):
    set_threads(1)
    alone = train(tmp_path / "one", "num_steps=3")
    two = train(tmp_path / "two", "num_steps=2", "trainer.devices=2")
    steps = [entry for entry in two if entry.kind == "train"]
    assert_same([entry for entry in alone if entry.kind == "train"][:2], steps)
    assert any(0 < sum(entry.num_kept) < 16 for entry in steps)  # some of 16 sequences are rejected

    went_on = train(tmp_path / "two", "num_steps=3", "trainer.strategy=fsdp2")
    assert_same(alone[-2:], went_on[-2:])
    ours, theirs = (load_file(tmp_path / name / RUN / "policy/model.safetensors") for name in ("one", "two"))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in ours)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_stops_a_rank_is_told_in_one_line(tmp_path: Path):
    set_threads(1)
    save_policy(tiny_policy(), TOKENIZER, tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    folders = (f"output.dir={tmp_path / 'runs'}", f"policy.path={tmp_path / 'model'}")
    fixed = ("rollout.engine=transformers", "trainer.strategy=fsdp2")
    config = load_arm(ARM, [SMOKE], [*fixed, *folders])
    RunDirectory(config).prepare()
    with pytest.raises(InputError, match="no model can be loaded"):
        train_ranks(config, tmp_path / "model")
