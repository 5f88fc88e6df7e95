"""Training on a data set: every problem once before any comes again, in an order that the seed decides."""

import random
from collections.abc import Sequence
from functools import lru_cache

from trm_repro.config import derive_seed
from trm_repro.tasks.dataset import DatasetTask, GradingMode
from trm_repro.tasks.problems import Problem


class MathTask(DatasetTask):
    """Problems of a data set, with the rule that grades them."""

    def __init__(self, problems: Sequence[Problem], *, seed: int, grading: GradingMode = "strict") -> None:
        """Take the problems.

        Args:
            problems: at least one; their prompts are what the policy is given.
            seed: decides the order.
            grading: the rule.
        """
        super().__init__(grading)
        self.problems = list(problems)
        self.seed = seed
        self._order = lru_cache(maxsize=2)(self._shuffle)  # a step may end one pass and begin the next

    def draw(self, step: int, num_problems: int) -> list[Problem]:
        """Draw a step's problems.

        The passes over the data are laid end to end, each in an order of its own, and cut into steps; so a step is
        the same however training got there.

        Args:
            step: index of the step, from 0.
            num_problems: how many, the same in every step.

        Returns:
            The problems; one comes twice only where the step spans two passes.
        """
        first = step * num_problems
        positions = (divmod(first + offset, len(self.problems)) for offset in range(num_problems))
        return [self.problems[self._order(epoch)[place]] for epoch, place in positions]

    def _shuffle(self, epoch: int) -> list[int]:
        order = list(range(len(self.problems)))
        random.Random(derive_seed(self.seed, "order of training problems", epoch)).shuffle(order)
        return order
