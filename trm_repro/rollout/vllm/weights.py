"""From the policy's weights to the names and shapes of a checkpoint that vLLM loads."""

from collections.abc import Iterator, Mapping

from torch import Tensor

GATE_UP = ".mlp.experts.gate_up_proj"
DOWN = ".mlp.experts.down_proj"


def checkpoint_weights(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Name weights as in a checkpoint: experts one by one, and the output head always.

    transformers fuses a layer's experts into ``gate_up_proj [experts, 2 inner, hidden]`` and
    ``down_proj [experts, hidden, inner]``. An output head tied to the embedding is still sent: vLLM may hold a
    packed copy of it, which would silently stay as it was.

    Args:
        weights: the policy's weights by name.

    Yields:
        Names and tensors of the checkpoint format.
    """
    for name, weight in weights.items():
        if name.endswith(GATE_UP):
            prefix = name.removesuffix("gate_up_proj")
            for expert, fused in enumerate(weight):
                gate, up = fused.chunk(2, dim=0)
                yield f"{prefix}{expert}.gate_proj.weight", gate
                yield f"{prefix}{expert}.up_proj.weight", up
        elif name.endswith(DOWN):
            prefix = name.removesuffix("down_proj")
            for expert, down in enumerate(weight):
                yield f"{prefix}{expert}.down_proj.weight", down
        else:
            yield name, weight
    if "lm_head.weight" not in weights:
        yield "lm_head.weight", weights["model.embed_tokens.weight"]
