"""Batches whose numbers were not finite, kept on disk for whoever looks for the cause."""

import contextlib
from dataclasses import fields
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from trm_repro.step_metrics import UpdateRecord

KEPT_BATCHES = 16
"""Of a run, the newest: a fault that comes now and then must not fill the disk."""


def save_batch(path: Path, record: UpdateRecord) -> str:
    """Save what an update saw: the batch's tensors, the policy's log-probs and the mask, by name.

    Args:
        path: a ``.safetensors`` file, in a folder of such files alone.
        record: the update.

    Returns:
        Where it is, or why it could not be saved, for a message: that is not to hide the fault itself.
    """
    tensors = {field.name: getattr(record.batch, field.name) for field in fields(record.batch)}
    tensors |= {"policy_logprobs": record.measurement.policy_logprobs, "sequence_mask": record.sequence_mask}
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in tensors.items() if isinstance(value, Tensor)}, partial)
        partial.replace(path)
        for old in sorted(path.parent.glob("*.safetensors"))[:-KEPT_BATCHES]:
            old.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        return f"its batch could not be saved as {path}: {error}"
    return f"its batch is in {path}"
