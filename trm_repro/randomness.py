"""Every source of randomness of a run: where its seeds come from, and what they are. Written beside every run."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trm_repro.config import RunConfig, derive_seed

RULE = "the first 4 bytes of SHA-256 of 'seed/label/index/...', as a big-endian number, divided by 2 and rounded down"


@dataclass(frozen=True, kw_only=True)
class Source:
    """One use of randomness.

    Attributes:
        label: the first label of `derive_seed`.
        indices: what the labels behind it count; ``step`` counts from 0.
        use: what is drawn.
        seed: None for the run's own seed, else the fixed one in its place.
    """

    label: str
    use: str
    indices: tuple[str, ...] = ()
    seed: int | None = None


SOURCES = (
    Source(label="initial weights", use="random weights of a policy that is not loaded"),
    Source(label="warm start", use="problems of the supervised warm start"),
    Source(label="warm start check", use="problems on which the warm start is measured"),
    Source(label="held-out problems", use="problems of the evaluation during training"),
    Source(label="training problems", use="prompts of a step", indices=("step",)),
    Source(label="order of training problems", use="order of a data set's problems", indices=("pass",)),
    Source(label="rollout", use="tokens of a response", indices=("step", "prompt", "sample")),
    Source(label="minibatches", use="division of a step's sequences", indices=("step", "epoch")),
    Source(label="random mask", use="sequences that a control keeps", indices=("step", "update")),
    Source(label="evaluation", use="seed of an evaluation after so many steps", indices=("step",)),
    Source(label="score", use="tokens of an answer, below the evaluation's seed", indices=("problem", "sample")),
    Source(label="probe", use="problems of the probe, the same in every run", seed=0),
    Source(label="probe contexts", use="places where the probe cuts them, the same in every run", seed=0),
)


def seed_record(config: RunConfig) -> dict[str, Any]:
    """List the seeds of a run.

    Args:
        config: the run.

    Returns:
        The run's seed, the rule that derives the others, and by label its use, its indices and its seed; where there
        is one for each step, those of all steps at index 0 of whatever else is counted. Of a source without a seed
        here, the seed follows from what is drawn by the rule.
    """
    return {"seed": config.seed, "rule": RULE, "sources": {s.label: dict(_described(s, config)) for s in SOURCES}}


def _described(source: Source, config: RunConfig) -> Iterator[tuple[str, Any]]:
    yield "use", source.use
    yield "indices", list(source.indices)
    seed = config.seed if source.seed is None else source.seed
    if not source.indices:
        yield "seed", derive_seed(seed, source.label)
    elif source.indices[0] == "step":
        rest = (0,) * (len(source.indices) - 1)
        last = config.num_steps if source.label == "evaluation" else config.num_steps - 1
        yield "seeds", [derive_seed(seed, source.label, step, *rest) for step in range(last + 1)]
