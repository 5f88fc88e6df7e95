"""Problems read from a file: AIME and other problems whose answers are integers."""

import json
from pathlib import Path
from typing import Any

from trm_repro.errors import InputError
from trm_repro.tasks.grading import grade_integer, normalize_integer
from trm_repro.tasks.problems import Grade, Problem, Response

PROMPT_KEYS = ("problem", "question", "prompt")
ANSWER_KEYS = ("answer", "gold", "label")
LARGEST_EXACT_FLOAT = 2**53
"""Above it a float64 no longer tells neighbouring integers apart."""


class DatasetTask:
    """Grades by the strict integer rule."""

    def grade(self, problem: Problem, response: Response) -> Grade:
        """Give reward 1 when the last marked answer is the right integer, else 0."""
        return grade_integer(problem.answer, response.text, finished=response.finished)


def load_problems(path: Path) -> list[Problem]:
    """Read problems from a JSONL or Parquet file.

    Args:
        path: a file whose rows have a problem (``problem``, ``question`` or ``prompt``), an integer answer
            (``answer``, ``gold`` or ``label``; text or number, 2.0 too) and, if they like, an ``id``.

    Returns:
        The problems in the file's order; rows without an id are numbered.

    Raises:
        InputError: if the file is missing, unreadable or empty, or a row lacks a problem or an integer answer.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file; expected problems as .jsonl or .parquet")
    rows = _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)
    if not rows:
        raise InputError(f"{path}: has no problems")
    problems = [_to_problem(row, f"{path}: row {number}", number) for number, row in enumerate(rows, start=1)]
    if len({problem.id for problem in problems}) != len(problems):
        raise InputError(f"{path}: two problems have the same id")
    return problems


def _read_jsonl(path: Path) -> list[Any]:
    rows = []
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        rows.append(json.loads(line))
                    except (ValueError, RecursionError):  # also a number of more digits than Python reads
                        raise InputError(f"{path}: line {number} is not a JSON object") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not UTF-8 text; expected .jsonl or .parquet") from None
    return rows


def _read_parquet(path: Path) -> list[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: list[Any] = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: is not a readable Parquet file ({str(error).splitlines()[0]})") from None
    return rows


def _to_problem(row: object, where: str, number: int) -> Problem:
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected an object, got {type(row).__name__}")
    prompt = next((row[key] for key in PROMPT_KEYS if isinstance(row.get(key), str) and row[key].strip()), None)
    if prompt is None:
        raise InputError(f"{where}: expected text under one of {', '.join(PROMPT_KEYS)}, found keys {sorted(row)}")
    answer = next((row[key] for key in ANSWER_KEYS if row.get(key) is not None), None)
    if isinstance(answer, float) and answer.is_integer() and abs(answer) <= LARGEST_EXACT_FLOAT:
        answer = int(answer)
    normalized = None if answer is None else normalize_integer(str(answer))
    if normalized is None:
        raise InputError(f"{where}: expected an integer under one of {', '.join(ANSWER_KEYS)}, got {answer!r}")
    identifier = row.get("id")
    return Problem(id=str(number if identifier is None else identifier), prompt=prompt, answer=normalized)
