"""The loss with the normalizers that the mask pass found is the loss without them."""

from dataclasses import replace

import pytest
import torch

from tests.unit.builders import make_batch, near_policy, tiny_policy
from trm_repro.config_sections import LossConfig
from trm_repro.errors import FaultError
from trm_repro.losses import OBJECTIVES
from trm_repro.measurement import measure
from trm_repro.steps import surrogate_loss

SETTINGS = {"temperature": 0.8}


def scene():
    policy = tiny_policy(tie_word_embeddings=False)
    batch = near_policy(make_batch([(3, 4), (2, 7), (4, 1)]), policy, torch.tensor([0.05, 0.1, 0.1]), **SETTINGS)
    return policy, batch


def loss_and_gradients(batch, config):
    policy = tiny_policy(tie_word_embeddings=False)
    loss = surrogate_loss(policy, batch, config, denominator=5.0, **SETTINGS)
    loss.backward()
    return loss.detach(), [weight.grad for weight in policy.parameters()]


@pytest.mark.parametrize("is_weighed", [False, True])
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_loss_and_gradients_of_every_objective_are_the_same_with_the_measured_normalizers(name, is_weighed):
    policy, batch = scene()
    if is_weighed:
        batch = replace(batch, token_weights=torch.rand(batch.response_mask.shape, generator=torch.Generator()))
    measurement = measure(policy, batch, tokens_per_micro_batch=20, **SETTINGS)
    measured = replace(batch, policy_normalizers=measurement.normalizers).select(torch.tensor([True, True, False]))
    config = LossConfig(name=name, length_normalizer=10.0)
    loss, gradients = loss_and_gradients(measured, config)
    expected, expected_gradients = loss_and_gradients(replace(measured, policy_normalizers=None), config)
    torch.testing.assert_close(loss, expected)
    assert float(expected_gradients[-1].abs().max()) > 0
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=1e-4)


def test_normalizers_of_other_weights_stop_the_update_instead_of_spoiling_it():
    policy, batch = scene()
    with torch.no_grad():
        policy.model.lm_head.weight.mul_(1.5)
    normalizers = measure(policy, batch, tokens_per_micro_batch=20, **SETTINGS).normalizers
    with pytest.raises(FaultError, match=r"add up to .*, not 1: .* other weights"):
        loss_and_gradients(replace(batch, policy_normalizers=normalizers), LossConfig())


def test_in_half_precision_the_normalizers_of_another_pass_are_not_used():
    policy, batch = scene()
    policy.to(torch.bfloat16)
    wrong = torch.full_like(batch.rollout_logprobs, 100.0)
    logprobs = [
        policy(replace(batch, policy_normalizers=normalizers), **SETTINGS).logprobs for normalizers in (wrong, None)
    ]
    assert torch.equal(*logprobs)
