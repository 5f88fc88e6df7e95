"""How long a user waits: `--help`, `bounds`, each command's help, and `reproduce` until its first step has ended.

Commands are started as processes, once to fill the disk cache and then `REPEATS` times. Of `reproduce`, with a warm
start from the cache, it notes when the run's folder, its first evaluation and its first step were written.

    make bench ARGS="--only startup"
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from benchmarks.measure import Row, add_report_arguments, goal, publish
from pipelines.cli import COMMANDS
from pipelines.environment import ROOT

PARTS = ("commands", "reproduce")
REPEATS = 7
LIMIT_SECONDS = 0.5
MARKS = {"folder": "config.yaml", "evaluation": '"kind": "evaluate"', "first step": '"kind": "train"'}
PATIENCE_SECONDS = 600


def command_line() -> list[str]:
    """Return the words that start `trm-repro`, installed or not."""
    script = Path(sys.executable).with_name("trm-repro")
    return [str(script)] if script.is_file() else [sys.executable, "-m", "pipelines.cli"]


def start_seconds(words: list[str]) -> list[float]:
    """Start a command once in vain and then `REPEATS` times; return how long each took until it had ended."""
    seconds = []
    for _ in range(1 + REPEATS):
        begin = time.perf_counter()
        subprocess.run([*command_line(), *words], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def first_step(settings: list[str]) -> dict[str, float]:
    """Start `reproduce` and stop it after its first step.

    Args:
        settings: configuration files and keys.

    Returns:
        Seconds from the start of the process to each of `MARKS`.

    Raises:
        SystemExit: if it ended before, or there was no step in `PATIENCE_SECONDS`.
    """
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        words = [*command_line(), "reproduce", *settings, f"output.dir={folder}/runs", "reproduce.num_workers=1"]
        words += ["reproduce.arms=[trm_avg_0.001]", "reproduce.seeds=[101]"]
        begin = time.perf_counter()
        process = subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        run = Path(folder) / "runs" / "trm_avg_0.001" / "seed_101"
        try:
            while len(found) < len(MARKS):
                elapsed = time.perf_counter() - begin
                if process.poll() is not None or elapsed > PATIENCE_SECONDS:
                    raise SystemExit(f"{' '.join(words)}: no first step after {elapsed:.0f} s")
                spool = run / "metrics.jsonl"
                text = spool.read_text(encoding="utf-8") if spool.is_file() else ""
                for name, mark in MARKS.items():
                    if name not in found and (mark in text or (run / mark).is_file()):
                        found[name] = elapsed
                time.sleep(0.05)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return found


def main() -> int:
    """Measure every command and print a Markdown table."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that what was started is ended, too
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_report_arguments(parser)
    parser.add_argument("--starts", type=int, default=5, help="of reproduce")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    commands = [["--help"], ["bounds"]] if "commands" in arguments.parts else []
    commands += [[command, "--help"] for command in COMMANDS] if commands and not arguments.quick else []
    rows: list[Row] = []
    goals: list[Row] = []
    for words in tqdm(commands, desc="startup"):
        seconds = start_seconds(words)
        name = f"trm-repro {' '.join(words)}"
        rows.append({"command": name, "median, s": statistics.median(seconds), "slowest, s": max(seconds)})
        goals.append(goal(f"{name}, s", statistics.median(seconds), LIMIT_SECONDS, "at_most"))
    settings = ["conf/smoke.yaml"] if arguments.quick else []
    starts = 1 if arguments.quick else arguments.starts
    if "reproduce" in arguments.parts:
        # The first start fills the warm-start cache and the disk's.
        found = [first_step(settings) for _ in tqdm(range(1 + starts), desc="reproduce")][1:]
        for name in MARKS:
            seconds = [start[name] for start in found]
            row = {"median, s": statistics.median(seconds), "slowest, s": max(seconds)}
            rows.append({"command": f"trm-repro reproduce {' '.join(settings)}, to the {name}", **row})
    notes = [f"medians of {REPEATS} starts, of reproduce {starts} after one that fills the caches"]
    publish("startup", rows, goals, arguments.json, notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
