"""`trm-repro grade`: grade responses of any model, by the rule the training loop uses or by verl's.

Reads lines ``{"gold": ..., "response": ...}`` one at a time and prints one JSON object for each: ``correct``,
``answer`` (what was found, or null) and ``reason``.
"""

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

from trm_repro.errors import InputError
from trm_repro.tasks.grading import grade_integer, normalize_integer
from trm_repro.tasks.problems import Grade
from trm_repro.tasks.verl_grading import grade_by_verl

if TYPE_CHECKING:
    from trm_repro.tasks.second_opinion import SecondOpinion

HELP = "grade responses in a file of {gold, response} lines, and print why"
GRADERS = {"strict": grade_integer, "verl": grade_by_verl}
STANDARD_INPUT = "-"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "file",
        metavar="FILE.jsonl",
        help='lines {"gold": answer, "response": text}; other keys are ignored; - reads standard input',
    )
    parser.add_argument(
        "--mode",
        choices=tuple(GRADERS),
        default="strict",
        help="strict: the last complete marker holds one integer; verl: as verl's DAPO rule (default: strict)",
    )
    parser.add_argument(
        "--second-opinion",
        action="store_true",
        help="add what math-verify thinks of each grade: agree, disagree, timed out or not available",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        0 when every line was graded, 1 when the reader of the output went away.

    Raises:
        InputError: at the first line that cannot be graded; the lines before it are printed.
    """
    from tqdm import tqdm

    name = "standard input" if arguments.file == STANDARD_INPUT else arguments.file
    with contextlib.ExitStack() as stack:
        lines, num_bytes = _open(arguments.file, stack)
        second = _start_second_opinion(stack) if arguments.second_opinion else None
        bar = stack.enter_context(
            tqdm(total=num_bytes, unit="B", unit_scale=True, desc="grade", disable=not sys.stderr.isatty())
        )
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    text = json.dumps(_grade_line(line, f"{name}: line {number}", arguments.mode, second))
                    if bar.disable:
                        sys.stdout.write(text + "\n")
                    else:
                        bar.write(text, file=sys.stdout)
                    sys.stdout.flush()
                bar.update(len(line))
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to flush at exit
            return 1
    return 0


def _open(file: str, stack: contextlib.ExitStack) -> tuple[IO[bytes], int | None]:
    """Open the input; its size in bytes where that is known."""
    if file == STANDARD_INPUT:
        return sys.stdin.buffer, None
    path = Path(file)
    if not path.exists():
        raise InputError(f"{path}: no such file; expected lines {{gold, response}} as .jsonl")
    lines = stack.enter_context(path.open("rb"))
    return lines, path.stat().st_size if path.is_file() else None


def _start_second_opinion(stack: contextlib.ExitStack) -> "SecondOpinion":
    from trm_repro.tasks.second_opinion import SecondOpinion

    return stack.enter_context(SecondOpinion())


def _grade_line(line: bytes, where: str, mode: str, second: "SecondOpinion | None") -> dict[str, str | bool | None]:
    gold, response = _read(line, where)
    try:
        grade: Grade = GRADERS[mode](gold, response)
    except ValueError as error:
        raise InputError(f"{where}: gold: {error}") from None
    correct = grade.reward == 1.0
    graded: dict[str, str | bool | None] = {"correct": correct, "answer": grade.answer, "reason": grade.reason}
    if second is not None:
        answer = normalize_integer(gold) or gold  # math-verify reads 336^\circ as an angle
        graded["second_opinion"] = second.ask(answer, response, correct=correct)
    return graded


def _read(line: bytes, where: str) -> tuple[str, str]:
    """Read one line's right answer and response."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise InputError(f"{where}: is not UTF-8 text") from None
    except (ValueError, RecursionError):  # also a number of more digits than Python reads
        raise InputError(f"{where}: is not a JSON object") from None
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected an object with gold and response, got {type(row).__name__}")
    gold, response = row.get("gold"), row.get("response")
    if isinstance(gold, bool) or not isinstance(gold, str | int):
        raise InputError(f"{where}: expected text or an integer under gold, got {_shown(row, 'gold')}")
    if not isinstance(response, str):
        raise InputError(f"{where}: expected text under response, got {_shown(row, 'response')}")
    return str(gold), response


def _shown(row: dict[str, object], key: str) -> str:
    return f"{row[key]!r:.80}" if key in row else "nothing"
