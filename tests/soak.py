"""A run of many short steps must hold memory and file handles flat: `python -m tests.soak` (`make soak`)."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.chaos import ROOT

ARM = "trm_avg_0.001"
SETTINGS = (
    "conf/smoke.yaml",
    "rollout.engine=transformers",
    "rollout.precision=float32",
    "task.max_operands=2",
    "policy.architecture=dense",
    "policy.hidden_size=32",
    "policy.num_layers=1",
    "policy.intermediate_size=64",
    "policy.head_dim=16",
    "warm_start.max_operands=2",
    "warm_start.target_pass_rate=0.01",
    "rollout.num_prompts=2",
    "rollout.group_size=2",
    "rollout.max_response_tokens=10",
    "rollout.probe_contexts=4",
    "evaluation.every_steps=100",
    "evaluation.max_response_tokens=10",
    "evaluation.num_problems=4",
    "evaluation.num_sampled_problems=4",
    "evaluation.num_final_problems=0",
    "evaluation.length_operands=[]",
    "output.keep_shards_every=100",
)
"""Every part of a step on a policy of one layer: what grows from step to step grows with it."""
NUM_SHARDS = 10_000
WARM_UP = 0.25  # of the steps, in which caches fill
MOST_MEMORY_SLOPE = 20.0  # MB in 1,000 steps
MOST_HANDLE_SLOPE = 1.0  # in 1,000 steps
MOST_LISTING_SECONDS = 1.0
REPLAY_SECONDS, MAX_BATCH = 5.0, 1000
"""Of pipelines.tracking: seconds between two looks at the spool, points in one request at most."""
CHILD = "--child"


def main() -> int:
    """Run, sample, and print the slopes; returns 1 where memory or handles grew, or MLflow was written to too often.

    A write to MLflow is one request with metrics in it. Batched, there are at most as many as looks at the spool and
    full requests together.
    """
    parser = argparse.ArgumentParser(description="hold memory and file handles flat over many short steps")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("settings", nargs="*", help="further key=value settings of the run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [*SETTINGS, f"num_steps={arguments.steps}", f"output.dir={folder}/runs", *arguments.settings]
        words += [f"output.warm_start_dir={folder}/warm_starts", "seed=1"]
        writes = folder / "writes.json"
        began = time.monotonic()
        with (folder / "errors").open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.soak", CHILD, str(writes), "train", "--arm", ARM, *words],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            samples = sample(process, folder / "runs" / ARM / "seed_1" / "metrics.jsonl")
        if process.returncode:
            sys.stderr.write((folder / "errors").read_text()[-2000:])
            return 1
        result = slopes(samples, arguments.steps) | json.loads(writes.read_text())
        seconds = time.monotonic() - began
        result["seconds_to_list_10000_shards"] = round(list_store(folder / "store"), 2)
        result["minutes"] = round(seconds / 60, 1)
    sys.stdout.write(json.dumps(result) + "\n")
    is_flat = result["memory_mb_per_1000_steps"] <= MOST_MEMORY_SLOPE
    is_flat &= result["file_handles_per_1000_steps"] <= MOST_HANDLE_SLOPE
    most_writes = seconds / REPLAY_SECONDS + result["mlflow_points"] / (MAX_BATCH / 2)
    is_quick = result["seconds_to_list_10000_shards"] <= MOST_LISTING_SECONDS
    return 0 if is_flat and is_quick and result["mlflow_writes"] <= most_writes else 1


def list_store(folder: Path) -> float:
    """Time how long a store of 10,000 shards with their masks takes to list, seconds."""
    from pipelines.audit.own_shards import find_dumps
    from tests.unit.builders import make_rollout
    from trm_repro.shards import MaskRow, write_masks, write_rollouts

    first = folder / "shards" / "step_00000.parquet", folder / "masks" / "step_00000.parquet"
    write_rollouts(first[0], [make_rollout(2)], 0)
    logprobs = make_rollout(2).logprobs
    write_masks(first[1], [MaskRow(update=0, sequence_id=0, kept=True, policy_logprobs=logprobs, token_kl=None)], 0)
    for step in range(1, NUM_SHARDS):
        for file in first:
            shutil.copy(file, file.with_name(f"step_{step:05d}.parquet"))
    began = time.monotonic()
    assert len(find_dumps([str(folder)])) == NUM_SHARDS
    return time.monotonic() - began


def slopes(samples: list[tuple[int, float, int]], num_steps: int) -> dict[str, Any]:
    """Fit lines through the samples after the warm-up.

    Args:
        samples: (steps done, resident MB, open handles), in order.
        num_steps: of the whole run.

    Returns:
        Slopes in 1,000 steps, and where memory began and ended.
    """
    steps, memory, handles = (np.array(column, dtype=float) for column in zip(*samples, strict=True))
    late = steps > WARM_UP * num_steps
    return {
        "steps": int(steps.max()),
        "memory_mb_at_start_of_fit": round(float(memory[late][0]), 1),
        "memory_mb_at_end": round(float(memory[-1]), 1),
        "memory_mb_per_1000_steps": round(float(np.polyfit(steps[late], memory[late], 1)[0]) * 1000, 2),
        "file_handles_at_start_and_end": [int(handles[late][0]), int(handles[-1])],
        "file_handles_per_1000_steps": round(float(np.polyfit(steps[late], handles[late], 1)[0]) * 1000, 2),
    }


def sample(process: subprocess.Popen[bytes], spool: Path) -> list[tuple[int, float, int]]:
    """Collect (steps done, resident MB, open handles) every two seconds until the process ends."""
    samples, handle = [], psutil.Process(process.pid)
    steps, position = 0, 0
    while process.poll() is None:
        time.sleep(2.0)
        try:
            used, num_handles = handle.memory_info().rss / 1e6, handle.num_fds()
        except psutil.Error:
            continue
        if spool.is_file():
            with spool.open("rb") as lines:
                lines.seek(position)
                text = lines.read()
            complete = text[: text.rfind(b"\n") + 1]
            steps, position = steps + complete.count(b'"kind": "train"'), position + len(complete)
        if steps and used:  # a process that has just ended has no memory
            samples.append((steps, used, num_handles))
    return samples


def child(file: Path, words: list[str]) -> int:
    """Run a command and count what it writes to MLflow: requests and the points in them."""
    from mlflow import MlflowClient

    from pipelines.cli import main as trm_repro

    counts, log_batch = {"mlflow_writes": 0, "mlflow_points": 0}, MlflowClient.log_batch

    def counted(self: MlflowClient, run_id: str, metrics: Any = (), **others: Any) -> Any:
        if metrics:
            counts["mlflow_writes"] += 1
            counts["mlflow_points"] += len(metrics)
        return log_batch(self, run_id, metrics=metrics, **others)

    MlflowClient.log_batch = counted
    code = trm_repro(words)
    file.write_text(json.dumps(counts))
    return code


if __name__ == "__main__":
    sys.exit(child(Path(sys.argv[2]), sys.argv[3:]) if sys.argv[1:2] == [CHILD] else main())
