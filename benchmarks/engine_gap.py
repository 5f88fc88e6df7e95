"""How far engine and trainer are apart before any update: same weights, learning rate 0.

For the dense and the mixture-of-experts miniature and each engine precision, samples 1,024 responses from the warm
start, scores them with the float32 trainer, and prints gap, exact KL, routing agreement and what each gate accepts.

    make bench ARGS="--only engine_gap"
    .venv/bin/python -m benchmarks.engine_gap seed=102
"""

import argparse
import dataclasses
import sys
from typing import get_args

from tqdm import tqdm

from benchmarks.measure import add_report_arguments, publish
from pipelines.arguments import add_config_arguments, config_from
from pipelines.session import open_session, set_threads
from pipelines.training import build_module, starting_policy
from trm_repro.batch import RolloutBatch
from trm_repro.config import RunConfig, load_arm
from trm_repro.config_sections import Precision
from trm_repro.divergence import perplexity_gap
from trm_repro.rollout.sampler import RolloutSampler
from trm_repro.steps import gate

GATES = ("trm_max_0.05", "trm_avg_0.001", "trm_max_0.1", "trm_avg_0.002", "trm_max_0.1_avg_0.002")
NUM_PROMPTS = 128


def measure_gap(config: RunConfig, architecture: str, precision: Precision) -> dict[str, str]:
    """Sample with an engine of one precision and score with the trainer."""
    config = dataclasses.replace(
        config,
        policy=dataclasses.replace(config.policy, architecture=architecture),
        rollout=dataclasses.replace(config.rollout, precision=precision, num_prompts=NUM_PROMPTS),
    )
    path = starting_policy(config, show_progress=True)
    session = open_session(config, path)
    batch = RolloutBatch.from_rollouts(RolloutSampler(config, session.engine, session.tokenizer).sample_step(0, 0))
    module = build_module(config, path, None)
    module.configure_model()
    measurement = module.measure(batch)
    assert measurement.kl is not None
    kl = measurement.kl[batch.response_mask]
    gap = perplexity_gap(measurement.policy_logprobs, batch.rollout_logprobs, batch.response_mask)
    row = {
        "policy": architecture,
        "engine": precision,
        "PPL gap": f"{gap.mean():.1e}",
        "KL mean": f"{kl.mean():.1e}",
        "KL p99": f"{kl.kthvalue(int(0.99 * len(kl))).values:.1e}",
        "KL max": f"{kl.max():.2g}",
        "routed alike": "",
    }
    if measurement.is_flipped is not None:
        row["routed alike"] = f"{1 - measurement.is_flipped[batch.response_mask].float().mean():.3f}"
    for name in GATES:
        kept = gate(measurement, batch.response_mask, load_arm(name).mask)
        row[name] = f"{kept.float().mean():.2f}"
    return row


def main() -> int:
    """Measure every combination and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser)
    add_report_arguments(parser)
    arguments = parser.parse_intermixed_args()
    config = config_from(arguments)
    set_threads(config.num_threads)
    architectures = (config.policy.architecture,) if arguments.quick else ("moe", "dense")
    combinations = [(a, p) for a in architectures for p in get_args(Precision)]
    rows = [measure_gap(config, *combination) for combination in tqdm(combinations, desc="engine gap")]
    notes = [f"{NUM_PROMPTS * config.rollout.group_size} responses a row; seed {config.seed}"]
    publish("engine_gap", rows, [], arguments.json, notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
