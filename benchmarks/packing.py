"""Does packing pay? Seconds of forward and backward, padded and packed, on the same sequences in one process.

The policy is the miniature's, with random weights; response lengths are those of 8 to 14 operands (6 n - 3 tokens), or
skewed: one response in eight as long as that of 50 operands. Above a ratio padded / packed of 1, packing pays.

    make bench ARGS="--only packing"
"""

import argparse
import random
import sys
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.measure import Row, add_report_arguments, median_seconds, publish
from trm_repro.batch import Rollout, RolloutBatch
from trm_repro.config import RunConfig
from trm_repro.policy import Policy, build_policy, build_tokenizer
from trm_repro.tasks.chain_arithmetic import ALPHABET

NUM_SEQUENCES = 32  # of one update


def batch_of(lengths: Sequence[int]) -> RolloutBatch:
    """Make random sequences with these response lengths."""
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for index, length in enumerate(lengths):
        response = tuple(torch.randint(4, 18, (length,), generator=generator).tolist())
        prompt = (4,) * (length // 3)
        rollouts.append(Rollout(group=index, prompt_ids=prompt, response_ids=response, logprobs=torch.zeros(length)))
    return RolloutBatch.from_rollouts(rollouts)


def run_pass(policy: Policy, batch: RolloutBatch, budget: int, *, packed: bool) -> None:
    """Run one forward and backward pass over the batch, in micro-batches."""
    policy.is_packing = packed
    for part in batch.split(budget, packed=packed):
        policy(part).logprobs.sum().backward()
    policy.zero_grad()


def main() -> int:
    """Measure both kinds of lengths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_report_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    policy = build_policy(RunConfig().policy, build_tokenizer(ALPHABET), seed=0)
    rows: list[Row] = []
    for kind in ("even", "skewed"):
        rng = random.Random(0)
        sizes = [50 if kind == "skewed" and n % 8 == 0 else rng.randint(8, 14) for n in range(NUM_SEQUENCES)]
        batch = batch_of([6 * size - 3 for size in sizes])
        for budget in (512, 2048, 16384):
            forms = {
                "padded": partial(run_pass, policy, batch, budget, packed=False),
                "packed": partial(run_pass, policy, batch, budget, packed=True),
            }
            seconds = median_seconds(forms, repeats=5 if arguments.quick else 9)
            rows.append(
                {
                    "lengths": kind,
                    "tokens": int((batch.prompt_lengths + batch.response_lengths).sum()),
                    "in one rectangle": batch.input_ids.numel(),
                    "tokens per micro-batch": budget,
                    "padded, s": seconds["padded"],
                    "packed, s": seconds["packed"],
                    "padded / packed": seconds["padded"] / seconds["packed"],
                }
            )
    publish("packing", rows, [], arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
