"""Want of memory is told by the key that asked for it, and nothing else is called so."""

import pytest
import torch

from trm_repro.errors import FaultError
from trm_repro.memory_limits import engine_start_problem, memory_limited
from trm_repro.rollout import Probe, SamplingSettings
from trm_repro.rollout.probe import ProbeReading
from trm_repro.rollout.synced_engine import SyncedEngine

TOO_MUCH = 2**58  # bytes; more than any address space


class StarvingEngine:
    """Asks torch for more memory than there is when it samples."""

    vocab_size = 8

    def sample(self, requests, settings):
        return torch.empty(TOO_MUCH, dtype=torch.uint8)


def test_running_out_of_memory_while_sampling_names_the_keys():
    engine = SyncedEngine(StarvingEngine(), Probe(None, [], "float32", 3.0), ProbeReading(gap=0.0, threshold=0.0))
    told = r"the rollout stage ran out of memory \(.*\); lower rollout\.max_concurrent_sequences or rollout\.kv_cache"
    with pytest.raises(FaultError, match=told):
        engine.sample([], SamplingSettings(max_tokens=1))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError()]
)
def test_every_way_to_say_that_memory_ran_out_is_understood(error: Exception):
    with (
        pytest.raises(FaultError, match=r"the mask stage ran out of memory \(.+\); lower this"),
        memory_limited("mask", "lower this"),
    ):
        raise error


def test_another_error_of_the_runtime_is_not_called_want_of_memory():
    with pytest.raises(RuntimeError, match="size") as raised, memory_limited("mask", "lower this"):
        torch.zeros(2) @ torch.zeros(3)
    assert not isinstance(raised.value, FaultError)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "No available memory for the cache blocks. Try increasing",
            "rollout.kv_cache_bytes=7 does not hold one sequence",
        ),
        (
            "... GiB KV cache is needed, which is larger than the available",
            "of 96 tokens; raise it, or lower rollout.max",
        ),
        ("CUDA out of memory. Tried to allocate", "lower rollout.kv_cache_bytes=7 or rollout.max_concurrent_sequences"),
        ("DefaultCPUAllocator: can't allocate memory", "the engine ran out of memory while it started"),
    ],
)
def test_an_engine_that_does_not_start_for_want_of_memory_names_the_key(said: str, told: str):
    assert told in (engine_start_problem(said, kv_cache_bytes=7, max_length=96) or "")


def test_an_engine_that_does_not_start_for_another_reason_says_nothing_of_memory():
    assert engine_start_problem("config.json is damaged", kv_cache_bytes=7, max_length=96) is None
