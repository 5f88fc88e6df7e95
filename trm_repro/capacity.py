"""What a step costs: floating-point operations, bytes read and stored, seconds.

Arithmetic on shapes; no weights, no torch. Every estimate states what it counts, and `trm-repro plan` prints it.
Symbols: P parameters, L layers, H hidden size, V vocabulary, T tokens. Memory is in `trm_repro.memory`.
"""

from dataclasses import asdict, dataclass

from trm_repro.config_sections.checks import LARGEST_SETTING, require

BF16, FLOAT32 = 2, 4  # bytes
TOKEN_BYTES = 2 * FLOAT32  # of a stored token: its id and its log-prob


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A Qwen3-like decoder.

    Attributes:
        hidden_size: H.
        num_layers: L.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: width of a head.
        intermediate_size: inner width of the feed-forward block, or of one expert.
        vocab_size: V.
        tie_word_embeddings: whether the output head is the embedding.
        num_experts: experts a layer; 1 is a dense block.
        num_experts_per_token: experts a token visits.
    """

    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    num_experts: int = 1
    num_experts_per_token: int = 1

    def __post_init__(self) -> None:
        """Check that every size is one that a model can have."""
        for name, value in asdict(self).items():
            if name != "tie_word_embeddings":
                require(1 <= value <= LARGEST_SETTING, name, f">= 1 and at most {LARGEST_SETTING:g}", value)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of one V x H matrix."""
        return self.vocab_size * self.hidden_size

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: attention, its two head norms, feed-forward, router, two norms."""
        query = self.num_attention_heads * self.head_dim
        key_value = self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * (2 * query + 2 * key_value)
        router = self.hidden_size * self.num_experts if self.num_experts > 1 else 0
        return attention + self.num_experts * self._expert_parameters + router + self._norm_parameters

    @property
    def num_parameters(self) -> int:
        """P, every parameter."""
        heads = self.embedding_parameters * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * self.layer_parameters + heads + self.hidden_size

    @property
    def flops_per_token(self) -> float:
        """Operations of one token's forward pass through the matrices, attention's scores left out: 2 a weight used."""
        unused = (self.num_experts - self.num_experts_per_token) * self._expert_parameters + self._norm_parameters
        return 2.0 * (self.num_layers * (self.layer_parameters - unused) + self.embedding_parameters)

    def attention_flops(self, length: float) -> float:
        """Count the operations of causal attention over one sequence of ``length`` tokens: scores and sums, forward."""
        return 2.0 * self.num_layers * self.num_attention_heads * self.head_dim * length * length

    @property
    def key_value_bytes_per_token(self) -> int:
        """Bytes of one token in a bfloat16 key-value cache."""
        return 2 * self.num_layers * self.num_key_value_heads * self.head_dim * BF16

    @property
    def _norm_parameters(self) -> int:
        return 2 * self.hidden_size + 2 * self.head_dim

    @property
    def _expert_parameters(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU by its data sheet.

    Attributes:
        name: as sold.
        memory_bytes: all of it.
        flops: dense bfloat16 operations a second.
        bandwidth: bytes a second from its memory.
    """

    name: str
    memory_bytes: float
    flops: float
    bandwidth: float


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="a100-80gb", memory_bytes=80e9, flops=312e12, bandwidth=2.04e12),
        Gpu(name="l40s", memory_bytes=48e9, flops=362e12, bandwidth=0.864e12),
        Gpu(name="h100-80gb", memory_bytes=80e9, flops=989e12, bandwidth=3.35e12),
        Gpu(name="h200", memory_bytes=141e9, flops=989e12, bandwidth=4.8e12),
        Gpu(name="b200", memory_bytes=180e9, flops=2250e12, bandwidth=8e12),
    )
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step.

    Attributes:
        num_sequences: responses.
        prompt_tokens: mean length of a prompt.
        response_tokens: mean length of a response.
        num_epochs: passes of updates over the responses.
        is_rebuilding: whether the mask rebuilds the rollout distribution from hidden states.
    """

    num_sequences: int
    prompt_tokens: float
    response_tokens: float
    num_epochs: int
    is_rebuilding: bool

    @property
    def sequence_tokens(self) -> float:
        """Prompt and response together."""
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the data sheet that are reached; assumptions, to be replaced by measurements.

    Attributes:
        training: of the operations, in forward and backward passes.
        decoding: of the memory bandwidth, while sampling.
    """

    training: float = 0.4
    decoding: float = 0.6


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """What a stage costs all GPUs together.

    Attributes:
        stage: its name.
        flops: operations.
        bytes_read: from GPU memory; 0 where operations bind.
        seconds: expected time, all GPUs working.
    """

    stage: str
    flops: float
    bytes_read: float
    seconds: float


