"""A made-up experiment in a real MLflow store: curves of several arms and seeds, through the spool and the tracker."""

import math
from dataclasses import replace
from pathlib import Path

from pipelines.run_directory import RunDirectory
from pipelines.spool import MetricsSpool, SpoolEntry
from pipelines.tracking import Tracker
from trm_repro.config import RunConfig, load_arm, load_config

ARMS = ("ppo_clip", "trm_max_0.05", "trm_avg_0.001")
RISES = {"ppo_clip": -0.3, "trm_max_0.05": 0.2, "trm_avg_0.001": 0.25}
GAP_GROWTH = {"ppo_clip": 2.0, "trm_max_0.05": 0.2, "trm_avg_0.001": 0.1}
"""Of log10, from the first step to the last."""


def store_experiment(
    folder: Path, *, seeds: tuple[int, ...] = (1, 2, 3, 4, 5), num_steps: int = 6, overrides: tuple[str, ...] = ()
) -> RunConfig:
    """Store an experiment of three arms; returns the configuration that reads it back.

    Args:
        folder: output folder; MLflow's database is in it.
        seeds: of every arm.
        num_steps: of every run; a score at each even step.
        overrides: of the configuration, such as another name.
    """
    arms = ",".join(ARMS)
    words = [
        f"output.dir={folder}",
        f"num_steps={num_steps}",
        f"reproduce.arms=[{arms}]",
        f"reproduce.seeds=[{','.join(map(str, seeds))}]",
        "name=made",
        "claims.num_random_pairs=20",
        *overrides,
    ]
    config = load_config(overrides=words)
    tracker = Tracker(config)
    parent = tracker.open_parent(config)
    for seed in seeds:
        for arm in ARMS:
            store_run(tracker, parent, replace(load_arm(arm, [], words), seed=seed))
    tracker.close_parent(parent, "FINISHED")
    return config


def store_run(tracker: Tracker, parent: str, config: RunConfig, *, status: str = "FINISHED") -> str:
    """Store one run; returns its MLflow id."""
    directory = RunDirectory(config)
    directory.prepare()
    spool = MetricsSpool(directory.spool_file)
    for step in range(config.num_steps + 1):
        if step % 2 == 0:
            spool.append(SpoolEntry(step=step, kind="evaluate", time=1000.0 + step, metrics=_scores(config, step)))
        if step:
            spool.append(SpoolEntry(step=step, kind="train", time=1000.5 + step, metrics=_step(config, step)))
    run_id = tracker.open_run(directory, parent)
    tracker.replay(directory)
    tracker.close_run(directory, status)
    return run_id


def _scores(config: RunConfig, step: int) -> dict[str, float]:
    share = step / config.num_steps
    return {"score/greedy": 0.4 + RISES[config.arm] * share + 0.01 * config.seed, "time/evaluate_seconds": 0.5}


def _step(config: RunConfig, step: int) -> dict[str, float]:
    share = step / config.num_steps
    gap = 1e-3 * 10 ** (GAP_GROWTH[config.arm] * share) * (1 + 0.02 * config.seed)
    kept = 1.0 if config.arm == "ppo_clip" else 0.9 - 0.05 * share + 0.002 * config.seed
    return {
        "divergence/ppl_gap": gap,
        "divergence/kl_mean": gap / 2,
        "divergence/kl_max": 20 * gap,
        "router/agreement_fraction": 0.99,
        "mask/kept_sequence_fraction": kept,
        "mask/kept_correct_fraction": min(1.0, kept + 0.05),
        "mask/kept_wrong_fraction": max(0.0, kept - 0.05),
        "mask/kept_short_fraction": min(1.0, kept + 0.08),
        "mask/kept_long_fraction": max(0.0, kept - 0.08),
        "bounds/unified_paper": 40 * math.sqrt(gap),
        "bounds/unified_sharp": 20 * math.sqrt(gap),
        "bounds/trivial": 5 * math.sqrt(gap),
        "bounds/surrogate": 0.01 * math.sin(step),
        "bounds/num_refuting_sequences": float(config.arm == "ppo_clip"),
        "time/rollout_seconds": 1.0,
        "time/update_seconds": 0.5,
        "time/step_seconds": 2.0,
        "throughput/step_tokens_per_second": 500.0 + config.seed,
    }
