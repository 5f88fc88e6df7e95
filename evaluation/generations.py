"""Sampled answers before they are graded: sampling them, and one Parquet file per problem that has all of them.

Grading reads these files and changes nothing in them, so that answers can be graded again by another rule.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerFast

from trm_repro.config import derive_seed
from trm_repro.errors import FaultError, InputError
from trm_repro.parquet_files import write_table
from trm_repro.rollout import Sampler, SamplingRequest, SamplingSettings
from trm_repro.tasks import Problem

Question = tuple[Problem, tuple[int, ...]]
"""A problem and the token ids of its prompt."""
MAX_NAME_CHARACTERS = 80
DAMAGED = "delete it, and `evaluate` samples that problem again"


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One sampled answer.

    Example: ``Generation(problem_id="aime25-I-01", prompt="Find ...", gold="70", sample=0, seed=17, response="...",
    num_tokens=812, finished=True)``.

    Attributes:
        problem_id: the problem's id.
        prompt: text the policy was given.
        gold: the right answer.
        sample: number of the answer among those to the same problem, from 0.
        seed: of its sampling.
        response: decoded text without special tokens.
        num_tokens: length of the response.
        finished: whether it ended by itself.
    """

    problem_id: str
    prompt: str
    gold: str
    sample: int
    seed: int
    response: str
    num_tokens: int
    finished: bool


SCHEMA = pa.schema(
    [
        ("problem_id", pa.string()),
        ("prompt", pa.string()),
        ("gold", pa.string()),
        ("sample", pa.int64()),
        ("seed", pa.int64()),
        ("response", pa.string()),
        ("num_tokens", pa.int64()),
        ("finished", pa.bool_()),
    ]
)


def sample_answers(
    engine: Sampler,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[Question],
    *,
    num_samples: int,
    settings: SamplingSettings,
    seed: int = 0,
) -> list[Generation]:
    """Answer each problem ``num_samples`` times.

    An answer's seed follows from ``seed``, the problem's id and the number of the answer, and from nothing else: which
    problems are asked beside it, and in which order, does not matter.

    Args:
        engine: holds the weights.
        tokenizer: of the policy.
        questions: problems, each with the token ids of its prompt.
        num_samples: k; one is enough for greedy answers.
        settings: how to sample.
        seed: seed of the sampling.

    Returns:
        ``len(questions) * num_samples`` answers, problem by problem.

    Raises:
        FaultError: if the engine returned another number of responses than asked for.
    """
    asked = [(problem, prompt, sample) for problem, prompt in questions for sample in range(num_samples)]
    requests = [
        SamplingRequest(prompt_ids=prompt, seed=derive_seed(seed, "score", problem.id, sample))
        for problem, prompt, sample in asked
    ]
    completions = engine.sample(requests, settings)
    if len(completions) != len(requests):
        raise FaultError(f"the engine returned {len(completions)} responses to {len(requests)} requests")
    return [
        Generation(
            problem_id=problem.id,
            prompt=problem.prompt,
            gold=problem.answer,
            sample=sample,
            seed=request.seed,
            response=tokenizer.decode(completion.text_ids, skip_special_tokens=True),
            num_tokens=len(completion.token_ids),
            finished=completion.finished,
        )
        for (problem, _, sample), request, completion in zip(asked, requests, completions, strict=True)
    ]


def generation_file(folder: Path, problem_id: str) -> Path:
    """Name the file of a problem's answers: its id where that can be a file's name, else a hash of it."""
    is_plain = problem_id.isascii() and problem_id[:1].isalnum() and all(c.isalnum() or c in "._-" for c in problem_id)
    if not is_plain or len(problem_id) > MAX_NAME_CHARACTERS:
        problem_id = f"id-{hashlib.sha256(problem_id.encode()).hexdigest()[:24]}"
    return folder / f"{problem_id}.parquet"


def write_generations(folder: Path, generations: Iterable[Generation]) -> None:
    """Write answers, a file for each problem, each there whole or not at all.

    Args:
        folder: of the files.
        generations: all answers to each of their problems.
    """
    by_problem: dict[str, list[Generation]] = {}
    for generation in generations:
        by_problem.setdefault(generation.problem_id, []).append(generation)
    for problem_id, answers in by_problem.items():
        table = pa.Table.from_pylist([asdict(answer) for answer in answers], schema=SCHEMA)
        write_table(generation_file(folder, problem_id), table)


def read_generations(path: Path) -> list[Generation]:
    """Read one problem's answers.

    Raises:
        InputError: if the file is damaged, or holds something else.
    """
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: is not a readable Parquet file ({str(error).splitlines()[0]}); {DAMAGED}") from None
    try:
        table = table.select(SCHEMA.names).cast(SCHEMA)  # other tools write the same columns in types of their own
    except (KeyError, ValueError, pa.ArrowException):
        table = SCHEMA.empty_table()
    if any(column.null_count for column in table.columns) or not table.num_rows:
        raise InputError(f"{path}: does not hold a problem's answers; {DAMAGED}")
    return [Generation(**row) for row in table.to_pylist()]
