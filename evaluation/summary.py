"""What graded answers come to: avg@k, pass@k, maj@k, truncation, lengths, each with its interval, and each problem.

Shape letters: P problems, K answers per problem.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike

from evaluation.scores import ScoredResponse
from evaluation.statistics import FloatArray, bootstrap_mean, majority_at_k, pass_at_k

MAX_RESAMPLED = 20_000_000
"""Problems drawn in all resamples together, at most; with very many problems fewer resamples are enough."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over problems with its 95% interval from resampling whole problems; no interval where there is one.

    Example: per problem 1.0 and 0.0: ``Estimate(mean=0.5, low=0.0, high=1.0)``.
    """

    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        """Write it for a table."""
        interval = "no interval" if self.low is None or self.high is None else f"{self.low:.3f} to {self.high:.3f}"
        return f"{self.mean:.3f} ({interval})"


@dataclass(frozen=True, kw_only=True)
class ProblemScore:
    """One problem's row.

    Attributes:
        problem_id: its id.
        gold: the right answer.
        num_correct: right answers.
        num_samples: K.
        majority: the answer found most often, the first of equals; None where none was found.
        num_truncated: answers cut off by the length limit.
        num_without_answer: answers that ended by themselves without one that could be found.
        mean_tokens: mean length.
    """

    problem_id: str
    gold: str
    num_correct: int
    num_samples: int
    majority: str | None
    num_truncated: int
    num_without_answer: int
    mean_tokens: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The scores of a policy on some problems.

    Attributes:
        num_problems: P.
        k: K.
        avg_at_k: share of right answers.
        pass_at_k: for k = 1, 2, 4 ... up to K: chance that one of k answers is right, without bias.
        maj_at_k: share of problems whose most frequent answer is right.
        truncated_fraction: share of answers cut off by the length limit.
        no_answer_fraction: share of answers that ended by themselves without an answer that could be found.
        response_tokens: mean length.
        max_response_tokens: longest.
        total_response_tokens: of all answers.
        problems: a row each.
    """

    num_problems: int
    k: int
    avg_at_k: Estimate
    pass_at_k: dict[int, Estimate]
    maj_at_k: Estimate
    truncated_fraction: Estimate
    no_answer_fraction: Estimate
    response_tokens: Estimate
    max_response_tokens: int
    total_response_tokens: int
    problems: list[ProblemScore]

    def as_dict(self) -> dict[str, object]:
        """Return plain values for JSON."""
        return asdict(self)


def summarize(scored: Sequence[ScoredResponse]) -> Summary:
    """Sum up graded answers.

    Args:
        scored: answers, as many to each problem as to any other.

    Returns:
        The scores. The same answers give the same intervals.

    Raises:
        ValueError: if there is no answer, or one problem has more of them than another.
    """
    groups: dict[str, list[ScoredResponse]] = {}
    for answer in scored:
        groups.setdefault(answer.problem_id, []).append(answer)
    sizes = {len(group) for group in groups.values()}
    if len(sizes) != 1:
        raise ValueError(f"every problem must have as many answers as any other, got {sorted(sizes) or 'no answer'}")
    (k,) = sizes
    answers = list(groups.values())
    rewards = np.array([[answer.reward for answer in group] for group in answers])  # [P, K]
    truncated = np.array([[not answer.finished for answer in group] for group in answers])  # [P, K]
    missing = np.array([[answer.finished and answer.answer is None for answer in group] for group in answers])
    tokens = np.array([[answer.num_tokens for answer in group] for group in answers])  # [P, K]
    num_correct = (rewards == 1.0).sum(axis=1)  # [P]
    return Summary(
        num_problems=len(answers),
        k=k,
        avg_at_k=estimate(rewards.mean(axis=1)),
        pass_at_k={size: estimate(pass_at_k(num_correct, k, size)) for size in powers_of_two(k)},
        maj_at_k=estimate(majority_at_k([[answer.answer for answer in group] for group in answers], rewards)),
        truncated_fraction=estimate(truncated.mean(axis=1)),
        no_answer_fraction=estimate(missing.mean(axis=1)),
        response_tokens=estimate(tokens.mean(axis=1)),
        max_response_tokens=int(tokens.max()),
        total_response_tokens=int(tokens.sum()),
        problems=[
            ProblemScore(
                problem_id=group[0].problem_id,
                gold=group[0].gold,
                num_correct=int(num_correct[index]),
                num_samples=k,
                majority=most_frequent([answer.answer for answer in group]),
                num_truncated=int(truncated[index].sum()),
                num_without_answer=int(missing[index].sum()),
                mean_tokens=float(tokens[index].mean()),
            )
            for index, group in enumerate(answers)
        ],
    )


def estimate(values: ArrayLike) -> Estimate:
    """Average over problems.

    Args:
        values: ``[P]``.

    Returns:
        Mean and 95% interval. Where all problems have the same value the interval has length 0, which says that these
        problems do not differ and not that others would not.
    """
    array: FloatArray = np.asarray(values, dtype=np.float64)
    if array.size == 1:
        return Estimate(mean=float(array.mean()), low=None, high=None)
    num_resamples = max(1000, min(10_000, MAX_RESAMPLED // array.size))
    interval = bootstrap_mean(array, np.random.default_rng(0), num_resamples=num_resamples)
    return Estimate(mean=float(interval.estimate), low=float(interval.low), high=float(interval.high))


def powers_of_two(most: int) -> list[int]:
    """List 1, 2, 4 ... up to a number."""
    return [1 << exponent for exponent in range(most.bit_length())]


def most_frequent(answers: Sequence[str | None]) -> str | None:
    """Find the answer given most often, the first of equals."""
    votes = Counter(answer for answer in answers if answer is not None)
    return votes.most_common(1)[0][0] if votes else None


def problem_table(problems: Sequence[ProblemScore]) -> str:
    """Write a row per problem, aligned for a terminal."""
    header = ("problem", "right", "gold", "majority", "cut off", "no answer", "tokens")
    rows = [
        (
            row.problem_id,
            f"{row.num_correct}/{row.num_samples}",
            row.gold,
            "-" if row.majority is None else " ".join(row.majority.split())[:24],
            str(row.num_truncated),
            str(row.num_without_answer),
            f"{row.mean_tokens:.0f}",
        )
        for row in problems
    ]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    return "\n".join(line.rstrip() for line in lines)


def headline(summary: Summary) -> str:
    """Write the scores with their intervals, a line each."""
    lines = [
        (f"avg@{summary.k}", summary.avg_at_k),
        *((f"pass@{size}", value) for size, value in summary.pass_at_k.items()),
        (f"maj@{summary.k}", summary.maj_at_k),
        ("cut off", summary.truncated_fraction),
        ("no answer", summary.no_answer_fraction),
    ]
    text = [f"{name:<12}{value}" for name, value in lines]
    tokens = summary.response_tokens
    interval = "" if tokens.low is None or tokens.high is None else f" ({tokens.low:.0f} to {tokens.high:.0f})"
    text.append(
        f"{'tokens':<12}{tokens.mean:.0f}{interval} a response, {summary.max_response_tokens} the longest, "
        f"{summary.total_response_tokens:,} in all"
    )
    return "\n".join(text)
