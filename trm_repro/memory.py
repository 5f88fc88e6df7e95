"""What a run needs of its machine's memory, on a GPU and on the host, by category.

Arithmetic on shapes; no weights, no torch. `trm-repro plan` prints it, and refuses what cannot fit.
Symbols: P parameters, H hidden size, V vocabulary, W ranks that share the trainer's weights.
"""

from dataclasses import dataclass, fields
from typing import Literal

from trm_repro.capacity import BF16, FLOAT32, ModelShape

LAYERS_IN_FLIGHT = 2  # FSDP2 gathers the next layer while it computes this one
LIVE_IN_BACKWARD = 2  # activations of a layer, and their gradients


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """How the trainer holds the model.

    Attributes:
        num_ranks: W, GPUs that share weights, gradients and optimizer states.
        optimizer_moments: float32 numbers kept a parameter: 2 for AdamW, 0 for plain SGD, 1 more where a step can be
            taken back.
        is_sharded: whether the policy is an FSDP2 module, whose passes gather it unit by unit.
        is_checkpointing: whether activations are recomputed in the backward pass.
        is_offloading: whether masters, gradients and optimizer states live in host memory.
        compute_bytes: of one number in forward and backward passes.
        tokens_per_micro_batch: tokens of one forward and backward pass on one rank.
        chunk_elements: logits that exist at once.
    """

    num_ranks: int
    optimizer_moments: int
    is_sharded: bool
    is_checkpointing: bool
    is_offloading: bool
    compute_bytes: int
    tokens_per_micro_batch: int
    chunk_elements: int


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The engine, and what of a step's rollouts lies on one GPU of the trainer.

    Attributes:
        engine_ranks: GPUs that share one engine's weights (its tensor-parallel size).
        key_value_cache: bytes of the engine's cache on one GPU.
        engine: sleeping: on the trainer's GPUs, its memory free while the trainer works; resident: on them all the
            time; elsewhere: on GPUs of its own.
        has_head: whether the trainer holds the head of the rollout weights, to rebuild distributions from hidden
            states.
        distribution_bytes: of one rank's share of the step's rollout distributions.
    """

    engine_ranks: int
    key_value_cache: float
    engine: Literal["sleeping", "resident", "elsewhere"]
    has_head: bool
    distribution_bytes: float


KEPT = ("masters", "gradients", "optimizer", "rollout_head", "rollout_distributions")
ENGINE = ("engine_weights", "key_value_cache", "streamed_weight")
MOMENTS: dict[str, tuple[str, ...]] = {
    "scoring": (*KEPT, "gathered_root", "saved_activations", "logit_chunk", "head_gradient"),
    "backward": (
        *(*KEPT, "gathered_root", "gathered_layers", "saved_activations", "layer_activations", "head_gradient"),
        "layer_reduction",
    ),
    "reduction": (*KEPT, "root_reduction"),
    "stepping": (*KEPT, "step_workspace"),
}
"""When a GPU of the trainer is fullest, and with what: at the head, in a layer's backward pass, when the gradients of
embedding and head, which are then no longer gathered, are summed over the ranks, and in the optimizer's step."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one GPU by category; those of the trainer are not all there at the same moment."""

    masters: float
    gradients: float
    optimizer: float
    rollout_head: float
    rollout_distributions: float
    gathered_root: float
    gathered_layers: float
    saved_activations: float
    layer_activations: float
    logit_chunk: float
    head_gradient: float
    layer_reduction: float
    root_reduction: float
    step_workspace: float
    engine_weights: float
    key_value_cache: float
    streamed_weight: float
    engine: Literal["sleeping", "resident", "elsewhere"]

    def categories(self) -> dict[str, float]:
        """Return every category."""
        return {field.name: float(getattr(self, field.name)) for field in fields(self) if field.name != "engine"}

    def moments(self) -> dict[str, dict[str, float]]:
        """List what is there at each moment of a step at which a GPU can be fullest, by category."""
        resident = ENGINE if self.engine == "resident" else ()
        moments = {moment: (*names, *resident) for moment, names in MOMENTS.items()}
        # Gradients are freed before the engine wakes; masters and moments stay.
        moments["sampling"] = ENGINE if self.engine == "elsewhere" else ("masters", "optimizer", *ENGINE)
        values = self.categories()
        return {moment: {name: values[name] for name in names} for moment, names in moments.items()}

    def total(self, moment: str) -> float:
        """Add up what is there at one moment."""
        return sum(self.moments()[moment].values())

    @property
    def training(self) -> float:
        """Bytes in use at the fullest moment of the trainer."""
        return max(self.total(moment) for moment in MOMENTS)

    @property
    def sampling(self) -> float:
        """Bytes in use while the engine samples."""
        return self.total("sampling")


