import dataclasses
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.unit.builders import make_rollout, tiny_policy
from trm_repro.batch import RolloutBatch
from trm_repro.capacity import (
    GPUS,
    Efficiency,
    ModelShape,
    Workload,
    stage_costs,
    stored_bytes_per_token,
)
from trm_repro.config_sections import LossConfig
from trm_repro.measurement import measure
from trm_repro.steps import surrogate_loss

QWEN3_8B = ModelShape(
    hidden_size=4096,
    num_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=151936,
    tie_word_embeddings=False,
)
DENSE = ModelShape(
    hidden_size=32,
    num_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
    vocab_size=50,
    tie_word_embeddings=True,
)
EXPERTS = dataclasses.replace(DENSE, num_experts=6, num_experts_per_token=2, tie_word_embeddings=False)
WORK = Workload(num_sequences=16, prompt_tokens=10, response_tokens=90, num_epochs=1, is_rebuilding=False)


def build(shape: ModelShape) -> torch.nn.Module:
    sizes = {
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tie_word_embeddings,
    }
    if shape.num_experts == 1:
        return Qwen3ForCausalLM(Qwen3Config(**sizes, attn_implementation="eager"))
    sizes |= {"moe_intermediate_size": shape.intermediate_size, "num_experts": shape.num_experts}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts_per_tok=shape.num_experts_per_token))


@pytest.mark.parametrize("shape", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_parameters_are_those_of_the_real_model(shape: ModelShape):
    assert shape.num_parameters == sum(weight.numel() for weight in build(shape).parameters())


def test_qwen3_8b_has_8_19_billion_parameters_and_144_kib_of_cache_per_token():
    with torch.device("meta"):
        model = build(QWEN3_8B)
    assert QWEN3_8B.num_parameters == sum(weight.numel() for weight in model.parameters()) == 8_190_735_360
    assert QWEN3_8B.key_value_bytes_per_token == 144 * 1024


def test_operations_of_a_forward_pass_are_those_a_counter_finds():
    model, length = build(DENSE), 24
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, length, dtype=torch.long))
    # The counter takes attention as a full square; causal attention needs half of it.
    assert counter.get_total_flops() == length * DENSE.flops_per_token + 2 * DENSE.attention_flops(length)


def test_idle_experts_cost_no_operations():
    one_more = dataclasses.replace(EXPERTS, num_experts=7)
    router = 2 * DENSE.num_layers * DENSE.hidden_size
    assert one_more.flops_per_token - EXPERTS.flops_per_token == router


def costs(work: Workload = WORK, **changes: object) -> dict[str, object]:
    arguments: dict[str, object] = {
        "num_gpus": 2,
        "engine_ranks": 1,
        "concurrent_sequences": 4,
        "is_checkpointing": False,
        "is_half_precision": False,
        "efficiency": Efficiency(),
    }
    found = stage_costs(DENSE, work, GPUS["h200"], **(arguments | changes))
    return {cost.stage: cost for cost in found}


def test_stage_costs_by_hand():
    found = costs()
    head = 2 * 50 * 32
    # The head sees the 90 response tokens of each of 16 sequences, the layers all 100.
    forward = 16 * (100 * (DENSE.flops_per_token - head) + 90 * head + DENSE.attention_flops(100))
    # 8 sequences on each of 2 engines, 4 together: 2 waves of 90 decoding steps, each reading all bfloat16 weights.
    weights = 2 * 2 * 90 * 2 * DENSE.num_parameters
    cache = 16 * 90 * (10 + 45) * (2 * 3 * 2 * 16 * 2)
    assert found["rollout"].bytes_read == weights + cache
    assert found["rollout"].seconds == pytest.approx((weights + cache) / (2 * 4.8e12 * 0.6))
    assert found["mask"].flops == forward
    assert found["update"].flops == 3 * forward
    assert found["update"].seconds == pytest.approx(3 * forward / (2 * 989e12 * 0.4))


def test_rebuilt_distributions_cost_the_mask_one_more_pass_of_the_head():
    rebuilt = costs(dataclasses.replace(WORK, is_rebuilding=True))
    assert rebuilt["mask"].flops - costs()["mask"].flops == 2 * 50 * 32 * 16 * 90


def test_checkpointing_repeats_the_layers_forward_pass_and_half_precision_the_heads():
    head = 2 * 50 * 32 * 16 * 90
    layers = costs()["mask"].flops - head
    assert costs(is_checkpointing=True)["update"].flops - costs()["update"].flops == layers
    assert costs(is_half_precision=True)["update"].flops - costs()["update"].flops == head


def test_mask_and_update_take_the_operations_that_a_counter_finds_in_the_code():
    prompt, response, num_sequences = 6, 18, 4
    policy = tiny_policy(tie_word_embeddings=False).train()
    policy.model.set_attn_implementation("eager")
    sizes = policy.model.config
    shape = ModelShape(
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_hidden_layers,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.intermediate_size,
        vocab_size=sizes.vocab_size,
        tie_word_embeddings=False,
    )
    work = Workload(
        num_sequences=num_sequences,
        prompt_tokens=prompt,
        response_tokens=response,
        num_epochs=1,
        is_rebuilding=True,
    )
    head = torch.zeros(sizes.vocab_size, sizes.hidden_size)  # of a uniform rollout policy
    known = {
        "log_distribution": None,
        "hidden": torch.zeros(response, sizes.hidden_size),
        "logprobs": torch.full((response,), -math.log(sizes.vocab_size)),
    }
    rollouts = [
        dataclasses.replace(make_rollout(response, prompt_length=prompt, advantage=1.0), **known)
        for _ in range(num_sequences)
    ]
    batch = RolloutBatch.from_rollouts(rollouts, {0: head})
    with FlopCounterMode(display=False) as mask:
        measurement = measure(policy, batch, temperature=1.0, tokens_per_micro_batch=10_000)
    batch = dataclasses.replace(batch, policy_normalizers=measurement.normalizers)
    with FlopCounterMode(display=False) as update:
        loss = surrogate_loss(policy, batch, LossConfig(), temperature=1.0, denominator=1.0)
        loss.backward()
    arguments = {"num_gpus": 1, "engine_ranks": 1, "concurrent_sequences": 4, "efficiency": Efficiency()}
    planned = {
        cost.stage: cost.flops
        for cost in stage_costs(shape, work, GPUS["h200"], is_checkpointing=False, is_half_precision=False, **arguments)
    }
    # The counter takes attention as a full square; causal attention needs half of it.
    square = num_sequences * shape.attention_flops(prompt + response)
    assert mask.get_total_flops() == planned["mask"] + square
    own_logits = 2 * num_sequences * response * shape.hidden_size  # each token's with its own row of the head
    assert update.get_total_flops() == planned["update"] + 3 * square + own_logits


@pytest.mark.parametrize(
    ("distribution", "wanted"), [("sampled", 8), ("top_k", 520), ("hidden", 8200), ("full", 607752)]
)
def test_stored_bytes_of_a_token(distribution: str, wanted: int):
    found = stored_bytes_per_token(distribution, hidden_size=4096, vocab_size=151936, num_top_logprobs=64)
    assert found == wanted
