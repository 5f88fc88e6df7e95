"""Does packing pay? Seconds of forward and backward, padded and packed, on the same sequences in one process.

Run: .venv/bin/python benchmarks/packing.py [lengths: even | skewed]
The policy is the miniature's, with random weights; response lengths are those of 8 to 14 operands (6 n - 3 tokens), or
skewed: one response in eight as long as that of 50 operands. Prints the ratio padded / packed; above 1 packing pays.
"""

import random
import sys
import time
from collections.abc import Sequence

import torch

from trm_repro.batch import Rollout, RolloutBatch
from trm_repro.config import RunConfig
from trm_repro.policy import Policy, build_policy, build_tokenizer
from trm_repro.tasks.chain_arithmetic import ALPHABET

NUM_SEQUENCES = 32  # of one update
REPEATS = 9


def batch_of(lengths: Sequence[int]) -> RolloutBatch:
    """Make random sequences with these response lengths."""
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for index, length in enumerate(lengths):
        response = tuple(torch.randint(4, 18, (length,), generator=generator).tolist())
        prompt = (4,) * (length // 3)
        rollouts.append(Rollout(group=index, prompt_ids=prompt, response_ids=response, logprobs=torch.zeros(length)))
    return RolloutBatch.from_rollouts(rollouts)


def seconds(policy: Policy, batch: RolloutBatch, budget: int) -> float:
    """Time one forward and backward pass over the batch, in micro-batches."""
    begin = time.perf_counter()
    for part in batch.split(budget, packed=policy.is_packing):
        policy(part).logprobs.sum().backward()
    policy.zero_grad()
    return time.perf_counter() - begin


def main() -> None:
    """Print the ratios."""
    torch.set_num_threads(1)
    rng = random.Random(0)
    is_skewed = sys.argv[1:] == ["skewed"]
    sizes = [50 if is_skewed and index % 8 == 0 else rng.randint(8, 14) for index in range(NUM_SEQUENCES)]
    batch = batch_of([6 * size - 3 for size in sizes])
    policy = build_policy(RunConfig().policy, build_tokenizer(ALPHABET), seed=0)
    tokens = int((batch.prompt_lengths + batch.response_lengths).sum())
    print(f"{tokens} tokens, {batch.input_ids.numel()} padded to one rectangle")
    for budget in (512, 2048, 16384):
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(REPEATS):
            for policy.is_packing in times:
                times[policy.is_packing].append(seconds(policy, batch, budget))
        padded, packed = min(times[False]), min(times[True])
        print(f"budget {budget:5d}: padded {padded:.3f} s, packed {packed:.3f} s, ratio {padded / packed:.2f}")


if __name__ == "__main__":
    main()
