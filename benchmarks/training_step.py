"""A whole step (rollout, mask, updates, weight sync) against TRL's GRPOTrainer, and the shares of its stages.

Every system trains the same model on the same task, with as many responses of the same forced length and as many
updates; a worker is a process. Two workers of one thread each share the machine in one row, one worker has two threads
in another; the machine's tokens per second are what counts. Rows are measured one after another.

    make bench ARGS="--only training_step"
    python -m benchmarks.training_step --only model_ --model DIRECTORY     # a model of your own; minutes a step
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.measure import Row, add_report_arguments, goal, publish
from benchmarks.peers.ours import SAMPLED
from benchmarks.peers.work import Work
from pipelines.run_directory import write_atomically

SYSTEMS = {"ours": ("ours", ""), "TRL, vLLM": ("trl_grpo", "vllm"), "TRL, own generation": ("trl_grpo", "own")}
WORKERS = {"miniature": {1: 2, 2: 1}, "model": {1: 2}}
"""Threads of each worker, by number of workers; the passes of a larger model keep both cores busy."""
WARM_UP = {"miniature": 2, "model": 1}
TRL_LIMITS = {
    "miniature": {"TRL, vLLM": 2.0, "TRL, own generation": 1.3},
    "model": {"TRL, vLLM": 1.2, "TRL, own generation": 3.0},
}
MASK_LIMITS = {"sampled": 0.01, "exact": 0.05}
NOTES = (
    "Beyond the common work, ours probes the engine after every sync, computes both gates and the bounds, writes "
    "rollouts and masks as Parquet, metrics, a checkpoint a step and MLflow; TRL computes its metrics, detokenizes, "
    "and with vLLM weighs tokens by importance; it saves nothing and logs to no tracker.",
    "Parts of a stage (stage: part) are contained in it.",
)
LONGEST_SILENCE = 1200.0
"""Seconds after which a worker that says nothing is given up."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row to measure.

    Attributes:
        name: of the model.
        system: a key of SYSTEMS.
        distribution: what ours stores of the rollout policy.
        num_workers: processes at once.
        work: of each of them, but for its folder.
    """

    name: str
    system: str
    distribution: str
    num_workers: int
    work: Work

    @property
    def label(self) -> str:
        """Tell the case from the others."""
        return "_".join([self.name, self.system, self.distribution, str(self.num_workers)]).replace(", ", "_")


def dense_miniature(folder: Path) -> Path:
    """Write the dense miniature with random weights; its configuration asks engines for bfloat16."""
    from trm_repro.config import RunConfig
    from trm_repro.policy import build_policy, build_tokenizer, save_policy
    from trm_repro.tasks.chain_arithmetic import ALPHABET

    tokenizer = build_tokenizer(ALPHABET)
    policy = build_policy(dataclasses.replace(RunConfig().policy, architecture="dense"), tokenizer, seed=0)
    save_policy(policy, tokenizer, folder)
    file = folder / "config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(settings | {"dtype": "bfloat16"}), encoding="utf-8")
    return folder


def has_trl() -> bool:
    """Whether TRL is installed; it is in requirements/dev.txt."""
    return importlib.util.find_spec("trl") is not None


def cases(miniature: Path, model: Path | None, *, quick: bool) -> Iterator[Case]:
    """List the rows: ours with sampled log-probs, as TRL has them, and with exact divergences; TRL's two."""
    nowhere = Path()
    small = Work(
        model=miniature,
        num_prompts=16,
        group_size=8,
        response_tokens=63,
        num_updates=4,
        num_threads=1,
        folder=nowhere,
    )
    works = {"miniature": (small, "full")}
    if model is not None:
        large = Work(
            model=model,
            num_prompts=8,
            group_size=8,
            response_tokens=16 if quick else 256,
            num_updates=4,
            num_threads=2,
            folder=nowhere,
        )
        works["model"] = (large, "hidden")
    for name, (work, exact) in works.items():
        for system, (_, engine) in SYSTEMS.items():
            if system != "ours" and not has_trl():
                continue
            distributions = ["sampled", exact] if system == "ours" else ["sampled"]
            for distribution in distributions:
                for num_workers, num_threads in WORKERS[name].items():
                    if quick and num_workers < max(WORKERS[name]):
                        continue
                    ours = SAMPLED if distribution == "sampled" else (f"rollout.distribution={distribution}",)
                    yield Case(
                        name=name,
                        system=system,
                        distribution=distribution,
                        num_workers=num_workers,
                        work=dataclasses.replace(work, engine=engine, num_threads=num_threads, overrides=ours),
                    )


def worker(module: str, connection: Connection, work: Work) -> None:
    """Be a worker process; end at once when something goes wrong, though an engine's threads may still run."""
    try:
        importlib.import_module(f"benchmarks.peers.{module}").run(connection, work)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def measure(case: Case, folder: Path, *, warm_up: int, repeats: int) -> list[dict[str, Any]]:
    """Run a case's workers side by side until each has done its steps.

    Args:
        case: what to run.
        folder: for the workers' files.
        warm_up: steps that do not count.
        repeats: steps that do.

    Returns:
        The steps that count, of all workers.

    Raises:
        SystemExit: if a worker ended or fell silent.
    """
    os.environ["OMP_NUM_THREADS"] = str(case.work.num_threads)  # read once, when a process loads torch
    context = multiprocessing.get_context("spawn")
    processes: dict[Connection, BaseProcess] = {}
    for number in range(case.num_workers):
        ours, theirs = context.Pipe()
        work = dataclasses.replace(case.work, folder=folder / f"{case.label}_{number}")
        process = context.Process(target=worker, args=(SYSTEMS[case.system][0], theirs, work))
        process.start()
        theirs.close()
        processes[ours] = process
    try:
        said: dict[Connection, list[Any]] = {connection: [] for connection in processes}

        def listen(count: int) -> None:
            while any(len(found) < count for found in said.values()):
                for connection in wait(list(said), LONGEST_SILENCE) or list(said):
                    assert isinstance(connection, Connection)
                    said[connection].append(hear(connection, case, folder))

        listen(1)  # each says that it is ready
        for connection in said:
            connection.send("go")
        listen(1 + warm_up + repeats)
    finally:
        for process in processes.values():
            process.kill()
            process.join()
    return [step for found in said.values() for step in found[1 + warm_up :][:repeats]]


