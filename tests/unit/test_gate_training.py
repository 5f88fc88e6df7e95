"""Every gate as a training arm: the gradient of one update against Algorithm 1 written out, and short real runs."""

from dataclasses import replace

import pytest
import torch

from tests.unit.builders import make_batch, near_policy, tiny_policy
from trm_repro.config import load_config
from trm_repro.config_sections import LossConfig, MaskConfig
from trm_repro.errors import InputError
from trm_repro.gate_specs import GATE_SPECS
from trm_repro.losses import OBJECTIVES, ClipRange
from trm_repro.masks import gate_mask
from trm_repro.measurement import measure
from trm_repro.steps import CRITERIA, gate, surrogate_loss, token_statistics, weigh_tokens

CONTROLS = {"random", "length_matched"}
LENGTHS = [(2, 3), (4, 5), (1, 2), (3, 6)]  # (prompt, response)
TEMPERATURE = 0.9
STRICT = {  # thresholds at which the batch below is neither kept nor rejected whole
    "trm_max": {"max_threshold": 0.3},
    "trm_avg": {"avg_threshold": 0.02},
    "trm_max_avg": {"max_threshold": 0.3, "avg_threshold": 0.02},
    "ln_trm": {"ln_trm_threshold": 0.3},
    "ser": {"ser_threshold": 0.3},
    "geometric": {"thresholds": {"low": 0.9, "high": 1.1}},
    "opsm": {"thresholds": {"threshold": 0.0}},
    "token_tis": {"thresholds": {"cap": 1.1}},
    "icepop": {"thresholds": {"low": 0.8, "high": 1.3}},
    "ipo": {"thresholds": {"threshold": 0.02}},
    "dppo_binary_tv": {"thresholds": {"low": 0.01, "high": 0.01}},
    "dppo_binary_kl": {"thresholds": {"low": 0.001, "high": 0.001}},
    "dppo_top_k_tv": {"thresholds": {"threshold": 0.05}},
    "dppo_top_k_kl": {"thresholds": {"threshold": 0.01}},
    "cppo": {"thresholds": {"threshold": 0.02, "budget": 0.002}},
}


@pytest.fixture(scope="module")
def scene():
    """A policy and four sequences, two of them far from it."""
    policy = tiny_policy()
    noise = torch.tensor([0.05, 0.9, 0.05, 0.6])
    return policy, near_policy(make_batch(LENGTHS), policy, noise, temperature=TEMPERATURE)


def gradient(policy):
    found = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    policy.zero_grad()
    return found


@pytest.mark.parametrize("name", sorted(set(GATE_SPECS) - CONTROLS))
def test_an_update_under_a_gate_has_the_gradient_of_weight_times_ratio_times_advantage(scene, name):
    policy, batch = scene
    if name in ("gspo", "opsm"):  # so that some sequences have moved the way their advantage pushes them
        batch = replace(batch, advantages=batch.advantages.abs() * (1 if name == "gspo" else -1))
    config = MaskConfig(criterion=name, **STRICT.get(name, {}))
    measurement = measure(policy, batch, temperature=TEMPERATURE, tokens_per_micro_batch=1000)
    keep = gate(measurement, batch.response_mask, config, batch=batch)
    weighed = weigh_tokens(batch, measurement, config)
    assert bool(keep.any())
    loss = surrogate_loss(
        policy, weighed.select(keep), LossConfig(length_normalizer=1.0), temperature=TEMPERATURE, denominator=4.0
    )
    loss.backward()
    ours = gradient(policy)
    # -1/4 sum_i A_i sum_t weight_t rho_t log pi_theta with the ratio held fixed: the gradient of Algorithm 1
    weights = (keep[:, None] & batch.response_mask).float() if weighed.token_weights is None else weighed.token_weights
    logprobs = batch.dense(policy(batch, temperature=TEMPERATURE).logprobs)
    factors = weights * measurement.log_ratio.exp() * batch.advantages[:, None]
    (-(factors * logprobs).sum() / 4).backward()
    assert torch.allclose(ours, gradient(policy), atol=1e-5)
    if name not in ("none", "m2po", "minpro"):
        rejects_some = (
            not bool(keep.all()) if weighed.token_weights is None else weighed.token_weights.unique().numel() > 1
        )
        assert rejects_some, "the thresholds above must bite"


