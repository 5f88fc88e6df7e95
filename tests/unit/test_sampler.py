import math
import re
from dataclasses import replace

import pytest
import torch

from tests.unit.builders import TOKENIZER, make_rollout
from trm_repro.config import EvaluationConfig, RolloutConfig, RunConfig, TaskConfig, UpdateConfig
from trm_repro.errors import FaultError, InputError
from trm_repro.rollout import Completion
from trm_repro.rollout.sampler import (
    RolloutSampler,
    chain_probe_contexts,
    encode_prompt,
    held_out_problems,
    with_advantages,
)
from trm_repro.tasks.chain_arithmetic import make_problem
from trm_repro.tasks.problems import Grade

EOS = TOKENIZER.eos_token_id


def config_for(**changes):
    values = {
        "task": TaskConfig(min_operands=2, max_operands=3),
        "rollout": RolloutConfig(
            num_prompts=3, group_size=4, max_response_tokens=20, probe_contexts=10, distribution="sampled"
        ),
        "update": UpdateConfig(num_updates_per_rollout=2),
        "evaluation": EvaluationConfig(num_problems=60, num_sampled_problems=8, num_final_problems=0),
    }
    return RunConfig(**(values | changes))


class ScriptedEngine:
    """Writes out the right solution to every second request, a wrong one to the others, and remembers the requests."""

    vocab_size = len(TOKENIZER)
    stop_ids = ()  # it goes on after an ending token, so that the cut-off response has tokens

    def __init__(self, *, num_lost=0):
        self.num_lost = num_lost
        self.requests, self.settings = [], None

    def sample(self, requests, settings):
        self.requests += requests
        self.settings = settings
        completions = []
        for index, request in enumerate(requests):
            prompt = TOKENIZER.decode(request.prompt_ids, skip_special_tokens=True)
            problem = make_problem([int(operand) for operand in prompt.removesuffix("=").split("+")])
            text = problem.solution if index % 2 == 0 else f"#{(int(problem.answer) + 1) % 10}"
            tokens = (*TOKENIZER(text, add_special_tokens=False).input_ids, EOS)
            if index == 4:  # the first response of the second group was cut off
                tokens = (tokens * 20)[-settings.max_tokens :]
            completions.append(
                Completion(
                    token_ids=tokens,
                    logprobs=torch.full((len(tokens),), -0.25 * (index + 1)),
                    log_distribution=None,
                    experts=torch.full((len(tokens), 1, 1), index, dtype=torch.uint8),
                    finished=index != 4,
                )
            )
        return completions[: len(completions) - self.num_lost]


def sampler_for(config, engine=None):
    return RolloutSampler(config, engine or ScriptedEngine(), TOKENIZER)


def test_a_step_is_graded_and_compared_group_by_group():
    rollouts = sampler_for(config_for()).sample_step(5, weight_version=3)
    assert [rollout.group for rollout in rollouts] == [0] * 4 + [1] * 4 + [2] * 4
    assert [rollout.reward for rollout in rollouts] == [1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 1, 0]
    half = 0.5 / (0.5 + 1e-4)  # two of four right
    deviation = math.sqrt(0.25 * 0.75) + 1e-4  # one of four right
    expected = [half, -half] * 2 + [-0.25 / deviation] * 2 + [0.75 / deviation, -0.25 / deviation] + [half, -half] * 2
    assert [rollout.advantage for rollout in rollouts] == pytest.approx(expected, rel=1e-5)
    assert {rollout.weight_version for rollout in rollouts} == {3}


def test_what_the_engine_returned_is_kept_beside_the_request():
    engine = ScriptedEngine()
    rollouts = sampler_for(config_for(), engine).sample_step(0, weight_version=0)
    for index, (request, rollout) in enumerate(zip(engine.requests, rollouts, strict=True)):
        assert rollout.prompt_ids == request.prompt_ids
        assert rollout.response_ids[-1] == EOS
        assert rollout.logprobs.tolist() == [-0.25 * (index + 1)] * len(rollout.response_ids)
        assert rollout.experts.flatten().tolist() == [index] * len(rollout.response_ids)
        assert rollout.finished == (index != 4)
    assert len({rollout.prompt_ids for rollout in rollouts[:4]}) == 1


def test_sampling_follows_the_configuration():
    engine = ScriptedEngine()
    config = config_for()
    config = replace(config, rollout=replace(config.rollout, temperature=0.7, distribution="sampled"))
    sampler_for(config, engine).sample_step(0, weight_version=0)
    settings = engine.settings
    assert (settings.max_tokens, settings.temperature, settings.top_p, settings.distribution) == (
        20,
        0.7,
        1.0,
        "sampled",
    )


@pytest.mark.parametrize("reward", [1.5, -0.1, math.nan])
def test_a_reward_outside_its_range_is_a_fault_that_names_the_problem(reward):
    sampler = sampler_for(config_for())
    sampler.task.grade = lambda problem, response: Grade(reward=reward, answer=None, reason="wrong")
    name = sampler.problems(0)[0].id
    with pytest.raises(FaultError, match=rf"the reward of problem {re.escape(name)} is {reward}, not in \[0, 1\]"):
        sampler.sample_step(0, weight_version=0)


