"""Kill -9: a run that is started again must end exactly as one that nobody disturbed.

`python -m tests.chaos --kills 50` (`make chaos`) is the long form of the test in tests/integration/test_chaos.py. Nine
kills in ten fall inside a named stage of `trm-repro train`; the others fall at random moments on `trm-repro reproduce`
with its worker process.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.killed_inside import STAGES, Kill, start

ROOT = Path(__file__).resolve().parents[1]
ARM = "trm_avg_0.001"
SETTINGS = (
    str(ROOT / "conf" / "smoke.yaml"),
    "rollout.engine=transformers",
    "rollout.precision=float32",
    "rollout.staleness_steps=2",
    "evaluation.every_steps=3",
    "evaluation.length_operands=[]",
    "output.keep_shards_every=3",
    "policy.num_layers=1",
    "policy.hidden_size=32",
    "policy.moe_intermediate_size=32",
    "task.max_operands=2",
    "warm_start.max_operands=2",
    "rollout.max_response_tokens=10",
    "evaluation.max_response_tokens=10",
)
REPRODUCE = ("num_steps=14", f"reproduce.arms=[{ARM}, random_as_{ARM}]", "reproduce.num_workers=1")
CLOCKED = ("time/", "throughput/")
LONGEST_SECONDS = 600.0
SHARE_OF_REPRODUCE = 10  # of so many kills one falls on it
LAST_STAGE = "final policy"


@dataclass
class Report:
    """What a chaos run did: at which stage each kill fell, and how often the command was started."""

    kills: Counter[str] = field(default_factory=Counter)
    starts: int = 0


def kill_inside_stages(folder: Path, *, kills: int, seed: int) -> tuple[Report, dict[str, object], dict[str, object]]:
    """Train twice: once undisturbed, once killed inside every stage in turn, at moments drawn within its usual time.

    Args:
        folder: empty; everything is written there.
        kills: how many, at least as many as there are stages; the last falls while the final policy is written.
        seed: of stages and moments.

    Returns:
        What was done, and what the undisturbed and the disturbed run came to.
    """
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    settings = [*SETTINGS, f"num_steps={2 * kills}", f"output.warm_start_dir={folder / 'warm_starts'}", "seed=1"]
    words = ["train", "--arm", ARM, *settings]
    usual = json.loads(_train([*words, f"output.dir={folder / 'undisturbed'}"], folder, None))
    early = [stage for stage in STAGES if stage != LAST_STAGE]
    chosen = [early[number % len(early)] for number in range(kills - 1)]
    first, others = chosen[0], chosen[1:]  # a run is opened in MLflow once
    rng.shuffle(others)
    report = Report()
    for stage in (first, *others, LAST_STAGE):
        skip = rng.randint(0, 1) if stage not in (first, "evaluation", LAST_STAGE) else 0
        kill = Kill(stage, skip, rng.random() * usual[stage])
        fell = _train([*words, f"output.dir={folder / 'disturbed'}"], folder, kill)
        report.kills[fell] += 1
    _train([*words, f"output.dir={folder / 'disturbed'}"], folder, None)
    report.starts = kills + 1
    return report, outcome(folder / "undisturbed"), outcome(folder / "disturbed")


def _train(words: list[str], folder: Path, kill: Kill | None) -> str:
    """Run `train` to its end, or to the kill; returns what it reported."""
    log_file, report = folder / "log.txt", folder / "report.txt"
    report.unlink(missing_ok=True)
    process = start(words, log_file, report, kill)
    process.join(LONGEST_SECONDS)
    expected = 0 if kill is None else -signal.SIGKILL
    assert process.exitcode == expected, f"{kill}: ended with {process.exitcode}\n{log_file.read_text()[-2000:]}"
    return report.read_text()


def command(folder: Path, warm_starts: Path) -> subprocess.Popen[bytes]:
    """Start `trm-repro reproduce` in a process group of its own."""
    words = [*SETTINGS, *REPRODUCE, f"output.dir={folder}", f"output.warm_start_dir={warm_starts}"]
    return subprocess.Popen(
        [sys.executable, "-m", "pipelines.cli", "reproduce", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def undisturbed(folder: Path, warm_starts: Path) -> None:
    """Run to the end."""
    process = command(folder, warm_starts)
    _, errors = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 0, errors.decode()[-2000:]


def disturbed(folder: Path, warm_starts: Path, *, kills: int, seed: int) -> Report:
    """Kill the command and its workers at random moments after each has begun to work, then let it end."""
    rng = random.Random(seed)
    report = Report()
    while True:
        report.starts += 1
        process = command(folder, warm_starts)
        before = newest_change(folder)
        if report.kills.total() >= kills:
            _, errors = process.communicate(timeout=LONGEST_SECONDS)
            assert process.returncode == 0, errors.decode()[-2000:]
            return report
        while process.poll() is None and newest_change(folder) == before:
            time.sleep(0.02)
        wait_until = time.monotonic() + rng.expovariate(1 / 0.7)
        while process.poll() is None and time.monotonic() < wait_until:
            time.sleep(0.005)
        if process.poll() is not None:
            _, errors = process.communicate()
            assert process.returncode == 0, errors.decode()[-2000:]
            return report
        report.kills[f"reproduce, {stage(folder)}"] += 1
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        time.sleep(0.1)  # the workers die with their parent


def last_written(folder: Path) -> tuple[float, Path | None]:
    """Find the file of a run that was written last: when, in seconds, and which; files come and go meanwhile."""
    newest: tuple[float, Path | None] = (0.0, None)
    for path in folder.glob("*/seed_*/**/*"):
        try:
            changed = path.stat().st_mtime
        except FileNotFoundError:
            continue
        if path.name not in ("lock", "config.yaml") and path.is_file() and changed > newest[0]:
            newest = (changed, path)
    return newest


def newest_change(folder: Path) -> float:
    """Say when a file of a run's last changed, seconds; 0 when there is none."""
    return last_written(folder)[0]


