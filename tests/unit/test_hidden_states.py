"""The rollout policy known by hidden states: batches, shards, heads beside them, and what they rebuild."""

from dataclasses import replace

import pytest
import torch

from pipelines import mask as mask_command
from tests.unit.builders import TOKENIZER, VOCAB_SIZE, make_rollout, tiny_policy
from trm_repro.batch import Rollout, RolloutBatch
from trm_repro.config import load_config
from trm_repro.config_sections import RolloutConfig
from trm_repro.datamodule import minibatches
from trm_repro.errors import FaultError, InputError
from trm_repro.heads import head_path, read_heads, remove_unused_heads, write_head
from trm_repro.measurement import measure
from trm_repro.policy import save_policy
from trm_repro.rollout import SamplingRequest, SamplingSettings, start_engine
from trm_repro.rollout.precision import engine_head
from trm_repro.sharding import policy_weights
from trm_repro.shards import read_rollouts, write_rollouts
from trm_repro.step_metrics import UpdateRecord, step_metrics

HIDDEN = 4


def make_hidden_rollout(length=3, *, version=0, seed=0, dtype=torch.bfloat16):
    hidden = torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)
    rollout = make_rollout(length, seed=seed)
    return replace(rollout, log_distribution=None, hidden=hidden, weight_version=version)


