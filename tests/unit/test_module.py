"""TRMModule inside Lightning: steps, skipped steps, mask timing, and one class for every policy."""

import dataclasses
import inspect
import math

import pytest
import torch

from pipelines.training import build_trainer
from trm_repro.batch import Rollout
from trm_repro.config import RunConfig, load_arm
from trm_repro.datamodule import RolloutDataModule, minibatches
from trm_repro.errors import FaultError
from trm_repro.module import TRMModule
from trm_repro.policy import build_policy, build_tokenizer
from trm_repro.steps import ReferenceUpdate
from trm_repro.tasks.chain_arithmetic import ALPHABET

TOKENIZER = build_tokenizer(ALPHABET)
SMALL = [
    "policy.hidden_size=32",
    "policy.num_layers=1",
    "policy.moe_intermediate_size=32",
    "policy.intermediate_size=32",
    "policy.num_experts=4",
    "rollout.num_prompts=2",
    "rollout.group_size=4",
    "update.num_updates_per_rollout=2",
    "update.warmup_updates=1",
    "num_steps=1",
]


def small_config(arm: str = "trm_avg_0.001", *overrides: str) -> RunConfig:
    return load_arm(arm, overrides=[*SMALL, *overrides])


def rollouts_of(config: RunConfig, *, shift: float = 0.0) -> list[Rollout]:
    """Rollouts of the module's own starting policy, their log-probs shifted by so many nats."""
    policy = build_policy(config.policy, TOKENIZER, seed=5)
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for index in range(8):
        response = tuple(torch.randint(4, 18, (6 + index,), generator=generator).tolist())
        prompt = (1, 8, 14, 9, 15)
        with torch.no_grad():
            logits = policy.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        distribution = torch.log_softmax(logits, dim=-1)
        logprobs = distribution.gather(-1, torch.tensor(response)[:, None]).squeeze(-1) + shift
        rollouts.append(
            Rollout(
                group=index // 4,
                prompt_ids=prompt,
                response_ids=response,
                logprobs=logprobs,
                log_distribution=distribution,
                reward=float(index % 2),
                advantage=1.0 if index % 2 else -1.0,
            )
        )
    return rollouts


def fit(config: RunConfig, rollouts: list[Rollout], reference=None) -> tuple[TRMModule, dict[str, torch.Tensor]]:
    """Train one step; returns the module and the weights it started from."""
    module = TRMModule(config, TOKENIZER, reference)
    module.policy = build_policy(config.policy, TOKENIZER, seed=5)
    before = {name: weight.detach().clone() for name, weight in module.policy.named_parameters()}
    build_trainer(1, []).fit(module, datamodule=RolloutDataModule(config, None, run_name="t", stored=rollouts))
    return module, before


def moved(module: TRMModule, before: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(weight, before[name]) for name, weight in module.policy.named_parameters())


def test_on_policy_rollouts_are_kept_and_move_the_weights():
    config = small_config()
    module, before = fit(config, rollouts_of(config))
    first = module.records[0]
    assert first.sequence_mask.all()
    assert float(first.measurement.log_ratio.abs().max()) < 1e-4
    assert not first.is_skipped
    assert moved(module, before)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_when_nothing_is_kept_no_step_is_taken(optimizer: str):
    config = small_config("trm_avg_0.001", f"update.optimizer={optimizer}", "update.weight_decay=0.1")
    module, before = fit(config, rollouts_of(config, shift=1.0))  # k3 = e^-1 - 1 + 1 = 0.37 at every token
    assert not torch.cat([record.sequence_mask for record in module.records]).any()
    assert all(record.is_skipped for record in module.records)
    assert not moved(module, before)