def hear(connection: Connection, case: Case, folder: Path) -> Any:  # noqa: ANN401
    """Receive what a worker says next.

    Raises:
        SystemExit: if it ended or says nothing.
    """
    try:
        if connection.poll(LONGEST_SILENCE):
            return connection.recv()
        reason = "says nothing"
    except (EOFError, OSError):
        reason = "ended"
    logs = sorted(folder.glob(f"{case.label}_*/log"))
    tail = logs[0].read_text(encoding="utf-8", errors="replace")[-2000:] if logs else ""
    raise SystemExit(f"{case.label}: a worker {reason}\n{tail}")


def summarise(case: Case, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Take the medians of a case's steps."""
    seconds = statistics.median(step["wall"] for step in steps)
    names = dict.fromkeys(name for step in steps for name in step["stages"])
    stages = {name: statistics.median(step["stages"].get(name, 0.0) for step in steps) for name in names}
    return {
        "model": case.name,
        "system": case.system,
        "rollout log-probs": case.distribution,
        "workers": case.num_workers,
        "threads each": case.work.num_threads,
        "seconds a step": seconds,
        "CPU seconds a step": statistics.median(step["processor"] for step in steps),
        "tokens/s": round(case.num_workers * case.work.num_tokens / seconds),
        "stages": stages,
    }


def trl_goals(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Compare the machine's tokens per second: each system with the number of workers that suits it best."""
    best: dict[tuple[object, object], float] = {}
    for row in rows:
        if row["rollout log-probs"] == "sampled":
            key = (row["model"], row["system"])
            best[key] = max(best.get(key, 0.0), float(str(row["tokens/s"])))
    goals = []
    for name, limits in TRL_LIMITS.items():
        for system, limit in limits.items():
            if {(name, "ours"), (name, system)} <= best.keys():
                ratio = best[name, "ours"] / best[name, system]
                goals.append(goal(f"{name}: tokens/s over {system}", ratio, limit, "at_least"))
    return goals


def shares(row: dict[str, Any]) -> dict[str, float]:
    """Divide the seconds of the stages of ours by those of its step; empty for other systems."""
    return {
        f"{name} share": seconds / row["seconds a step"]
        for name, seconds in row["stages"].items()
        if seconds and name != "step"
    }


def share_goals(rows: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
    """Compare the shares of the stages of ours, with as many workers as there may be, with what they may be.

    The mask stage scores the minibatch, as any trainer that corrects for its engine does, and then decides. Both are
    goals: the stage, and what it adds to the scoring pass of sampled log-probs.
    """
    ours = {
        (row["model"], row["rollout log-probs"]): row
        for row in rows
        if row["system"] == "ours" and row["workers"] == max(WORKERS[row["model"]])
    }
    goals = []
    for (model, distribution), row in ours.items():
        stages, whole = row["stages"], row["seconds a step"]
        limit = MASK_LIMITS["sampled" if distribution == "sampled" else "exact"]
        wanted = {"mask": (stages["mask"], limit)}
        if (model, "sampled") in ours:
            scoring = ours[model, "sampled"]["stages"]["mask: scoring"]
            wanted["mask beyond scoring"] = (stages["mask"] - scoring, limit)
        wanted["sync, probe apart"] = (stages["sync"] - stages["sync: probe"], 0.05)
        wanted["record, checkpoint apart"] = (stages["record"] - stages["record: checkpoint"], 0.01)
        for name, (seconds, most) in wanted.items():
            goals.append(goal(f"{model}, {distribution}: share of {name}", seconds / whole, most, "at_most"))
    return goals


def main() -> int:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_report_arguments(parser)
    parser.add_argument("--model", type=Path, help="directory of a larger model, 64 responses of 256 tokens")
    parser.add_argument("--parts", type=Path, help="folder of rows: what is there is not measured again")
    parser.add_argument("--only", default="", help="measure rows whose label has this in it, publish all there are")
    parser.add_argument("--repeats", type=int, default=5, help="steps that count, after one or two that do not")
    arguments = parser.parse_args()
    repeats = 2 if arguments.quick else arguments.repeats
    with tempfile.TemporaryDirectory() as folder:
        parts = arguments.parts or Path(folder) / "parts"
        parts.mkdir(parents=True, exist_ok=True)
        listed = list(cases(dense_miniature(Path(folder) / "miniature"), arguments.model, quick=arguments.quick))
        for case in tqdm(listed, desc="whole steps"):
            part = parts / f"{case.label}.json"
            if arguments.only in case.label and not part.is_file():
                steps = measure(case, Path(folder), warm_up=WARM_UP[case.name], repeats=repeats)
                write_atomically(part, json.dumps(summarise(case, steps), indent=2) + "\n")
        found = [parts / f"{case.label}.json" for case in listed]
        rows = [json.loads(part.read_text(encoding="utf-8")) for part in found if part.is_file()]
    table = [{name: value for name, value in row.items() if name != "stages"} | shares(row) for row in rows]
    notes = NOTES if has_trl() else (*NOTES, "TRL is not installed: pip install --no-deps -r requirements/dev.txt")
    publish("training_step", table, [*trl_goals(rows), *share_goals(rows)], arguments.json, notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
