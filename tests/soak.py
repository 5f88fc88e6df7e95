"""A run of many short steps must hold memory and file handles flat: `python -m tests.soak` (`make soak`)."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from tests.chaos import ROOT

SETTINGS = (
    "conf/smoke.yaml",
    "rollout.engine=transformers",
    "rollout.precision=float32",
    "rollout.num_prompts=2",
    "rollout.group_size=2",
    "rollout.max_response_tokens=12",
    "evaluation.every_steps=100",
    "evaluation.max_response_tokens=12",
    "evaluation.length_operands=[]",
    "output.keep_shards_every=100",
)
WARM_UP = 0.25  # of the steps, in which caches fill


def main() -> int:
    """Run, sample, and print the slopes; returns 1 where memory grew by more than 20 MB in 1,000 steps."""
    parser = argparse.ArgumentParser(description="hold memory and file handles flat over many short steps")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("settings", nargs="*", help="further key=value settings of the run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [*SETTINGS, f"num_steps={arguments.steps}", f"output.dir={folder}/runs", *arguments.settings]
        process = subprocess.Popen(
            [sys.executable, "-m", "pipelines.cli", "train", "--arm", "trm_avg_0.001", *words, "seed=1"],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        samples = sample(process, folder / "runs" / "trm_avg_0.001" / "seed_1" / "metrics.jsonl")
        errors = process.stderr.read().decode() if process.stderr else ""
        if process.returncode:
            sys.stderr.write(errors[-2000:])
            return 1
    steps, memory, handles = (np.array(column, dtype=float) for column in zip(*samples, strict=True))
    late = steps > WARM_UP * arguments.steps
    memory_slope = float(np.polyfit(steps[late], memory[late], 1)[0]) * 1000
    handle_slope = float(np.polyfit(steps[late], handles[late], 1)[0]) * 1000
    result = {
        "steps": int(steps.max()),
        "memory_mb_at_start_of_fit": round(float(memory[late][0]), 1),
        "memory_mb_at_end": round(float(memory[-1]), 1),
        "memory_mb_per_1000_steps": round(memory_slope, 2),
        "file_handles_per_1000_steps": round(handle_slope, 2),
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return 1 if memory_slope > 20 or handle_slope > 1 else 0


def sample(process: subprocess.Popen[bytes], spool: Path) -> list[tuple[int, float, int]]:
    """Collect (steps done, resident MB, open handles) once a second until the process ends."""
    samples, handle = [], psutil.Process(process.pid)
    while process.poll() is None:
        time.sleep(1.0)
        try:
            used, num_handles = handle.memory_info().rss / 1e6, handle.num_fds()
        except psutil.Error:
            continue
        steps = spool.read_bytes().count(b'"kind": "train"') if spool.is_file() else 0
        if steps and used:  # a process that has just ended has no memory
            samples.append((steps, used, num_handles))
    return samples


if __name__ == "__main__":
    sys.exit(main())
