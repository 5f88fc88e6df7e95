"""What an inference engine does for training: take weights in, sample responses, say how likely they were.

The engine knows nothing about tasks or rewards. Shape letters: T response tokens, V vocabulary, L layers,
K experts per token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from trm_repro.config_sections import RolloutConfig

Distribution = Literal["full", "hidden", "top_k", "sampled"]


@dataclass(frozen=True, kw_only=True)
class SamplingRequest:
    """One response to sample.

    Attributes:
        prompt_ids: at least one token.
        seed: distinct per request; requests that share a seed can get the same tokens.
    """

    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How to sample.

    Attributes:
        max_tokens: longest response, end-of-sequence token included.
        temperature: 0 is greedy.
        top_p: nucleus; 1 samples from the whole distribution.
        distribution: return log-probs of the whole vocabulary, final hidden states with the sampled token's log-prob,
            log-probs of the likeliest tokens, or of the sampled token only.
        num_top: K, the number of likeliest tokens under distribution top_k.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    distribution: Distribution = "sampled"
    num_top: int = 1


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled response.

    Attributes:
        token_ids: T >= 1 tokens, the ending token included.
        logprobs: ``[T]`` float32, nats; of the sampled tokens, under the distribution they were drawn from.
        log_distribution: ``[T, V]`` float32, nats, or None.
        hidden: ``[T, H]`` in the engine's dtype; final hidden states, after the last norm, or None.
        top_ids: ``[T, K]`` int32; the likeliest tokens, or None.
        top_logprobs: ``[T, K]`` float32, nats; theirs, or None.
        experts: ``[T, L, K]`` uint8, or None for a dense model.
        finished: whether it ended with a token that ends responses.
    """

    token_ids: tuple[int, ...]
    logprobs: Tensor
    finished: bool
    log_distribution: Tensor | None = None
    hidden: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    experts: Tensor | None = None

    @property
    def text_ids(self) -> tuple[int, ...]:
        """The tokens that are graded: all, but for the one that ended the response."""
        return self.token_ids[:-1] if self.finished else self.token_ids


class Sampler(Protocol):
    """Something to sample from."""

    def sample(self, requests: Sequence[SamplingRequest], settings: SamplingSettings) -> list[Completion]:
        """Sample one response per request, in order."""
        ...


class RolloutEngine(Sampler, Protocol):
    """An inference engine."""

    vocab_size: int
    stop_ids: tuple[int, ...]
    """Tokens that end a response; see `trm_repro.rollout.stopping`."""

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights and forget everything computed with the old ones.

        Args:
            weights: float32 tensors under the policy's own names; the engine rounds them to its precision.
        """
        ...


def start_engine(config: RolloutConfig, model_path: Path, max_length: int) -> RolloutEngine:
    """Start the configured engine on a saved model.

    Args:
        config: the rollout section.
        model_path: directory with weights, configuration and tokenizer.
        max_length: longest prompt and response together, tokens.

    Returns:
        The engine, with the saved weights.

    Raises:
        InputError: if the engine is not installed.
    """
    if config.placement == "server":
        from trm_repro.rollout.vllm.server import ServerEngine

        return ServerEngine(config, model_path, max_length)
    if config.engine == "vllm":
        from trm_repro.rollout.vllm.engine import VllmEngine

        return VllmEngine(config, model_path, max_length)
    from trm_repro.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(config, model_path)