def gpu_memory(model: ModelShape, trainer: Trainer, sampling: Sampling) -> Memory:
    """Estimate the memory of one GPU.

    Counted: float32 masters and gradients and the optimizer's moments; a step's rollout distributions and the head that
    rebuilds them; what FSDP2 gathers (embedding, last norm and head as one unit, `LAYERS_IN_FLIGHT` layers) in compute
    precision; gradients of a unit in compute precision and, while summed over ranks, in float32; activations; the
    logits that exist at once; a float32 copy of the shards that the optimizer's step makes; the engine's bfloat16
    weights and cache, and the largest weight on its way into it. Not counted: the CUDA context and fragmentation,
    about 3 GB.

    Args:
        model: the policy.
        trainer: how it is held.
        sampling: the engine.

    Returns:
        Bytes by category.
    """
    share = model.num_parameters / trainer.num_ranks
    width, tokens = trainer.compute_bytes, trainer.tokens_per_micro_batch
    on_gpu = 0.0 if trainer.is_offloading else 1.0
    sharded = 1.0 if trainer.is_sharded else 0.0
    root = model.num_parameters - model.num_layers * model.layer_parameters
    embedding = model.embedding_parameters
    inside = tokens * width * _activation_width(model)
    lowered = width if width < FLOAT32 else 0  # probabilities are rounded for their products
    is_saved = not trainer.is_checkpointing
    return Memory(
        masters=FLOAT32 * share * on_gpu,
        gradients=FLOAT32 * share * on_gpu,
        optimizer=FLOAT32 * trainer.optimizer_moments * share * on_gpu,
        rollout_head=BF16 * embedding if sampling.has_head else 0.0,
        rollout_distributions=sampling.distribution_bytes,
        gathered_root=sharded * width * root,
        gathered_layers=sharded * width * LAYERS_IN_FLIGHT * model.layer_parameters,
        saved_activations=model.num_layers * (tokens * model.hidden_size * width + is_saved * inside),
        layer_activations=LIVE_IN_BACKWARD * inside,
        logit_chunk=(FLOAT32 + lowered) * min(trainer.chunk_elements, 2 * tokens * model.vocab_size),
        head_gradient=sharded * width * embedding,
        layer_reduction=sharded * (width + FLOAT32) * model.layer_parameters,
        root_reduction=sharded * (width + FLOAT32) * root,
        step_workspace=FLOAT32 * share * on_gpu,
        engine_weights=BF16 * model.num_parameters / sampling.engine_ranks,
        key_value_cache=sampling.key_value_cache,
        streamed_weight=(FLOAT32 + BF16) * embedding,
        engine=sampling.engine,
    )


def _activation_width(model: ModelShape) -> int:
    """Numbers a token leaves inside one layer: two norms, queries, keys, values, attention, three feed-forward, sum."""
    query = model.num_attention_heads * model.head_dim
    key_value = model.num_key_value_heads * model.head_dim
    return 3 * model.hidden_size + 2 * query + 2 * key_value + 3 * model.intermediate_size * model.num_experts_per_token


@dataclass(frozen=True, kw_only=True)
class Host:
    """What of a run lies in the memory of its first machine.

    Attributes:
        ranks_here: ranks of the trainer on it.
        num_snapshots: copies of the weights that rollouts may still be sampled from, the one being made included.
        distribution_bytes: of all rollout distributions of a step.
        sleeping_bytes: of the engines' weights that wait on this machine.
    """

    ranks_here: int
    num_snapshots: int
    distribution_bytes: float
    sleeping_bytes: float


def host_memory(model: ModelShape, trainer: Trainer, host: Host) -> dict[str, float]:
    """Estimate the memory of the first machine.

    The first rank alone reads the model, whole and in float32, and hands each rank its shards; at the end it gathers
    the weights to save them. It holds a step's rollout distributions, the ranks hold their shares, and one rank's share
    is packed twice on its way. Not counted: processes themselves, about 3 GB each with an engine.

    Args:
        model: the policy.
        trainer: how it is held.
        host: what lies there.

    Returns:
        Bytes by category; `starting` is over before the others are there.
    """
    share_here = FLOAT32 * model.num_parameters * host.ranks_here / trainer.num_ranks
    states = 2 + trainer.optimizer_moments
    return {
        "starting": float(FLOAT32 * model.num_parameters),
        "snapshots": host.num_snapshots * share_here,
        "offloaded_states": states * share_here if trainer.is_offloading else 0.0,
        "sleeping_engines": host.sleeping_bytes,
        "rollout_distributions": host.distribution_bytes
        * (1 + (host.ranks_here + 2 if trainer.num_ranks > 1 else 2) / trainer.num_ranks),
    }


def host_total(parts: dict[str, float]) -> float:
    """Add up what the host holds at its fullest: while starting, or in a step."""
    return max(parts["starting"], sum(parts.values()) - parts["starting"])
