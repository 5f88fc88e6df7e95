"""The loss and the optimizer."""

from dataclasses import dataclass
from typing import Literal

from trm_repro.config_sections.checks import (
    require,
    require_at_least,
    require_fraction,
    require_positive,
)

LossName = Literal["token_is", "ppo_clip", "token_tis", "gspo", "cispo"]


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The surrogate and its reduction."""

    name: LossName = "token_is"
    """token_is: ratio times advantage (Algorithm 1); ppo_clip, gspo: clipped; token_tis, cispo: capped weights."""
    clip_low: float = 0.2
    """ppo_clip, gspo, cispo: ratios below 1 - clip_low are clipped; 1 leaves that end open."""
    clip_high: float = 0.2
    """ppo_clip, gspo, cispo, token_tis: ratios above 1 + clip_high are clipped."""
    length_normalizer: float = 100.0
    """Each sequence's token sum is divided by this constant; 1 is Algorithm 1 to the letter."""
    denominator: Literal["all", "kept"] = "all"
    """Divide by all sequences of the minibatch (Algorithm 1), or by the kept ones."""
    baseline: Literal["all", "kept"] = "all"
    """Who votes in a group's mean and deviation: all of its sequences, or those the current mask keeps (slower)."""
    advantage_epsilon: float = 1e-4
    """Added to a group's standard deviation of rewards before dividing by it."""

    def __post_init__(self) -> None:
        """Check ranges."""
        require_fraction("loss", clip_low=self.clip_low)
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
    step_limit: float | None = None
    """Largest mean divergence from the rollout policy, nats, a step may leave on what it learned from; null: any."""
    step_halvings: int = 6
    """Times a step above step_limit is halved before it is undone."""
    skip_empty: bool = True
    """Leave the weights alone where no sequence is kept; false: AdamW steps by its momentum and decay alone."""
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
        if self.step_limit is not None:
            require_positive("update", step_limit=self.step_limit)
        require(0 <= self.step_halvings <= 60, "update.step_halvings", "between 0 and 60", self.step_halvings)
        counts = ("warmup_updates", "num_updates_per_rollout", "num_epochs", "tokens_per_micro_batch")
        require_at_least("update", 1, **{name: getattr(self, name) for name in counts})
        for name in ("adam_beta1", "adam_beta2"):
            require(0 <= getattr(self, name) < 1, f"update.{name}", "in [0, 1)", getattr(self, name))
