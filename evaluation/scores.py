"""Scores: grade sampled answers, and average.

The score of the miniature's held-out problems and AIME25's avg@k are the same computation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from transformers import PreTrainedTokenizerFast

from evaluation.generations import Generation, Question, sample_answers
from trm_repro.rollout import Sampler, SamplingSettings
from trm_repro.tasks import Problem, Response, Task


@dataclass(frozen=True, kw_only=True)
class ScoredResponse(Generation):
    """One graded answer.

    Attributes:
        answer: the answer found in the response, or None.
        reason: why the reward is what it is.
        reward: in [0, 1].
    """

    answer: str | None
    reason: str
    reward: float


def score_problems(
    engine: Sampler,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    questions: Sequence[Question],
    *,
    num_samples: int,
    settings: SamplingSettings,
    seed: int = 0,
) -> list[ScoredResponse]:
    """Answer each problem ``num_samples`` times and grade the answers; see `sample_answers` and `grade_answers`."""
    return grade_answers(
        task, sample_answers(engine, tokenizer, questions, num_samples=num_samples, settings=settings, seed=seed)
    )


def grade_answers(task: Task, generations: Sequence[Generation]) -> list[ScoredResponse]:
    """Grade sampled answers.

    Args:
        task: grades.
        generations: the answers.

    Returns:
        The answers with their grades, in the order given.
    """
    scored = []
    for generation in generations:
        problem = Problem(id=generation.problem_id, prompt=generation.prompt, answer=generation.gold)
        grade = task.grade(problem, Response(text=generation.response, finished=generation.finished))
        sampled = {field.name: getattr(generation, field.name) for field in fields(Generation)}
        scored.append(ScoredResponse(**sampled, answer=grade.answer, reason=grade.reason, reward=grade.reward))
    return scored


def average_at_k(scored: Sequence[ScoredResponse]) -> float:
    """Average the rewards of all answers.

    Args:
        scored: at least one answer.

    Returns:
        avg@k in [0, 1].
    """
    return sum(answer.reward for answer in scored) / len(scored)


def problem_scores(scored: Sequence[ScoredResponse]) -> list[float]:
    """Average the rewards of each problem's answers.

    Args:
        scored: answers.

    Returns:
        A mean in [0, 1] for each problem, in the order in which the problems first come.
    """
    rewards: dict[str, list[float]] = {}
    for answer in scored:
        rewards.setdefault(answer.problem_id, []).append(answer.reward)
    return [sum(values) / len(values) for values in rewards.values()]
