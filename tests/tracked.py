"""Experiments for tests of tracking: folders as training leaves them, with made-up points."""

import math
from collections.abc import Sequence
from pathlib import Path

from pipelines.run_directory import RunDirectory
from pipelines.spool import MetricsSpool, SpoolEntry
from trm_repro.config import RunConfig, load_arm, load_config

STAGES = ("sync", "rollout", "mask", "update", "evaluate", "record")


def experiment_config(folder: Path, arms: Sequence[str], seeds: Sequence[int], *settings: str) -> RunConfig:
    """Configure an experiment whose output is below a folder."""
    return load_config(
        overrides=[
            f"output.dir={folder / 'runs'}",
            f"reproduce.arms=[{','.join(arms)}]",
            f"reproduce.seeds=[{','.join(map(str, seeds))}]",
            *settings,
        ]
    )


def run_directory(folder: Path, arm: str, seed: int, *settings: str) -> RunDirectory:
    """Prepare the folder of one run."""
    directory = RunDirectory(load_arm(arm, (), [f"output.dir={folder / 'runs'}", f"seed={seed}", *settings]))
    directory.prepare()
    return directory


def train_entry(step: int, *, offset: float = 0.0, num_metrics: int = 2) -> SpoolEntry:
    """Make the entry of a training step that took 6 s, one for each stage, and began 10 s after the one before."""
    begin = 1_700_000_000.0 + 10 * step
    return SpoolEntry(
        step=step,
        kind="train",
        time=begin + 6,
        metrics={f"family/quantity_{number}": math.sin(step / 8 + number) + offset for number in range(num_metrics)},
        spans=[(stage, begin + number, begin + number + 1) for number, stage in enumerate(STAGES)],
    )


def evaluate_entry(step: int, value: float) -> SpoolEntry:
    """Make the entry of an evaluation."""
    return SpoolEntry(step=step, kind="evaluate", time=1_700_000_009.5 + 10 * step, metrics={"score/greedy": value})


def fill(directory: RunDirectory, num_steps: int, *, offset: float = 0.0, num_metrics: int = 2) -> None:
    """Write a run of so many steps, with an evaluation before the first and after every second step."""
    spool = MetricsSpool(directory.spool_file)
    spool.append(evaluate_entry(0, 0.5))
    for step in range(1, num_steps + 1):
        if step % 2 == 0:
            spool.append(evaluate_entry(step, min(1.0, max(0.0, 0.5 + offset * step / num_steps))))
        spool.append(train_entry(step, offset=offset, num_metrics=num_metrics))
