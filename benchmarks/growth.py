"""How time and memory grow with batch, response length, group, model size and vocabulary: slopes on log-log axes.

It measures the mask and update stages of a step on stored rollouts, each size in a process of its own, so that the peak
of its memory is its own, and vLLM's rollouts, all sizes with one engine. The sizes of an axis take turns, step by step.
The local slope is that between a size and the one before it: 0 where it costs nothing, 1 where cost is proportional.

    make bench ARGS="--only growth"
    .venv/bin/python -m benchmarks.growth --axes response vocabulary
"""

import argparse
import dataclasses
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import MIB, Row, add_report_arguments, in_turn, publish, reset_peak, resident
from trm_repro.rollout.engine import RolloutEngine, SamplingRequest, SamplingSettings, start_engine

PARTS = ("stages", "engine")
REPEATS = 5
PROMPT_LENGTH = 16


@dataclass(frozen=True, kw_only=True)
class Size:
    """One point: a policy and a step's rollouts."""

    sequences: int = 64
    group: int = 8
    response: int = 64
    hidden: int = 64
    vocabulary: int = 1024


AXES: Mapping[str, tuple[Size, ...]] = {
    "batch": tuple(Size(sequences=size) for size in (32, 64, 128, 256, 512)),
    "response": tuple(Size(response=size) for size in (32, 64, 128, 256, 512, 1024)),
    "group": tuple(Size(sequences=128, group=size) for size in (2, 8, 32, 128)),
    "hidden": tuple(Size(hidden=size) for size in (32, 64, 128, 256, 512)),
    "vocabulary": tuple(Size(sequences=16, vocabulary=size) for size in (1024, 4096, 16384, 65536, 151_936)),
}
FIELDS = {"batch": "sequences"}
"""The field that an axis varies, where its name is another."""
ENGINE_AXES = {
    "batch": tuple(Size(sequences=size) for size in (32, 128, 512)),
    "response": tuple(Size(response=size) for size in (32, 128, 512)),
    "group": tuple(Size(sequences=128, group=size) for size in (2, 16, 128)),
}


