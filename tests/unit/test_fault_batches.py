"""Batches with numbers that are not finite, on disk: a bounded number of them, and no fault hidden by a full disk."""

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.builders import make_batch, make_measurement
from trm_repro.fault_batches import KEPT_BATCHES, save_batch
from trm_repro.step_metrics import UpdateRecord


@pytest.fixture
def record() -> UpdateRecord:
    return UpdateRecord(
        batch=make_batch([(2, 3)]),
        measurement=make_measurement([[0.0, 0.1, float("inf")]]),
        sequence_mask=torch.tensor([False]),
        loss=0.0,
        gradient_norm=0.0,
        is_skipped=True,
        learning_rate=0.1,
    )


def test_the_newest_batches_are_kept_and_the_message_names_the_file(tmp_path, record):
    for step in range(KEPT_BATCHES + 3):
        path = tmp_path / "faults" / f"step_{step:05d}_update_0.safetensors"
        assert save_batch(path, record) == f"its batch is in {path}"
    found = sorted(file.name for file in (tmp_path / "faults").iterdir())
    assert found == [f"step_{step:05d}_update_0.safetensors" for step in range(3, KEPT_BATCHES + 3)]
    assert load_file(path)["policy_logprobs"].tolist() == [[0.0, pytest.approx(0.1), float("inf")]]


def test_a_batch_that_cannot_be_saved_says_so_and_leaves_the_fault_to_be_told(tmp_path, record):
    (tmp_path / "faults").write_text("a file where the folder should be")
    path = tmp_path / "faults" / "step_00000_update_0.safetensors"
    assert save_batch(path, record).startswith(f"its batch could not be saved as {path}: ")
