"""Tokens a second and peak memory of `trm-repro audit` on dumps that it makes: Parquet and JSONL.

Each audit runs in a process of its own, so that its peak memory is its own; the time is that of the process, imports
included, and the rate leaves out the time of an audit of one sequence, which is printed.

    .venv/bin/python -m benchmarks.audit --tokens 1e7 1e8
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from benchmarks.measure import add_report_arguments, goal, publish

MEAN_LENGTH = 1000
ROWS_A_GROUP = 2000
QUICK, FULL = "drift and the paper's gates", "everything"
GOALS = ((".parquet", QUICK, 20e6), (".parquet", FULL, 5e6), (".jsonl", QUICK, 1e6), (".jsonl", FULL, 1e6))
"""File, what is measured of it, and the rate it should reach, in tokens a second on two cores."""


class Run(NamedTuple):
    """One audit."""

    seconds: float
    cpu_seconds: float
    peak_mib: float
    num_tokens: int


def make_rows(rng: np.random.Generator, num_rows: int) -> pa.RecordBatch:
    """Draw rollouts with lengths around `MEAN_LENGTH` and a heavy-tailed log-ratio."""
    lengths = rng.integers(MEAN_LENGTH // 2, MEAN_LENGTH * 3 // 2, num_rows)
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())
    num_tokens = int(lengths.sum())
    rollout = -rng.exponential(0.5, num_tokens).astype(np.float32)
    policy = np.minimum(rollout + 0.01 * rng.standard_t(3, num_tokens).astype(np.float32), 0)
    tokens = rng.integers(0, 150_000, num_tokens).astype(np.int32)
    return pa.record_batch(
        {
            "step": pa.array(np.full(num_rows, rng.integers(0, 100)), pa.int32()),
            "prompt_id": pa.array(rng.integers(0, 1000, num_rows), pa.int32()),
            "reward": pa.array(rng.integers(0, 2, num_rows).astype(np.float32)),
            "advantage": pa.array(rng.standard_normal(num_rows).astype(np.float32)),
            "rollout_logprobs": pa.ListArray.from_arrays(offsets, rollout),
            "policy_logprobs": pa.ListArray.from_arrays(offsets, policy),
            "token_ids": pa.ListArray.from_arrays(offsets, tokens),
        }
    )


def write_parquet(path: Path, num_tokens: int) -> None:
    """Write about this many tokens."""
    rng = np.random.default_rng(0)
    left = max(1, num_tokens // MEAN_LENGTH)
    writer = None
    while left > 0:
        batch = make_rows(rng, min(left, ROWS_A_GROUP))
        # Log-probs hardly repeat: a dictionary would only cost time, as would compression.
        writer = writer or pq.ParquetWriter(path, batch.schema, compression="lz4", use_dictionary=False)
        writer.write_batch(batch)
        left -= ROWS_A_GROUP
    assert writer is not None
    writer.close()


def write_jsonl(path: Path, num_tokens: int) -> None:
    """Write about this many tokens, without token ids."""
    rows = make_rows(np.random.default_rng(0), max(1, num_tokens // MEAN_LENGTH)).drop_columns(["token_ids"])
    with path.open("w", encoding="utf-8") as file:
        for row in rows.to_pylist():
            file.write(json.dumps(row) + "\n")


def in_own_process(write: Callable[[Path, int], None], path: Path, num_tokens: int) -> None:
    """Write a file elsewhere: a child begins with the peak memory of its parent, which is to stay small."""
    process = multiprocessing.get_context("spawn").Process(target=write, args=(path, num_tokens))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{path} could not be written")


def audit_once(path: Path, options: list[str]) -> Run:
    """Audit a file in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "audit.json"
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "pipelines.cli", "audit", str(path), "--json", str(out), *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        if status:
            raise SystemExit(f"the audit of {path} failed")
        cpu_seconds, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
        return Run(seconds, cpu_seconds, peak, json.loads(out.read_text())["num_tokens"])


def measure(jobs: list[tuple[Path, list[str]]], repeats: int) -> list[Run]:
    """Run every audit in turn, once to warm up and then ``repeats`` times: medians, and the largest peak."""
    rounds = [[audit_once(*job) for job in jobs] for _ in tqdm(range(1 + repeats))][1:]
    return [
        Run(
            statistics.median(run.seconds for run in runs),
            statistics.median(run.cpu_seconds for run in runs),
            max(run.peak_mib for run in runs),
            runs[0].num_tokens,
        )
        for runs in zip(*rounds, strict=True)
    ]


def main() -> int:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, nargs="+", default=[1e7, 1e8])
    parser.add_argument("--jsonl-tokens", type=float, default=2e6, help="tokens of the JSONL file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "audit_benchmark")
    add_report_arguments(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.tokens, arguments.jsonl_tokens, arguments.repeats = [2e5], 2e5, 1
    arguments.folder.mkdir(parents=True, exist_ok=True)
    try:
        files = [arguments.folder / "one.parquet", *(arguments.folder / f"{n:.0f}.parquet" for n in arguments.tokens)]
        for path, size in zip(files, [1, *arguments.tokens], strict=True):
            in_own_process(write_parquet, path, int(size))
        files.append(arguments.folder / "tokens.jsonl")
        in_own_process(write_jsonl, files[-1], int(arguments.jsonl_tokens))
        jobs = [(path, options) for path in files for options in (["--quick"], [])]
        runs = measure(jobs, arguments.repeats)
    finally:
        shutil.rmtree(arguments.folder)
    starts = {True: runs[0].seconds, False: runs[1].seconds}
    rows: list[dict[str, Any]] = []
    rates: dict[tuple[str, str], float] = {}
    for (path, options), run in zip(jobs[2:], runs[2:], strict=True):
        what = QUICK if options else FULL
        rate = run.num_tokens / max(run.seconds - starts[bool(options)], 1e-9)
        rates[path.suffix, what] = min(rate, rates.get((path.suffix, what), rate))
        rows.append(
            {
                "file": path.suffix,
                "what": what,
                "tokens": run.num_tokens,
                "seconds": run.seconds,
                "CPU seconds": run.cpu_seconds,
                "tokens/s": rate,
                "peak MiB": run.peak_mib,
            }
        )
    goals = [
        goal(f"{file}: {what}, tokens/s without the start", rates[file, what], limit, "at_least")
        for file, what, limit in GOALS
    ]
    goals.append(goal("peak memory, MiB", max(run.peak_mib for run in runs), 1000.0, "at_most"))
    note = (
        f"Medians of {arguments.repeats} after one to warm up. An audit of one sequence: {starts[True]:.2f} s with "
        f"--quick, {starts[False]:.2f} s without, most of it importing torch."
    )
    publish("audit", rows, goals, arguments.json, notes=[note])
    return 0


if __name__ == "__main__":
    sys.exit(main())
