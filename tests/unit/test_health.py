"""Conditions under which a run stops, and responses that an engine must not return."""

import dataclasses
from pathlib import Path

import pytest
import torch

from trm_repro.config_sections import HealthConfig
from trm_repro.errors import FaultError
from trm_repro.health import ENTROPY, KEPT, MIXED, NONFINITE, health_problem
from trm_repro.rollout.completion_checks import check_completions
from trm_repro.rollout.engine import Completion, SamplingRequest, SamplingSettings

FAULTS = Path("runs/ppo_clip/seed_1/faults")
FINE = {KEPT: 0.8, ENTROPY: 1.0, MIXED: 0.5, NONFINITE: 0.0}


@pytest.mark.parametrize(
    ("config", "bad", "wanted"),
    [
        (HealthConfig(patience=3, acceptance_floor=0.1), {KEPT: 0.09}, "less than 0.1 of the sequences was kept"),
        (HealthConfig(patience=3, entropy_floor=0.05), {ENTROPY: 0.04}, "entropy was below 0.05 nats"),
        (HealthConfig(patience=3, stop_without_variance=True), {MIXED: 0.0}, "no group had differing rewards"),
        (
            HealthConfig(patience=9, max_nonfinite_steps=3),
            {NONFINITE: 1.0},
            f"last 3 steps; the batches are in {FAULTS}",
        ),
    ],
)
def test_a_run_stops_only_when_a_condition_held_for_all_the_last_steps(config, bad: dict[str, float], wanted: str):
    sick = FINE | bad
    assert health_problem([FINE, sick, sick], config, FAULTS) is None
    assert health_problem([sick, sick, FINE], config, FAULTS) is None
    assert health_problem([sick, FINE, sick, sick], config, FAULTS) is None
    assert wanted in (health_problem([FINE, sick, sick, sick], config, FAULTS) or "")
    assert health_problem([sick] * 2, config, FAULTS) is None


def test_by_default_only_what_is_not_finite_stops_a_run():
    dead = {KEPT: 0.0, ENTROPY: 0.0, MIXED: 0.0, NONFINITE: 0.0}
    assert health_problem([dead] * 500, HealthConfig(), FAULTS) is None
    assert health_problem([dead | {NONFINITE: 2.0}] * 3, HealthConfig(), FAULTS) is not None


REQUESTS = [SamplingRequest(prompt_ids=(1,), seed=0)]
SETTINGS = SamplingSettings(max_tokens=3, temperature=1.0, distribution="full")
DISTRIBUTION = torch.log_softmax(torch.randn(3, 7, generator=torch.Generator().manual_seed(0)), dim=-1)
GOOD = Completion(
    token_ids=(2, 0, 6),
    logprobs=DISTRIBUTION[torch.arange(3), torch.tensor([2, 0, 6])],
    finished=True,
    log_distribution=DISTRIBUTION,
)


def test_a_response_as_asked_for_passes():
    check_completions([GOOD], REQUESTS, SETTINGS, 7)
    check_completions([dataclasses.replace(GOOD, finished=False)], REQUESTS, SETTINGS, 7)


def test_log_probs_that_are_not_finite_are_left_to_the_mask():
    holed = GOOD.logprobs.clone()
    holed[1] = float("nan")
    check_completions([dataclasses.replace(GOOD, logprobs=holed)], REQUESTS, SETTINGS, 7)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"token_ids": ()}, "has 0 tokens, 1 to 3"),
        ({"token_ids": (2, 0, 6, 1)}, "has 4 tokens, 1 to 3"),
        ({"token_ids": (2, 0), "finished": False}, "was cut off at 2 of 3"),
        ({"token_ids": (2, 0, 7)}, "has token 7, the policy's vocabulary has 7"),
        ({"token_ids": (2, 0, -1)}, "has token -1"),
        ({"token_ids": (2, 0)}, "has 3 log-probs for 2 tokens"),
        ({"token_ids": (3, 0, 6)}, "not those of its own distribution"),
        ({"log_distribution": DISTRIBUTION[:2]}, "has 2 log-distributions for 3 tokens"),
        ({"log_distribution": None}, "has no log-distributions"),
        ({"logprobs": torch.tensor([-1.0, 0.5, -1.0])}, "has a log-prob of 0.5, above 0"),
    ],
)
def test_other_than_what_was_asked_for_stops_the_run(changes: dict[str, object], wanted: str):
    with pytest.raises(FaultError, match="cannot be trusted") as stopped:
        check_completions([dataclasses.replace(GOOD, **changes)], REQUESTS, SETTINGS, 7)
    assert wanted in str(stopped.value)


def test_a_missing_response_stops_the_run():
    with pytest.raises(FaultError, match="returned 0 responses to 1 requests"):
        check_completions([], REQUESTS, SETTINGS, 7)
