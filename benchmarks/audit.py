"""Tokens a second and peak memory of `trm-repro audit` on dumps that it makes: Parquet and JSONL.

Each audit runs in a process of its own, so that its peak memory is its own; the time is that of the process, imports
included, and the rate leaves out the time of an audit of one sequence, which is printed.

    python benchmarks/audit.py --tokens 1e6 1e7 --folder /tmp/audit_benchmark
"""

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

MEAN_LENGTH = 1000
ROWS_A_GROUP = 2000
GOALS = (
    (".parquet", "drift and the paper's gates", 20e6),
    (".parquet", "everything", 5e6),
    (".jsonl", "drift and the paper's gates", 1e6),
    (".jsonl", "everything", 1e6),
)
"""File, what is measured of it, and the rate it should reach, in tokens a second on two cores."""


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


def measure(path: Path, options: list[str]) -> tuple[float, float, float, int]:
    """Audit a file in a process of its own: seconds, CPU seconds, peak MiB, tokens."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "audit.json"
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "pipelines.cli", "audit", str(path), "--json", str(out), *options],
            stdout=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        if status:
            raise SystemExit(f"the audit of {path} failed")
        return (
            seconds,
            usage.ru_utime + usage.ru_stime,
            usage.ru_maxrss / 1024,
            json.loads(out.read_text())["num_tokens"],
        )


def goals_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the slowest row of each kind, and the largest peak, with the goals."""
    goals = []
    for file, what, limit in GOALS:
        rates = [row["rate"] for row in rows if row["file"] == file and row["what"] == what]
        if rates:
            text = f"{file}: {what}, tokens/s without the start"
            goals.append((text, min(rates), limit, "at_least"))
    goals.append(("peak memory, MiB", max(row["peak_mib"] for row in rows), 1000.0, "at_most"))
    return [
        {
            "goal": text,
            "value": value,
            "limit": limit,
            "direction": direction,
            "met": value >= limit if direction == "at_least" else value <= limit,
        }
        for text, value, limit, direction in goals
    ]


def main() -> int:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, nargs="+", default=[1e6, 1e7])
    parser.add_argument("--jsonl-tokens", type=float, default=2e6, help="tokens of the JSONL file; 0 for none")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write rows and goals as JSON")
    parser.add_argument("--quick", action="store_true", help="a rehearsal: 200,000 tokens of each kind")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "audit_benchmark")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.tokens, arguments.jsonl_tokens = [2e5], 2e5
    arguments.folder.mkdir(parents=True, exist_ok=True)
    try:
        jobs = []
        for size in arguments.tokens:
            path = arguments.folder / f"{int(size)}.parquet"
            in_own_process(write_parquet, path, int(size))
            jobs += [(path, ["--quick"]), (path, [])]
        if arguments.jsonl_tokens:
            path = arguments.folder / "tokens.jsonl"
            in_own_process(write_jsonl, path, int(arguments.jsonl_tokens))
            jobs += [(path, ["--quick"]), (path, [])]
        one = arguments.folder / "one.parquet"
        in_own_process(write_parquet, one, 1)
        start = {quick: measure(one, ["--quick"] * quick)[0] for quick in (True, False)}
        print(
            f"{os.cpu_count()} cores; an audit of one sequence: quick {start[True]:.2f} s, full {start[False]:.2f} s\n"
        )
        rows: list[dict[str, Any]] = []
        print("| file | what | tokens | seconds | CPU seconds | tokens/s | peak MiB |\n|---|---|---|---|---|---|---|")
        for path, options in jobs:
            seconds, cpu, peak, num_tokens = measure(path, options)
            rate = num_tokens / max(seconds - start[bool(options)], 1e-9)
            what = "drift and the paper's gates" if options else "everything"
            row = dict(file=path.suffix, what=what, tokens=num_tokens, seconds=seconds, cpu_seconds=cpu, rate=rate)
            rows.append(row | {"peak_mib": peak, "start_seconds": start[bool(options)]})
            print(
                f"| {path.suffix} | {what} | {num_tokens:,} | {seconds:.1f} | {cpu:.1f} | {rate:,.0f} | {peak:.0f} |",
                flush=True,
            )
    finally:
        shutil.rmtree(arguments.folder)
    if arguments.json is not None:
        text = json.dumps({"benchmark": "audit", "rows": rows, "goals": goals_of(rows)}, indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
