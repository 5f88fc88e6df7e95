from trm_repro.tasks import MathTask, Problem

PROBLEMS = [Problem(id=str(n), prompt=f"{n}?", answer=str(n)) for n in range(10)]


def drawn(num_steps, num_problems, seed=1):
    task = MathTask(PROBLEMS, seed=seed)
    return [problem.id for step in range(num_steps) for problem in task.draw(step, num_problems)]


def test_every_problem_comes_once_before_any_comes_again():
    ids = drawn(15, 2)
    assert [sorted(ids[first : first + 10]) for first in (0, 10, 20)] == [[str(n) for n in range(10)]] * 3


def test_each_pass_over_the_data_has_an_order_of_its_own():
    ids = drawn(2, 10)
    assert ids[:10] != ids[10:]


def test_a_pass_that_ends_within_a_step_loses_and_repeats_nothing():
    ids = drawn(10, 3)
    assert ids == drawn(3, 10)  # the order does not depend on how it is cut into steps
    assert sorted(ids) == sorted(3 * [str(n) for n in range(10)])


def test_a_step_is_the_same_however_training_got_there_and_another_for_another_seed():
    fresh = MathTask(PROBLEMS, seed=1)
    late = [problem.id for problem in fresh.draw(7, 3)]
    assert late == drawn(8, 3)[-3:]
    assert drawn(4, 5, seed=1) != drawn(4, 5, seed=2)


def test_more_problems_than_there_are_come_again_in_one_step():
    assert sorted(drawn(1, 20)) == sorted(2 * [str(n) for n in range(10)])
