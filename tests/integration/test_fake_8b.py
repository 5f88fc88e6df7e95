"""Qwen3-8B on one of eight ranks without its weights: what a step makes, and that `trm-repro plan` counted it right."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.unit.test_capacity import QWEN3_8B
from trm_repro.memory import Sampling, Trainer, gpu_memory
from trm_repro.vocab.chunks import CUDA_CHUNK_ELEMENTS

pytestmark = [pytest.mark.slow]


def test_one_step_of_qwen3_8b_has_the_shapes_dtypes_and_bytes_that_were_planned():
    done = subprocess.run(
        [sys.executable, "-m", "tests.fake_8b"], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    trainer = Trainer(
        num_ranks=8,
        optimizer_moments=2,
        is_sharded=True,
        is_checkpointing=True,
        is_offloading=False,
        tokens_per_micro_batch=2048,
        compute_bytes=2,
        chunk_elements=CUDA_CHUNK_ELEMENTS,
    )
    states = 4 * 512 * 4096 * 2.0
    sampling = Sampling(
        engine_ranks=1, key_value_cache=0.0, engine="sleeping", has_head=True, distribution_bytes=states
    )
    planned = gpu_memory(QWEN3_8B, trainer, sampling)
    assert found["parameters"] == 8_190_735_360
    assert found["local_parameters"] == 8_190_735_360 // 8
    assert found["masters_bytes"] == planned.masters
    assert found["gradients_bytes"] == planned.gradients
    assert found["optimizer_bytes"] == planned.optimizer
    assert found["without_gradient"] == 0
    assert found["gradient_dtypes"] == ["torch.float32"]
    assert found["hidden"] == [[4 * 512, 4096], "torch.bfloat16"]
    assert found["kl"] == [[4 * 512], "torch.float32"]
    assert found["logprobs"] == [[4 * 512], "torch.float32"]
    assert found["mask"] == [[4], "torch.bool"]
    assert found["up_proj_shard"] == [[12288 // 8, 4096], "torch.float32"]
    # The optimizer's moments are made by the step itself, after the passes that need most.
    assert found["peak_bytes"] == pytest.approx(planned.training - planned.optimizer, rel=0.1)
