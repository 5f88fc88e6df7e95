"""The loss whose gradients are formed token by token is the loss on whole sequences."""

from dataclasses import replace

import pytest
import torch

from tests.unit.builders import make_batch, near_policy, tiny_policy
from trm_repro.config_sections import LossConfig
from trm_repro.divergence import log_ratio
from trm_repro.losses import OBJECTIVES, OF_SEQUENCES, reduce_objective
from trm_repro.steps import clip_range, surrogate_loss


def on_whole_sequences(policy, batch, config, *, temperature, denominator):
    ratio = log_ratio(batch.dense(policy(batch, temperature=temperature).logprobs), batch.rollout_logprobs)
    objective = OBJECTIVES[config.name](ratio, batch.response_mask, batch.advantages, clip_range(config))
    if batch.token_weights is not None:
        objective = objective * batch.token_weights
    return reduce_objective(
        objective, batch.response_mask, denominator=denominator, length_normalizer=config.length_normalizer
    )


@pytest.mark.parametrize("is_weighed", [False, True])
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_loss_and_gradients_of_every_objective_are_those_on_whole_sequences(name, is_weighed):
    start = tiny_policy(tie_word_embeddings=False)
    batch = near_policy(make_batch([(3, 4), (2, 7), (4, 1)]), start, torch.tensor([0.05, 0.1, 0.1]), temperature=0.8)
    if is_weighed:
        batch = replace(batch, token_weights=torch.rand(batch.response_mask.shape, generator=torch.Generator()))
    config = LossConfig(name=name, length_normalizer=10.0)
    results = []
    for function in (surrogate_loss, on_whole_sequences):
        policy = tiny_policy(tie_word_embeddings=False)
        loss = function(policy, batch, config, temperature=0.8, denominator=5.0)
        loss.backward()
        results.append((loss.detach(), [weight.grad for weight in policy.parameters()]))
    (loss, gradients), (expected, expected_gradients) = results
    torch.testing.assert_close(loss, expected)
    assert float(expected_gradients[-1].abs().max()) > 0
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=1e-4)


def test_only_the_named_objectives_let_a_tokens_value_depend_on_another_token():
    ratio, mask = torch.tensor([[0.1, -0.2, 0.15]]), torch.ones(1, 3, dtype=torch.bool)
    changed = torch.tensor([[0.1, -0.2, 0.05]])
    for name, objective in OBJECTIVES.items():
        first, second = (
            objective(values, mask, torch.tensor([1.0]), clip_range(LossConfig())) for values in (ratio, changed)
        )
        assert (not torch.equal(first[:, :2], second[:, :2])) == (name in OF_SEQUENCES)
