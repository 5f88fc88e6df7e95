import json
import math
from dataclasses import replace

import pytest
import torch

from tests.unit.builders import TOKENIZER, tiny_config, tiny_policy
from trm_repro.config import (
    OutputConfig,
    PolicyConfig,
    RunConfig,
    TaskConfig,
    UpdateConfig,
    WarmStartConfig,
    derive_seed,
)
from trm_repro.errors import FaultError
from trm_repro.policy import build_policy, load_tokenizer
from trm_repro.tasks.chain_arithmetic import make_problem
from trm_repro.warm_start import (
    LEARNING_RATE_WARMUP_STEPS,
    ensure_warm_start,
    exact_solution_rate,
    learning_rate_factor,
    solution_batch,
    train_warm_start,
    warm_start_path,
)

TARGET = 0.05
CONFIG = RunConfig(
    seed=3,
    task=TaskConfig(min_operands=2, max_operands=2),
    policy=replace(tiny_config(), initializer_range=0.05),
    warm_start=WarmStartConfig(
        target_pass_rate=TARGET,
        min_operands=2,
        max_operands=2,
        tokens_per_step=400,
        num_problems=32,
        learning_rate=1e-2,
        cosine_steps=300,
        max_steps=300,
    ),
)
PROBLEMS = [make_problem(operands) for operands in ([4, 8], [1, 2, 3], [9, 9, 9, 9])]


@torch.no_grad()
def chance_of(policy, problem):
    """Multiply the probabilities of a solution's tokens, one forward pass of the model each."""
    tokens = TOKENIZER(problem.prompt).input_ids
    chance = 1.0
    for token in [*TOKENIZER(problem.solution, add_special_tokens=False).input_ids, TOKENIZER.eos_token_id]:
        logits = policy.model(input_ids=torch.tensor([tokens])).logits[0, -1]
        chance *= torch.softmax(logits.double(), dim=-1)[token].item()
        tokens = [*tokens, token]
    return chance


@pytest.fixture(scope="module")
def trained():
    readings = []
    policy, tokenizer, result = train_warm_start(CONFIG, lambda step, rate: readings.append((step, rate)))
    return policy, tokenizer, result, readings


def test_solutions_become_responses_that_end_with_the_end_of_sequence():
    batch = solution_batch(PROBLEMS[:2], TOKENIZER)
    first = [*TOKENIZER("4+8=").input_ids, *TOKENIZER("4+8=2;#2", add_special_tokens=False).input_ids, 2]
    assert batch.input_ids[0, : len(first)].tolist() == first
    assert batch.prompt_lengths.tolist() == [5, 7]
    assert batch.response_lengths.tolist() == [9, 15]
    assert TOKENIZER.decode(batch.response_ids[1, :14].tolist()) == "1+2=3;3+3=6;#6"
    assert batch.response_ids[1, 14].item() == TOKENIZER.eos_token_id


def test_the_rate_of_exact_solutions_is_the_mean_product_of_token_probabilities():
    policy = tiny_policy(seed=2)
    expected = sum(chance_of(policy, problem) for problem in PROBLEMS) / 3
    assert expected > 0.0
    for tokens in (1, 1000):
        rate = exact_solution_rate(policy, solution_batch(PROBLEMS, TOKENIZER), tokens)
        assert rate == pytest.approx(expected, rel=1e-3)


def test_training_stops_at_the_first_measurement_that_reaches_the_target(trained):
    _, _, result, readings = trained
    assert [step for step, _ in readings] == list(range(10, result.num_steps + 1, 10))
    assert all(rate < TARGET for _, rate in readings[:-1])
    assert result.pass_rate == readings[-1][1] >= TARGET
    assert len(readings) > 1


def test_the_trained_policy_has_the_pass_rate_that_is_reported(trained):
    policy, _, result, _ = trained
    problems = [make_problem([a, (3 * a + b) % 10]) for a in range(10) for b in range(3)]
    rate = sum(chance_of(policy, problem) for problem in problems) / 30
    assert result.pass_rate == pytest.approx(rate, rel=0.5)  # reported on another sample of the 100 there are
    untrained = build_policy(CONFIG.policy, TOKENIZER, derive_seed(CONFIG.seed, "initial weights"))
    assert rate > 1000 * max(chance_of(untrained, problem) for problem in problems[:3])


def test_the_same_configuration_gives_the_same_policy_to_the_bit(trained):
    policy, _, result, _ = trained
    again, _, again_result = train_warm_start(CONFIG)
    assert (again_result.num_steps, again_result.pass_rate) == (result.num_steps, result.pass_rate)
    for left, right in zip(policy.parameters(), again.parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_target_out_of_reach_is_a_fault_that_says_what_to_change():
    config = replace(CONFIG, warm_start=replace(CONFIG.warm_start, target_pass_rate=1.0, max_steps=10))
    with pytest.raises(FaultError, match=r"in 10 steps, not 1; raise warm_start\.max_steps, lower warm_start\.target"):
        train_warm_start(config)


def test_a_warm_start_is_trained_once_and_found_again(tmp_path, trained):
    config = replace(CONFIG, output=OutputConfig(warm_start_dir=str(tmp_path)))
    path = ensure_warm_start(config)
    assert path.parent == tmp_path
    report = json.loads((path / "warm_start.json").read_text())
    assert (report["num_steps"], report["pass_rate"]) == (trained[2].num_steps, trained[2].pass_rate)

    def fail(step, rate):
        raise AssertionError("trained again")

    assert ensure_warm_start(config, fail) == path
    assert [folder.name for folder in tmp_path.iterdir() if folder.suffix != ".lock"] == [path.name]
    tokenizer = load_tokenizer(path)
    saved = build_policy(PolicyConfig(path=str(path)), tokenizer, seed=0)
    for left, right in zip(saved.parameters(), trained[0].parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_half_written_warm_start_is_trained_again(tmp_path):
    config = replace(CONFIG, output=OutputConfig(warm_start_dir=str(tmp_path)))
    path = warm_start_path(config)
    path.mkdir()
    (path / "config.json").write_text("{}")
    assert ensure_warm_start(config) == path
    assert (path / "warm_start.json").is_file()
    assert json.loads((path / "config.json").read_text())["hidden_size"] == 32


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"arm": "ppo_clip", "num_steps": 7, "update": UpdateConfig(learning_rate=0.1)}, True),
        ({"seed": 4}, False),
        ({"num_threads": 2}, False),
        ({"task": TaskConfig(min_operands=2, max_operands=3)}, False),
        ({"policy": replace(CONFIG.policy, hidden_size=64)}, False),
        ({"warm_start": replace(CONFIG.warm_start, target_pass_rate=0.06)}, False),
    ],
)
def test_a_warm_start_is_shared_by_the_runs_it_does_not_depend_on(changes, is_same):
    assert (warm_start_path(replace(CONFIG, **changes)) == warm_start_path(CONFIG)) == is_same


def test_the_learning_rate_grows_linearly_then_falls_by_a_cosine_to_a_tenth():
    assert LEARNING_RATE_WARMUP_STEPS == 50
    assert learning_rate_factor(0, 1000) == pytest.approx(1 / 50)
    quarter = 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2
    assert learning_rate_factor(250, 1000) == pytest.approx(quarter)
    assert learning_rate_factor(24, 10**9) == pytest.approx(0.5)
    assert learning_rate_factor(500, 1000) == pytest.approx(0.55)
    for step in (1000, 1001, 10**6):
        assert learning_rate_factor(step, 1000) == pytest.approx(0.1)
