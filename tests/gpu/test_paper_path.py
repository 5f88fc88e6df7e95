"""What only a GPU shows of the paper's path: flash attention, sleeping engines, weights by NCCL, FSDP2 in bfloat16."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.unit.builders import TOKENIZER, make_batch, tiny_policy
from trm_repro.config_sections import RolloutConfig, TrainerConfig
from trm_repro.policy import save_policy
from trm_repro.rollout import SamplingRequest, SamplingSettings, start_engine
from trm_repro.rollout.synced_engine import policy_weights
from trm_repro.sharding import local, prepare_policy, shard_policy, whole

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


@pytest.fixture
def process_group():
    """This process alone, with the group that `trm-repro train` makes for GPUs."""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("cpu_offload", [False, True], ids=["on_the_gpu", "offloaded"])
def test_an_fsdp2_policy_learns_as_a_plain_one_and_keeps_its_masters_where_it_is_told(process_group, cpu_offload: bool):
    batch = make_batch([(3, 9), (5, 4), (2, 17)])
    plain = tiny_policy(tie_word_embeddings=False).train()
    plain(batch).logprobs.square().sum().backward()
    expected = {name: weight.grad for name, weight in plain.named_parameters()}

    policy = tiny_policy(tie_word_embeddings=False).train()
    config = TrainerConfig(accelerator="gpu", compute_dtype="float32", strategy="fsdp2", cpu_offload=cpu_offload)
    prepare_policy(policy, config)
    shard_policy(policy, config, init_device_mesh("cuda", (1,)))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    policy(batch.to("cuda")).logprobs.square().sum().backward()
    place = "cpu" if cpu_offload else "cuda"
    for name, weight in policy.named_parameters():
        assert local(weight).device.type == local(weight.grad).device.type == place
        torch.testing.assert_close(whole(weight.grad).cpu(), expected[name], atol=1e-3, rtol=1e-2)
    before = [local(weight.detach()).clone() for weight in policy.parameters()]
    norm = whole(torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0))
    assert bool(norm.isfinite())
    optimizer.step()
    assert any(not torch.equal(local(w), b) for w, b in zip(policy.parameters(), before, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: one a rank")
def test_two_ranks_by_nccl_train_as_one_process(tmp_path: Path):
    from tests.integration.test_ranks import assert_same, train

    alone = train(tmp_path / "one", "num_steps=2")
    two = train(tmp_path / "two", "num_steps=2", "trainer.devices=2", "trainer.accelerator=gpu")
    assert_same([entry for entry in alone if entry.kind == "train"], [entry for entry in two if entry.kind == "train"])
