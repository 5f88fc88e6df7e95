"""vLLM on this machine: weights go in right, the probe notices when they do not, routing is read right."""

import dataclasses
import gc
from pathlib import Path

import pytest
import torch

from trm_repro.batch import Rollout, RolloutBatch
from trm_repro.config_sections import PolicyConfig, RolloutConfig
from trm_repro.divergence import exact_kl_divergence
from trm_repro.errors import FaultError, InputError
from trm_repro.policy import Policy, build_policy, build_tokenizer, save_policy
from trm_repro.rollout import Probe, SamplingRequest, SamplingSettings, start_engine
from trm_repro.rollout.probe import long_probe_contexts
from trm_repro.rollout.synced_engine import SyncedEngine, policy_weights
from trm_repro.rollout.vllm.weights import checkpoint_weights
from trm_repro.tasks.chain_arithmetic import ALPHABET

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOKENIZER = build_tokenizer(ALPHABET)
PROMPTS = [tuple(TOKENIZER("+".join("1234567"[:n]) + "=").input_ids) for n in range(2, 8)]
CONTEXTS = [(1, *(4 + (7 * i * j + j) % 14 for j in range(5 + i % 40))) for i in range(32)]
MAX_LENGTH = 144  # longer than a block of the prefix cache
FULL = SamplingSettings(max_tokens=24, distribution="full")


def make_policy(architecture: str, seed: int) -> Policy:
    config = PolicyConfig(architecture=architecture, num_layers=2, initializer_range=0.2)
    return build_policy(config, TOKENIZER, seed)


def requests(count: int = 24) -> list[SamplingRequest]:
    return [SamplingRequest(prompt_ids=PROMPTS[i % len(PROMPTS)], seed=i) for i in range(count)]


def batch_of(engine, count: int = 24) -> RolloutBatch:
    sent = requests(count)
    return RolloutBatch.from_rollouts(
        [
            Rollout(
                group=0,
                prompt_ids=request.prompt_ids,
                response_ids=completion.token_ids,
                logprobs=completion.logprobs,
                log_distribution=completion.log_distribution,
                experts=completion.experts,
            )
            for request, completion in zip(sent, engine.sample(sent, FULL), strict=True)
        ]
    )


def mean_kl(engine, policy: Policy) -> float:
    """Exact KL(engine || policy) per sampled token, from the engine's stored distributions."""
    batch = batch_of(engine)
    assert batch.rollout_log_distribution is not None
    total = batch.rollout_log_distribution.exp().sum(dim=-1)
    torch.testing.assert_close(total, torch.ones_like(total), atol=1e-4, rtol=0)
    with torch.no_grad():
        output = policy(batch, measure=True)
    return float(output.kl.mean())


@pytest.fixture(scope="module", params=["moe", "dense"])
def engine_and_policies(request, tmp_path_factory: pytest.TempPathFactory):
    """A bfloat16 engine started on one policy, and that policy with another of the same architecture."""
    first, second = make_policy(request.param, 0), make_policy(request.param, 1)
    path = tmp_path_factory.mktemp(request.param)
    save_policy(first, TOKENIZER, path)
    return start_engine(RolloutConfig(prefix_caching=True), path, MAX_LENGTH), first, second


def test_loaded_weights_are_the_policys_before_and_after_a_sync(engine_and_policies):
    engine, first, second = engine_and_policies
    engine.load_weights(policy_weights(first))
    own = mean_kl(engine, first)
    far = mean_kl(engine, second)
    engine.load_weights(policy_weights(second))
    after = mean_kl(engine, second)
    assert far > 1.0  # two random policies are nats apart: weights that do not arrive cannot hide
    assert own < 0.01
    assert after < 0.01


def test_probe_passes_after_a_sync_and_stops_when_it_was_skipped(engine_and_policies):
    engine, first, second = engine_and_policies
    engine.load_weights(policy_weights(first))
    probe = Probe(first, CONTEXTS, "bfloat16", 5.0)
    probe.start(engine, policy_weights(first))
    with pytest.raises(FaultError, match="stale weights: after the sync of weight version 3"):
        probe.check(engine, policy_weights(second), version=3)
    engine.load_weights(policy_weights(second))
    reading = probe.check(engine, policy_weights(second), version=3)
    assert reading.gap <= reading.threshold