def stage(folder: Path) -> str:
    """Name what the run wrote last, as a hint of what the kill interrupted."""
    path = last_written(folder)[1]
    if path is None:
        return "at the start"
    return f"after {path.parent.name if path.suffix == '.parquet' else path.name}"


def outcome(folder: Path) -> dict[str, object]:
    """Collect what must not depend on interruptions: metrics, weights, shards, MLflow's points and runs."""
    found: dict[str, object] = {}
    for spool in sorted(folder.glob("*/seed_*/metrics.jsonl")):
        entries = [json.loads(line) for line in spool.read_text().splitlines()]
        found[f"{spool.parent.parent.name} metrics"] = [
            (
                entry["step"],
                entry["kind"],
                entry["num_kept"],
                {name: value for name, value in entry["metrics"].items() if not name.startswith(CLOCKED)},
            )
            for entry in entries
        ]
        for path in sorted([*spool.parent.rglob("*.safetensors"), *spool.parent.rglob("*.parquet")]):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path.relative_to(folder))] = digest
    with sqlite3.connect(folder / "mlflow.db") as store:
        points = store.execute(
            "select arm.value, seed.value, m.key, m.step, count(*), min(m.value) from metrics m "
            "join tags arm on arm.run_uuid = m.run_uuid and arm.key = 'arm' "
            "left join tags seed on seed.run_uuid = m.run_uuid and seed.key = 'seed' "  # an arm's own run has none
            "group by 1, 2, 3, 4 order by 1, 2, 3, 4"
        ).fetchall()
        found["points"] = [
            (arm, seed, name, step, count, None if name.startswith(CLOCKED) else value)
            for arm, seed, name, step, count, value in points
        ]
        found["runs"] = store.execute("select status, count(*) from runs group by 1 order by 1").fetchall()
    return found


def main() -> int:
    """Run the long form; returns 0 when all runs ended alike."""
    parser = argparse.ArgumentParser(description="kill -9 a run and compare its end with an undisturbed one")
    parser.add_argument("--kills", type=int, default=50, help=f"at least {2 * len(STAGES)}")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    num_on_reproduce = arguments.kills // SHARE_OF_REPRODUCE
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report, first, second = kill_inside_stages(
            folder / "train", kills=arguments.kills - num_on_reproduce, seed=arguments.seed
        )
        undisturbed(folder / "undisturbed", folder / "warm_starts")
        others = disturbed(folder / "disturbed", folder / "warm_starts", kills=num_on_reproduce, seed=arguments.seed)
        report.kills += others.kills
        report.starts += others.starts
        for results, run in ((first, "undisturbed"), (second, "disturbed")):
            results |= {f"reproduce {what}": value for what, value in outcome(folder / run).items()}
    different = sorted(name for name in {*first, *second} if first.get(name) != second.get(name))
    kills = ", ".join(f"{count} {where}" for where, count in report.kills.most_common())
    minutes = (time.monotonic() - began) / 60
    sys.stdout.write(f"{report.kills.total()} kills in {report.starts} starts, {minutes:.0f} minutes ({kills}); ")
    sys.stdout.write(f"{len(first)} results compared, different: {different or 'none'}\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
