"""One forward pass for mask and update where most is kept: the same step as with two, at fewer passes."""

import dataclasses
import math

import pytest
import torch

from tests.unit.test_module import fit, rollouts_of, small_config
from trm_repro import module as module_file
from trm_repro.batch import Rollout
from trm_repro.config import RunConfig
from trm_repro.module import TRMModule
from trm_repro.policy import Policy

NEVER, ALWAYS = math.inf, 0.0
CRITERIA = {
    "none": ("mask.criterion=none",),
    "trm_max": ("mask.criterion=trm_max", "mask.max_threshold=0.05"),
    "trm_avg": ("mask.criterion=trm_avg", "mask.avg_threshold=0.01"),
    "trm_max_avg": ("mask.criterion=trm_max_avg", "mask.max_threshold=0.05", "mask.avg_threshold=0.01"),
}
SETTINGS = {
    "dense": ("policy.architecture=dense",),
    "mixture of experts": (),
    "packed": ("policy.architecture=dense", "trainer.packing=true"),
    "micro-batches": ("policy.architecture=dense", "update.tokens_per_micro_batch=40"),
}


def mixed_rollouts(config: RunConfig) -> list[Rollout]:
    """Two sequences that every gate rejects, one without an advantage, one with log-probs that are no numbers."""
    rollouts = rollouts_of(config)
    for index in (1, 6):
        rollouts[index] = dataclasses.replace(
            rollouts[index],
            logprobs=rollouts[index].logprobs - 2.0,
            log_distribution=torch.log_softmax(2.0 * rollouts[index].log_distribution, dim=-1),
        )
    rollouts[2] = dataclasses.replace(rollouts[2], advantage=0.0)
    rollouts[5] = dataclasses.replace(rollouts[5], logprobs=torch.full_like(rollouts[5].logprobs, math.nan))
    return rollouts


def step(
    monkeypatch: pytest.MonkeyPatch, share: float, config: RunConfig, rollouts: list[Rollout]
) -> tuple[TRMModule, int]:
    """Train a step with one pass from this share on; returns the module and the passes through the policy."""
    monkeypatch.setattr(module_file, "ONE_PASS_SHARE", share)
    passes = []
    with monkeypatch.context() as patch:
        forward = Policy.forward
        patch.setattr(Policy, "forward", lambda *args, **options: passes.append(1) or forward(*args, **options))
        module, _ = fit(config, rollouts)
    return module, len(passes)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("criterion", CRITERIA)
def test_one_pass_makes_the_step_of_two(monkeypatch: pytest.MonkeyPatch, criterion: str, setting: str):
    config = small_config("token_is", *CRITERIA[criterion], *SETTINGS[setting])
    rollouts = mixed_rollouts(config)
    (one, num_one), (two, num_two) = (step(monkeypatch, share, config, rollouts) for share in (ALWAYS, NEVER))
    assert num_one < num_two
    for ours, wanted in zip(one.records, two.records, strict=True):
        assert torch.equal(ours.sequence_mask, wanted.sequence_mask)
        assert ours.loss == pytest.approx(wanted.loss, rel=1e-5)
        assert ours.gradient_norm == pytest.approx(wanted.gradient_norm, rel=1e-4)
        for name in ("policy_logprobs", "log_ratio", "entropy", "kl"):
            found, expected = (getattr(record.measurement, name) for record in (ours, wanted))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, equal_nan=True)
    kept = torch.cat([record.sequence_mask for record in one.records])
    assert 0 < int(kept.sum()) < len(kept)
    for weight, wanted in zip(one.policy.parameters(), two.policy.parameters(), strict=True):
        torch.testing.assert_close(weight, wanted, atol=1e-6, rtol=1e-5)


def test_without_a_mask_a_minibatch_takes_one_pass(monkeypatch: pytest.MonkeyPatch):
    config = small_config("token_is")
    _, num_passes = step(monkeypatch, module_file.ONE_PASS_SHARE, config, rollouts_of(config))
    assert num_passes == config.update.num_updates_per_rollout


def test_under_a_mask_what_the_last_update_kept_decides(monkeypatch: pytest.MonkeyPatch):
    config = small_config("trm_avg_0.001", "update.learning_rate=1e-6")
    kept, rejected = rollouts_of(config), rollouts_of(config, shift=-1.0)
    assert step(monkeypatch, module_file.ONE_PASS_SHARE, config, kept)[1] == 2 + 1
    assert step(monkeypatch, module_file.ONE_PASS_SHARE, config, rejected)[1] == 1 + 1  # nothing to learn from


@pytest.mark.parametrize(("num_without", "expected"), [(2, 1), (3, 2)])  # of eight, 6 / 8 and 5 / 8 have an advantage
def test_sequences_without_an_advantage_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, num_without: int, expected: int
):
    config = small_config("token_is", "update.num_updates_per_rollout=1")
    rollouts = rollouts_of(config)
    rollouts[:num_without] = [dataclasses.replace(rollout, advantage=0.0) for rollout in rollouts[:num_without]]
    assert step(monkeypatch, module_file.ONE_PASS_SHARE, config, rollouts)[1] == expected


@pytest.mark.parametrize(
    "settings",
    [
        ("mask.criterion=m2po",),
        ("mask.criterion=icepop",),
        ("loss.denominator=kept",),
        ("loss.baseline=kept",),
    ],
)
def test_what_has_to_see_the_whole_minibatch_takes_two_passes(monkeypatch: pytest.MonkeyPatch, settings):
    config = small_config("token_is", *settings)
    _, num_passes = step(monkeypatch, ALWAYS + 1e-9, config, rollouts_of(config))
    assert num_passes >= 2 * config.update.num_updates_per_rollout


def test_where_nothing_contributes_the_step_is_skipped(monkeypatch: pytest.MonkeyPatch):
    config = small_config("trm_avg_0.001")
    module, _ = step(monkeypatch, ALWAYS, config, rollouts_of(config, shift=-1.0))
    assert [record.is_skipped for record in module.records] == [True, True]
    assert [record.loss for record in module.records] == [0.0, 0.0]
