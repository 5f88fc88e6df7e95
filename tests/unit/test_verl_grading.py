import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trm_repro.tasks.verl_grading import MAX_SCORED_CHARACTERS, grade_by_verl, normalize_verl_answer

UNLIKE_STRICT = {  # uncontested cases that verl's rule decides against: it reads no box, and deletes commas
    "nested-braces",
    "latex-minus-sep",
    "plain-boxed",
    "bold-wrapper",
    "thousands-latex",
    "equation-in-box",
    "several-boxed-last-right",
    "text-wrapper",
    "bold-markdown-2",
}


def read_cases(folder):
    return [json.loads(line) for line in (folder / "grading_cases.jsonl").read_text(encoding="utf-8").splitlines()]


def test_uncontested_cases_differ_from_the_strict_rule_where_verl_reads_no_box(test_data):
    cases = [case for case in read_cases(test_data) if not case["contested"]]
    unlike = {case["tag"] for case in cases if grade_by_verl(case["gold"], case["response"]).reward != case["expected"]}
    assert unlike == UNLIKE_STRICT


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        ("70", "70"),
        (" 70 ", "70"),
        ("070", "070"),
        ("70.", "70."),
        ("1,024", "1024"),
        ("1{,}024", "1024"),
        (r"1,\!024", "1024"),
        ("1, 2", "12"),  # a list is read as one number
        ("-1,024", "-1,024"),  # the minus is no digit, so the comma stays
        ("x = y = 70", "70"),
        ("$70$", "70"),
        ("$70.$", "70"),
        ("about $70$ of $80$", "70"),
        (r"\$70", "70"),
        ("a 70", "70"),
        ("an 70", "70"),
        ("70 degrees", "70"),
        ("70 square units", "70"),
        ("70 students", "70"),
        ("70 apples", "70apples"),
        (r"336^\circ", "336"),
        (r"336^{\circ}", "336"),
        (r"\text{70}", "70"),
        (r"70\mbox{s}", "70"),
        (r"70\text{m}^2", "70"),
        (r"1\text{and}2", "12"),
        (r"1,\text{and}2", "12"),
        (r"\textbf{70}", "70"),
        (r"\overline{70}", "70"),
        (r"\boxed{70}", "70"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),  # up to the last brace
        (r"\text{a{b}c}", "a{bc}"),  # up to the first brace
        (r"\text{1}\text{2}", "12"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\frac123", r"\frac{1}{2}3"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"\mathbf{70}", r"\mathbf{70}"),
        ("**70**", "**70**"),
        ("\u22127", "\u22127"),
        ("\uff17\uff10", "\uff17\uff10"),
        ("issue", "is"),  # words are deleted inside words
        ("", ""),
    ],
)
def test_an_answer_is_rewritten_as_verl_rewrites_it(text, rewritten):
    assert normalize_verl_answer(text) == rewritten


@pytest.mark.parametrize(
    ("response", "answer", "reason"),
    [
        ("Answer: 70", "70", "correct"),
        ("ANSWER : $70$", "70", "correct"),
        ("unanswer: 70", "70", "correct"),  # verl asks for no word boundary
        ("Answer:\n\n70", "70", "correct"),
        (r"Answer: \boxed{70}", "70", "correct"),
        ("Answer: 49\nAnswer: 70", "70", "correct"),
        ("Answer: 70\nno, \\boxed{49}", "70", "correct"),
        ("Answer: 70\nAnswer:", "70", "correct"),
        ("Answer: 70\nAnswer: 49", "49", "wrong answer"),
        ("Answer: 70 Answer: 70", "70Answer:70", "wrong answer"),
        ("Answer: 70.", "70.", "wrong answer"),
        ("Answer: 070", "070", "wrong answer"),
        ("Answer:  \n", "", "wrong answer"),
        ("Answer\uff1a70", None, "no Answer: in the last 300 characters"),
        (r"\boxed{70}", None, "no Answer: in the last 300 characters"),
        ("", None, "no Answer: in the last 300 characters"),
    ],
)
def test_the_last_answer_line_decides(response, answer, reason):
    grade = grade_by_verl("70", response)
    assert (grade.answer, grade.reason) == (answer, reason)
    assert grade.reward == float(reason == "correct")


def test_only_the_last_300_characters_are_read():
    response = "Answer: 70\n"
    filler = "x" * (MAX_SCORED_CHARACTERS - len(response))
    assert grade_by_verl("70", response + filler).reward == 1.0
    assert grade_by_verl("70", response + filler + "x").reward == 0.0


def test_the_right_answer_may_be_any_text_and_is_rewritten_alike():
    assert grade_by_verl(r"\frac12", r"Answer: $\frac{1}{2}$").reward == 1.0
    assert grade_by_verl("1,024", "Answer: 1024").reward == 1.0


@pytest.mark.parametrize("answer", ["", "  ", "$$", "degrees"])
def test_a_right_answer_of_which_nothing_is_left_is_refused(answer):
    with pytest.raises(ValueError, match="must not be empty"):
        grade_by_verl(answer, "Answer:  ")


@settings(max_examples=200, deadline=None)
@given(
    number=st.integers(-(10**22), 10**22),
    wrapper=st.sampled_from(["{}", "${}$", "$x = {}$", r"\boxed{{{}}}", r"\text{{{}}}", "{} degrees", r"{}^\circ"]),
    before=st.text(alphabet=st.characters(exclude_categories=()), max_size=400),
)
def test_a_random_integer_in_random_wrappers_is_graded_right(number, wrapper, before):
    response = f"{before}\nAnswer: {wrapper.format(number)}"
    assert grade_by_verl(str(number), response).reward == 1.0
    assert grade_by_verl(str(number + 1), response).reward == 0.0


@settings(max_examples=200, deadline=None)
@given(response=st.text(alphabet=st.characters(exclude_categories=()), max_size=60))
def test_any_text_is_graded_without_an_error(response):
    assert grade_by_verl("71", f"Answer: {response}").reward in (0.0, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "\\text{" * 100_000,
        "\\text{}" * 100_000,
        "\\boxed{" * 100_000,
        "$" * 300_000,
        "\\frac" * 100_000,
        "\n" * 300_000,
    ],
    ids=lambda text: repr(text[:8]),
)
def test_degenerate_texts_take_linear_time(text):
    began = time.perf_counter()
    assert grade_by_verl("70", f"Answer: {text}").reward == 0.0
    normalize_verl_answer(text)  # a right answer is not cut to its end
    assert time.perf_counter() - began < 3.0
