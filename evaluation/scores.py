"""Scores: sample answers, grade them, and average.

The score of the miniature's held-out problems and AIME25's avg@k are the same computation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from trm_repro.config import derive_seed
from trm_repro.rollout import Sampler, SamplingRequest, SamplingSettings
from trm_repro.tasks import Problem, Response, Task


@dataclass(frozen=True, kw_only=True)
class ScoredResponse:
    """One graded answer.

    Attributes:
        problem_id: the problem's id.
        sample: number of the answer among those to the same problem, from 0.
        response: decoded text.
        answer: the answer found in it, or None.
        reason: why the reward is what it is.
        reward: in [0, 1].
        num_tokens: length of the response.
        finished: whether it ended by itself.
    """

    problem_id: str
    sample: int
    response: str
    answer: str | None
    reason: str
    reward: float
    num_tokens: int
    finished: bool


def score_problems(
    engine: Sampler,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    questions: Sequence[tuple[Problem, tuple[int, ...]]],
    *,
    num_samples: int,
    settings: SamplingSettings,
    seed: int = 0,
) -> list[ScoredResponse]:
    """Answer each problem ``num_samples`` times and grade the answers.

    Args:
        engine: holds the weights to score.
        tokenizer: of the policy.
        task: grades.
        questions: problems, each with the token ids of its prompt.
        num_samples: k; one is enough for greedy answers.
        settings: how to sample.
        seed: seed of the sampling; each answer gets its own from it.

    Returns:
        ``len(questions) * num_samples`` answers, problem by problem.
    """
    requests = [
        SamplingRequest(prompt_ids=prompt, seed=derive_seed(seed, "score", problem.id, sample))
        for problem, prompt in questions
        for sample in range(num_samples)
    ]
    completions = engine.sample(requests, settings)
    scored = []
    for index, completion in enumerate(completions):
        problem = questions[index // num_samples][0]
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        grade = task.grade(problem, Response(text=text, finished=completion.finished))
        scored.append(
            ScoredResponse(
                problem_id=problem.id,
                sample=index % num_samples,
                response=text,
                answer=grade.answer,
                reason=grade.reason,
                reward=grade.reward,
                num_tokens=len(completion.token_ids),
                finished=completion.finished,
            )
        )
    return scored


def average_at_k(scored: Sequence[ScoredResponse]) -> float:
    """Average the rewards over answers and problems; every problem has the same number of answers.

    Args:
        scored: at least one answer.

    Returns:
        avg@k in [0, 1].
    """
    return sum(answer.reward for answer in scored) / len(scored)
