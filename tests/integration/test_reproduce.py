"""`trm-repro reproduce` on the smoke configuration: files, MLflow, report, and going on after an interruption."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

from pipelines.run_directory import RunDirectory
from pipelines.spool import read_spool
from tests.conftest import ROOT, SMOKE, run_command, run_process
from trm_repro.config import load_arm, load_config
from trm_repro.shards import read_masks, read_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ARMS = ("trm_avg_0.001", "ppo_clip", "random_as_trm_avg_0.001")


def runs(folder: Path) -> dict[str, RunDirectory]:
    overrides = [f"output.dir={folder / 'runs'}", f"output.warm_start_dir={folder / 'warm_starts'}", "seed=1"]
    return {arm: RunDirectory(load_arm(arm, [SMOKE], overrides)) for arm in ARMS}


def values(directory: RunDirectory) -> list[tuple[int, str, dict[str, float]]]:
    """Everything measured, without what depends on the clock."""
    return [
        (
            entry.step,
            entry.kind,
            {k: v for k, v in entry.metrics.items() if not k.startswith(("time/", "throughput/"))},
        )
        for entry in read_spool(directory.spool_file)
    ]


def same(a: list, b: list) -> bool:
    return json.dumps(a) == json.dumps(b)


def test_every_arm_has_every_step_and_its_evaluations(smoke: Path):
    for directory in runs(smoke).values():
        entries = values(directory)
        assert [step for step, kind, _ in entries if kind == "train"] == [1, 2, 3, 4]
        assert [step for step, kind, _ in entries if kind == "evaluate"] == [0, 2, 4]
        assert directory.is_finished
        assert (directory.policy / "model.safetensors").is_file()


def test_promised_metrics_are_logged_every_step(smoke: Path):
    promised = {
        "divergence/ppl_gap",
        "rollout/reward_mean",
        *(f"divergence/{kind}_{part}" for kind in ("kl", "k2", "k3") for part in ("mean", "p99", "max")),
        "mask/kept_sequence_fraction",
        "train/gradient_norm_mean",
        "train/num_skipped_updates",
        "train/clip_fraction",
        "policy/entropy_mean",
        "router/agreement_fraction",
        "rollout/response_length_mean",
        "divergence/num_clamped_tokens",
        "divergence/num_nonfinite_tokens",
        *(f"time/{stage}_seconds" for stage in ("sync", "rollout", "mask", "update", "step")),
        "throughput/step_tokens_per_second",
        "probe/gap",
    }
    for directory in runs(smoke).values():
        for entry in read_spool(directory.spool_file):
            if entry.kind == "train" and entry.metrics["train/num_skipped_updates"] < 2:
                assert promised <= set(entry.metrics)


def test_random_control_keeps_as_many_as_its_reference_at_every_update(smoke: Path):
    directories = runs(smoke)
    reference = [e.num_kept for e in read_spool(directories["trm_avg_0.001"].spool_file) if e.kind == "train"]
    control = [e.num_kept for e in read_spool(directories["random_as_trm_avg_0.001"].spool_file) if e.kind == "train"]
    assert control == reference


def test_staleness_is_what_was_asked_for(smoke: Path):
    versions = [
        entry.metrics["rollout/weight_version"]
        for entry in read_spool(runs(smoke)["ppo_clip"].spool_file)
        if entry.kind == "train"
    ]
    assert versions == [0, 0, 1, 2]  # staleness_steps: 1


def test_shards_hold_what_the_masks_are_about(smoke: Path):
    directory = runs(smoke)["trm_avg_0.001"]
    assert sorted(path.name for path in directory.shards.iterdir()) == [
        f"step_0000{step}.parquet" for step in (0, 2, 3)
    ]
    rollouts, step = read_rollouts(directory.shards / "step_00003.parquet")
    masks = read_masks(directory.masks / "step_00003.parquet")
    assert step == 3
    assert sorted(row.sequence_id for row in masks) == list(range(len(rollouts)))
    for row in masks:
        rollout = rollouts[row.sequence_id]
        difference = row.policy_logprobs - rollout.logprobs
        k3 = torch.expm1(difference) - difference
        assert row.kept == bool(k3.mean() <= 0.001)


def test_mlflow_has_parent_and_nested_runs_with_every_point(smoke: Path):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{smoke / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("trm-repro")
    parent = json.loads((smoke / "runs" / "mlflow.json").read_text())["run_id"]
    arms = client.search_runs([experiment.experiment_id], f"tags.`mlflow.parentRunId` = '{parent}'")
    assert {run.info.run_name for run in arms} == set(ARMS)
    assert {run.data.tags["kind"] for run in arms} == {"arm"}
    children = client.search_runs([experiment.experiment_id], f"tags.experiment_run = '{parent}' AND tags.kind = 'run'")
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {run.info.run_id for run in arms}
    assert {run.data.tags["arm"] for run in children} == set(ARMS)
    assert {run.info.status for run in children} == {"FINISHED"}
    for run in children:
        directory = runs(smoke)[run.data.tags["arm"]]
        assert run.data.params["update.learning_rate"] == "0.1"
        assert run.data.tags["git_commit"]
        artifacts = {file.path for file in client.list_artifacts(run.info.run_id, "setup")}
        assert artifacts == {f"setup/{name}" for name in ("config.yaml", "seeds.json", "environment.json", "cpu.txt")}
        profiles = client.download_artifacts(run.info.run_id, "profiles/divergence_by_position.json")
        assert set(json.loads(Path(profiles).read_text())) == {"1", "2", "3", "4"}
        for entry in read_spool(directory.spool_file):
            for name, value in entry.metrics.items():
                points = [p for p in client.get_metric_history(run.info.run_id, name) if p.step == entry.step]
                assert [(p.value, p.timestamp) for p in points] == [(value, round(entry.time * 1000))]


def test_figures_come_with_points_that_name_their_run(smoke: Path):
    folder = smoke / "runs" / "figures"
    for name in ("figure_2", "control"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    points = pd.read_csv(folder / "control.csv")
    assert set(points.arm) == set(ARMS)
    assert points.run_id.notna().all()


def test_report_and_summary_say_what_was_run(smoke: Path):
    report = (smoke / "runs" / "report.md").read_text()
    assert "| ppo_clip | 1 | 4 |" in report
    assert "not run" in report
    assert "> **Warning.** A trial of 4 steps" in report
    assert "| not run |" not in (smoke / "stdout.txt").read_text()
    assert "claims were not run; the report lists them." in (smoke / "stdout.txt").read_text()
    assert "figures/figure_2_gap.svg" in report
    page = smoke / "runs" / "report.html"
    assert page.read_text().count('src="data:image/svg+xml;base64,') > 10
    assert f"report: {page.resolve().as_uri()}" in (smoke / "stdout.txt").read_text()
    assert "| ppo_clip | 1 | 4 |" in (smoke / "stdout.txt").read_text()


def test_logs_are_lines_of_progress_without_the_chatter_of_libraries(smoke: Path):
    logs = [smoke / "stderr.txt", *(smoke / "runs" / "logs").glob("worker_*.log")]
    assert len(logs) > 1
    for log in logs:
        text = log.read_text()
        assert "\r" not in text
        assert "Warning" not in text
        assert "Disabling Triton" not in text
    progress = logs[0].read_text().splitlines()
    assert progress[0].startswith("reproduce:   0% 0/12")
    assert progress[-1].startswith("reproduce: 100% 12/12")


def test_second_call_does_nothing_when_all_is_done(smoke_copy: Path):
    before = {path: path.read_bytes() for path in smoke_copy.rglob("*.jsonl")}
    done = run_command("reproduce", SMOKE, f"output.dir={smoke_copy / 'runs'}")
    assert done.returncode == 0, done.stderr
    assert {path: path.read_bytes() for path in smoke_copy.rglob("*.jsonl")} == before
    assert not any((smoke_copy / "runs" / "logs").glob("worker_2*"))


def test_another_configuration_is_refused_in_the_same_folder(smoke_copy: Path):
    done = run_command("reproduce", SMOKE, f"output.dir={smoke_copy / 'runs'}", "update.learning_rate=0.2")
    assert done.returncode == 2
    assert "update.learning_rate is 0.1 there and 0.2 here" in done.stderr


def children_of(parent: int) -> list[int]:
    """List the processes that a process has started, but for multiprocessing's own, which ends after them."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            is_child = status.read_text().rpartition(")")[2].split()[1] == str(parent)
            if is_child and b"resource_tracker" not in status.with_name("cmdline").read_bytes():
                found.append(int(status.parent.name))
        except OSError:  # ended meanwhile
            continue
    return found