def test_each_way_to_be_stale_is_stopped_and_told_by_its_name(engine_and_policies, monkeypatch: pytest.MonkeyPatch):
    engine, first, second = engine_and_policies
    engine.load_weights(policy_weights(first))
    long_contexts = long_probe_contexts(CONTEXTS, MAX_LENGTH)
    assert min(map(len, long_contexts)) > engine.llm.llm_engine.vllm_config.cache_config.block_size
    probe = Probe(first, CONTEXTS, "bfloat16", 5.0, long_contexts=long_contexts)
    synced = SyncedEngine(engine, probe, probe.start(engine, policy_weights(first)))
    synced.sync(policy_weights(second), run="a", version=1)

    def skip(fault: pytest.MonkeyPatch) -> None:
        fault.setattr(type(engine), "load_weights", lambda engine, weights: None)

    def drop_head(fault: pytest.MonkeyPatch) -> None:
        def without_head(weights, change):
            return (pair for pair in checkpoint_weights(weights, change) if pair[0] != "lm_head.weight")

        fault.setattr("trm_repro.rollout.vllm.engine.checkpoint_weights", without_head)

    def keep_cache(fault: pytest.MonkeyPatch) -> None:
        fault.setattr(engine.llm, "reset_prefix_cache", lambda: True)

    for inject, told in (
        (skip, r"it answers as before: the sync did not reach it"),
        (drop_head, r"the output head, lm_head\.weight, did not reach it"),
        (keep_cache, r"contexts of more than 128 tokens \(its prefix cache, .* was not emptied"),
    ):
        with monkeypatch.context() as fault:
            inject(fault)
            with pytest.raises(FaultError, match=f"stale weights: after the sync of weight version 2 .*{told}"):
                synced.sync(policy_weights(first), run="a", version=2)
        synced.sync(policy_weights(second), run="a", version=1)  # whole again


def test_probe_stops_when_experts_are_reloaded_without_packing(engine_and_policies):
    engine, first, second = engine_and_policies
    if not engine.has_routers:
        pytest.skip("a dense model has no experts")
    probe = Probe(first, CONTEXTS, "bfloat16", 5.0)
    engine.load_weights(policy_weights(first))
    probe.start(engine, policy_weights(first))
    plain = [(name, weight.bfloat16()) for name, weight in checkpoint_weights(policy_weights(second))]
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(plain)})
    with pytest.raises(FaultError, match="stale weights"):
        probe.check(engine, policy_weights(second), version=1)
    engine.load_weights(policy_weights(second))
    probe.check(engine, policy_weights(second), version=1)


def test_recorded_routing_is_the_models_own(engine_and_policies):
    engine, first, _ = engine_and_policies
    engine.load_weights(policy_weights(first))
    batch = batch_of(engine)
    with torch.no_grad():
        output = first(batch, measure=True)
    if not engine.has_routers:
        assert batch.rollout_experts is None
        assert output.experts is None
        return
    assert batch.rollout_experts is not None
    agree = output.experts.sort(-1).values == batch.rollout_experts.long().sort(-1).values
    # Rounding flips a few routers; rows read at wrong positions would agree in one of 28 pairs.
    assert float(agree.all(dim=-1).float().mean()) > 0.9


def test_same_requests_give_the_same_bits_and_other_seeds_other_tokens(engine_and_policies):
    engine, first, _ = engine_and_policies
    engine.load_weights(policy_weights(first))
    once, again = engine.sample(requests(), FULL), engine.sample(requests(), FULL)
    assert all(a.token_ids == b.token_ids for a, b in zip(once, again, strict=True))
    assert all(torch.equal(a.log_distribution, b.log_distribution) for a, b in zip(once, again, strict=True))
    other = engine.sample([dataclasses.replace(r, seed=r.seed + 1000) for r in requests()], FULL)
    assert any(a.token_ids != b.token_ids for a, b in zip(once, other, strict=True))


