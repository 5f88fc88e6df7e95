"""How many sequences stay undecided when only the K largest rollout log-probs are stored.

Takes a shard with whole distributions and the checkpoint of its run, keeps the K largest log-probs of each token, and
prints for each K the width of the certified interval and the share of sequences TRM-Max cannot decide.

    python benchmarks/undecided_share.py --in runs/miniature/ARM/seed_N/shards/step_00059.parquet \
        --checkpoint runs/miniature/ARM/seed_N/checkpoint.ckpt
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from pipelines.arguments import add_config_arguments, config_from
from pipelines.checkpoints import load_into, read_checkpoint
from pipelines.session import set_threads
from pipelines.train import build_module, starting_policy
from trm_repro.batch import Rollout, RolloutBatch
from trm_repro.config_sections import MaskConfig
from trm_repro.shards import read_rollouts
from trm_repro.steps import certified_decision, gate

THRESHOLDS = (0.05, 0.1)


def keep_top(rollout: Rollout, num_top: int) -> Rollout:
    """Forget all but the largest log-probs of each token."""
    assert rollout.log_distribution is not None
    top = rollout.log_distribution.topk(num_top)
    return dataclasses.replace(
        rollout, log_distribution=None, top_ids=top.indices.int(), top_logprobs=top.values, experts=None
    )


def main() -> int:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser)
    parser.add_argument("--in", dest="shard", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    arguments = parser.parse_intermixed_args()
    config = config_from(arguments)
    set_threads(config.num_threads)
    rollouts, _ = read_rollouts(arguments.shard)
    module = build_module(config, starting_policy(config), None)
    module.configure_model()
    load_into(module.policy, read_checkpoint(arguments.checkpoint), arguments.checkpoint)
    full = RolloutBatch.from_rollouts(rollouts)
    exact = module.measure(full)
    assert full.rollout_log_distribution is not None
    masks = [MaskConfig(criterion="trm_max", max_threshold=threshold) for threshold in THRESHOLDS]
    exact_masks = [gate(exact, full.response_mask, mask) for mask in masks]
    heads = ["K", "mean width", *(f"undecided at {t:g}" for t in THRESHOLDS), "decided against exact KL"]
    print("| " + " | ".join(heads) + " |\n" + "|" + "---|" * len(heads))
    for num_top in range(1, full.rollout_log_distribution.shape[1] + 1):
        batch = RolloutBatch.from_rollouts([keep_top(rollout, num_top) for rollout in rollouts])
        measurement = module.measure(batch)
        assert measurement.kl_interval is not None
        width = (measurement.kl_interval.high - measurement.kl_interval.low)[batch.response_mask]
        cells, wrong = [], 0
        for mask, exact_mask in zip(masks, exact_masks, strict=True):
            decision = certified_decision(measurement, batch.response_mask, mask)
            assert decision is not None
            cells.append(f"{decision.undecided.float().mean():.3f}")
            wrong += int(((decision.accepted & ~exact_mask) | (decision.rejected & exact_mask)).sum())
        print(f"| {num_top} | {width.mean():.1e} | " + " | ".join(cells) + f" | {wrong} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