def overrides(size: Size) -> list[str]:
    """Write a size as keys of the configuration."""
    num_heads = max(1, size.hidden // 32)
    return [
        "policy.architecture=dense",
        f"policy.hidden_size={size.hidden}",
        f"policy.intermediate_size={3 * size.hidden}",
        f"policy.num_attention_heads={num_heads}",
        f"policy.num_key_value_heads={max(1, num_heads // 2)}",
        f"policy.vocab_size={size.vocabulary}",
        "policy.max_position_embeddings=2048",
        f"rollout.num_prompts={size.sequences // size.group}",
        f"rollout.group_size={size.group}",
        "rollout.distribution=sampled",
        f"rollout.max_response_tokens={size.response}",
        "num_steps=1",
    ]


def stages(size: Size) -> Iterator[dict[str, float]]:
    """Train steps of one size in this process: each one's seconds, and peak memory so far beyond what was there."""
    from benchmarks.stored_step import StoredStep, draw_rollouts
    from pipelines.session import set_threads
    from trm_repro.config import load_arm

    set_threads(1)
    step = StoredStep(load_arm("token_is", overrides=overrides(size)))
    lengths = [(PROMPT_LENGTH, size.response)] * size.sequences
    rollouts = draw_rollouts(lengths, size.group, size.vocabulary, with_distribution=False)
    step.run(rollouts[:4])  # one sequence an update: imports, and what does not grow
    reset_peak()
    before = resident("VmRSS")
    while True:
        seconds, _ = step.run(rollouts)
        yield {
            "parameters": float(step.num_parameters),
            "mask, s": seconds["mask"],
            "update, s": seconds["update"],
            "peak, MiB": (resident("VmHWM") - before) / MIB,
        }


def rollouts_of_engine(sizes: Sequence[Size]) -> Iterator[list[dict[str, float]]]:
    """Sample every size with one engine on a policy with random weights, again and again: seconds and tokens."""
    from benchmarks.stored_step import StoredStep
    from pipelines.session import set_threads
    from trm_repro.config import load_arm
    from trm_repro.policy import save_policy

    set_threads(1)
    longest = max(size.response for size in sizes)
    config = load_arm("token_is", overrides=[*overrides(Size()), "rollout.max_concurrent_sequences=512"])
    step = StoredStep(config)
    with tempfile.TemporaryDirectory() as folder:
        save_policy(step.policy, step.tokenizer, Path(folder))
        engine = start_engine(config.rollout, Path(folder), PROMPT_LENGTH + longest)
        while True:
            yield [_sampled(engine, size) for size in sizes]


def _sampled(engine: RolloutEngine, size: Size) -> dict[str, float]:
    requests = [
        SamplingRequest(prompt_ids=(1, *(4 + index // size.group % 14,) * (PROMPT_LENGTH - 1)), seed=index)
        for index in range(size.sequences)
    ]
    begin = time.perf_counter()
    completions = engine.sample(requests, SamplingSettings(max_tokens=size.response))
    seconds = time.perf_counter() - begin
    return {"rollout, s": seconds, "tokens": float(sum(len(completion.token_ids) for completion in completions))}


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Take medians over the rounds after the first, which warms up; of a peak so far, the last."""
    return {
        name: runs[-1][name] if name.startswith("peak") else statistics.median(run[name] for run in runs[1:])
        for name in runs[0]
    }


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Fit a line to points on log-log axes by least squares; return its slope."""
    x = [math.log(size) for size in sizes]
    y = [math.log(value) for value in values]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    pairs = list(zip(x, y, strict=True))
    return sum((a - mean_x) * (b - mean_y) for a, b in pairs) / sum((a - mean_x) ** 2 for a in x)


def with_slopes(rows: list[dict[str, object]], x: str, measured: Sequence[str]) -> list[dict[str, object]]:
    """Add to every row but the first the local slope of each measured column."""
    result = []
    for index, row in enumerate(rows):
        added = {}
        for column in measured:
            pair = [{key: float(str(r[key])) for key in (x, column)} for r in rows[max(0, index - 1) : index + 1]]
            positive = len(pair) == 2 and all(point[column] > 0 for point in pair)
            name = f"slope of {column.partition(',')[0]}"
            added[name] = slope([p[x] for p in pair], [p[column] for p in pair]) if positive else ""
        result.append(row | added)
    return result


def main() -> int:
    """Measure every axis and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_report_arguments(parser)
    parser.add_argument("--axes", nargs="*", choices=AXES, default=list(AXES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="stages need no engine")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for axis in arguments.axes if "stages" in arguments.parts else ():
        sizes = AXES[axis][:2] if arguments.quick else AXES[axis]
        found = in_turn(stages, sizes, 1 + REPEATS, desc=axis)
        points = [point(axis, size, medians(runs)) for size, runs in zip(sizes, found, strict=True)]
        rows += with_slopes(points, "size", ("mask, s", "update, s", "peak, MiB"))
    if "engine" in arguments.parts and not arguments.quick:
        axes = {axis: sizes for axis, sizes in ENGINE_AXES.items() if axis in arguments.axes}
        every = [size for sizes in axes.values() for size in sizes]
        rounds = in_turn(rollouts_of_engine, [every], 1 + REPEATS, desc="rollouts")[0] if every else []
        measured = iter(medians(runs) for runs in zip(*rounds, strict=True))
        for axis, sizes in axes.items():
            points = [point(axis, size, next(measured)) for size in sizes]
            rows += with_slopes(points, "size", ("rollout, s",))
    base = ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(Size()).items())
    notes = [f"1 thread, medians of {REPEATS}; what an axis does not vary: {base}, prompts of {PROMPT_LENGTH} tokens"]
    publish("growth", rows, [], arguments.json, notes=notes)
    return 0


def point(axis: str, size: Size, values: Mapping[str, float]) -> dict[str, object]:
    """Name what was measured at one size."""
    varied = getattr(size, FIELDS.get(axis, axis))
    whole = {name: int(value) if name in ("parameters", "tokens") else value for name, value in values.items()}
    return {"axis": axis, "size": varied, **whole}


if __name__ == "__main__":
    sys.exit(main())
