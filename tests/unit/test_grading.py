import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trm_repro.tasks import DatasetTask, Problem, Response
from trm_repro.tasks.grading import (
    MAX_ANSWER_CHARACTERS,
    MAX_RESPONSE_CHARACTERS,
    grade_integer,
    last_marked_answer,
    normalize_integer,
)

CONTESTED = {  # where graders differ: what ours says to a response that others may take either way
    "no-marker": False,
    "marker-conflict-box-last": True,
    "boxed-no-brace": False,
    "decimal-integer": False,
    "scientific": False,
    "truncated-box": False,
    "chinese-colon": True,
    "boxed-far-from-end": True,
    "answer-next-line": True,
    "empty-box": False,
    "expression-mod": False,
    "fullwidth-digits": True,
    "fraction-integer": False,
    "fbox": False,
    "nested-frac": False,
    "boxed-space": True,
}


def read_cases(folder, *, contested):
    cases = [json.loads(line) for line in (folder / "grading_cases.jsonl").read_text(encoding="utf-8").splitlines()]
    return [case for case in cases if case["contested"] == contested]


def test_every_uncontested_case_is_graded_as_expected(test_data):
    cases = read_cases(test_data, contested=False)
    assert len(cases) >= 20
    graded = {case["tag"]: grade_integer(case["gold"], case["response"]).reward for case in cases}
    assert graded == {case["tag"]: float(case["expected"]) for case in cases}


def test_contested_cases_are_graded_by_the_strict_rule(test_data):
    cases = read_cases(test_data, contested=True)
    graded = {case["tag"]: grade_integer(case["gold"], case["response"]).reward for case in cases}
    assert graded == {tag: float(kept) for tag, kept in CONTESTED.items()}


@pytest.mark.parametrize(
    ("response", "answer", "reason"),
    [
        (r"So \boxed{70}.", "70", "correct"),
        (r"\boxed{21} and \boxed{49}, together \boxed{70}", "70", "correct"),
        (r"\boxed{70}, or rather \boxed{49}", "49", "wrong answer"),
        ("Answer: 70\nAnswer: 49", "49", "wrong answer"),
        ("Answer: 49\nno, \\boxed{70}", "70", "correct"),
        ("\\boxed{49}\nAnswer: 70", "70", "correct"),
        ("**Answer**: $70$", "70", "correct"),
        ("ANSWER: 70.", "70", "correct"),
        ("Answer: $\\boxed{70}$ because \\boxed{49} fails", "49", "wrong answer"),
        ("the answers: 70", None, "no marked answer"),
        ("unanswer: 70", None, "no marked answer"),
        ("70", None, "no marked answer"),
        ("", None, "no marked answer"),
        (r"\boxed{70", None, "no marked answer"),
        (r"\boxed{70} and then \boxed{49", "70", "correct"),
        (r"\boxed{\boxed{70}}", "70", "correct"),
        (r"a set \{1\} and \boxed{70} \}", "70", "correct"),
        (r"stray } and { and \boxed{70}", "70", "correct"),
        (r"\boxed{70\}}", r"70\}", "not one integer"),
        (r"\boxed{x_{1} + 3}", "x_{1} + 3", "not one integer"),
        (r"\boxed{}", "", "not one integer"),
        (r"\boxed{-70}", "-70", "wrong answer"),
        (r"\boxed{7 0}", "7 0", "not one integer"),
        (r"\boxed{70, 70}", "70, 70", "not one integer"),
        (r"\boxed{70x}", "70x", "not one integer"),
        ("Answer: 70 or 49", "70 or 49", "not one integer"),
        ("Answer: 70.5", "70.5", "not one integer"),
    ],
)
def test_the_last_complete_marker_decides(response, answer, reason):
    grade = grade_integer("70", response)
    assert (grade.answer, grade.reason) == (answer, reason)
    assert grade.reward == float(reason == "correct")


def test_a_box_inside_one_that_never_closes_still_counts():
    assert grade_integer("70", r"Put it in \boxed{ like this: \boxed{70}").reward == 1.0
    assert last_marked_answer(r"\boxed{ \boxed{1} \boxed{2}") == "2"


