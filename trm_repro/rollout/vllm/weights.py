"""From the policy's weights to the names and shapes of a checkpoint that vLLM loads."""

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

GATE_UP = ".mlp.experts.gate_up_proj"
DOWN = ".mlp.experts.down_proj"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def checkpoint_weights(
    weights: Mapping[str, Tensor], change: Callable[[str, Tensor], Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Name weights as in a checkpoint: experts one by one, and the output head always.

    transformers fuses a layer's experts into ``gate_up_proj [experts, 2 inner, hidden]`` and
    ``down_proj [experts, hidden, inner]``. An output head tied to the embedding is still sent: vLLM may hold a
    packed copy of it, which would silently stay as it was. Each weight is asked for once, in its order, as gathering it
    from shards is a collective operation.

    Args:
        weights: the policy's weights by name.
        change: applied to each of them, such as rounding.

    Yields:
        Names and tensors of the checkpoint format.
    """
    embedding = None
    for name, whole in weights.items():
        weight = whole if change is None else change(name, whole)
        if name == EMBEDDING:
            embedding = weight
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
    if HEAD not in weights and embedding is not None:
        yield HEAD, embedding