def test_a_fresh_process_with_the_same_configuration_gives_the_same_bits(
    smoke: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The experiment's worker came to this arm after another one, with another hash seed, in another folder."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    done = run_process(
        "train",
        "--arm",
        "ppo_clip",
        SMOKE,
        "seed=1",
        f"output.dir={tmp_path / 'runs'}",
        f"output.warm_start_dir={smoke / 'warm_starts'}",
    )
    assert done.returncode == 0, done.stderr
    here, there = runs(tmp_path)["ppo_clip"], runs(smoke)["ppo_clip"]
    assert same(values(here), values(there))
    for file in (
        "policy/model.safetensors",
        *(f"{kind}/step_0000{n}.parquet" for kind in ("shards", "masks") for n in (0, 2, 3)),
    ):
        assert (here.path / file).read_bytes() == (there.path / file).read_bytes(), file


def test_killed_run_goes_on_and_ends_with_the_same_numbers(smoke: Path, tmp_path: Path):
    shutil.copytree(smoke / "warm_starts", tmp_path / "warm_starts")
    command = [sys.executable, "-m", "pipelines.cli", "reproduce", str(SMOKE), f"output.dir={tmp_path / 'runs'}"]
    command.append(f"output.warm_start_dir={tmp_path / 'warm_starts'}")
    spool = runs(tmp_path)["trm_avg_0.001"].spool_file
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 400
    while time.time() < deadline and not (spool.is_file() and any(e.step >= 2 for e in read_spool(spool))):
        time.sleep(0.02)
    workers = children_of(process.pid)
    for worker in workers:  # in the middle of what they do, holding their runs
        os.kill(worker, signal.SIGSTOP)
    waiting = run_command("train", "--arm", "trm_avg_0.001", *command[4:], "seed=1")
    assert (waiting.returncode, waiting.stderr.count("\n")) == (2, 1), waiting.stderr
    assert "another process is training this run" in waiting.stderr
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not runs(tmp_path)["random_as_trm_avg_0.001"].is_finished
    assert len(workers) >= 2
    deadline = time.time() + 30
    while any(Path(f"/proc/{worker}").exists() for worker in workers):  # the kernel ends them with their parent
        assert time.time() < deadline, "a worker outlived the command that started it"
        time.sleep(0.05)
    for directory in runs(tmp_path).values():
        with directory.locked():  # the locks ended with them
            pass
    command.append("reproduce.num_workers=1")  # on another number of workers than before
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr
    for arm, directory in runs(tmp_path).items():
        assert same(values(directory), values(runs(smoke)[arm])), arm
        first = (directory.policy / "model.safetensors").read_bytes()
        assert first == (runs(smoke)[arm].policy / "model.safetensors").read_bytes()