@pytest.mark.parametrize("text", ["1, 2", "1 2", r"1\ 2", r"1\,2", "1,2", "1{,}2"])
def test_numbers_side_by_side_are_not_one_integer(text):
    assert normalize_integer(text) is None


@pytest.mark.parametrize(
    ("text", "integer"),
    [
        ("0", "0"),
        ("007", "7"),
        ("-0", "0"),
        ("+5", "5"),
        ("- 3", "-3"),
        ("-007", "-7"),
        ("\u22127", "-7"),  # minus sign
        ("\u20137", "-7"),  # en dash
        ("\uff0d\uff17", "-7"),  # full width
        ("1,024", "1024"),
        ("12,345,678", "12345678"),
        (r"1{,}024", "1024"),
        (r"1\,024", "1024"),
        (r"1,\!024", "1024"),
        ("$336^\\circ$", "336"),
        (r"\text{-07}", "-7"),
        (r"\mathbf{\text{7}}", "7"),
        (r"\color{blue}{7}", "7"),
        ("{{7}}", "7"),
        (r"\(7\)", "7"),
        ("**7**", "7"),
        ("x = y = 7", "7"),
        ("7.", "7"),
        ("7%", "7"),
        (r"7\%", "7"),
        ("", None),
        ("=", None),
        ("7=", None),
        ("seven", None),
        ("7.0", None),
        ("7/1", None),
        (r"\frac{7}{1}", None),
        ("10^3", None),
        ("1e3", None),
        ("0x10", None),
        ("1_000", None),
        ("10,24", None),
        ("1,0244", None),
        (",024", None),
        ("--7", None),
        ("7-", None),
        ("\u0667", None),  # an Arabic-Indic digit
        ("$", None),
        ("{7", None),
    ],
)
def test_one_integer_is_read_out_of_its_wrappers(text, integer):
    assert normalize_integer(text) == integer


@pytest.mark.parametrize(
    ("text", "integer"),
    [
        ("7\u00b2", None),  # a superscript two: 49, not 72
        ("10\u2083", None),  # a subscript three: a base, not 103
        ("7\u00bd", None),
        ("\u2467", None),  # a circled 8
        ("7\u00b2 + 21 = 70", "70"),
        ("x \uff1d \uff17\uff10", "70"),  # all full width
        ("\U0001d7d5", "7"),  # a bold 7
        (r"\,70\,", "70"),
        (r"\ 70\ ", "70"),
        (r"~70\;", "70"),
        (r"1\;024", "1024"),
        (r"1\!024", "1024"),
        (r"12\,345\,678", "12345678"),
        (r"1\,24", None),
        (r"1024\,1024", None),
        (r"\$70", "70"),
        (r"$\$70$", "70"),
        ("`70`", "70"),
        (r"\color{blue} 70", "70"),
        (r"{\color{blue}70}", "70"),
        (r"\textcolor{red}{\mathsf{70}}", "70"),
        (r"\displaystyle 70", "70"),
        (r"\bfseries 70", None),
        ("x >= 70", None),
        ("x <= 70", None),
        ("x != 70", None),
        (r"x \not= 70", None),
        ("x = 1, x = 70", None),
        (r"x = 1 \text{ or } x = 70", None),
        ("x=1;y=70", None),
        ("m = 21 and n = 70", None),
        ("f(2, 3) = 70", "70"),
        ("a = f(2, 3) = 70", "70"),
        ("x = 1,024 - 954 = 70", "70"),
        ("since m, n are coprime, m + n = 70", "70"),
        ("a\x0070", None),
        ("\ud80070", None),
    ],
)
def test_spaces_and_lists_and_comparisons_are_told_from_integers(text, integer):
    assert normalize_integer(text) == integer


WRAPPERS = st.lists(
    st.sampled_from(
        ["${}$", r"\text{{{}}}", r"\mathrm{{{}}}", r"\textbf{{{}}}", "{{{}}}", r"\color{{red}}{{{}}}", " {} ", "**{}**"]
    ),
    max_size=4,
)
OUTERMOST = st.sampled_from(["{}", "x = {}", "m + n = 3 + 4 = {}", "{}.", r"{}^\circ", r"\({}\)"])
MARKERS = st.sampled_from([r"so \boxed{{{}}}", r"$\boxed {{{}}}$.", "done\nAnswer: {}", "final ANSWER: {}\nbye"])