def test_a_step_without_gradient_can_be_asked_for_and_then_adamw_decays():
    config = small_config(
        "trm_avg_0.001", "update.optimizer=adamw", "update.weight_decay=0.1", "update.skip_empty=false"
    )
    module, before = fit(config, rollouts_of(config, shift=1.0))
    assert not any(record.is_skipped for record in module.records)
    kept = math.prod(1 - 0.1 * record.learning_rate for record in module.records)  # both moments are 0
    for name, weight in module.policy.named_parameters():
        torch.testing.assert_close(weight, kept * before[name], rtol=1e-6, atol=0.0)


def test_when_no_kept_sequence_has_an_advantage_no_step_is_taken():
    config = small_config("ppo_clip", "update.optimizer=adamw", "update.weight_decay=0.1")
    flat = [dataclasses.replace(rollout, advantage=0.0) for rollout in rollouts_of(config)]
    module, before = fit(config, flat)
    assert all(record.is_skipped for record in module.records)
    assert not moved(module, before)


def test_non_finite_log_probs_reject_their_sequence_under_every_arm():
    config = small_config("ppo_clip")
    rollouts = rollouts_of(config)
    broken = rollouts[2].logprobs.clone()
    broken[1] = float("-inf")
    rollouts[2] = dataclasses.replace(rollouts[2], logprobs=broken)
    module, _ = fit(config, rollouts)
    for record in module.records:
        assert record.sequence_mask.tolist() == [sequence != 2 for sequence in record.batch.sequence_ids.tolist()]
    assert all(torch.isfinite(weight).all() for weight in module.policy.parameters())


def test_masks_follow_the_policy_update_by_update_or_stay_as_they_were():
    large = ("update.learning_rate=50", "mask.avg_threshold=0.0001")
    follows, _ = fit(small_config("trm_avg_0.001", *large), rollouts_of(small_config()))
    assert follows.records[0].sequence_mask.all()
    assert not follows.records[1].sequence_mask.any()  # the first update went far
    stays, _ = fit(small_config("trm_avg_0.001", *large, "mask.timing=once"), rollouts_of(small_config()))
    assert stays.records[0].sequence_mask.all()
    assert stays.records[1].sequence_mask.all()


def test_weights_that_are_not_finite_stop_the_run():
    config = small_config("ppo_clip")
    module = TRMModule(config, TOKENIZER)
    module.policy = build_policy(config.policy, TOKENIZER, seed=5)
    with torch.no_grad():
        next(module.policy.parameters())[0, 0] = float("inf")
    data = RolloutDataModule(config, None, run_name="t", stored=rollouts_of(config))
    with pytest.raises(FaultError, match="weights are not finite after update 0 of step 0; lower"):
        build_trainer(1, []).fit(module, datamodule=data)


def test_random_control_keeps_the_given_numbers():
    config = small_config("random_as_trm_avg_0.001")
    module, _ = fit(config, rollouts_of(config), {0: [ReferenceUpdate(num_kept=3), ReferenceUpdate(num_kept=1)]})
    assert [int(record.sequence_mask.sum()) for record in module.records] == [3, 1]


def test_learning_rate_warms_up_by_updates():
    config = small_config("ppo_clip", "update.warmup_updates=4", "update.learning_rate=0.4")
    module, _ = fit(config, rollouts_of(config))
    assert [record.learning_rate for record in module.records] == pytest.approx([0.1, 0.2])


def test_minibatches_are_disjoint_and_cover_the_step():
    config = small_config("ppo_clip", "update.num_epochs=2")
    parts = minibatches(rollouts_of(config), config, step=3)
    assert [part.num_sequences for part in parts] == [4, 4, 4, 4]
    for epoch in (parts[:2], parts[2:]):
        assert sorted(torch.cat([part.sequence_ids for part in epoch]).tolist()) == list(range(8))
    again = minibatches(rollouts_of(config), config, step=3)
    assert all(torch.equal(a.sequence_ids, b.sequence_ids) for a, b in zip(parts, again, strict=True))
    other = minibatches(rollouts_of(config), config, step=4)
    assert any(not torch.equal(a.sequence_ids, b.sequence_ids) for a, b in zip(parts, other, strict=True))


