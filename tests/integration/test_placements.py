"""Where the engine stands: a server of its own, with and without sampling ahead, and one vLLM in each rank."""

from pathlib import Path

import pytest

from pipelines.launch import train_ranks
from pipelines.run_directory import RunDirectory
from pipelines.session import Session, open_session, set_threads
from pipelines.spool import SpoolEntry, read_spool
from pipelines.training import starting_policy, train_run
from tests.conftest import SMOKE
from trm_repro.config import RunConfig, load_arm
from trm_repro.rollout import SamplingRequest, SamplingSettings
from trm_repro.shards import read_rollouts

ARM = "trm_avg_0.001"


def run_on(session: Session, config: RunConfig, model_path: Path) -> list[SpoolEntry]:
    directory = RunDirectory(config)
    directory.prepare()
    train_run(config, session, model_path)
    return [entry for entry in read_spool(directory.spool_file) if entry.kind == "train"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_takes_every_weight_version_and_sampling_ahead_changes_nothing_but_time(tmp_path: Path):
    set_threads(1)
    overrides = [
        *("num_steps=3", "rollout.placement=server", "rollout.staleness_steps=1", "evaluation.every_steps=100"),
        *(f"output.warm_start_dir={tmp_path / 'warm_starts'}", "output.keep_shards_every=1"),
    ]
    here = load_arm(ARM, [SMOKE], [*overrides, f"output.dir={tmp_path / 'here'}"])
    ahead = load_arm(ARM, [SMOKE], [*overrides, f"output.dir={tmp_path / 'ahead'}", "rollout.overlap=true"])
    model_path = starting_policy(here)
    session = open_session(here, model_path)
    try:
        in_turn, overlapped = run_on(session, here, model_path), run_on(session, ahead, model_path)
        server, request = session.engine.engine, SamplingRequest(prompt_ids=(1, 8, 14, 9), seed=3)
        (whole,) = server.sample([request], SamplingSettings(max_tokens=6))
        server.stop_ids = whole.token_ids[:1]
        (stopped,) = server.sample([request], SamplingSettings(max_tokens=6))
        assert (stopped.token_ids, stopped.finished) == (whole.token_ids[:1], True)
    finally:
        session.engine.engine.close()
    # Rollouts of step s come from the weights after s - 1 steps, the oldest there are at first.
    assert [entry.metrics["rollout/weight_version"] for entry in overlapped] == [0, 0, 1]
    assert [entry.metrics["rollout/lag_steps"] for entry in overlapped] == [0, 1, 1]
    assert all(entry.metrics["probe/gap"] <= entry.metrics["probe/threshold"] for entry in overlapped)
    for step in range(3):
        pair = [read_rollouts(RunDirectory(c).shards / f"step_{step:05d}.parquet")[0] for c in (here, ahead)]
        assert [rollout.response_ids for rollout in pair[0]] == [rollout.response_ids for rollout in pair[1]]
        assert {rollout.weight_version for rollout in pair[1]} == {max(0, step - 1)}
    for one, other in zip(in_turn, overlapped, strict=True):
        assert one.num_kept == other.num_kept
        assert other.metrics["divergence/kl_mean"] == pytest.approx(one.metrics["divergence/kl_mean"], rel=1e-6)
    assert all(entry.metrics["overlap/sampling_seconds"] > 0 for entry in overlapped[1:])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_vllm_in_each_of_two_ranks_samples_what_the_policy_holds(tmp_path: Path):
    set_threads(1)
    overrides = [
        *("num_steps=2", "policy.architecture=dense", "evaluation.every_steps=100", "output.keep_shards_every=1"),
        *("trainer.devices=2", "rollout.placement=colocated", "rollout.staleness_steps=0"),
        "update.num_updates_per_rollout=1",  # so that every sequence is measured by the policy that sampled it
        *(f"output.dir={tmp_path / 'runs'}", f"output.warm_start_dir={tmp_path / 'warm_starts'}"),
    ]
    config = load_arm(ARM, [SMOKE], overrides)
    model_path = starting_policy(config)
    RunDirectory(config).prepare()
    train_ranks(config, model_path)
    run = tmp_path / "runs" / ARM / "seed_101"
    entries = [entry for entry in read_spool(run / "metrics.jsonl") if entry.kind == "train"]
    assert [entry.metrics["rollout/weight_version"] for entry in entries] == [0, 1]
    assert all(entry.metrics["probe/gap"] <= entry.metrics["probe/threshold"] for entry in entries)
    assert all(entry.metrics["divergence/kl_mean"] < 1e-3 for entry in entries)  # rounding, not other weights
    rollouts, _ = read_rollouts(run / "shards" / "step_00001.parquet")
    assert [rollout.group for rollout in rollouts] == [group for group in range(4) for _ in range(4)]
    prompts = {rollout.group: rollout.prompt_ids for rollout in rollouts}
    assert all(rollout.prompt_ids == prompts[rollout.group] for rollout in rollouts)  # each at its own request's place
