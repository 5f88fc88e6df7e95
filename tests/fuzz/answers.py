"""Readers of what models and data sets say, and of addresses."""

import json
import string
import time

from hypothesis import strategies as st

from pipelines.credentials import without_credentials
from pipelines.grade import _grade_line
from tests.fuzz.damage import changed_rows, damaged, json_values
from tests.fuzz.reading import Target, refused
from trm_repro.tasks.dataset import _to_problem
from trm_repro.tasks.grading import grade_integer, normalize_integer
from trm_repro.tasks.verl_grading import grade_by_verl

LONGEST_GRADING = 2.0  # seconds, of a response of 2,000 characters

PIECES = (
    "\\boxed{", "\\boxed {", "{", "}", "\\{", "\\}", "Answer:", "answer :", "\n", "$", "$$", "\\text{", "\\frac", "\\(",
    "\\)", "\\,", "\\!", "{,}", ",", ".", "=", "<", "42", "-", "007", "1,024", "\uff11", "\u00b2", "\u2212", "%",
    "^\\circ", "\\textcolor{red}{", "\\displaystyle", "\\", " ", "**", "~", "or", "square", "x",
)  # fmt: skip
responses = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=60).map("".join) | st.builds(
    lambda piece, n: piece * n, st.sampled_from(PIECES), st.integers(1, 400)
)
golds = st.sampled_from(["42", "-7", "1024", "$336^\\circ$", "x", ""]) | st.text(max_size=10)


def check_grading(drawn: tuple[str, str, bool]) -> None:
    gold, response, finished = drawn
    began = time.process_time()
    for grade in (
        lambda: grade_integer(gold, response, finished=finished),
        lambda: grade_by_verl(gold, response),
    ):
        try:
            found = grade()
        except ValueError as error:
            if "the right answer must" not in str(error):
                raise
            continue
        assert found.reward in (0.0, 1.0)
        assert (found.reward == 1.0) == (found.reason == "correct")
    read = normalize_integer(response)
    assert read is None or normalize_integer(read) == read
    assert time.process_time() - began < LONGEST_GRADING


def check_grade_line(drawn: tuple[bytes, str]) -> None:
    line, mode = drawn
    graded = refused(lambda: _grade_line(line, "line 1", mode, None))
    assert graded is None or set(graded) == {"correct", "answer", "reason"}


def check_problem(row: object) -> None:
    problem = refused(lambda: _to_problem(row, "row 1"))
    assert problem is None or (problem.prompt and normalize_integer(problem.answer) == problem.answer)


def check_credentials(drawn: tuple[str, str, str]) -> None:
    user, password, rest = drawn
    for uri in (f"https://{user}:{password}@host/{rest}", f"https://host/{rest}?token={password}"):
        assert "s3cret" not in without_credentials(uri), uri


PROBLEM = {
    "id": "1",
    "problem": "1 + 1?",
    "answer": 2,
    "extra_info": {"index": 3},
    "reward_model": {"ground_truth": "2"},
}
words = st.text(string.ascii_letters + string.digits + "/@:?#&%=", max_size=12)


TARGETS = {
    "grading": Target(st.tuples(golds, responses, st.booleans()), check_grading),
    "grade_line": Target(
        st.tuples(
            damaged(b'{"gold": 42, "response": "so \\\\boxed{42}"}')
            | changed_rows([{"gold": 42, "response": "x"}]).map(lambda rows: json.dumps(rows[0]).encode())
            | json_values.map(lambda value: json.dumps(value).encode()),
            st.sampled_from(["strict", "verl"]),
        ),
        check_grade_line,
    ),
    "problem": Target(changed_rows([PROBLEM]).map(lambda rows: rows[0]) | json_values, check_problem),
    "credentials": Target(st.tuples(words, words.map("s3cret".__add__), words), check_credentials),
}
