import math
from itertools import combinations

import numpy as np
import pytest

from evaluation.scores import ScoredResponse
from evaluation.statistics import Interval
from evaluation.summary import estimate, headline, most_frequent, powers_of_two, problem_table, summarize


def answer(problem="a", text="1", reward=0.0, tokens=10, finished=True):
    return ScoredResponse(
        problem_id=problem,
        prompt="?",
        gold="7",
        sample=0,
        seed=0,
        response="",
        num_tokens=tokens,
        finished=finished,
        answer=text,
        reason="",
        reward=reward,
    )


ANSWERS = [
    *(answer("a", "7", 1.0, 10), answer("a", "7", 1.0, 20), answer("a", "5", 0.0, 30), answer("a", None, 0.0, 40)),
    *(answer("b", "5", 0.0, 50, finished=True), answer("b", None, 0.0, 60, finished=False)),
    *(answer("b", "5", 0.0, 50), answer("b", "7", 1.0, 0)),
]


def test_scores_by_hand():
    summary = summarize(ANSWERS)
    assert (summary.num_problems, summary.k) == (2, 4)
    assert summary.avg_at_k.mean == 3 / 8  # 2 of 4 and 1 of 4
    assert summary.maj_at_k.mean == 0.5  # 7 wins in a, 5 in b
    assert summary.truncated_fraction.mean == 1 / 8
    assert summary.no_answer_fraction.mean == 1 / 8  # the one that was cut off is counted there only
    assert summary.response_tokens.mean == 260 / 8
    assert (summary.max_response_tokens, summary.total_response_tokens) == (60, 260)
    first, second = summary.problems
    assert (first.problem_id, first.num_correct, first.majority, first.num_without_answer) == ("a", 2, "7", 1)
    assert (second.num_truncated, second.num_without_answer, second.mean_tokens) == (1, 0, 40.0)


def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_answer():
    summary = summarize(ANSWERS)
    assert list(summary.pass_at_k) == [1, 2, 4]
    for k, value in summary.pass_at_k.items():
        shares = []
        for problem in ("a", "b"):
            rewards = [one.reward for one in ANSWERS if one.problem_id == problem]
            subsets = list(combinations(rewards, k))
            shares.append(sum(max(subset) for subset in subsets) / len(subsets))
        assert value.mean == pytest.approx(np.mean(shares))


@pytest.mark.parametrize(("most", "expected"), [(1, [1]), (2, [1, 2]), (32, [1, 2, 4, 8, 16, 32]), (7, [1, 2, 4])])
def test_pass_at_k_is_given_for_powers_of_two(most, expected):
    assert powers_of_two(most) == expected


def test_an_interval_is_about_other_problems_not_other_answers():
    # Two problems, always right and always wrong: resampled by problem the mean is 0, 1/2 or 1.
    summary = summarize([answer("a", reward=1.0)] * 50 + [answer("b")] * 50)
    assert (summary.avg_at_k.low, summary.avg_at_k.high) == (0.0, 1.0)


def test_an_interval_has_the_width_theory_gives():
    values = np.random.default_rng(1).normal(size=400)
    found = estimate(values)
    half = 1.96 * values.std() / math.sqrt(400)
    assert found.low == pytest.approx(values.mean() - half, abs=0.01)
    assert found.high == pytest.approx(values.mean() + half, abs=0.01)
    assert estimate(values) == found


def test_one_problem_has_no_interval_and_says_so():
    summary = summarize([answer(reward=1.0)])
    assert (summary.avg_at_k.mean, summary.avg_at_k.low, summary.avg_at_k.high) == (1.0, None, None)
    assert "avg@1       1.000 (no interval)" in headline(summary)


@pytest.mark.parametrize(("num_problems", "num_resamples"), [(30, 10_000), (4000, 5000), (30_000, 1000)])
def test_very_many_problems_take_fewer_resamples(num_problems, num_resamples, monkeypatch):
    asked = []

    def bootstrap_mean(values, rng, *, num_resamples):
        asked.append(num_resamples)
        return Interval(values.mean(), values.min(), values.max())

    monkeypatch.setattr("evaluation.summary.bootstrap_mean", bootstrap_mean)
    assert estimate(np.tile([0.0, 1.0], num_problems // 2)).mean == 0.5
    assert asked == [num_resamples]


def test_the_order_of_the_answers_does_not_change_the_scores():
    assert summarize(ANSWERS[4:] + ANSWERS[:4]).avg_at_k == summarize(ANSWERS).avg_at_k


def test_problems_with_different_numbers_of_answers_are_refused():
    with pytest.raises(ValueError, match=r"as many answers as any other, got \[1, 2\]"):
        summarize([answer("a"), answer("b"), answer("b")])
    with pytest.raises(ValueError, match="no answer"):
        summarize([])


def test_the_majority_is_the_first_of_equals_and_none_does_not_vote():
    assert most_frequent([None, None, None, "3", "4"]) == "3"
    assert most_frequent([None]) is None


def test_the_tables_for_a_terminal_show_every_problem_and_every_score_with_its_interval():
    summary = summarize([*ANSWERS, *([answer("c", "long  text\nof an answer that goes on and on")] * 4)])
    lines = problem_table(summary.problems).splitlines()
    assert lines[0].split() == ["problem", "right", "gold", "majority", "cut", "off", "no", "answer", "tokens"]
    assert lines[1].split() == ["a", "2/4", "7", "7", "0", "1", "25"]
    assert "long text of an answer" in lines[3]
    assert len({len(line.rstrip()) for line in lines[1:]}) <= 2
    text = headline(summary).splitlines()
    assert [line.split("  ")[0] for line in text] == [
        *("avg@4", "pass@1", "pass@2", "pass@4", "maj@4", "cut off", "no answer", "tokens")
    ]
    assert all(" to " in line for line in text)
