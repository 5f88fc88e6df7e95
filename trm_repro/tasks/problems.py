"""What a task is: problems with answers, responses, and a rule that grades one by the other."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A prompt with its answer.

    Example: ``Problem(id="4+8=", prompt="4+8=", answer="2", solution="4+8=2;#2")``.

    Attributes:
        id: unique within its task.
        prompt: text given to the policy.
        answer: text of the right answer.
        solution: text of one whole right response, or None where the task has none.
    """

    id: str
    prompt: str
    answer: str
    solution: str | None = None


@dataclass(frozen=True, kw_only=True)
class Response:
    """What the policy wrote.

    Attributes:
        text: decoded response without special tokens.
        finished: whether it ended by itself within the length limit.
    """

    text: str
    finished: bool


@dataclass(frozen=True, kw_only=True)
class Grade:
    """How a response was graded.

    Attributes:
        reward: in [0, 1].
        answer: the answer found, or None.
        reason: why the reward is what it is, in a few words.
    """

    reward: float
    answer: str | None
    reason: str


class Task(Protocol):
    """A rule that grades responses; it knows nothing about tokens."""

    def grade(self, problem: Problem, response: Response) -> Grade:
        """Grade one response."""
        ...
