"""Fuzz every reader for a bounded time: `python -m tests.fuzz --seconds 60` (`make fuzz`).

With atheris each reader runs in a process of its own, its inputs steered by the lines they reach; without it hypothesis
draws them. Prints executions and faults by reader; returns 1 where there was a fault.
"""

import argparse
import importlib.util
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
INSTRUMENTED = ["trm_repro", "pipelines", "evaluation"]
LONGEST_INPUT = 8192  # bytes that steer one draw
SECONDS_EACH_INPUT = 20
START_SECONDS = 180.0
BATCH = 200
NUM_SEEDS = 16
COUNT_FILE, COUNT_EVERY = "executions.txt", 20
numbers = itertools.count(1)
"""Of the inputs that this process has given a reader."""


def main() -> int:
    """Run."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="fuzz every reader for a bounded time")
    parser.add_argument("--seconds", type=int, default=120, help="in all; default 120")
    parser.add_argument("--targets", nargs="+", default=[], help="only these readers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=("atheris", "hypothesis"), help="default: atheris where it is installed")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    engine = arguments.engine or ("atheris" if importlib.util.find_spec("atheris") else "hypothesis")
    if arguments.one:
        (fuzz_by_atheris if engine == "atheris" else fuzz_by_hypothesis)(
            arguments.one, arguments.seconds, arguments.seed
        )
        return 0
    names = arguments.targets or target_names()
    seconds = max(1, arguments.seconds // len(names))
    faults = 0
    total = 0
    for name in names:
        executions, fault = run_one(name, engine, seconds, arguments.seed)
        total += executions
        faults += bool(fault)
        sys.stdout.write(f"{name}: {executions:,} executions, {'FAULT' if fault else 'no fault'}\n{fault}")
        sys.stdout.flush()
    sys.stdout.write(f"{engine}: {len(names)} readers, {total:,} executions, {faults} with a fault\n")
    return 1 if faults else 0


def target_names() -> list[str]:
    """List the readers; the fuzzing processes import what they read with."""
    code = (
        "from tests.fuzz.reading import clean_up; from tests.fuzz.targets import TARGETS; print(*TARGETS); clean_up()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.split()


def run_one(name: str, engine: str, seconds: int, seed: int) -> tuple[int, str]:
    """Fuzz one reader in a process; returns the number of executions, and the end of what it said of a fault."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        words = ["--one", name, "--engine", engine, "--seconds", str(seconds), "--seed", str(seed)]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "tests.fuzz", *words],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": folder, "PYTHONWARNINGS": "ignore"},
                capture_output=True,
                timeout=seconds + START_SECONDS,
                check=False,
            )
            output, code = done.stderr + done.stdout, done.returncode
        except subprocess.TimeoutExpired as error:
            output, code = (error.stderr or b"") + (error.stdout or b"") + b"no end", -1
        count = Path(folder) / COUNT_FILE
        executions = int(count.read_text()) if count.is_file() else 0
    text = output.decode(errors="replace")
    return executions, "" if code == 0 else f"{text[-4000:]}\n(ended with {code})\n"


def fuzz_by_atheris(name: str, seconds: int, seed: int) -> None:
    """Let libFuzzer steer hypothesis's draws; does not return."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        check = property_of(name, 1)
    corpus = Path(tempfile.mkdtemp())
    rng = random.Random(seed)
    for number in range(NUM_SEEDS):  # long ones: a draw that runs out of bytes is no input
        (corpus / str(number)).write_bytes(rng.randbytes(LONGEST_INPUT // 2))
    words = [f"-max_total_time={seconds}", f"-max_len={LONGEST_INPUT}", "-len_control=0", f"-seed={seed}"]
    words += [f"-timeout={SECONDS_EACH_INPUT}", "-rss_limit_mb=8192", f"-artifact_prefix={corpus}/"]
    atheris.Setup([sys.argv[0], *words, str(corpus)], check.hypothesis.fuzz_one_input)
    atheris.Fuzz()


def fuzz_by_hypothesis(name: str, seconds: int, seed: int) -> None:
    """Draw inputs until the time is up."""
    from hypothesis import seed as with_seed

    end = time.monotonic() + seconds
    for number in itertools.count(seed):
        if time.monotonic() > end:
            break
        with_seed(number)(property_of(name, BATCH))()


def property_of(name: str, max_examples: int) -> Any:
    """Make a hypothesis test of one reader."""
    from hypothesis import HealthCheck, Phase, given, settings

    from tests.fuzz.targets import TARGETS

    target = TARGETS[name]
    count_file = Path(tempfile.gettempdir()) / COUNT_FILE

    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs)
    def check(value: Any) -> None:
        number = next(numbers)
        if number % COUNT_EVERY == 0:
            count_file.write_text(str(number))
        target.check(value)

    return check


if __name__ == "__main__":
    sys.exit(main())
