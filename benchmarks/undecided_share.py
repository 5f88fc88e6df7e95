"""How many sequences stay undecided when only the K largest rollout log-probs are stored.

Takes a shard with whole distributions and the checkpoint of its run, keeps the K largest log-probs of each token, and
prints for each K the width of the certified interval and the share of sequences TRM-Max cannot decide.

    .venv/bin/python -m benchmarks.undecided_share --in runs/miniature/ARM/seed_N/shards/step_00059.parquet \
        --checkpoint runs/miniature/ARM/seed_N/checkpoint.ckpt
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from benchmarks.measure import Row, add_report_arguments, goal, publish
from pipelines.arguments import add_config_arguments, config_from
from pipelines.checkpoints import load_into, read_checkpoint
from pipelines.session import set_threads
from pipelines.training import build_module, starting_policy
from trm_repro.batch import Rollout, RolloutBatch
from trm_repro.config import RunConfig
from trm_repro.config_sections import MaskConfig
from trm_repro.shards import read_rollouts
from trm_repro.steps import certified_decision, gate

THRESHOLDS = (0.05, 0.1)
WRONG = "decided against exact KL"


def keep_top(rollout: Rollout, num_top: int) -> Rollout:
    """Forget all but the largest log-probs of each token."""
    assert rollout.log_distribution is not None
    top = rollout.log_distribution.topk(num_top)
    return dataclasses.replace(
        rollout, log_distribution=None, top_ids=top.indices.int(), top_logprobs=top.values, experts=None
    )


def stored_run(config: RunConfig) -> tuple[Path, Path] | None:
    """Find the last shard and the checkpoint of a finished TRM-Avg run of the configured experiment."""
    for checkpoint in sorted(Path(config.output.dir).glob("trm_avg_0.001/seed_*/checkpoint.ckpt")):
        shards = sorted((checkpoint.parent / "shards").glob("step_*.parquet"))
        if shards and (checkpoint.parent / "finished").is_file():
            return shards[-1], checkpoint
    return None


def compare(config: RunConfig, shard: Path, checkpoint: Path) -> list[Row]:
    """Keep more and more of the distribution, and count what stays open."""
    rollouts, _ = read_rollouts(shard)
    module = build_module(config, starting_policy(config), None)
    module.configure_model()
    load_into(module.policy, read_checkpoint(checkpoint), checkpoint)
    full = RolloutBatch.from_rollouts(rollouts)
    exact = module.measure(full)
    assert full.rollout_log_distribution is not None
    masks = [MaskConfig(criterion="trm_max", max_threshold=threshold) for threshold in THRESHOLDS]
    exact_masks = [gate(exact, full.response_mask, mask) for mask in masks]
    rows: list[Row] = []
    for num_top in range(1, full.rollout_log_distribution.shape[1] + 1):
        batch = RolloutBatch.from_rollouts([keep_top(rollout, num_top) for rollout in rollouts])
        measurement = module.measure(batch)
        assert measurement.kl_interval is not None
        width = (measurement.kl_interval.high - measurement.kl_interval.low)[batch.response_mask]
        row: dict[str, object] = {"K": num_top, "mean width": float(width.mean())}
        wrong = 0
        for mask, exact_mask in zip(masks, exact_masks, strict=True):
            decision = certified_decision(measurement, batch.response_mask, mask)
            assert decision is not None
            row[f"undecided at {mask.max_threshold:g}"] = float(decision.undecided.float().mean())
            wrong += int(((decision.accepted & ~exact_mask) | (decision.rejected & exact_mask)).sum())
        rows.append(row | {WRONG: wrong})
    return rows


def main() -> int:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser)
    add_report_arguments(parser)
    parser.add_argument("--in", dest="shard", type=Path, help="default: the last shard of a finished TRM-Avg run")
    parser.add_argument("--checkpoint", type=Path, help="of the same run")
    arguments = parser.parse_intermixed_args()
    config = config_from(arguments)
    set_threads(config.num_threads)
    if (arguments.shard is None) != (arguments.checkpoint is None):
        parser.error("--in and --checkpoint go together")
    found = (arguments.shard, arguments.checkpoint) if arguments.shard is not None else stored_run(config)
    if found is None:
        reason = f"{config.output.dir} holds no finished trm_avg_0.001 run with its shards; make reproduce makes one"
        publish("undecided_share", [], [], arguments.json, skipped=reason)
        return 0
    rows = compare(config, *found)
    wrong = sum(int(str(row[WRONG])) for row in rows)
    goals = [goal("decisions that differ from exact KL's", wrong, 0, "at_most")]
    publish("undecided_share", rows, goals, arguments.json, notes=[f"{found[0].name}, {THRESHOLDS} nats"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