def test_stage_commands_repeat_the_training_run_to_the_bit(smoke: Path, tmp_path: Path):
    online = runs(smoke)["trm_avg_0.001"]
    settings = [SMOKE, "seed=1", f"output.warm_start_dir={smoke / 'warm_starts'}"]
    for command in (
        ["rollout", *settings, "--out", tmp_path],
        ["mask", *settings, "--in", tmp_path / "step_00000.parquet", "--out", tmp_path / "first.parquet"],
        ["update", *settings, "--in", tmp_path / "step_00000.parquet", "--out", tmp_path / "update"],
    ):
        done = run_command(*command)
        assert done.returncode == 0, done.stderr
    here, _ = read_rollouts(tmp_path / "step_00000.parquet")
    there, _ = read_rollouts(online.shards / "step_00000.parquet")
    for a, b in zip(here, there, strict=True):
        assert (a.prompt_ids, a.response_ids, a.reward, a.advantage) == (
            b.prompt_ids,
            b.response_ids,
            b.reward,
            b.advantage,
        )
        assert torch.equal(a.log_distribution, b.log_distribution)
        assert torch.equal(a.experts, b.experts)
    online_masks = read_masks(online.masks / "step_00000.parquet")
    for a, b in zip(read_masks(tmp_path / "update" / "masks_step_00000.parquet"), online_masks, strict=True):
        assert (a.update, a.sequence_id, a.kept) == (b.update, b.sequence_id, b.kept)
        assert torch.equal(a.policy_logprobs, b.policy_logprobs)
        assert torch.equal(a.token_kl, b.token_kl)
    first = {row.sequence_id: row for row in read_masks(tmp_path / "first.parquet")}
    for row in online_masks:
        if row.update == 0:
            assert first[row.sequence_id].kept == row.kept
            torch.testing.assert_close(first[row.sequence_id].token_kl, row.token_kl, atol=1e-6, rtol=1e-5)


