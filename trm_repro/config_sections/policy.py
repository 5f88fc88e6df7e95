"""The language model and its supervised start."""

from dataclasses import dataclass
from typing import Literal

from trm_repro.config_sections.checks import (
    require,
    require_at_least,
    require_fraction,
    require_positive,
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
