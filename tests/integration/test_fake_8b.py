"""Qwen3-8B on one of eight ranks without its weights: what a step makes, and that `trm-repro plan` counted it right."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.unit.test_capacity import QWEN3_8B
from trm_repro.capacity import Trainer, trainer_memory

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
        is_checkpointing=True,
        is_offloading=False,
        tokens_per_micro_batch=2048,
        chunk_tokens=512,
    )
    planned = trainer_memory(QWEN3_8B, trainer, engine_ranks=1, key_value_cache=0.0)
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
