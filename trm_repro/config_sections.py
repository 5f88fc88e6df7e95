"""The sections of a run's configuration: frozen dataclasses whose defaults are the CPU miniature.

Every field has a default and a one-line meaning under it; ranges are checked in ``__post_init__``.
Imports the standard library only; `trm_repro.config` joins the sections and loads files.
"""

from dataclasses import dataclass
from typing import Literal

Precision = Literal["bfloat16", "float32", "int8", "fp8"]
MaskCriterion = Literal["none", "trm_max", "trm_avg", "trm_max_avg", "ln_trm", "ser", "random"]
MaxEstimator = Literal["exact", "k2"]
MeanEstimator = Literal["exact", "k3"]
LossName = Literal["token_is", "ppo_clip"]


LARGEST_SETTING = 1e13  # more bytes, tokens or steps than any machine has


def require(condition: bool, key: str, wanted: str, got: object) -> None:
    """Raise ValueError naming the key, what it must be and what it was, unless the condition holds."""
    if not condition:
        shown = repr(got)
        raise ValueError(f"{key} must be {wanted}, got {shown if len(shown) <= 100 else shown[:100] + '...'}")


def require_positive(section: str, **values: float) -> None:
    """Check that values are above 0, and neither smaller nor larger than any real setting."""
    for name, value in values.items():
        is_in_range = 1 / LARGEST_SETTING <= value <= LARGEST_SETTING
        require(is_in_range, f"{section}.{name}", f"> 0 and at most {LARGEST_SETTING:g}", value)


def require_at_least(section: str, minimum: float, **values: float) -> None:
    """Check that values are not below a minimum, nor larger than any real setting."""
    for name, value in values.items():
        is_in_range = minimum <= value <= LARGEST_SETTING
        require(is_in_range, f"{section}.{name}", f">= {minimum:g} and at most {LARGEST_SETTING:g}", value)


def require_fraction(section: str, **values: float) -> None:
    """Check that values lie in (0, 1]."""
    for name, value in values.items():
        require(0 < value <= 1, f"{section}.{name}", "in (0, 1]", value)


