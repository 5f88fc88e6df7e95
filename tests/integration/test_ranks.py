"""Several processes train one policy: the same masks and losses as one process, also after kill -9."""

import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipelines.launch import train_ranks
from pipelines.run_directory import RunDirectory
from pipelines.session import open_session, set_threads
from pipelines.spool import SpoolEntry, read_spool
from pipelines.training import starting_policy, train_run
from tests.conftest import SMOKE
from tests.unit.builders import TOKENIZER, tiny_policy
from trm_repro.config import load_arm
from trm_repro.config_sections import PolicyConfig
from trm_repro.errors import FaultError, InputError
from trm_repro.policy import build_policy, save_policy

ARM = "trm_avg_0.001"
RUN = Path(ARM) / "seed_101"
NOT_COMPARED = ("time/", "throughput/")
TOLERANCE = 1e-4  # relative; the ranks add the same float32 numbers up in another order


def train(output: Path, *overrides: str, arm: str = ARM) -> list[SpoolEntry]:
    fixed = ("rollout.engine=transformers", "evaluation.every_steps=100", "output.keep_shards_every=1")
    folders = (f"output.dir={output}", f"output.warm_start_dir={output.parent / 'warm_starts'}")
    config = load_arm(arm, [SMOKE], [*fixed, *folders, *overrides])
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


def processes_of_ranks() -> list[int]:
    """Find the processes that this one has started as ranks."""
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    found = [int(pid) for file in children for pid in file.read_text().split()]
    return [pid for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def written(path: Path) -> int | None:
    """When a file was written, nanoseconds; None where it is not there."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def train_until_killed(output: Path, *overrides: str, num_killed: int) -> None:
    """Train with two ranks, and kill some as soon as they have written a checkpoint."""
    checkpoint = output / RUN / "checkpoint.ckpt"
    before = written(checkpoint)

    def kill() -> None:
        while written(checkpoint) in (None, before):
            time.sleep(0.02)
        for pid in processes_of_ranks()[:num_killed]:
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(FaultError, match=r"rank [01] of .*SIGKILL"):
        train(output, *overrides)
    killer.join()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_killed_ranks_go_on_and_train_as_one_process_and_one_rank_goes_on_from_two(tmp_path: Path):
    set_threads(1)
    hidden = ("num_steps=3", "rollout.distribution=hidden")
    alone = train(tmp_path / "one", *hidden)
    assert any(0 < sum(entry.num_kept) < 16 for entry in alone if entry.kind == "train")  # some of 16 are rejected
    assert all(entry.metrics["divergence/kl_max"] > 0 for entry in alone if entry.kind == "train")

    two = (*hidden, "trainer.devices=2")
    train_until_killed(tmp_path / "two", *two, num_killed=1)
    train_until_killed(tmp_path / "two", *two, num_killed=2)
    shutil.copytree(tmp_path / "two", tmp_path / "fewer")
    (tmp_path / "fewer" / RUN / "checkpoint.ckpt" / ".metadata").unlink()  # back to the checkpoint before it
    runs = {"two": train(tmp_path / "two", *two), "fewer": train(tmp_path / "fewer", *hidden, "trainer.strategy=fsdp2")}
    ours = load_file(tmp_path / "one" / RUN / "policy/model.safetensors")
    for name, entries in runs.items():
        assert_same(alone, entries)
        theirs = load_file(tmp_path / name / RUN / "policy/model.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in ours)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_train_on_real_problems_as_one_process(tmp_path: Path, test_data: Path, qwen3_tokenizer):
    set_threads(1)
    sizes = PolicyConfig(architecture="dense", num_layers=2, initializer_range=0.2, max_position_embeddings=512)
    policy = build_policy(replace(sizes, vocab_size=151_936), qwen3_tokenizer, seed=0)
    save_policy(policy, qwen3_tokenizer, tmp_path / "model")
    settings = [
        *(f"policy.path={tmp_path / 'model'}", "policy.max_position_embeddings=512", "num_steps=1"),
        *("task.name=math", f"task.file={test_data / 'dapo_math_17k_dup100.parquet'}", "task.prompt_template=dapo"),
        *("evaluation.task=aime25", f"evaluation.file={test_data / 'aime25.jsonl'}", "evaluation.num_problems=1"),
        *(
            "evaluation.num_sampled_problems=1",
            "evaluation.num_samples=1",
            "evaluation.num_final_problems=0",
            "evaluation.max_response_tokens=4",
        ),
        *("evaluation.length_operands=[]", "rollout.max_prompt_tokens=400", "rollout.max_response_tokens=12"),
        *("rollout.num_prompts=2", "rollout.distribution=top_k", "rollout.num_top_logprobs=1024"),
    ]
    alone = train(tmp_path / "one", *settings, arm="trm_max_0.05")
    assert_same(alone, train(tmp_path / "two", *settings, "trainer.devices=2", arm="trm_max_0.05"))
    (run,) = (entry for entry in alone if entry.kind == "train")
    assert run.metrics["probe/gap"] <= run.metrics["probe/threshold"]
    # Nothing is masked, so that mask and update share each pass, here over one sequence.
    shared = (*settings, "update.tokens_per_micro_batch=1")
    alone = train(tmp_path / "one_shared", *shared, arm="token_is")
    assert_same(alone, train(tmp_path / "two_shared", *shared, "trainer.devices=2", arm="token_is"))
    assert [entry.num_kept for entry in alone if entry.kind == "train"] == [[4, 4]]


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
