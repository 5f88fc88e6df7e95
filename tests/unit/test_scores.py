import pytest
import torch

from evaluation.generations import sample_answers
from evaluation.scores import ScoredResponse, average_at_k, grade_answers, problem_scores, score_problems
from tests.unit.builders import TOKENIZER
from trm_repro.errors import FaultError
from trm_repro.rollout import Completion, SamplingSettings
from trm_repro.tasks import ChainArithmetic, DatasetTask
from trm_repro.tasks.chain_arithmetic import make_problem

PROBLEMS = [make_problem([4, 8]), make_problem([3, 3])]  # answers 2 and 6
ANSWERS = ["4+8=2;#2", "#7", "#2", "#6", "6", "#6"]  # three to each problem
FINISHED = [True, True, False, True, True, True]
SETTINGS = SamplingSettings(max_tokens=20)


class ScriptedEngine:
    """Gives the answers above in turn, and remembers what it was asked."""

    def sample(self, requests, settings):
        self.requests, self.settings = list(requests), settings
        completions = []
        for text, finished in zip(ANSWERS, FINISHED, strict=True):
            tokens = (*TOKENIZER(text, add_special_tokens=False).input_ids, *([2] if finished else []))
            completions.append(
                Completion(
                    token_ids=tokens,
                    logprobs=torch.zeros(len(tokens)),
                    log_distribution=None,
                    experts=None,
                    finished=finished,
                )
            )
        return completions


def score(seed=0):
    engine = ScriptedEngine()
    questions = [(problem, tuple(TOKENIZER(problem.prompt).input_ids)) for problem in PROBLEMS]
    scored = score_problems(
        engine, TOKENIZER, ChainArithmetic(2, 2), questions, num_samples=3, settings=SETTINGS, seed=seed
    )
    return engine, scored


def test_every_answer_is_graded_against_its_own_problem():
    _, scored = score()
    assert [(answer.problem_id, answer.sample) for answer in scored] == [
        (problem, sample) for problem in ("4+8=", "3+3=") for sample in range(3)
    ]
    assert [answer.reward for answer in scored] == [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    assert [answer.answer for answer in scored] == ["2", "7", None, "6", None, "6"]
    assert [answer.reason for answer in scored] == [
        "correct", "wrong answer", "unfinished", "correct", "no answer", "correct"
    ]  # fmt: skip


def test_text_length_and_ending_are_kept_for_inspection():
    _, scored = score()
    assert [answer.response for answer in scored] == ANSWERS
    assert [answer.num_tokens for answer in scored] == [9, 3, 2, 3, 2, 3]  # the end of sequence counts
    assert [answer.finished for answer in scored] == FINISHED


def test_each_answer_is_asked_for_with_a_seed_of_its_own_that_follows_from_one_seed():
    engine, _ = score(seed=4)
    assert engine.settings == SETTINGS
    assert [TOKENIZER.decode(request.prompt_ids, skip_special_tokens=True) for request in engine.requests] == [
        "4+8="
    ] * 3 + ["3+3="] * 3
    seeds = [request.seed for request in engine.requests]
    assert len(set(seeds)) == 6
    assert seeds == [request.seed for request in score(seed=4)[0].requests]
    assert not set(seeds) & {request.seed for request in score(seed=5)[0].requests}


def test_avg_at_k_is_the_mean_over_answers():
    _, scored = score()
    assert average_at_k(scored) == pytest.approx(0.5)


@pytest.mark.parametrize(("rewards", "expected"), [([1.0], 1.0), ([0.0, 0.0], 0.0), ([1.0, 0.0, 0.0, 0.0], 0.25)])
def test_avg_at_k_by_hand(rewards, expected):
    answers = [
        ScoredResponse(
            problem_id="p",
            prompt="?",
            gold="1",
            seed=0,
            sample=index,
            response="",
            answer=None,
            reason="",
            reward=reward,
            num_tokens=1,
            finished=True,
        )
        for index, reward in enumerate(rewards)
    ]
    assert average_at_k(answers) == expected


def test_each_problem_has_a_score_of_its_own_in_the_order_of_the_problems():
    assert problem_scores(score()[1]) == [pytest.approx(1 / 3), pytest.approx(2 / 3)]


def test_what_is_asked_beside_a_problem_and_in_which_order_does_not_change_its_seeds():
    def seeds(problems):
        engine = ScriptedEngine()
        questions = [(problem, (1, 2)) for problem in problems]
        with pytest.raises(FaultError, match="returned 6 responses"):  # it always gives six
            sample_answers(engine, TOKENIZER, questions, num_samples=4, settings=SETTINGS, seed=3)
        return {
            problem.id: [request.seed for request in engine.requests[4 * place : 4 * place + 4]]
            for place, problem in enumerate(problems)
        }

    both = seeds(PROBLEMS)
    assert seeds(PROBLEMS[::-1]) == both
    assert seeds(PROBLEMS[1:])[PROBLEMS[1].id] == both[PROBLEMS[1].id]


def test_answers_can_be_graded_again_by_another_rule():
    scored = score()[1]
    again = grade_answers(DatasetTask("verl"), scored)
    assert {answer.reason for answer in again} == {"no Answer: in the last 300 characters"}
    assert [(one.response, one.gold, one.seed) for one in again] == [
        (one.response, one.gold, one.seed) for one in scored
    ]
