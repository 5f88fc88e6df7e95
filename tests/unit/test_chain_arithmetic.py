import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trm_repro.tasks import ChainArithmetic, Response
from trm_repro.tasks.chain_arithmetic import ALPHABET, make_problem

OPERANDS = st.lists(st.integers(0, 9), min_size=2, max_size=20)
TASK = ChainArithmetic(2, 3)


def test_the_example_of_the_docstring():
    problem = make_problem([4, 8, 1])
    assert problem.prompt == problem.id == "4+8+1="
    assert problem.solution == "4+8=2;2+1=3;#3"
    assert problem.answer == "3"


@given(operands=OPERANDS)
def test_every_written_step_is_true_and_follows_from_the_last(operands):
    problem = make_problem(operands)
    steps, _, answer = problem.solution.partition("#")
    running = operands[0]
    for step, operand in zip(re.findall(r"(\d)\+(\d)=(\d);", steps), operands[1:], strict=True):
        assert int(step[0]) == running
        assert int(step[1]) == operand
        assert (int(step[0]) + int(step[1]) - int(step[2])) % 10 == 0
        running = int(step[2])
    assert problem.answer == answer == str(sum(operands) % 10)


@given(operands=OPERANDS)
def test_lengths_are_as_stated_and_only_the_alphabet_is_used(operands):
    problem = make_problem(operands)
    assert len(problem.prompt) == 2 * len(operands)
    assert len(problem.solution) == 6 * len(operands) - 4
    assert set(problem.prompt + problem.solution) <= set(ALPHABET)


@given(operands=OPERANDS)
def test_the_solution_itself_earns_the_reward(operands):
    problem = make_problem(operands)
    grade = TASK.grade(problem, Response(text=problem.solution, finished=True))
    assert (grade.reward, grade.answer, grade.reason) == (1.0, problem.answer, "correct")


@pytest.mark.parametrize(
    ("text", "finished", "reward", "answer", "reason"),
    [
        ("#3", True, 1.0, "3", "correct"),
        ("4+8=9;nonsense#3", True, 1.0, "3", "correct"),  # only the answer counts
        ("4+8=2;2+1=3;#4", True, 0.0, "4", "wrong answer"),
        ("4+8=2;2+1=3;#3", False, 0.0, None, "unfinished"),
        ("4+8=2;2+1=3;3", True, 0.0, None, "no answer"),
        ("#33", True, 0.0, "33", "wrong answer"),
        ("#3;", True, 0.0, "3;", "wrong answer"),
        ("#03", True, 0.0, "03", "wrong answer"),
        ("#4#3", True, 0.0, "4#3", "wrong answer"),  # the first mark decides
        ("#", True, 0.0, "", "wrong answer"),
        ("", True, 0.0, None, "no answer"),
    ],
)
def test_grading_by_hand(text, finished, reward, answer, reason):
    grade = TASK.grade(make_problem([4, 8, 1]), Response(text=text, finished=finished))
    assert (grade.reward, grade.answer, grade.reason) == (reward, answer, reason)


@pytest.mark.parametrize("operands", [[], [3], [1, 10], [-1, 2]])
def test_operands_out_of_range_are_refused(operands):
    with pytest.raises(ValueError, match="two or more integers in"):
        make_problem(operands)


def test_every_length_of_the_range_is_drawn_and_no_other():
    problems = ChainArithmetic(3, 6).sample(300, random.Random(0))
    lengths = {len(problem.prompt) // 2 for problem in problems}
    assert lengths == {3, 4, 5, 6}
    assert {digit for problem in problems for digit in problem.prompt} == set("0123456789+=")


def test_the_same_seed_draws_the_same_problems():
    task = ChainArithmetic(8, 14)
    first, again = task.sample(20, random.Random(1)), task.sample(20, random.Random(1))
    assert first == again
    assert first != task.sample(20, random.Random(2))


def test_excluded_problems_are_never_drawn():
    every = {make_problem([a, b]).id for a in range(10) for b in range(10)}
    allowed = {"1+2=", "3+4=", "9+9="}
    drawn = ChainArithmetic(2, 2).sample(50, random.Random(0), exclude=frozenset(every - allowed))
    assert {problem.id for problem in drawn} == allowed
