"""Batches whose numbers were not finite, kept on disk for whoever looks for the cause."""

from dataclasses import fields
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from trm_repro.step_metrics import UpdateRecord


def save_batch(path: Path, record: UpdateRecord) -> None:
    """Save what an update saw: the batch's tensors, the policy's log-probs and the mask, by name.

    Args:
        path: a ``.safetensors`` file.
        record: the update.
    """
    tensors = {field.name: getattr(record.batch, field.name) for field in fields(record.batch)}
    tensors |= {"policy_logprobs": record.measurement.policy_logprobs, "sequence_mask": record.sequence_mask}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({name: value.contiguous() for name, value in tensors.items() if isinstance(value, Tensor)}, partial)
    partial.replace(path)