@st.composite
def written_integers(draw):
    number = draw(st.integers(-(10**22), 10**22))
    digits = draw(st.sampled_from(["{:d}", "{:,d}", "00{:d}"])).format(abs(number))
    text = ("-" if number < 0 else draw(st.sampled_from(["", "+"]))) + digits
    for wrapper in draw(WRAPPERS):
        text = wrapper.format(text)
    return number, draw(MARKERS).format(draw(OUTERMOST).format(text))


@settings(max_examples=400, deadline=None)
@given(written=written_integers(), difference=st.integers(1, 10**22), noise=st.sampled_from(["", "\\boxed{1} is no. "]))
def test_a_random_integer_in_random_wrappers_is_graded_right(written, difference, noise):
    number, response = written
    right = grade_integer(str(number), noise + response)
    assert (right.reward, right.answer) == (1.0, str(number))
    wrong = grade_integer(str(number + difference), noise + response)
    assert (wrong.reward, wrong.reason) == (0.0, "wrong answer")


@settings(max_examples=300, deadline=None)
@given(response=st.text(alphabet="\\boxed{}$answer: \n71,=-*", max_size=60))
def test_any_text_is_graded_without_an_error(response):
    assert grade_integer("71", response).reward in (0.0, 1.0)


@settings(max_examples=200, deadline=None)
@given(response=st.text(alphabet=st.characters(exclude_categories=()), max_size=40))
def test_nuls_and_surrogates_and_any_script_are_graded_without_an_error(response):
    for written in (response, f"Answer: {response}", f"\\boxed{{{response}}}"):
        assert grade_integer("71", written).reward in (0.0, 1.0)


@pytest.mark.parametrize(
    "response",
    [
        "\\boxed{" * 50_000,
        "\\boxed{" * 40_000 + "}" * 40_000,
        "\\boxed{1} " * 30_000,
        "{" * 300_000,
        "}" * 300_000,
        "\\" * 300_001,
        "answer" + " *" * 150_000,
        "answer: " * 40_000,
        "Answer:\n" * 40_000,
        "Answer: " + "9" * 300_000,
        "\\boxed{" + "9" * 300_000 + "}",
        "\\boxed" + " " * 300_000 + "{",
        "Answer: 9^9^9^9^9",
    ],
    ids=lambda response: response[:12],
)
def test_degenerate_responses_are_graded_in_linear_time(response):
    began = time.perf_counter()
    assert grade_integer("70", response).reward == 0.0
    assert time.perf_counter() - began < 3.0


def test_an_answer_longer_than_any_is_not_read_and_the_longest_is():
    longest = "7" * MAX_ANSWER_CHARACTERS
    assert grade_integer(longest, f"Answer: {longest}").reward == 1.0
    grade = grade_integer("7", f"Answer: {longest}7")
    assert (grade.reason, len(grade.answer)) == ("not one integer", MAX_ANSWER_CHARACTERS)


def test_only_the_end_of_an_endless_response_is_read():
    filler = "x" * MAX_RESPONSE_CHARACTERS
    assert last_marked_answer(r"\boxed{70}" + filler) is None
    assert last_marked_answer(filler + r"\boxed{70}") == "70"


def test_a_response_cut_off_earns_nothing_whatever_it_says():
    grade = grade_integer("70", r"\boxed{70}", finished=False)
    assert (grade.reward, grade.answer, grade.reason) == (0.0, None, "cut off")


def test_a_right_answer_that_is_no_integer_is_refused():
    with pytest.raises(ValueError, match="must be an integer, got 'seven'"):
        grade_integer("seven", r"\boxed{7}")


def test_the_right_answer_is_read_like_the_response():
    assert grade_integer("007", r"\boxed{7}").reward == 1.0
    assert grade_integer("1,000", "Answer: 1000").reward == 1.0


def test_the_dataset_task_grades_by_this_rule():
    problem = Problem(id="1", prompt="?", answer="70")
    assert DatasetTask().grade(problem, Response(text=r"\boxed{70}", finished=True)).reward == 1.0
    assert DatasetTask().grade(problem, Response(text=r"\boxed{71}", finished=True)).reward == 0.0
    assert DatasetTask().grade(problem, Response(text=r"\boxed{70}", finished=False)).reward == 0.0
