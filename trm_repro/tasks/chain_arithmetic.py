"""Chain arithmetic: running sums modulo 10, written out in characters.

The prompt lists the operands; the response writes each running sum, then the answer after a mark:
``4+8+1=`` is answered by ``4+8=2;2+1=3;#3``. n operands take 2 n prompt and 6 n - 4 response characters.
"""

import random

from trm_repro.errors import InputError
from trm_repro.tasks.problems import Grade, Problem, Response

ALPHABET = "0123456789+=;#"
ANSWER_MARK = "#"
MAX_DRAWS_PER_PROBLEM = 1000


def make_problem(operands: list[int]) -> Problem:
    """Write out the problem of summing operands modulo 10.

    Args:
        operands: two or more integers in [0, 9].

    Returns:
        The problem with its solution; the prompt is its id.

    Raises:
        ValueError: if there are fewer than two operands or one is out of range.
    """
    if len(operands) < 2 or not all(0 <= operand <= 9 for operand in operands):
        raise ValueError(f"operands must be two or more integers in [0, 9], got {operands}")
    running, steps = operands[0], []
    for operand in operands[1:]:
        total = (running + operand) % 10
        steps.append(f"{running}+{operand}={total};")
        running = total
    prompt = "+".join(map(str, operands)) + "="
    return Problem(id=prompt, prompt=prompt, answer=str(running), solution=f"{''.join(steps)}{ANSWER_MARK}{running}")


class ChainArithmetic:
    """Problems of a range of lengths, and the rule that the text after the mark must be the answer."""

    def __init__(self, min_operands: int, max_operands: int) -> None:
        """Set the range of operand counts, both ends included."""
        self.min_operands = min_operands
        self.max_operands = max_operands

    def sample(self, num_problems: int, rng: random.Random, exclude: frozenset[str] = frozenset()) -> list[Problem]:
        """Draw problems.

        Args:
            num_problems: how many.
            rng: the source of randomness.
            exclude: ids of problems not to draw, such as held-out ones.

        Returns:
            The problems; one may come twice.

        Raises:
            InputError: if nearly all problems of these lengths are excluded.
        """
        problems: list[Problem] = []
        for _ in range(MAX_DRAWS_PER_PROBLEM * num_problems):
            if len(problems) == num_problems:
                return problems
            length = rng.randint(self.min_operands, self.max_operands)
            problem = make_problem([rng.randrange(10) for _ in range(length)])
            if problem.id not in exclude:
                problems.append(problem)
        raise InputError(
            f"nearly all problems of {self.min_operands} to {self.max_operands} operands are held out; raise "
            "task.max_operands or lower evaluation.num_problems and num_final_problems"
        )

    def grade(self, problem: Problem, response: Response) -> Grade:
        """Give reward 1 when a finished response has exactly the answer after its first mark, else 0."""
        if not response.finished:
            return Grade(reward=0.0, answer=None, reason="unfinished")
        _, mark, answer = response.text.partition(ANSWER_MARK)
        if not mark:
            return Grade(reward=0.0, answer=None, reason="no answer")
        correct = answer == problem.answer
        return Grade(reward=float(correct), answer=answer, reason="correct" if correct else "wrong answer")