def test_no_two_requests_share_a_seed_within_or_across_steps():
    engine = ScriptedEngine()
    sampler = sampler_for(config_for(), engine)
    for step in range(5):
        sampler.sample_step(step, weight_version=0)
    assert len({request.seed for request in engine.requests}) == len(engine.requests) == 60


def test_the_same_step_gives_the_same_requests_and_another_step_or_run_others():
    def requests(seed, step):
        engine = ScriptedEngine()
        sampler_for(config_for(seed=seed), engine).sample_step(step, weight_version=0)
        return engine.requests

    assert requests(1, 2) == requests(1, 2)
    assert [r.prompt_ids for r in requests(1, 2)] != [r.prompt_ids for r in requests(1, 3)]
    assert [r.prompt_ids for r in requests(1, 2)] != [r.prompt_ids for r in requests(2, 2)]


def test_held_out_problems_are_different_ones_and_never_trained_on():
    config = config_for(task=TaskConfig(min_operands=2, max_operands=2))
    sampler = sampler_for(config)
    held_out = {problem.id for problem in sampler.held_out}
    assert len(held_out) == len(sampler.held_out) == 60  # of the 100 there are
    trained = {problem.id for step in range(200) for problem in sampler.problems(step)}
    assert len(trained) == 40  # every problem that is not held out, and none that is
    assert not trained & held_out


def test_held_out_problems_are_enough_for_both_evaluations_and_belong_to_the_seed():
    few = config_for(evaluation=EvaluationConfig(num_problems=5, num_sampled_problems=9, num_final_problems=7))
    assert len(held_out_problems(few)) == 9
    more = config_for(evaluation=replace(few.evaluation, num_final_problems=12))
    assert held_out_problems(more)[:9] == held_out_problems(few)
    assert held_out_problems(few) == held_out_problems(few)
    assert held_out_problems(few) != held_out_problems(replace(few, seed=7))


def test_more_held_out_problems_than_there_are_is_refused():
    config = config_for(
        task=TaskConfig(min_operands=2, max_operands=2),
        evaluation=EvaluationConfig(num_problems=101, num_final_problems=0),
    )
    with pytest.raises(InputError, match="not 101 different problems of 2 to 2 operands"):
        held_out_problems(config)


@pytest.mark.timeout(5)
def test_holding_out_every_problem_there_is_is_refused_and_does_not_hang():
    config = config_for(
        task=TaskConfig(min_operands=2, max_operands=2),
        evaluation=EvaluationConfig(num_problems=100, num_final_problems=0),
    )
    with pytest.raises(InputError):
        sampler_for(config).problems(0)


def test_a_lost_response_stops_the_run():
    with pytest.raises(FaultError, match="returned 11 responses to 12 requests"):
        sampler_for(config_for(), ScriptedEngine(num_lost=1)).sample_step(0, weight_version=0)


def test_a_prompt_may_be_as_long_as_the_limit_and_no_longer():
    assert encode_prompt("4+8=", TOKENIZER, 5) == (1, 8, 14, 12, 15)
    with pytest.raises(InputError, match=r"a prompt of 5 tokens.*4\+8=.*expected 1 to 4, set by rollout\.max_prompt"):
        encode_prompt("4+8=", TOKENIZER, 4)


def test_prompts_of_a_step_that_are_too_long_are_refused():
    config = config_for()
    config = replace(config, rollout=replace(config.rollout, max_prompt_tokens=4))
    with pytest.raises(InputError, match=r"rollout\.max_prompt_tokens"):
        sampler_for(config).sample_step(0, weight_version=0)


def test_advantages_change_nothing_else():
    rollouts = [make_rollout(2, group=group, reward=reward) for group, reward in ((0, 1.0), (1, 1.0), (0, 0.0))]
    result = with_advantages(rollouts, 0.5)
    assert [rollout.advantage for rollout in result] == pytest.approx([0.5, 0.0, -0.5])
    for before, after in zip(rollouts, result, strict=True):
        assert replace(after, advantage=0.0) == before


def test_probe_contexts_are_beginnings_of_solved_problems_and_the_same_for_every_seed():
    contexts = chain_probe_contexts(config_for(), TOKENIZER)
    assert contexts == chain_probe_contexts(config_for(seed=9), TOKENIZER)
    assert len(contexts) == 10
    for context in contexts:
        text = TOKENIZER.decode(context, skip_special_tokens=True)
        prompt, equals, _ = text.partition("=")
        if equals:
            problem = make_problem([int(operand) for operand in prompt.split("+")])
            assert f"{problem.prompt}{problem.solution}".startswith(text)


@pytest.mark.timeout(5)
def test_far_more_held_out_problems_than_there_are_is_refused_at_once():
    config = config_for(evaluation=EvaluationConfig(num_problems=1_000_000))
    with pytest.raises(
        InputError, match="not 1000000 different problems of 2 to 3 operands, only 1100; lower evaluation"
    ):
        held_out_problems(config)
