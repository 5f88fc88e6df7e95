"""What a rejected sequence saves: seconds of an update stage by the share of sequences that the mask keeps.

Trains whole steps on stored rollouts through Lightning, with a random mask of the wanted size, and reads the stage
clock: the mask stage scores every sequence, the update stage passes over the kept ones alone. Every sequence has an
advantage, so that the mask alone decides. All shares are measured in turn.

    make bench ARGS="--only acceptance"
"""

import argparse
import random
import statistics
import sys

from tqdm import tqdm

from benchmarks.measure import Row, add_report_arguments, goal, publish
from benchmarks.stored_step import StoredStep, draw_rollouts
from pipelines.session import set_threads
from trm_repro.config import load_arm
from trm_repro.steps import ReferenceUpdate

SHARES = (1.0, 0.7, 0.4, 0.1)
LIMIT, LIMIT_SHARE = 0.85, 0.7
LARGER = ("policy.architecture=dense", "policy.hidden_size=128", "policy.num_layers=4", "policy.intermediate_size=384")
CASES = {
    "miniature, mixture of experts": (),
    "miniature, dense": ("policy.architecture=dense",),
    "wider, dense": LARGER,
    "wider, dense, packed": (*LARGER, "trainer.packing=true", "update.tokens_per_micro_batch=512"),
}


class Case:
    """One policy, trained on the same rollouts under masks of several sizes."""

    def __init__(self, overrides: tuple[str, ...]) -> None:
        """Build policy and rollouts; responses are as long as those of the miniature's task."""
        options = ["mask.criterion=random", "mask.reference_arm=trm_avg_0.001", "num_steps=1", *overrides]
        config = load_arm("token_is", overrides=options)
        self.step = StoredStep(config)
        self.num_updates = config.update.num_updates_per_rollout
        rng = random.Random(0)
        operands = [rng.randint(8, 14) for _ in range(config.rollout.num_prompts * config.rollout.group_size)]
        lengths = [(2 * count, 6 * count - 3) for count in operands]
        vocab_size = len(self.step.tokenizer)
        self.rollouts = draw_rollouts(lengths, config.rollout.group_size, vocab_size, with_distribution=True)

    def run(self, share: float) -> dict[str, float]:
        """Train one step; return the seconds of its mask and update stages."""
        num_kept = round(share * len(self.rollouts) / self.num_updates)
        seconds, module = self.step.run(self.rollouts, {0: [ReferenceUpdate(num_kept=num_kept)] * self.num_updates})
        assert all(int(record.sequence_mask.sum()) == num_kept for record in module.records)
        return seconds


def measure(name: str, repeats: int) -> list[dict[str, object]]:
    """Measure one case at every share, in turn."""
    case = Case(CASES[name])
    runs: dict[float, list[dict[str, float]]] = {share: [] for share in SHARES}
    for _ in tqdm(range(1 + repeats), desc=name):
        for share in SHARES:
            runs[share].append(case.run(share))
    medians = {
        share: {stage: statistics.median(run[stage] for run in runs[share][1:]) for stage in ("mask", "update")}
        for share in SHARES
    }
    whole = medians[1.0]
    return [
        {
            "policy": name,
            "acceptance": share,
            "update, s": found["update"],
            "update / that at 100%": found["update"] / whole["update"],
            "mask, s": found["mask"],
            "mask and update / those at 100%": sum(found.values()) / sum(whole.values()),
        }
        for share, found in medians.items()
    ]


def main() -> int:
    """Measure every case and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_report_arguments(parser)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    set_threads(1)
    names = list(CASES)[:2] if arguments.quick else list(CASES)
    rows: list[Row] = [row for name in names for row in measure(name, arguments.repeats)]
    goals = [
        goal(
            f"update stage at {LIMIT_SHARE:.0%} acceptance over that at 100%, {row['policy']}",
            float(str(row["update / that at 100%"])),
            LIMIT,
            "at_most",
        )
        for row in rows
        if row["acceptance"] == LIMIT_SHARE
    ]
    publish("acceptance", rows, goals, arguments.json, notes=[f"1 thread, medians of {arguments.repeats}"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
