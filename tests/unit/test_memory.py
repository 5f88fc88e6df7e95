"""Memory of a GPU and of the host, by category: what is counted, and when it is there."""

import dataclasses

import pytest

from tests.unit.test_capacity import QWEN3_8B
from trm_repro.memory import Host, Memory, Sampling, Trainer, gpu_memory, host_memory, host_total

TRAINER = Trainer(
    num_ranks=8,
    optimizer_moments=2,
    is_sharded=True,
    is_checkpointing=True,
    is_offloading=False,
    compute_bytes=2,
    tokens_per_micro_batch=1000,
    chunk_elements=100 * 151_936,
)
SAMPLING = Sampling(engine_ranks=1, key_value_cache=5e9, engine="sleeping", has_head=True, distribution_bytes=1e9)
HOST = Host(ranks_here=8, num_snapshots=2, distribution_bytes=8e9, sleeping_bytes=3e9)
EMBEDDING = 151_936 * 4096
LAYER = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128


def memory(sampling: Sampling = SAMPLING, **changes: object) -> Memory:
    return gpu_memory(QWEN3_8B, dataclasses.replace(TRAINER, **changes), sampling)


def test_adamw_in_float32_takes_sixteen_bytes_a_parameter_over_all_ranks():
    found = memory()
    assert 8 * (found.masters + found.gradients + found.optimizer) == 16 * QWEN3_8B.num_parameters


def test_a_rank_gathers_embedding_and_head_as_one_unit_and_two_layers():
    found = memory()
    assert found.gathered_root == 2 * (2 * EMBEDDING + 4096)
    assert found.gathered_layers == 2 * 2 * LAYER
    # Gradients of a unit in bfloat16, and in float32 for their sum over the ranks.
    assert found.root_reduction == 6 * (2 * EMBEDDING + 4096)
    assert found.layer_reduction == 6 * LAYER
    assert memory(compute_bytes=4).gathered_root == 2 * found.gathered_root


def test_one_plain_process_gathers_nothing():
    found = memory(num_ranks=1, is_sharded=False, compute_bytes=4)
    assert found.gathered_root == found.gathered_layers == found.root_reduction == found.layer_reduction == 0
    assert found.masters == 4 * QWEN3_8B.num_parameters


def test_hidden_states_need_the_head_that_the_engine_held():
    assert memory().rollout_head == 2 * EMBEDDING
    assert memory(dataclasses.replace(SAMPLING, has_head=False)).rollout_head == 0


def test_logits_are_as_many_as_the_chunk_and_no_more_than_there_are():
    assert memory().logit_chunk == (4 + 2) * 100 * 151_936  # float32, and rounded for the products
    assert memory(compute_bytes=4).logit_chunk == 4 * 100 * 151_936
    assert memory(tokens_per_micro_batch=3).logit_chunk == (4 + 2) * 2 * 3 * 151_936


def test_checkpointing_saves_all_insides_of_layers_but_the_one_at_work():
    inside = 1000 * 2 * (3 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 12288)
    assert memory(is_checkpointing=False).saved_activations - memory().saved_activations == 36 * inside


def test_offloading_leaves_no_masters_on_the_gpu_and_sixteen_bytes_a_parameter_on_the_host():
    found = memory(is_offloading=True)
    assert found.masters == found.gradients == found.optimizer == found.step_workspace == 0
    host = host_memory(QWEN3_8B, dataclasses.replace(TRAINER, is_offloading=True), HOST)
    assert host["offloaded_states"] == 16 * QWEN3_8B.num_parameters
    assert host_memory(QWEN3_8B, TRAINER, HOST)["offloaded_states"] == 0


def test_a_gpu_is_as_full_as_at_its_fullest_moment():
    found = memory()
    totals = {moment: sum(parts.values()) for moment, parts in found.moments().items()}
    assert found.training == max(value for moment, value in totals.items() if moment != "sampling")
    assert totals["reduction"] == pytest.approx(
        16 * QWEN3_8B.num_parameters / 8 + 2 * EMBEDDING + 1e9 + 6 * (2 * EMBEDDING + 4096)
    )


def test_an_engine_takes_turns_with_the_trainer_stays_beside_it_or_is_elsewhere():
    engine = 2 * QWEN3_8B.num_parameters + 5e9 + 6 * EMBEDDING
    kept = 12 * QWEN3_8B.num_parameters / 8  # masters and moments; gradients are freed
    sleeping, resident, elsewhere = (
        memory(dataclasses.replace(SAMPLING, engine=place)) for place in ("sleeping", "resident", "elsewhere")
    )
    assert sleeping.sampling == resident.sampling == engine + kept
    assert elsewhere.sampling == engine
    assert resident.training == sleeping.training + engine


def test_the_first_machine_holds_one_whole_model_while_starting_and_float32_snapshots_later():
    host = host_memory(QWEN3_8B, TRAINER, HOST)
    assert host["starting"] == 4 * QWEN3_8B.num_parameters  # of the first rank alone
    assert host["snapshots"] == 2 * 4 * QWEN3_8B.num_parameters
    assert host["rollout_distributions"] == 8e9 + 8e9 + 2 * 1e9  # all, the ranks' shares, one packed twice
    assert host_total(host) == host["snapshots"] + 18e9 + 3e9
    assert host_total(host | {"starting": 1e12}) == 1e12
    half = host_memory(QWEN3_8B, TRAINER, dataclasses.replace(HOST, ranks_here=4))
    assert half["snapshots"] == host["snapshots"] / 2