def test_one_class_serves_dense_experts_and_8b():
    qwen3_8b = [
        "policy.architecture=dense",
        "policy.vocab_size=151936",
        "policy.hidden_size=4096",
        "policy.intermediate_size=12288",
        "policy.num_layers=36",
        "policy.num_attention_heads=32",
        "policy.num_key_value_heads=8",
        "policy.head_dim=128",
        "policy.max_position_embeddings=32768",
        "policy.tie_word_embeddings=false",
    ]
    sizes = {}
    for name, overrides in {"moe": [], "dense": ["policy.architecture=dense"], "8b": qwen3_8b}.items():
        module = TRMModule(load_arm("trm_max_0.05", overrides=overrides), TOKENIZER)
        with torch.device("meta"):
            module.configure_model()
        assert type(module.policy).__name__ == "Policy"
        sizes[name] = sum(weight.numel() for weight in module.policy.parameters())
    assert sizes["moe"] == 335_104
    assert sizes["dense"] == 149_248
    # 151,936 x 4,096 twice; 36 layers of attention (32 + 8 + 8 + 32 heads of 128), feed-forward and norms.
    layer = 4096 * 128 * (32 + 8 + 8 + 32) + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    assert sizes["8b"] == 2 * 151_936 * 4096 + 36 * layer + 4096


def test_training_step_stays_short_enough_to_read_as_the_algorithm():
    assert len(inspect.getsource(TRMModule.training_step).splitlines()) <= 25


def test_length_matched_control_keeps_as_many_and_rejects_the_long_ones():
    config = small_config("length_as_trm_avg_0.001", "mask.num_length_bins=2")
    long = ReferenceUpdate(num_kept=2, rejected_lengths=(90, 90))
    module, _ = fit(config, rollouts_of(config), {0: [long, long]})
    for record in module.records:
        lengths = record.batch.response_lengths  # no two are equal
        assert sorted(lengths[~record.sequence_mask].tolist()) == lengths.sort().values[2:].tolist()


def test_kept_baseline_counts_the_kept_sequences_of_the_whole_group():
    """One update rejects; the group's other members, in the other minibatch, still vote."""
    config = small_config("trm_avg_0.001", "loss.baseline=kept", "update.learning_rate=0")
    rollouts = rollouts_of(config)
    # Sequence 1 of group 0 (reward 1) is far from the policy: rejected. Group 0 keeps rewards 0, 0, 1.
    rollouts[1] = dataclasses.replace(rollouts[1], logprobs=rollouts[1].logprobs - 1.0)
    module, _ = fit(config, rollouts)
    found = {}
    for record in module.records:
        found |= dict(zip(record.batch.sequence_ids.tolist(), record.batch.advantages.tolist(), strict=True))
        kept = dict(zip(record.batch.sequence_ids.tolist(), record.sequence_mask.tolist(), strict=True))
        assert all(is_kept == (sequence != 1) for sequence, is_kept in kept.items())
    half = 2**-0.5
    expected = [-half, 0.0, -half, 2 * half, -1.0, 1.0, -1.0, 1.0]
    assert [found[sequence] for sequence in range(8)] == pytest.approx(expected, abs=1e-3)  # epsilon is 1e-4


def test_kept_denominator_divides_by_the_kept_sequences():
    rollouts = rollouts_of(small_config())
    rollouts = [dataclasses.replace(r, logprobs=r.logprobs - float(i % 4 == 0)) for i, r in enumerate(rollouts)]
    losses = {}
    for denominator in ("all", "kept"):
        config = small_config("trm_avg_0.001", f"loss.denominator={denominator}", "update.num_updates_per_rollout=1")
        losses[denominator] = fit(config, rollouts)[0].records[0].loss
    assert losses["all"] != 0
    assert losses["kept"] == pytest.approx(losses["all"] * 8 / 6, rel=1e-5)  # 2 of 8 are rejected
