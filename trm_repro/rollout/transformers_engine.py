"""Sampling with transformers alone, for machines without vLLM: same interface, a key-value cache, no paging."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trm_repro.config_sections import RolloutConfig
from trm_repro.policy import load_model
from trm_repro.rollout.engine import Completion, SamplingRequest, SamplingSettings
from trm_repro.rollout.precision import compute_dtype, round_weight
from trm_repro.rollout.stopping import stop_token_ids


class _Step(NamedTuple):
    """One token of each of B responses, and what is kept of the distribution it was drawn from."""

    tokens: Tensor  # [B]
    logprobs: Tensor  # [B]
    log_distribution: Tensor | None  # [B, V]
    hidden: Tensor | None  # [B, H]
    experts: Tensor | None  # [B, L, K]


class TransformersEngine:
    """A `RolloutEngine` on transformers; prompts of equal length are decoded together."""

    def __init__(self, config: RolloutConfig, model_path: Path) -> None:
        """Load a saved model in the engine's precision.

        Args:
            config: the rollout section.
            model_path: directory with weights, configuration and tokenizer.

        Raises:
            InputError: if the directory holds no model that can be loaded.
        """
        self.precision = config.precision
        self.max_concurrent_sequences = config.max_concurrent_sequences
        model = load_model(model_path)
        weights = model.state_dict()
        self.model = model.to(compute_dtype(config.precision)).eval()
        self.load_weights(weights)
        self.vocab_size = int(model.config.vocab_size)
        self.num_experts_per_token: int | None = getattr(model.config, "num_experts_per_tok", None)
        self.stop_ids = stop_token_ids(config.stop_tokens, model_path)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights."""
        rounded = {name: round_weight(name, weight, self.precision) for name, weight in weights.items()}
        if "lm_head.weight" in self.model.state_dict():  # tied to the embedding, it is not among the policy's weights
            rounded.setdefault("lm_head.weight", rounded["model.embed_tokens.weight"])
        self.model.load_state_dict(rounded, strict=True)

    @torch.no_grad()
    def sample(self, requests: Sequence[SamplingRequest], settings: SamplingSettings) -> list[Completion]:
        """Sample one response per request, in order."""
        by_length: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            by_length.setdefault(len(request.prompt_ids), []).append(index)
        completions: dict[int, Completion] = {}
        for indices in by_length.values():
            for start in range(0, len(indices), self.max_concurrent_sequences):
                chunk = indices[start : start + self.max_concurrent_sequences]
                decoded = self._decode([requests[index] for index in chunk], settings)
                completions.update(zip(chunk, decoded, strict=True))
        return [completions[index] for index in range(len(requests))]

    def _decode(self, requests: Sequence[SamplingRequest], settings: SamplingSettings) -> list[Completion]:
        generators = [torch.Generator().manual_seed(request.seed) for request in requests]
        steps: list[_Step] = []
        inputs = torch.tensor([request.prompt_ids for request in requests])
        cache = None
        ended = torch.zeros(len(requests), dtype=torch.bool)
        routing = {"output_router_logits": True} if self.num_experts_per_token else {}
        while len(steps) < settings.max_tokens and not bool(ended.all()):
            output = self.model.model(input_ids=inputs, past_key_values=cache, use_cache=True, **routing)
            cache = output.past_key_values
            hidden = output.last_hidden_state[:, -1]  # [B, H]
            logits = self.model.lm_head(hidden).float()  # [B, V]
            log_distribution = processed_log_distribution(logits, settings)
            tokens = self._choose(log_distribution, generators, settings)
            experts = None
            if self.num_experts_per_token:
                last = [layer.view(*inputs.shape, -1)[:, -1] for layer in output.router_logits]
                experts = torch.stack([layer.topk(self.num_experts_per_token).indices for layer in last], dim=1)
            steps.append(
                _Step(
                    tokens=tokens,
                    logprobs=log_distribution.gather(-1, tokens[:, None])[:, 0],
                    log_distribution=log_distribution if settings.distribution in ("full", "top_k") else None,
                    hidden=hidden.clone() if settings.distribution == "hidden" else None,
                    experts=experts,
                )
            )
            ended |= torch.tensor([int(token) in self.stop_ids for token in tokens])
            inputs = tokens[:, None]
        return [self._to_completion(row, steps, settings) for row in range(len(requests))]

    def _choose(
        self, log_distribution: Tensor, generators: Sequence[torch.Generator], settings: SamplingSettings
    ) -> Tensor:
        if settings.temperature == 0:
            return log_distribution.argmax(dim=-1)
        rows = zip(log_distribution.exp(), generators, strict=True)
        return torch.cat([torch.multinomial(row, 1, generator=generator) for row, generator in rows])

    def _to_completion(self, row: int, steps: Sequence[_Step], settings: SamplingSettings) -> Completion:
        tokens = [int(step.tokens[row]) for step in steps]
        ends = [position for position, token in enumerate(tokens) if token in self.stop_ids]
        length = ends[0] + 1 if ends else len(tokens)

        def rows(name: str) -> Tensor | None:
            values = [getattr(step, name) for step in steps[:length]]
            return None if values[0] is None else torch.stack([value[row] for value in values])  # [T, ...]

        distribution, logprobs, experts = rows("log_distribution"), rows("logprobs"), rows("experts")
        assert logprobs is not None
        top = None
        if distribution is not None and settings.distribution == "top_k":
            top = distribution.topk(min(settings.num_top, self.vocab_size))
        return Completion(
            token_ids=tuple(tokens[:length]),
            logprobs=logprobs,
            log_distribution=distribution if top is None else None,
            hidden=rows("hidden"),
            top_ids=None if top is None else top.indices.int(),
            top_logprobs=None if top is None else top.values,
            experts=None if experts is None else experts.to(torch.uint8),
            finished=bool(ends),
        )


def processed_log_distribution(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """Turn logits into the log-distribution tokens are drawn from.

    Args:
        logits: ``[B, V]`` float32.
        settings: temperature (0 leaves the logits as they are) and nucleus.

    Returns:
        ``[B, V]`` float32, nats; -inf outside the nucleus.
    """
    if settings.temperature > 0:
        logits = logits / settings.temperature
    log_distribution = torch.log_softmax(logits, dim=-1)
    if settings.top_p < 1:
        ordered, order = log_distribution.sort(dim=-1, descending=True)
        mass_before = ordered.exp().cumsum(dim=-1) - ordered.exp()  # [B, V]
        outside = torch.zeros_like(mass_before, dtype=torch.bool).scatter(-1, order, mass_before >= settings.top_p)
        log_distribution = torch.log_softmax(log_distribution.masked_fill(outside, -torch.inf), dim=-1)
    return log_distribution
