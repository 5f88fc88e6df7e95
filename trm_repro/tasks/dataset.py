r"""Problems of data sets whose answers are integers: AIME, DAPO-Math and their like.

Rows come from `trm_repro.tasks.sources`; here each becomes a problem, questions that differ in white space only become
one, and questions that carry two different answers are dropped and counted.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

from trm_repro.errors import InputError
from trm_repro.tasks.grading import grade_integer, normalize_integer
from trm_repro.tasks.problems import Grade, Problem, Response
from trm_repro.tasks.sources import ProblemSource, stream_rows
from trm_repro.tasks.templates import question_of
from trm_repro.tasks.verl_grading import grade_by_verl

GradingMode = Literal["strict", "verl"]
PROMPT_KEYS = ("problem", "question", "prompt")
ANSWER_KEYS = ("answer", "gold", "label", "solution")
"""Looked at in this order: where a row has both an answer and a worked solution, the answer counts."""
LARGEST_EXACT_FLOAT = 2**53
"""Above it a float64 no longer tells neighbouring integers apart."""


class DatasetTask:
    """Grades by the strict integer rule, or as verl does."""

    def __init__(self, grading: GradingMode = "strict") -> None:
        """Choose the rule."""
        self.grading = grading

    def grade(self, problem: Problem, response: Response) -> Grade:
        """Give reward 1 when the rule finds the right integer in the response, else 0."""
        if self.grading == "verl":
            return grade_by_verl(problem.answer, response.text)
        return grade_integer(problem.answer, response.text, finished=response.finished)


@dataclass(frozen=True, kw_only=True)
class DatasetReport:
    """What reading a data set came to.

    Example: DAPO-Math-17k as published to this project's tests has 17,917 rows of 17,188 questions, of which 12 carry
    two answers each.

    Attributes:
        source: its name.
        num_rows: rows read.
        num_unique: questions that differ in more than white space.
        num_conflicting: of those, dropped because their rows disagree on the answer.
        num_held_out: of the rest, dropped because they are evaluated on.
        num_over_length: of the rest, dropped because the prompt is too long.
    """

    source: str
    num_rows: int
    num_unique: int
    num_conflicting: int
    num_held_out: int = 0
    num_over_length: int = 0

    @property
    def num_kept(self) -> int:
        """Problems left."""
        return self.num_unique - self.num_conflicting - self.num_held_out - self.num_over_length

    def __str__(self) -> str:
        """Say it in one line."""
        text = f"{self.source}: {self.num_rows:,} rows, {self.num_unique:,} different questions"
        if self.num_conflicting:
            text += f", {self.num_conflicting:,} dropped for conflicting answers"
        if self.num_held_out:
            text += f", {self.num_held_out:,} dropped because they are evaluated on"
        if self.num_over_length:
            text += f", {self.num_over_length:,} dropped for prompts over the limit"
        return f"{text}, {self.num_kept:,} kept"


def load_problems(source: ProblemSource, *, show_progress: bool = False) -> tuple[list[Problem], DatasetReport]:
    """Read a data set's problems, each question once.

    Args:
        source: rows with a question (``problem``, ``question`` or ``prompt``; text, or a chat with one user turn), an
            integer answer (``answer``, ``gold``, ``label``, ``solution`` or ``reward_model.ground_truth``; text or
            number, 2.0 too) and, if they like, an id (``id`` or ``extra_info.index``).
        show_progress: draw a progress bar over the rows.

    Returns:
        The problems in the order in which their questions first came, with bare questions as prompts, and the counts.
        A problem without an id gets one from its question; where two have the same, theirs are added to it.

    Raises:
        InputError: if the source cannot be read or has no problem, or a row lacks a question or an integer answer.
    """
    from tqdm import tqdm

    problems: dict[bytes, Problem] = {}
    conflicting: set[bytes] = set()
    num_rows = 0
    is_hidden = None if show_progress else True  # None: shown on a terminal only
    for row in tqdm(stream_rows(source), desc=str(source), unit=" rows", disable=is_hidden, leave=False):
        num_rows += 1
        problem = _to_problem(row, f"{source}: row {num_rows}")
        key = _question_digest(problem.prompt)
        if problems.setdefault(key, problem).answer != problem.answer:
            conflicting.add(key)
    kept = [problem for key, problem in problems.items() if key not in conflicting]
    if not kept:
        raise InputError(f"{source}: has no problems" + (" whose rows agree on the answer" if conflicting else ""))
    report = DatasetReport(
        source=str(source), num_rows=num_rows, num_unique=len(problems), num_conflicting=len(conflicting)
    )
    return _with_unique_ids(kept), report


def _with_unique_ids(problems: list[Problem]) -> list[Problem]:
    counts = Counter(problem.id for problem in problems)
    return [
        problem
        if problem.id and counts[problem.id] == 1
        else replace(problem, id=f"{problem.id or 'question'}-{_question_digest(problem.prompt).hex()[:12]}")
        for problem in problems
    ]


def _question_digest(question: str) -> bytes:
    """Hash a question up to white space."""
    return hashlib.sha256(" ".join(question.split()).encode()).digest()[:16]


def _to_problem(row: object, where: str) -> Problem:
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected an object, got {type(row).__name__}")
    question = next((text for key in PROMPT_KEYS if (text := _text_of(row.get(key)))), None)
    if question is None:
        raise InputError(f"{where}: expected text under one of {', '.join(PROMPT_KEYS)}, found keys {sorted(row)}")
    answer = next((row[key] for key in ANSWER_KEYS if row.get(key) is not None), None)
    if answer is None and isinstance(reward_model := row.get("reward_model"), dict):
        answer = reward_model.get("ground_truth")
    if isinstance(answer, float) and answer.is_integer() and abs(answer) <= LARGEST_EXACT_FLOAT:
        answer = int(answer)
    normalized = None if answer is None else normalize_integer(str(answer))
    if normalized is None:
        wanted = f"{', '.join(ANSWER_KEYS)}, reward_model.ground_truth"
        raise InputError(f"{where}: expected an integer under one of {wanted}, got {answer!r:.200}")
    extra = row.get("extra_info")
    identifier = row.get("id")
    if identifier is None and isinstance(extra, dict):
        identifier = extra.get("index")
    return Problem(id="" if identifier is None else str(identifier), prompt=question, answer=normalized)


def _text_of(value: Any) -> str | None:  # noqa: ANN401
    """Take the question out of a text, or out of a chat whose only user turn holds it."""
    if isinstance(value, list):
        turns = [turn for turn in value if isinstance(turn, dict) and turn.get("role") == "user"]
        value = turns[0].get("content") if len(turns) == 1 else None
    return question_of(value) if isinstance(value, str) else None
