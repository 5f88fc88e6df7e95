"""Hidden states captured from vLLM rebuild the distributions that vLLM itself returns."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipelines.spool import read_spool
from tests.conftest import SMOKE, run_command
from trm_repro.batch import Rollout, RolloutBatch
from trm_repro.config_sections import LossConfig, PolicyConfig, RolloutConfig
from trm_repro.divergence import exact_kl_divergence
from trm_repro.measurement import measure
from trm_repro.policy import Policy, build_policy, build_tokenizer, save_policy
from trm_repro.rollout import SamplingRequest, SamplingSettings, start_engine
from trm_repro.rollout.precision import engine_head
from trm_repro.sharding import policy_weights
from trm_repro.shards import read_masks
from trm_repro.steps import surrogate_loss
from trm_repro.tasks.chain_arithmetic import ALPHABET
from trm_repro.vocab.chunks import CPU_CHUNK_ELEMENTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOKENIZER = build_tokenizer(ALPHABET)
QWEN3_VOCABULARY = 151_936
BLOCK_BYTES = 2 * 2 * 128 * 32 * 2  # layers, keys and values, tokens, head size, bytes


def make_policy(seed: int, **changes: object) -> Policy:
    config = PolicyConfig(architecture="dense", num_layers=2, initializer_range=0.2, max_position_embeddings=256)
    return build_policy(replace(config, **changes), TOKENIZER, seed)


def requests_of(lengths: list[int]) -> list[SamplingRequest]:
    shared = [4 + i % 14 for i in range(max(lengths))]  # equal beginnings, for the prefix cache
    return [
        SamplingRequest(prompt_ids=(1, *shared[: length - 2], 4 + i % 14), seed=i) for i, length in enumerate(lengths)
    ]


def sample(engine, requests: list[SamplingRequest], distribution: str, max_tokens: int, temperature: float = 1.0):
    settings = SamplingSettings(max_tokens=max_tokens, temperature=temperature, distribution=distribution)
    return [
        Rollout(
            group=0,
            prompt_ids=request.prompt_ids,
            response_ids=completion.token_ids,
            logprobs=completion.logprobs,
            log_distribution=completion.log_distribution,
            hidden=completion.hidden,
            advantage=(-1.0) ** index,
        )
        for index, (request, completion) in enumerate(zip(requests, engine.sample(requests, settings), strict=True))
    ]


def measured(rollouts: list[Rollout], engine_weights, policy: Policy, temperature: float = 1.0):
    heads = {0: engine_head(engine_weights, "bfloat16")}
    batch = RolloutBatch.from_rollouts(rollouts, heads)
    return batch, measure(policy, batch, temperature=temperature, tokens_per_micro_batch=4096)


def test_divergence_from_vllms_hidden_states_equals_that_from_its_full_log_probs(tmp_path: Path, monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    num_evictions = 0
    evict = Scheduler._preempt_request

    def counted(*args, **kwargs):
        nonlocal num_evictions
        num_evictions += 1
        return evict(*args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", counted)
    policy, other = make_policy(0), make_policy(1)
    save_policy(policy, TOKENIZER, tmp_path)
    # Room for few blocks of 128 tokens: requests wait, and responses that grow past a block evict one another.
    config = RolloutConfig(prefix_caching=True, max_concurrent_sequences=8, kv_cache_bytes=BLOCK_BYTES * 6)
    engine = start_engine(config, tmp_path, 192)
    lengths = [3, 120, 40, 118, 3, 122, 60, 119, 121, 117, 5, 123]
    for weights in (policy_weights(policy), policy_weights(other)):  # the second after a sync
        engine.load_weights(weights)
        hidden, full = (sample(engine, requests_of(lengths), name, 40, 0.9) for name in ("hidden", "full"))
        assert [rollout.response_ids for rollout in hidden] == [rollout.response_ids for rollout in full]
        assert hidden[0].hidden.dtype == torch.bfloat16
        _, rebuilt = measured(hidden, weights, policy, 0.9)
        _, direct = measured(full, weights, policy, 0.9)
        torch.testing.assert_close(rebuilt.kl, direct.kl, atol=1e-5, rtol=1e-3)
        torch.testing.assert_close(rebuilt.total_variation, direct.total_variation, atol=1e-5, rtol=1e-3)
        assert float(rebuilt.rebuilding_error.max()) < 1e-5
    assert num_evictions > 0
    assert all(rollout.hidden is None for rollout in sample(engine, requests_of([5]), "sampled", 4))


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor any operation returned."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, list | tuple) else [result]:
            if isinstance(value, torch.Tensor):
                self.num_elements = max(self.num_elements, value.numel())
        return result


def test_exact_divergence_over_qwen3s_vocabulary_never_holds_tokens_times_vocabulary(tmp_path: Path):
    policy = make_policy(0, vocab_size=QWEN3_VOCABULARY, initializer_range=0.5)
    other = make_policy(1, vocab_size=QWEN3_VOCABULARY, initializer_range=0.5)
    save_policy(policy, TOKENIZER, tmp_path)
    engine = start_engine(RolloutConfig(), tmp_path, 192)
    requests = requests_of([5, 9] * 8)
    hidden = sample(engine, requests, "hidden", 48)
    num_tokens = sum(len(rollout.response_ids) for rollout in hidden)
    assert num_tokens > 600
    with LargestTensor() as largest:
        batch, _ = measured(hidden, policy_weights(policy), other)
        loss = surrogate_loss(other, batch, LossConfig(), temperature=1.0, denominator=16.0)
        loss.backward()
    assert largest.num_elements < num_tokens * QWEN3_VOCABULARY / 4
    assert largest.num_elements <= CPU_CHUNK_ELEMENTS  # one chunk of logits
    few = requests[:2]  # in a batch of another size the engine's states differ in their last bits
    known, full = (sample(engine, few, name, 12) for name in ("hidden", "full"))
    stop = known[0].response_ids[2]
    engine.stop_ids = (stop,)
    (stopped, _) = sample(engine, few, "sampled", 12)
    assert stopped.response_ids == known[0].response_ids[: known[0].response_ids.index(stop) + 1]
    batch, rebuilt = measured(known, policy_weights(policy), other)
    _, direct = measured(full, policy_weights(policy), other)
    torch.testing.assert_close(rebuilt.kl, direct.kl, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        logits = other.model(input_ids=batch.input_ids[:1]).logits[0, len(few[0].prompt_ids) - 1 :]
    rows = (full[0].log_distribution, logits[: len(full[0].response_ids)])
    expected = exact_kl_divergence(*(torch.log_softmax(row.double(), dim=-1) for row in rows))
    torch.testing.assert_close(rebuilt.kl[0, : len(expected)].double(), expected, atol=1e-4, rtol=1e-4)


def test_a_run_on_hidden_states_keeps_heads_beside_its_shards_and_masks_them_offline_as_online(tmp_path: Path):
    settings = [
        "--arm",
        "trm_max_0.05",
        SMOKE,
        "seed=1",
        "num_steps=4",
        "rollout.engine=transformers",
        "rollout.distribution=hidden",
        f"output.dir={tmp_path / 'runs'}",
        "policy.architecture=dense",
        "warm_start.target_pass_rate=0.001",
        f"output.warm_start_dir={tmp_path / 'warm_starts'}",
    ]
    done = run_command("train", *settings)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "trm_max_0.05" / "seed_1"
    trained = [entry.metrics for entry in read_spool(folder / "metrics.jsonl") if entry.kind == "train"]
    assert all(metrics["rollout/rebuilding_error_max"] < 1e-4 for metrics in trained)
    assert all(metrics["divergence/kl_max"] > 0 for metrics in trained)
    # Of steps 0 to 3, sampled from weights 0, 0, 1 and 2, every second shard is kept, and the last.
    assert sorted(path.name for path in (folder / "shards").iterdir()) == [
        "head_00000.safetensors",
        "head_00001.safetensors",
        "head_00002.safetensors",
        "step_00000.parquet",
        "step_00002.parquet",
        "step_00003.parquet",
    ]
    shard = folder / "shards" / "step_00000.parquet"
    done = run_command("mask", *settings, "--in", shard, "--out", tmp_path / "masks.parquet")
    assert done.returncode == 0, done.stderr
    offline = {row.sequence_id: row for row in read_masks(tmp_path / "masks.parquet")}
    online = [row for row in read_masks(folder / "masks" / "step_00000.parquet") if row.update == 0]
    assert online
    for row in online:
        assert offline[row.sequence_id].kept == row.kept
        torch.testing.assert_close(offline[row.sequence_id].token_kl, row.token_kl, atol=1e-6, rtol=1e-4)
    (folder / "shards" / "head_00002.safetensors").replace(folder / "shards" / "head_00000.safetensors")
    done = run_command("mask", *settings, "--in", shard, "--out", tmp_path / "masks.parquet")
    assert done.returncode == 2
    assert "is the head of weight version 2; expected 0" in done.stderr