def test_update_goes_on_from_a_checkpoint_as_training_does(smoke: Path, tmp_path: Path):
    shutil.copytree(smoke / "warm_starts", tmp_path / "warm_starts")
    common = [SMOKE, "seed=1", f"output.dir={tmp_path / 'runs'}", f"output.warm_start_dir={tmp_path / 'warm_starts'}"]
    arm = ["--arm", "trm_avg_0.001"]
    assert run_command("train", *arm, *common, "num_steps=3").returncode == 0
    directory = runs(tmp_path)["trm_avg_0.001"]
    shutil.copy(directory.checkpoint, tmp_path / "after_3.ckpt")
    done = run_command("train", *arm, *common, "num_steps=4")
    assert done.returncode == 0, done.stderr
    assert same(
        [e for e in values(directory) if e[:2] != (3, "evaluate")], values(runs(smoke)["trm_avg_0.001"])
    )  # the shorter run evaluated once more, at its end
    shard = directory.shards / "step_00003.parquet"
    stage = ["--in", shard, "--checkpoint", tmp_path / "after_3.ckpt", "--out", tmp_path / "out"]
    done = run_command("update", *arm, *common, *stage)
    assert done.returncode == 0, done.stderr
    here = read_masks(tmp_path / "out" / "masks_step_00003.parquet")
    for a, b in zip(here, read_masks(directory.masks / "step_00003.parquet"), strict=True):
        assert (a.update, a.sequence_id, a.kept) == (b.update, b.sequence_id, b.kept)
        assert torch.equal(a.policy_logprobs, b.policy_logprobs)
    weights = (tmp_path / "out" / "policy" / "model.safetensors").read_bytes()
    assert weights == (directory.policy / "model.safetensors").read_bytes()
    wrong = run_command("update", *arm, *common, "--in", shard, "--out", tmp_path / "out")
    assert wrong.returncode == 2
    assert "holds step 3, but the starting policy has done 0 steps" in wrong.stderr


def test_dense_policy_runs_by_one_key(smoke: Path, tmp_path: Path):
    done = run_command(
        "train",
        "--arm",
        "ppo_clip",
        SMOKE,
        "policy.architecture=dense",
        "num_steps=1",
        "warm_start.target_pass_rate=0.001",
        f"output.dir={tmp_path / 'runs'}",
        f"output.warm_start_dir={tmp_path / 'warm'}",
    )
    assert done.returncode == 0, done.stderr
    config = load_config([tmp_path / "runs" / "ppo_clip" / "seed_101" / "config.yaml"])
    assert config.policy.architecture == "dense"


def test_top_k_rollouts_train_with_certified_masks(smoke: Path, tmp_path: Path):
    done = run_command(
        "train",
        "--arm",
        "trm_max_0.05",
        SMOKE,
        "seed=1",
        "num_steps=2",
        "rollout.distribution=top_k",
        "rollout.num_top_logprobs=4",
        f"output.dir={tmp_path / 'runs'}",
        f"output.warm_start_dir={smoke / 'warm_starts'}",
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "trm_max_0.05" / "seed_1"
    trained = [entry.metrics for entry in read_spool(folder / "metrics.jsonl") if entry.kind == "train"]
    assert all(0.0 <= metrics["mask/undecided_fraction"] < 1.0 for metrics in trained)
    assert all("divergence/kl_mean" not in metrics for metrics in trained)
    rollouts, _ = read_rollouts(folder / "shards" / "step_00001.parquet")
    assert all(rollout.log_distribution is None for rollout in rollouts)
    assert all(rollout.top_logprobs.shape[1] == 4 for rollout in rollouts)


def test_length_table_measures_every_size(smoke: Path):
    rows = json.loads((smoke / "runs" / "figures" / "table_2.json").read_text())
    assert [row["num_operands"] for row in rows] == [2, 4]
    assert all(0.0 <= value <= 1.0 for row in rows for value in row["rejection"].values())
    assert "Rejection against length" in (smoke / "runs" / "report.md").read_text()


def test_evaluate_runs_aime_problems_through_engine_and_grader(smoke: Path, tmp_path: Path, test_data: Path):
    done = run_command(
        "evaluate",
        "--task",
        "aime25",
        "--data",
        test_data / "aime25.jsonl",
        "--in",
        runs(smoke)["ppo_clip"].policy,
        "--out",
        tmp_path,
        "evaluation.num_samples=2",
        "evaluation.max_response_tokens=16",
        "--limit",
        "1",
        SMOKE,
    )
    assert done.returncode == 0, done.stderr
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert (scores["num_problems"], scores["k"], scores["avg_at_k"]["mean"]) == (1, 2, 0.0)
    answers = pd.read_parquet(tmp_path / "answers.parquet")
    assert list(answers.problem_id) == ["aime25-I-01", "aime25-I-01"]