@pytest.mark.parametrize("name", ["token_tis", "cispo"])
def test_a_capping_loss_has_the_gradient_of_the_gate_of_the_same_name(scene, name):
    policy, batch = scene
    clip = {"clip_low": 0.1, "clip_high": 0.1}
    thresholds = {"cap": 1.1} if name == "token_tis" else {"low": 0.1, "high": 0.1}
    measurement = measure(policy, batch, temperature=TEMPERATURE, tokens_per_micro_batch=1000)
    arguments = {"temperature": TEMPERATURE, "denominator": 4.0}
    surrogate_loss(policy, batch, LossConfig(name=name, **clip), **arguments).backward()
    as_loss = gradient(policy)
    weighed = weigh_tokens(batch, measurement, MaskConfig(criterion=name, thresholds=thresholds))
    surrogate_loss(policy, weighed, LossConfig(), **arguments).backward()
    assert torch.allclose(as_loss, gradient(policy), atol=1e-7)
    surrogate_loss(policy, batch, LossConfig(), **arguments).backward()
    assert not torch.allclose(as_loss, gradient(policy), atol=1e-5)


def test_a_micro_batch_takes_its_sequences_token_weights_with_it(scene):
    _, batch = scene
    weights = torch.arange(batch.response_mask.numel()).reshape(batch.response_mask.shape).float()
    parts = list(replace(batch, token_weights=weights).split(8))
    assert len(parts) > 1
    rows = torch.cat([part.token_weights[part.response_mask] for part in parts])
    assert rows.tolist() == weights[batch.response_mask].tolist()


ARMS = ["opsm_0.5", "icepop", "minpro", "m2po_0.04", "gspo", "cispo", "token_tis"]


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_of_each_kind_trains_for_real(arm):
    from tests.unit.test_module import (
        fit,
        moved,
        rollouts_of,
        small_config,
    )  # Lightning, which no other test here needs

    config = small_config(arm)
    module, before = fit(config, rollouts_of(config, shift=0.05))
    assert moved(module, before)
    for record in module.records:
        is_dense = GATE_SPECS[config.mask.criterion].level == "token"
        assert (record.batch.token_weights is not None) == is_dense


def test_the_mask_of_training_is_that_of_the_registry(scene):
    policy, batch = scene
    measurement = measure(policy, batch, temperature=TEMPERATURE, tokens_per_micro_batch=1000)
    config = MaskConfig(criterion="opsm", thresholds={"threshold": 0.0})
    expected = gate_mask("opsm", token_statistics(measurement, batch.response_mask, batch), threshold=0.0)
    assert gate(measurement, batch.response_mask, config, batch=batch).tolist() == expected.tolist()


def test_every_gate_is_a_criterion_and_every_loss_an_objective_of_the_same_signature():
    assert set(CRITERIA) == set(GATE_SPECS)
    shape = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.ones(2)
    assert {objective(*shape, ClipRange()).shape for objective in OBJECTIVES.values()} == {(2, 3)}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["mask.criterion=trm_mx"], "mask.criterion: no gate 'trm_mx'; did you mean 'trm_max'?"),
        (["mask.criterion=icepop", "mask.thresholds.hihg=3"], "no threshold 'hihg'; did you mean 'high'?"),
        (["mask.criterion=ser", "mask.thresholds.ser_threshold=0.1"], "must be given as mask.ser_threshold"),
        (["mask.criterion=icepop", "mask.timing=once"], "mask.timing must be each_update for a gate of tokens"),
        (
            ["mask.criterion=dppo_top_k_tv", "rollout.distribution=sampled"],
            "rollout.distribution must be one that carri",
        ),
        (["mask.criterion=cispo", "loss.name=ppo_clip"], "loss.name must be token_is for mask.criterion cispo"),
        (["mask.criterion=icepop", "mask.thresholds.high=wide"], "mask.thresholds"),
    ],
)
def test_a_gate_that_cannot_be_configured_so_is_refused_in_one_line(overrides, said):
    with pytest.raises(InputError) as error:
        load_config(overrides=overrides)
    assert said in str(error.value)


def test_thresholds_come_from_their_own_keys_then_the_mapping_then_the_registry():
    mask = load_config(overrides=["mask.criterion=icepop", "mask.thresholds.high=3", "mask.ser_threshold=0.07"]).mask
    assert mask.gate_thresholds == {"low": 0.5, "high": 3.0}
    assert MaskConfig(criterion="ser", ser_threshold=0.07).gate_thresholds == {"ser_threshold": 0.07}
