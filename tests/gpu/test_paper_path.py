"""What only a GPU shows of the paper's path: flash attention, sleeping engines, weights by NCCL, FSDP2 in bfloat16."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.unit.builders import TOKENIZER, make_batch, tiny_policy
from trm_repro.config_sections import RolloutConfig, TrainerConfig
from trm_repro.policy import save_policy
from trm_repro.rollout import SamplingRequest, SamplingSettings, start_engine
from trm_repro.rollout.synced_engine import policy_weights
from trm_repro.sharding import prepare_policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REQUESTS = [SamplingRequest(prompt_ids=(1, 8, 14, 5 + index), seed=index) for index in range(8)]
FULL = SamplingSettings(max_tokens=8, distribution="full")


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs the flash-attn package")
def test_packed_flash_attention_scores_as_padded_sdpa_does():
    policy = tiny_policy().to("cuda", torch.bfloat16)
    batch = make_batch([(3, 9), (5, 4), (2, 17), (7, 1)]).to("cuda")
    with torch.no_grad():
        padded = policy(batch).logprobs
        trainer = TrainerConfig(
            accelerator="gpu", compute_dtype="bfloat16", attention="flash_attention_2", packing=True
        )
        prepare_policy(policy, trainer)
        packed = policy(batch).logprobs
    torch.testing.assert_close(packed, padded, atol=0.05, rtol=0)  # two kernels in bfloat16


def test_a_sleeping_engine_gives_its_memory_back_and_wakes_with_its_weights(tmp_path: Path):
    save_policy(tiny_policy(), TOKENIZER, tmp_path)
    engine = start_engine(RolloutConfig(placement="colocated", kv_cache_bytes=2**30), tmp_path, 64)
    before = [completion.token_ids for completion in engine.sample(REQUESTS, FULL)]
    free_awake = torch.cuda.mem_get_info()[0]
    engine.sleep()
    assert torch.cuda.mem_get_info()[0] > free_awake + 2**29
    assert [completion.token_ids for completion in engine.sample(REQUESTS, FULL)] == before
    engine.sleep()
    engine.load_weights(policy_weights(tiny_policy(seed=1)))
    assert [completion.token_ids for completion in engine.sample(REQUESTS, FULL)] != before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: trainer and server")
def test_weights_reach_a_server_by_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_policy(tiny_policy(), TOKENIZER, tmp_path)
    torch.zeros(1, device="cuda:0")  # the trainer's device, before the server is told to take the other
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    config = RolloutConfig(placement="server", weight_transfer="nccl", kv_cache_bytes=2**28)
    engine = start_engine(config, tmp_path, 64)
    try:
        other = tiny_policy(seed=1)
        engine.load_weights(policy_weights(other))
        for request, completion in zip(REQUESTS, engine.sample(REQUESTS, FULL), strict=True):
            ids = torch.tensor([request.prompt_ids + completion.token_ids])
            with torch.no_grad():
                logits = other.model(ids).logits[0, len(request.prompt_ids) - 1 : -1]
            torch.testing.assert_close(torch.log_softmax(logits, -1), completion.log_distribution, atol=0.2, rtol=0)
    finally:
        engine.close()