def make_head(seed=0, dtype=torch.bfloat16):
    return torch.randn(VOCAB_SIZE, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def refusal(call, *arguments):
    with pytest.raises(InputError) as raised:
        call(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hidden_states_and_heads_survive_a_shard_to_the_bit(tmp_path, dtype):
    rollouts = [make_hidden_rollout(length, version=v, seed=length, dtype=dtype) for length, v in ((3, 4), (5, 4))]
    head = make_head(dtype=dtype)
    write_head(tmp_path, 4, head)
    write_rollouts(tmp_path / "step_00006.parquet", rollouts, 6)
    read, _ = read_rollouts(tmp_path / "step_00006.parquet")
    heads = read_heads(tmp_path, read)
    for before, after in zip(rollouts, read, strict=True):
        assert after.hidden.dtype == dtype
        assert torch.equal(before.hidden, after.hidden)
        assert after.log_distribution is None
    assert list(heads) == [4]
    assert heads[4].dtype == dtype
    assert torch.equal(heads[4], head)
    size = (tmp_path / "step_00006.parquet").stat().st_size
    assert size < 12_000  # 8 tokens of 4 numbers; the rest is the file's frame


def test_rollouts_without_hidden_states_need_no_heads(tmp_path):
    assert read_heads(tmp_path, [make_rollout()]) is None
    assert RolloutBatch.from_rollouts([make_rollout()], {0: make_head()}).rollout_heads is None


def test_a_head_that_is_missing_damaged_or_not_the_shards_is_refused(tmp_path):
    rollouts = [make_hidden_rollout(version=3)]
    path = head_path(tmp_path, 3)
    assert f"{path}: no such file" in refusal(read_heads, tmp_path, rollouts)
    path.write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00not json")
    assert f"{path}: is not a readable output head" in refusal(read_heads, tmp_path, rollouts)
    write_head(tmp_path, 4, make_head())
    head_path(tmp_path, 4).rename(path)
    assert "is the head of weight version 4; expected 3" in refusal(read_heads, tmp_path, rollouts)
    write_head(tmp_path, 3, make_head(dtype=torch.float32))
    assert "of torch.float32; expected [vocabulary, 4] of torch.bfloat16" in refusal(read_heads, tmp_path, rollouts)
    write_head(tmp_path, 3, torch.zeros(VOCAB_SIZE, HIDDEN + 1, dtype=torch.bfloat16))
    assert "expected [vocabulary, 4]" in refusal(read_heads, tmp_path, rollouts)


def test_a_head_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refusal(write_head, tmp_path / "file", 0, make_head())


def test_heads_go_when_no_shard_needs_them_and_stay_before_theirs_is_written(tmp_path):
    for version in (0, 1, 2, 3):
        write_head(tmp_path, version, make_head())
    for step, version in ((4, 0), (5, 1), (6, 2)):
        write_rollouts(tmp_path / f"step_{step:05d}.parquet", [make_hidden_rollout(version=version)], step)
    remove_unused_heads(tmp_path)
    assert len(list(tmp_path.glob("head_*"))) == 4
    (tmp_path / "step_00005.parquet").unlink()
    remove_unused_heads(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("head_*")) == [f"head_0000{v}.safetensors" for v in (0, 2, 3)]


def test_a_batch_of_hidden_states_keeps_its_rows_together_and_its_heads_through_selection_and_splitting():
    rollouts = [make_hidden_rollout(length, version=length % 2, seed=length) for length in (2, 5, 3, 4)]
    heads = {0: make_head(0), 1: make_head(1), 7: make_head(7)}
    batch = RolloutBatch.from_rollouts(rollouts, heads)
    assert list(batch.rollout_heads) == [0, 1]  # those that are needed
    chosen = batch.select(torch.tensor([True, False, True, False]))
    assert torch.equal(chosen.rollout_hidden, torch.cat([rollouts[0].hidden, rollouts[2].hidden]))
    parts = list(batch.split(7))
    assert torch.equal(torch.cat([part.rollout_hidden for part in parts]), batch.rollout_hidden)
    assert all(part.rollout_heads[1] is heads[1] for part in parts)
    assert torch.equal(batch.to("cpu").rollout_heads[0], heads[0])
    with pytest.raises(ValueError, match=r"missing \{1\}"):
        RolloutBatch.from_rollouts(rollouts, {0: heads[0]})


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """Responses of a bfloat16 engine, known by hidden states and by full log-probs, and the policy's weights."""
    policy, path = tiny_policy("dense", seed=3), tmp_path_factory.mktemp("policy")
    save_policy(policy, TOKENIZER, path)
    engine = start_engine(RolloutConfig(engine="transformers"), path, 64)
    requests = [SamplingRequest(prompt_ids=tuple(range(1, 3 + i % 3)), seed=i) for i in range(6)]
    known = {}
    for distribution in ("hidden", "full"):
        settings = SamplingSettings(max_tokens=12, temperature=0.8, distribution=distribution)
        known[distribution] = [
            Rollout(
                group=0,
                prompt_ids=request.prompt_ids,
                response_ids=completion.token_ids,
                logprobs=completion.logprobs,
                log_distribution=completion.log_distribution,
                hidden=completion.hidden,
            )
            for request, completion in zip(requests, engine.sample(requests, settings), strict=True)
        ]
    return known["hidden"], known["full"], policy_weights(policy)


def measured(rollouts, heads=None, seed=4):
    batch = RolloutBatch.from_rollouts(rollouts, heads)
    return batch, measure(tiny_policy("dense", seed=seed), batch, temperature=0.8, tokens_per_micro_batch=40)


def test_divergence_from_hidden_states_equals_that_from_the_engines_full_log_probs(sampled):
    hidden, full, weights = sampled
    assert [r.response_ids for r in hidden] == [r.response_ids for r in full]
    assert hidden[0].hidden.dtype == torch.bfloat16
    head = engine_head(weights, "bfloat16")
    batch, rebuilt = measured(hidden, {0: head})
    _, direct = measured(full)
    assert float(direct.kl[batch.response_mask].min()) > 0.01  # policies of different seeds
    torch.testing.assert_close(rebuilt.kl, direct.kl, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(rebuilt.total_variation, direct.total_variation, atol=1e-5, rtol=1e-4)
    assert direct.rebuilding_error is None
    record = UpdateRecord(
        batch=batch,
        measurement=rebuilt,
        sequence_mask=torch.ones(6, dtype=torch.bool),
        loss=0.0,
        gradient_norm=0.0,
        is_skipped=False,
        learning_rate=0.0,
    )
    metrics = step_metrics([record], load_config().loss)
    assert 0 <= metrics["rollout/rebuilding_error_mean"] <= metrics["rollout/rebuilding_error_max"] < 1e-5


def test_hidden_states_in_another_order_or_another_versions_head_stop_the_run(sampled):
    hidden, _, weights = sampled
    head = engine_head(weights, "bfloat16")
    turned = [replace(rollout, hidden=rollout.hidden.flip(0)) for rollout in hidden]
    with pytest.raises(FaultError, match="hidden states do not match"):
        measured(turned, {0: head})
    with pytest.raises(FaultError, match="hidden states do not match"):
        measured(hidden, {0: head.roll(1, 0)})
    broken = [replace(rollout, hidden=torch.full_like(rollout.hidden, torch.nan)) for rollout in hidden]
    with pytest.raises(FaultError, match="hidden states do not match"):
        measured(broken, {0: head})


def test_a_token_whose_own_log_prob_is_not_finite_is_left_to_the_mask(sampled):
    hidden, _, weights = sampled
    logprobs = hidden[0].logprobs.clone()
    logprobs[0] = torch.nan
    _, measurement = measured([replace(hidden[0], logprobs=logprobs)], {0: engine_head(weights, "bfloat16")})
    assert measurement.rebuilding_error[0, 0] == 0.0


def test_minibatches_carry_the_heads(sampled):
    hidden, _, weights = sampled
    heads = {0: engine_head(weights, "bfloat16")}
    config = load_config(overrides=["update.num_updates_per_rollout=2", "update.num_epochs=1"])
    assert all(batch.rollout_heads[0] is heads[0] for batch in minibatches(hidden, config, 0, heads))


def test_an_exact_criterion_takes_a_shard_of_hidden_states(sampled, tmp_path):
    hidden, _, weights = sampled
    config = load_config(overrides=["mask.criterion=trm_max", "rollout.distribution=hidden"])

    class Module:
        policy = tiny_policy("dense")

    Module.config = config
    mask_command.check_shard(tmp_path / "step.parquet", hidden, Module, {0: engine_head(weights, "bfloat16")})
    bare = [replace(rollout, hidden=None) for rollout in hidden]
    assert "rollout.distribution=full, hidden or top_k" in refusal(
        mask_command.check_shard, tmp_path / "step.parquet", bare, Module
    )
