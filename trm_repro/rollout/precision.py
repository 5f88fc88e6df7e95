"""The engine's arithmetic: which dtype it computes in, and how weights are rounded when they go in."""

from collections.abc import Mapping

import torch
from torch import Tensor

from trm_repro.config_sections import Precision

_LARGEST = {"int8": 127.0, "fp8": 448.0}  # of int8, and of float8 e4m3


def compute_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of the engine's weights and activations."""
    return torch.float32 if precision == "float32" else torch.bfloat16


def round_weight(name: str, weight: Tensor, precision: Precision) -> Tensor:
    """Round one weight as the engine's precision does.

    int8 and fp8 (e4m3) round matrices per output channel, scaled to the largest absolute value, and leave
    embeddings, the output head, norms and routers in bfloat16, as quantised inference usually does.

    Args:
        name: the weight's name in the policy.
        weight: ``[out, in]``, ``[experts, out, in]`` or ``[size]``, float32.
        precision: the engine's precision.

    Returns:
        The rounded weight in the engine's dtype.
    """
    is_matrix = weight.dim() >= 2 and not any(part in name for part in ("embed_tokens", "lm_head", "mlp.gate."))
    if precision in _LARGEST and is_matrix:
        scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-8) / _LARGEST[precision]  # [..., out, 1]
        scaled = weight / scale
        rounded = scaled.round() if precision == "int8" else scaled.to(torch.float8_e4m3fn).float()
        weight = rounded * scale
    return weight.to(compute_dtype(precision))


def engine_head(weights: Mapping[str, Tensor], precision: Precision) -> Tensor:
    """Return the output head that an engine holds after it has been given these weights.

    Args:
        weights: the policy's, float32; a head tied to the embedding need not be among them. Where they are gathered
            from several processes, each of these must call.
        precision: the engine's.

    Returns:
        ``[V, H]`` in the engine's dtype, in CPU memory.
    """
    name = "lm_head.weight" if "lm_head.weight" in set(weights) else "model.embed_tokens.weight"
    return round_weight("lm_head.weight", weights[name], precision).cpu()
