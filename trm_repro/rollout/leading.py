"""One process leads, the others follow: code that talks to an engine runs on the first rank only.

The first rank's engine may need the others, such as a vLLM in each process whose engines step together. They wait in
`follow` and do what the leader's calls ask for, until `lead` ends.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from trm_repro import ranks
from trm_repro.rollout.engine import Completion, RolloutEngine, SamplingRequest, SamplingSettings

Result = TypeVar("Result")


@runtime_checkable
class SharedEngine(Protocol):
    """An engine made of one engine in each rank."""

    def follow(self) -> None:
        """On a rank that does not lead: take part in the leader's calls until it releases its followers."""
        ...

    def release(self) -> None:
        """On the first rank: let the followers go on."""
        ...


def lead(engine: object, task: Callable[[], Result]) -> Result | None:
    """Do a task on the first rank; the other ranks help and get None.

    Args:
        engine: what the task samples from.
        task: calls ``engine.sample`` any number of times.

    Returns:
        The task's result, on the first rank.
    """
    if not isinstance(engine, SharedEngine):
        return task() if ranks.is_first() else None
    if not ranks.is_first():
        engine.follow()
        return None
    try:
        return task()
    finally:
        engine.release()


class DividedEngine:
    """One engine in each rank; requests are dealt out, and responses come back to the first rank in order."""

    def __init__(self, engine: RolloutEngine) -> None:
        """Take this rank's engine."""
        self.engine = engine
        self.vocab_size = engine.vocab_size
        self.stop_ids = engine.stop_ids

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights of every rank's engine; called on every rank."""
        self.engine.load_weights(weights)

    def sample(self, requests: Sequence[SamplingRequest], settings: SamplingSettings) -> list[Completion]:
        """Sample one response per request, in order; called on the first rank, while the others follow."""
        num_ranks = ranks.num_ranks()
        parts = [(list(requests[part::num_ranks]), settings) for part in range(num_ranks)]
        answers = ranks.gather(self.engine.sample(*ranks.scatter(parts)))
        completions: list[Completion | None] = [None] * len(requests)
        for part, answer in enumerate(answers):
            completions[part::num_ranks] = answer
        return [completion for completion in completions if completion is not None]

    def follow(self) -> None:
        """Sample this rank's part of whatever the first rank samples, until it releases its followers."""
        while (part := ranks.scatter([None])) is not None:
            ranks.gather(self.engine.sample(*part))
        self._sleep()

    def release(self) -> None:
        """Let the followers go on."""
        if ranks.num_ranks() > 1:
            ranks.scatter([None] * ranks.num_ranks())
        self._sleep()

    def _sleep(self) -> None:
        """Leave the device to the trainer, where the engine can."""
        sleep = getattr(self.engine, "sleep", None)
        if sleep is not None:
            sleep()


class AbsentEngine:
    """What a rank without an engine has: it gathers weights along with the rank that has one."""

    vocab_size = 0
    stop_ids: tuple[int, ...] = ()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take part in gathering each weight, and drop it."""
        for _ in weights.values():
            pass

    def sample(self, requests: Sequence[SamplingRequest], settings: SamplingSettings) -> list[Completion]:
        """Never called: the first rank leads."""
        raise AssertionError("sampling is the first rank's part")