def require_plain_name(key: str, name: str) -> None:
    """Check that a name can be a file's name: letters, digits, dots, dashes and underscores."""
    is_plain = name[:1].isalnum() and all(c.isalnum() or c in "._-" for c in name) and name.isascii()
    wanted = "letters, digits, dots, dashes and underscores, the first a letter or digit, 100 at most"
    require(is_plain and len(name) <= 100, key, wanted, name)


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What the policy is trained on."""

    name: Literal["chain_arithmetic"] = "chain_arithmetic"
    """Training task; chain_arithmetic: running sums modulo 10, written out in characters."""
    min_operands: int = 8
    """Fewest operands of a training problem; n operands need 6 n - 3 response tokens."""
    max_operands: int = 14
    """Most operands of a training problem."""

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.min_operands >= 2, "task.min_operands", ">= 2", self.min_operands)
        require(
            self.min_operands <= self.max_operands <= 100,
            "task.max_operands",
            f"between task.min_operands = {self.min_operands} and 100",
            self.max_operands,
        )


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The language model; sizes are used when no path is given."""

    path: str | None = None
    """Directory or hub name of a pretrained model and its tokenizer; null builds a Qwen3 from the sizes below."""
    architecture: Literal["moe", "dense"] = "moe"
    """Qwen3-MoE or dense Qwen3."""
    hidden_size: int = 64
    """Width of the residual stream."""
    num_layers: int = 3
    """Decoder layers."""
    num_attention_heads: int = 2
    """Query heads."""
    num_key_value_heads: int = 1
    """Key and value heads."""
    head_dim: int = 32
    """Width of one attention head."""
    intermediate_size: int = 192
    """Inner width of the dense feed-forward block."""
    moe_intermediate_size: int = 64
    """Inner width of one expert."""
    num_experts: int = 8
    """Experts per layer."""
    num_experts_per_token: int = 2
    """Experts a token is routed to."""
    vocab_size: int | None = None
    """Rows of the embedding; null takes the tokenizer's number of tokens."""
    max_position_embeddings: int = 1024
    """Longest sequence the model can represent, tokens."""
    tie_word_embeddings: bool = True
    """Whether the output head shares the embedding's weights."""
    initializer_range: float = 0.05
    """Standard deviation of the initial weights."""

    def __post_init__(self) -> None:
        """Check ranges."""
        sizes = ["hidden_size", "num_layers", "num_attention_heads", "num_key_value_heads", "head_dim"]
        sizes += ["intermediate_size", "moe_intermediate_size", "num_experts", "max_position_embeddings"]
        require_at_least("policy", 1, **{name: getattr(self, name) for name in sizes})
        require_positive("policy", initializer_range=self.initializer_range)
        require(
            1 <= self.num_experts_per_token <= self.num_experts,
            "policy.num_experts_per_token",
            f"between 1 and policy.num_experts = {self.num_experts}",
            self.num_experts_per_token,
        )
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "policy.num_attention_heads",
            f"a multiple of policy.num_key_value_heads = {self.num_key_value_heads}",
            self.num_attention_heads,
        )
        require(self.path != "", "policy.path", "null or not empty", self.path)
        require(self.head_dim % 2 == 0, "policy.head_dim", "even (rotary embeddings turn pairs)", self.head_dim)
        for name in ("hidden_size", "intermediate_size", "moe_intermediate_size", "max_position_embeddings"):
            require(getattr(self, name) <= 2**20, f"policy.{name}", "at most 1048576", getattr(self, name))
        if self.vocab_size is not None:
            require_at_least("policy", 1, vocab_size=self.vocab_size)


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """Supervised training that gives reinforcement learning something to improve."""

    target_pass_rate: float = 0.3
    """Stop when the chance of writing the exact solution at temperature 1 reaches this."""
    learning_rate: float = 3e-3
    """Peak rate of AdamW."""
    cosine_steps: int = 1200
    """Steps over which the rate falls to a tenth of its peak."""
    max_steps: int = 3000
    """Give up after this many steps."""
    tokens_per_step: int = 1600
    """Response tokens in one supervised batch, about."""
    min_operands: int = 3
    """Curriculum: fewest operands."""
    max_operands: int = 14
    """Curriculum: most operands, reached half-way through cosine_steps."""
    check_every: int = 10
    """Steps between two measurements of the pass rate."""
    num_problems: int = 256
    """Problems on which the pass rate is measured."""

    def __post_init__(self) -> None:
        """Check ranges."""
        require_fraction("warm_start", target_pass_rate=self.target_pass_rate)
        require_positive("warm_start", learning_rate=self.learning_rate)
        counts = ("cosine_steps", "max_steps", "tokens_per_step", "check_every", "num_problems")
        require_at_least("warm_start", 1, **{name: getattr(self, name) for name in counts})
        require(
            2 <= self.min_operands <= self.max_operands,
            "warm_start.min_operands",
            f"between 2 and warm_start.max_operands = {self.max_operands}",
            self.min_operands,
        )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled, and what is kept of the distribution they were sampled from."""

    engine: Literal["vllm", "transformers"] = "vllm"
    """Inference engine."""
    precision: Precision = "bfloat16"
    """Engine arithmetic; int8 and fp8 round the weights at every sync and compute in bfloat16."""
    distribution: Literal["full", "top_k", "sampled"] = "full"
    """Stored per token: log-probs of the whole vocabulary, of the likeliest tokens, or of the sampled token only."""
    num_top_logprobs: int = 8
    """K of distribution top_k; exact KL is then known to lie in an interval."""
    staleness_steps: int = 4
    """Rollouts come from weights this many steps old; the first steps use the oldest there are."""
    num_prompts: int = 16
    """Prompts per step."""
    group_size: int = 8
    """Responses per prompt."""
    temperature: float = 1.0
    """Sampling temperature; the policy's logits are divided by it too."""
    top_p: float = 1.0
    """Nucleus sampling; only 1 is accepted in training: otherwise the rollout policy lacks support."""
    max_prompt_tokens: int = 32
    """Longest prompt, tokens."""
    max_response_tokens: int = 90
    """Longest response, tokens; a response cut here is unfinished and earns no reward."""
    prefix_caching: bool = False
    """Let the engine reuse key-value blocks of equal prompts; emptied at every sync."""
    kv_cache_bytes: int = 268435456
    """Memory for the engine's key-value cache, bytes."""
    max_concurrent_sequences: int = 256
    """Sequences the engine decodes together."""
    probe_contexts: int = 32
    """Fixed contexts on which engine and policy are compared after every sync."""
    probe_factor: float = 3.0
    """Stop when the probe's gap exceeds this many times the engine's own noise."""

    def __post_init__(self) -> None:
        """Check ranges."""
        require_at_least("rollout", 0, staleness_steps=self.staleness_steps)
        require(self.staleness_steps <= 10_000, "rollout.staleness_steps", "at most 10000", self.staleness_steps)
        counts = ["num_prompts", "max_prompt_tokens", "max_response_tokens", "kv_cache_bytes"]
        counts += ["max_concurrent_sequences", "probe_contexts", "num_top_logprobs"]
        require_at_least("rollout", 1, **{name: getattr(self, name) for name in counts})
        require_at_least("rollout", 2, group_size=self.group_size)
        require_positive("rollout", temperature=self.temperature)
        require(
            self.top_p == 1.0,
            "rollout.top_p",
            "1 in training (a truncated rollout policy lacks support, so no divergence bound holds)",
            self.top_p,
        )
        require(1 < self.probe_factor < 10, "rollout.probe_factor", "in (1, 10)", self.probe_factor)


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Which sequences an update may learn from."""

    criterion: MaskCriterion = "trm_avg"
    """none keeps all; trm_*, ln_trm and ser are the paper's; random copies another arm's rate."""
    max_threshold: float = 0.05
    """TRM-Max: largest token divergence of an accepted sequence, nats."""
    avg_threshold: float = 0.001
    """TRM-Avg: largest mean token divergence of an accepted sequence, nats."""
    max_estimator: MaxEstimator = "exact"
    """Token divergence behind TRM-Max: exact KL(rollout || policy), or k2 from the sampled token."""
    avg_estimator: MeanEstimator = "k3"
    """Token divergence behind TRM-Avg: exact KL(rollout || policy), or k3 from the sampled token."""
    ln_trm_threshold: float = 0.05
    """LN-TRM: largest weighted mean of |ratio - 1| of an accepted sequence."""
    ln_trm_epsilon: float = 0.1
    """LN-TRM: token TV assumed in the weights, in (0, 1]."""
    ln_trm_delta: float = 0.05
    """LN-TRM: token KL assumed in the weights, nats."""
    ser_threshold: float = 0.05
    """SER: largest mean of |ratio - 1| of an accepted sequence; the paper recommends 0.03 to 0.10."""
    undecided: Literal["reject", "accept"] = "reject"
    """What to do with a sequence whose exact KL the stored log-probs do not settle (rollout.distribution top_k)."""
    timing: Literal["each_update", "once"] = "each_update"
    """Recompute the mask before each update (Algorithm 1), or keep the one from before the first."""
    reference_arm: str | None = None
    """criterion random: the arm whose number of kept sequences is copied, update by update."""

    def __post_init__(self) -> None:
        """Check ranges."""
        require_fraction("mask", ln_trm_epsilon=self.ln_trm_epsilon)
        for name in ("max_threshold", "avg_threshold", "ln_trm_threshold", "ln_trm_delta", "ser_threshold"):
            value = getattr(self, name)
            require(value > 0, f"mask.{name}", "> 0", value)
        if self.reference_arm is not None:
            require_plain_name("mask.reference_arm", self.reference_arm)
        needs_reference = self.criterion == "random"
        require(
            needs_reference == (self.reference_arm is not None),
            "mask.reference_arm",
            "an arm's name when mask.criterion is random, and null otherwise",
            self.reference_arm,
        )

    @property
    def has_exact_max(self) -> bool:
        """Whether the criterion reads the exact largest divergence."""
        return self.criterion in ("trm_max", "trm_max_avg") and self.max_estimator == "exact"

    @property
    def has_exact_avg(self) -> bool:
        """Whether the criterion reads the exact mean divergence."""
        return self.criterion in ("trm_avg", "trm_max_avg") and self.avg_estimator == "exact"


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The surrogate and its reduction."""

    name: LossName = "token_is"
    """token_is: ratio times advantage (Algorithm 1); ppo_clip: PPO's pessimistic clip of it."""
    clip_low: float = 0.2
    """ppo_clip: ratios below 1 - clip_low are clipped."""
    clip_high: float = 0.2
    """ppo_clip: ratios above 1 + clip_high are clipped."""
    length_normalizer: float = 100.0
    """Each sequence's token sum is divided by this constant; 1 is Algorithm 1 to the letter."""
    denominator: Literal["all", "kept"] = "all"
    """Divide by all sequences of the minibatch (Algorithm 1), or by the kept ones."""
    advantage_epsilon: float = 1e-4
    """Added to a group's standard deviation of rewards before dividing by it."""

    def __post_init__(self) -> None:
        """Check ranges."""
        require(0 < self.clip_low < 1, "loss.clip_low", "in (0, 1)", self.clip_low)
        require_positive("loss", clip_high=self.clip_high, length_normalizer=self.length_normalizer)
        require_positive("loss", advantage_epsilon=self.advantage_epsilon)


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """The optimizer and how a rollout batch is divided into updates."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Optimizer."""
    learning_rate: float = 0.5
    """Learning rate after warm-up."""
    warmup_updates: int = 4
    """Updates over which the rate grows linearly to learning_rate."""
    adam_beta1: float = 0.9
    """adamw: decay of the first moment."""
    adam_beta2: float = 0.95
    """adamw: decay of the second moment."""
    weight_decay: float = 0.0
    """Decoupled (adamw) or L2 (sgd) weight decay."""
    max_gradient_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    num_updates_per_rollout: int = 4
    """Disjoint minibatches a step's sequences are divided into, one update each."""
    num_epochs: int = 1
    """Passes over a step's sequences."""
    tokens_per_micro_batch: int = 16384
    """Padded tokens in one forward and backward pass, at most; one sequence may exceed it."""

    def __post_init__(self) -> None:
        """Check ranges."""
        require_at_least("update", 0, learning_rate=self.learning_rate, weight_decay=self.weight_decay)
        require_positive("update", max_gradient_norm=self.max_gradient_norm)
        counts = ("warmup_updates", "num_updates_per_rollout", "num_epochs", "tokens_per_micro_batch")
        require_at_least("update", 1, **{name: getattr(self, name) for name in counts})
        for name in ("adam_beta1", "adam_beta2"):
            require(0 <= getattr(self, name) < 1, f"update.{name}", "in [0, 1)", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Scores on problems that are never trained on."""

    every_steps: int = 10
    """Steps between two evaluations; before the first step and after the last there is always one."""
    num_problems: int = 256
    """Held-out problems answered greedily."""
    num_sampled_problems: int = 64
    """Held-out problems answered num_samples times by sampling."""
    num_samples: int = 4
    """k of avg@k."""
    temperature: float = 1.0
    """Temperature of the sampled answers."""
    top_p: float = 0.95
    """Nucleus of the sampled answers."""
    max_response_tokens: int = 90
    """Longest answer, tokens."""
    length_operands: tuple[int, ...] = (8, 14, 20, 28, 38, 50)
    """Problem sizes at which rejection against response length is measured; an empty list leaves it out."""
    num_length_prompts: int = 32
    """Prompts of each of those sizes, rollout.group_size responses each."""
    prompt_template: Literal["plain", "chat"] = "plain"
    """Text as it is, or as one user turn of the tokenizer's chat template (for instruction-tuned models)."""

    def __post_init__(self) -> None:
        """Check ranges."""
        counts = ["every_steps", "num_problems", "num_sampled_problems", "num_samples", "max_response_tokens"]
        counts += ["num_length_prompts"]
        for size in self.length_operands:
            require(2 <= size <= 100, "evaluation.length_operands", "between 2 and 100", size)
        require_at_least("evaluation", 1, **{name: getattr(self, name) for name in counts})
        require_positive("evaluation", temperature=self.temperature)
        require_fraction("evaluation", top_p=self.top_p)