def stage_costs(  # noqa: PLR0913 - one argument for each thing that a user can vary
    model: ModelShape,
    workload: Workload,
    gpu: Gpu,
    *,
    num_gpus: int,
    engine_ranks: int,
    concurrent_sequences: int,
    is_checkpointing: bool,
    is_half_precision: bool,
    efficiency: Efficiency,
) -> list[StageCost]:
    """Estimate operations, bytes and seconds of one step.

    Rollout: each decoding step reads the weights once for all sequences that an engine decodes together, and each
    sequence's key-value cache; the engine's operations bind where that takes longer. Mask: one forward pass, and where
    distributions are rebuilt from hidden states one more pass of the output head. Update: forward, backward (twice the
    forward), with activation checkpointing the layers' forward once more, and in half precision one more pass of the
    head, whose normalizers are then not those of the mask's pass. The trainer's head sees response tokens alone. That
    mask and update share a pass where most sequences are kept is not counted on.

    Args:
        model: the policy.
        workload: one step.
        gpu: its data sheet.
        num_gpus: all that take part.
        engine_ranks: GPUs of one engine.
        concurrent_sequences: sequences that one engine decodes together, at most.
        is_checkpointing: whether activations are recomputed.
        is_half_precision: whether the trainer computes in bfloat16.
        efficiency: assumed shares of the data sheet.

    Returns:
        Rollout, mask, update.
    """
    tokens = workload.num_sequences * workload.sequence_tokens
    attention = workload.num_sequences * model.attention_flops(workload.sequence_tokens)
    num_responses = workload.num_sequences * workload.response_tokens
    head = 2.0 * model.embedding_parameters * num_responses
    layers = tokens * (model.flops_per_token - 2.0 * model.embedding_parameters) + attention
    forward = layers + head
    num_engines = num_gpus / engine_ranks
    together = max(1.0, min(concurrent_sequences, workload.num_sequences / num_engines))
    waves = workload.num_sequences / num_engines / together
    weight_reads = num_engines * waves * workload.response_tokens * BF16 * model.num_parameters
    mean_context = workload.prompt_tokens + workload.response_tokens / 2
    cache_reads = num_responses * mean_context * model.key_value_bytes_per_token
    read = weight_reads + cache_reads
    speed = num_gpus * gpu.flops * efficiency.training
    decoding = max(read / (num_gpus * gpu.bandwidth * efficiency.decoding), forward / speed)
    mask = workload.num_epochs * (forward + (head if workload.is_rebuilding else 0.0))
    again = (layers if is_checkpointing else 0.0) + (head if is_half_precision else 0.0)
    update = workload.num_epochs * (3.0 * forward + again)
    return [
        StageCost(stage="rollout", flops=forward, bytes_read=read, seconds=decoding),
        StageCost(stage="mask", flops=mask, bytes_read=0.0, seconds=mask / speed),
        StageCost(stage="update", flops=update, bytes_read=0.0, seconds=update / speed),
    ]


def stored_bytes_per_token(distribution: str, *, hidden_size: int, vocab_size: int, num_top_logprobs: int) -> int:
    """Count what a shard keeps of one response token, before compression.

    Args:
        distribution: full, hidden, top_k or sampled.
        hidden_size: H.
        vocab_size: V.
        num_top_logprobs: K of top_k.

    Returns:
        Bytes: token id and log-prob, and the distribution.
    """
    extra = {
        "sampled": 0,
        "top_k": num_top_logprobs * (FLOAT32 + FLOAT32),
        "hidden": hidden_size * BF16,
        "full": vocab_size * FLOAT32,
    }
    return TOKEN_BYTES + extra[distribution]
