"""FSDP2 on one rank: same numbers as the plain policy, float32 masters, snapshots that stay what they were."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.unit.builders import VOCAB_SIZE, make_batch, tiny_policy
from trm_repro import policy as policy_module
from trm_repro.config_sections import TrainerConfig
from trm_repro.policy import Policy
from trm_repro.rollout.vllm.weights import checkpoint_weights
from trm_repro.sharding import (
    ShardedWeights,
    load_snapshots,
    local,
    policy_weights,
    prepare_policy,
    save_snapshots,
    shard_policy,
    whole,
    whole_weights,
)
from trm_repro.vocab import HiddenRollout

BATCH = make_batch([(3, 9), (5, 4), (2, 17)], experts=True)


@pytest.fixture(scope="module", autouse=True)
def process_group():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def sharded(architecture: str = "dense", *, tied: bool = True, **settings: object) -> Policy:
    policy = tiny_policy(architecture, tie_word_embeddings=tied).train()
    config = TrainerConfig(strategy="fsdp2", **settings)
    prepare_policy(policy, config)
    shard_policy(policy, config, init_device_mesh("cpu", (1,)))
    return policy


def gradients(policy: Policy) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logprobs = policy(BATCH).logprobs
    logprobs.square().sum().backward()
    found = {name: whole(weight.grad) for name, weight in policy.named_parameters() if weight.grad is not None}
    return logprobs.detach(), found


@pytest.mark.parametrize("architecture", ["dense", "moe"])
@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": True}, {"packing": True}])
def test_a_sharded_policy_scores_and_learns_as_a_plain_one(architecture: str, settings: dict[str, bool]):
    plain_logprobs, plain = gradients(tiny_policy(architecture))
    logprobs, found = gradients(sharded(architecture, **settings))
    torch.testing.assert_close(logprobs, plain_logprobs, atol=1e-5, rtol=0)
    assert found.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_what_is_known_of_the_rollout_policy_reaches_a_sharded_policy_in_its_own_precision(
    compute_dtype: str, monkeypatch: pytest.MonkeyPatch
):
    seen = []
    real = policy_module.token_statistics

    def statistics(hidden, head, token_ids, *, rollout, temperature):
        if isinstance(rollout, HiddenRollout):
            seen.extend((rollout.hidden.dtype, rollout.heads[0].dtype))
        else:
            seen.append(rollout.dtype)
        return real(hidden, head, token_ids, rollout=rollout, temperature=temperature)

    monkeypatch.setattr(policy_module, "token_statistics", statistics)
    policy = sharded(compute_dtype=compute_dtype)
    known = {
        "rollout_log_distribution": None,
        "rollout_hidden": torch.randn(len(BATCH.rollout_log_distribution), 32).bfloat16(),
        "rollout_heads": {0: torch.randn(VOCAB_SIZE, 32).bfloat16()},
    }
    for batch in (BATCH, replace(BATCH, **known)):
        with torch.no_grad():
            policy(batch, measure=True)
    assert seen == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_bfloat16_passes_keep_masters_and_gradients_in_float32():
    policy = sharded(compute_dtype="bfloat16")
    seen = []
    policy.model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    logprobs, found = gradients(policy)
    assert seen == [torch.bfloat16]
    assert {weight.dtype for weight in policy.parameters()} == {torch.float32}
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    assert logprobs.dtype == torch.float32
    plain, _ = gradients(tiny_policy())
    assert 0 < float((logprobs - plain).abs().max()) < 0.5  # rounded, and not more


def test_scores_follow_an_optimizer_step_that_came_after_a_pass_without_gradient():
    policy, plain = sharded(), tiny_policy()
    for each in (policy, plain):
        each(BATCH).logprobs.sum().backward()
        with torch.no_grad():
            each(BATCH, measure=True)
        torch.optim.SGD(each.parameters(), lr=0.01).step()
    with torch.no_grad():
        torch.testing.assert_close(policy(BATCH).logprobs, plain(BATCH).logprobs, atol=1e-4, rtol=0)


def test_the_norm_of_the_gradient_is_that_over_all_shards():
    policy = sharded()
    _, found = gradients(policy)
    norm = whole(torch.nn.utils.clip_grad_norm_(policy.parameters(), 1e9))
    expected = torch.cat([gradient.flatten() for gradient in found.values()]).norm()
    torch.testing.assert_close(norm, expected)


def test_a_snapshot_stays_while_the_policy_moves_and_can_be_swapped_in_for_a_while():
    policy = sharded()
    snapshot = policy_weights(policy)
    assert isinstance(snapshot, ShardedWeights)
    before = policy(BATCH).logprobs.detach()
    with torch.no_grad():
        for weight in policy.parameters():
            local(weight).mul_(1.5)
    moved = policy(BATCH).logprobs.detach()
    assert not torch.allclose(before, moved, atol=1e-2)
    with snapshot.swapped_in():
        torch.testing.assert_close(policy(BATCH).logprobs.detach(), before)
    torch.testing.assert_close(policy(BATCH).logprobs.detach(), moved)
    with snapshot.swapped_in(lambda name, weight: torch.zeros_like(weight)):
        assert not any(local(weight).any() for weight in policy.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_gathered_once_each_and_asking_for_a_name_gathers_nothing(tied: bool, monkeypatch):
    snapshot = policy_weights(sharded(tied=tied))
    gathered = []
    monkeypatch.setattr(DTensor, "full_tensor", lambda self: gathered.append(1) or self.to_local())
    assert ("lm_head.weight" in snapshot) is not tied
    assert not gathered
    sent = dict(checkpoint_weights(snapshot))
    assert len(gathered) == len(snapshot)
    assert "lm_head.weight" in sent


@pytest.mark.parametrize("architecture", ["dense", "moe"])
def test_gathered_weights_are_those_of_a_plain_policy_under_the_same_names(architecture: str):
    plain = dict(tiny_policy(architecture).model.named_parameters())
    gathered = whole_weights(sharded(architecture))
    assert gathered.keys() == plain.keys()
    assert all(torch.equal(gathered[name], weight) for name, weight in plain.items())
    assert whole_weights(tiny_policy()) is None


def test_snapshots_come_back_from_disk(tmp_path: Path):
    policy = sharded()
    first = policy_weights(policy)
    with torch.no_grad():
        for weight in policy.parameters():
            local(weight).add_(1.0)
    save_snapshots(tmp_path / "snapshots", [(3, first), (4, policy_weights(policy))])
    read = load_snapshots(tmp_path / "snapshots", [3, 4], sharded())
    assert [version for version, _ in read] == [3, 4]
    for name in first:
        assert torch.equal(read[0][1][name], first[name])
        torch.testing.assert_close(read[1][1][name], first[name] + 1.0)