def test_sampled_logprobs_are_those_of_the_full_distribution(engine_and_policies):
    engine, first, _ = engine_and_policies
    engine.load_weights(policy_weights(first))
    full = engine.sample(requests(), FULL)
    sampled = engine.sample(requests(), SamplingSettings(max_tokens=24))
    for a, b in zip(full, sampled, strict=True):
        assert b.log_distribution is None
        chosen = a.log_distribution.gather(-1, torch.tensor(a.token_ids)[:, None]).squeeze(-1)
        assert torch.equal(a.logprobs, chosen)
        torch.testing.assert_close(b.logprobs, a.logprobs, atol=1e-5, rtol=0)


def test_top_logprobs_are_the_largest_of_the_full_distribution(engine_and_policies):
    engine, first, _ = engine_and_policies
    engine.load_weights(policy_weights(first))
    full = engine.sample(requests(), FULL)
    top = engine.sample(requests(), dataclasses.replace(FULL, distribution="top_k", num_top=5))
    for a, b in zip(full, top, strict=True):
        assert a.token_ids == b.token_ids
        assert b.log_distribution is None
        torch.testing.assert_close(b.top_logprobs, a.log_distribution.topk(5).values, atol=1e-5, rtol=0)
        torch.testing.assert_close(b.top_logprobs, a.log_distribution.gather(-1, b.top_ids.long()), atol=1e-5, rtol=0)
        torch.testing.assert_close(b.logprobs, a.logprobs, atol=1e-5, rtol=0)


def test_more_prompt_tokens_than_one_engine_step_takes_are_sampled(engine_and_policies):
    engine, _, _ = engine_and_policies
    many = [SamplingRequest(prompt_ids=(1, *[4 + (i + j) % 14 for j in range(60)]), seed=i) for i in range(300)]
    assert len(engine.sample(many, SamplingSettings(max_tokens=2, distribution="full"))) == 300


@pytest.mark.parametrize("precision", ["float32", "int8", "fp8"])
def test_engine_of_each_precision_holds_the_rounded_weights(precision: str, tmp_path: Path):
    policy, other = make_policy("moe", 0), make_policy("moe", 1)
    save_policy(policy, TOKENIZER, tmp_path)
    engine = start_engine(RolloutConfig(precision=precision), tmp_path, 96)
    probe = Probe(policy, CONTEXTS, precision, 5.0)
    probe.start(engine, policy_weights(policy))
    engine.load_weights(policy_weights(other))
    probe.check(engine, policy_weights(other), version=1)
    gap = mean_kl(engine, other)
    assert gap < {"float32": 1e-6, "int8": 0.05, "fp8": 0.5}[precision]
    if precision != "float32":
        assert gap > 1e-5  # rounding shows


def test_engine_agrees_with_transformers_engine_greedily(tmp_path: Path):
    policy = make_policy("dense", 2)
    save_policy(policy, TOKENIZER, tmp_path)
    greedy = SamplingSettings(max_tokens=12, temperature=0.0, distribution="full")
    config = RolloutConfig(precision="float32")
    ours = start_engine(config, tmp_path, 96).sample(requests(6), greedy)
    theirs = start_engine(dataclasses.replace(config, engine="transformers"), tmp_path, 96).sample(requests(6), greedy)
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids == b.token_ids
        assert float(exact_kl_divergence(a.log_distribution, b.log_distribution).max()) < 1e-5
        assert a.finished == b.finished


def test_an_engine_of_experts_starts_after_a_dense_one_and_outlives_it(tmp_path: Path):
    settings = SamplingSettings(max_tokens=2, distribution="full")
    for architecture in ("dense", "moe"):
        save_policy(make_policy(architecture, 0), TOKENIZER, tmp_path / architecture)
        engine = start_engine(RolloutConfig(precision="float32"), tmp_path / architecture, 96)
        assert len(engine.sample(requests(2), settings)) == 2
    gc.collect()  # the first one's end takes nothing from the second
    assert len(engine.sample(requests(2), settings)) == 2


def test_a_cache_too_small_for_one_sequence_names_the_key(tmp_path: Path):
    save_policy(make_policy("dense", 0), TOKENIZER, tmp_path)
    told = (
        r"rollout\.kv_cache_bytes=20000 does not hold one sequence of 96 tokens; raise it, or lower rollout\.max_prom"
    )
    with pytest.raises(InputError, match=told):
        start_engine(RolloutConfig(kv_cache_bytes=20_000), tmp_path, 96)
