"""Rollouts and the padded batch of them: the one place where shapes are defined.

Shape letters, here and everywhere: B sequences, S prompt and response tokens, T response tokens,
N response tokens of the whole batch without padding, V vocabulary, L layers, K experts per token.
A tensor ``[N, ...]`` holds the response tokens in row-major order of ``response_mask``, so that
``dense[response_mask] = flat`` and ``flat = dense[response_mask]``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

TOKEN_TENSORS = ("log_distribution", "hidden", "top_ids", "top_logprobs", "experts")
"""Optional tensors of a rollout with one row per response token; a batch has them without padding, as rollout_NAME."""
LOGPROB_ROUNDING = 1e-3
"""Nats by which rounding can lift a log-prob above 0: a float32 log-softmax over 151,936 tokens is off by 5e-4."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sampled response and what is known of the distribution it was sampled from.

    Example: ``prompt_ids=(1, 8, 14, 12, 15)`` ("4+8="), ``response_ids=(8, 14, 12, 15, 6, 16, 17, 6, 2)``
    ("4+8=2;#2", then end of sequence), ``logprobs=tensor([-0.01, ...])`` of 9 entries, ``reward=1.0``.

    Attributes:
        group: index of the prompt within its step; responses to one prompt share it.
        prompt_ids: prompt tokens, at least one.
        response_ids: T sampled tokens, at least one, the end-of-sequence token included.
        logprobs: ``[T]`` float32, nats; log pi_roll of the sampled tokens.
        log_distribution: ``[T, V]`` float32, nats; log pi_roll of every token, or None where only the sampled
            token's is stored.
        hidden: ``[T, H]`` bfloat16 or float32, as the engine computes; its final hidden state, after the last norm,
            from which each token was predicted, or None where it is not stored.
        top_ids: ``[T, K]`` int32; the K likeliest tokens, or None where they are not stored.
        top_logprobs: ``[T, K]`` float32, nats; log pi_roll of those tokens, or None.
        experts: ``[T, L, K]`` uint8; experts the engine routed each token to, or None for a dense model.
        finished: whether the response ended by itself within the length limit.
        reward: in [0, 1].
        advantage: group-relative advantage.
        weight_version: number of training steps behind the weights it was sampled from.
    """

    group: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: Tensor
    log_distribution: Tensor | None = None
    hidden: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    experts: Tensor | None = None
    finished: bool = True
    reward: float = 0.0
    advantage: float = 0.0
    weight_version: int = 0

    def __post_init__(self) -> None:
        """Check that lengths agree."""
        length = len(self.response_ids)
        if length == 0 or len(self.prompt_ids) == 0:
            raise ValueError(f"a rollout needs a prompt and a response, got {len(self.prompt_ids)} and {length} tokens")
        for name in ("logprobs", *TOKEN_TENSORS):
            value = getattr(self, name)
            if value is not None and value.shape[0] != length:
                raise ValueError(f"{name} has {value.shape[0]} rows, the response has {length} tokens")


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """B rollouts, padded on the right.

    Example: prompts of 5 and 7 tokens with responses of 9 and 15 give ``input_ids [2, 22]``,
    ``response_mask [2, 15]`` with 9 and 15 True entries, and ``rollout_log_distribution [24, V]``.

    Attributes:
        input_ids: ``[B, S]`` int64; prompt, response, then padding with token 0.
        prompt_lengths: ``[B]`` int64.
        response_ids: ``[B, T]`` int64; padding is token 0.
        response_mask: ``[B, T]`` bool; True on response tokens.
        rollout_logprobs: ``[B, T]`` float32, nats; 0 on padding.
        rewards: ``[B]`` float32.
        advantages: ``[B]`` float32.
        groups: ``[B]`` int64.
        weight_versions: ``[B]`` int64.
        sequence_ids: ``[B]`` int64; position of each sequence in its step.
        token_weights: ``[B, T]`` float32, factors >= 0 of each token's objective that a gate of tokens gave, or None.
        policy_normalizers: ``[B, T]`` float32, nats; log of the sum of exponentials of the tempered logits of the
            policy that is about to learn from the batch, from a measurement with the same weights; or None.
        rollout_log_distribution: ``[N, V]`` float32, nats, or None.
        rollout_hidden: ``[N, H]`` bfloat16 or float32, or None.
        rollout_heads: ``[V, H]`` by weight version, in the dtype of ``rollout_hidden``: the output heads that turn
            hidden states into logits; shared by every part of the batch. Or None.
        rollout_top_ids: ``[N, K]`` int32, or None.
        rollout_top_logprobs: ``[N, K]`` float32, nats, or None.
        rollout_experts: ``[N, L, K]`` uint8, or None.
    """

    input_ids: Tensor
    prompt_lengths: Tensor
    response_ids: Tensor
    response_mask: Tensor
    rollout_logprobs: Tensor
    rewards: Tensor
    advantages: Tensor
    groups: Tensor
    weight_versions: Tensor
    sequence_ids: Tensor
    token_weights: Tensor | None = None
    policy_normalizers: Tensor | None = None
    rollout_log_distribution: Tensor | None = None
    rollout_hidden: Tensor | None = None
    rollout_heads: Mapping[int, Tensor] | None = None
    rollout_top_ids: Tensor | None = None
    rollout_top_logprobs: Tensor | None = None
    rollout_experts: Tensor | None = None

    @classmethod
    def from_rollouts(cls, rollouts: Sequence[Rollout], heads: Mapping[int, Tensor] | None = None) -> "RolloutBatch":
        """Pad rollouts to one batch.

        Args:
            rollouts: at least one; either all or none carry ``log_distribution``, and likewise ``experts``.
            heads: ``[V, H]`` by weight version, for rollouts that carry ``hidden``.

        Returns:
            The batch, ``sequence_ids`` counting from 0.

        Raises:
            ValueError: if there are no rollouts, only some carry an optional tensor, or a version lacks its head.
        """
        if not rollouts:
            raise ValueError("a batch needs at least one rollout, got none")
        needed = {r.weight_version for r in rollouts if r.hidden is not None}
        if missing := needed - set(heads or {}):
            raise ValueError(f"hidden states need the output heads of their weight versions, missing {missing}")
        sequences = [torch.tensor(r.prompt_ids + r.response_ids) for r in rollouts]
        responses = [torch.tensor(r.response_ids) for r in rollouts]
        lengths = torch.tensor([len(r.response_ids) for r in rollouts])
        positions = torch.arange(int(lengths.max()))  # [T]
        return cls(
            input_ids=_pad(sequences),
            prompt_lengths=torch.tensor([len(r.prompt_ids) for r in rollouts]),
            response_ids=_pad(responses),
            response_mask=positions < lengths[:, None],  # [B, T]
            rollout_logprobs=_pad([r.logprobs.float() for r in rollouts]),
            rewards=torch.tensor([r.reward for r in rollouts], dtype=torch.float32),
            advantages=torch.tensor([r.advantage for r in rollouts], dtype=torch.float32),
            groups=torch.tensor([r.group for r in rollouts]),
            weight_versions=torch.tensor([r.weight_version for r in rollouts]),
            sequence_ids=torch.arange(len(rollouts)),
            rollout_heads={version: heads[version] for version in sorted(needed)} if heads and needed else None,
            **{
                f"rollout_{name}": _cat_all_or_none([getattr(r, name) for r in rollouts], name)
                for name in TOKEN_TENSORS
            },
        )

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.input_ids.shape[0]

    @property
    def response_lengths(self) -> Tensor:
        """``[B]`` int64."""
        return self.response_mask.sum(dim=-1)

    def select(self, keep: Tensor) -> "RolloutBatch":
        """Take some sequences, in their order, and trim the padding nobody needs any more.

        Args:
            keep: ``[B]`` bool with at least one True.

        Returns:
            The batch of the kept sequences.

        Raises:
            ValueError: if nothing is kept.
        """
        if not bool(keep.any()):
            raise ValueError("cannot select no sequence")
        flat_keep = keep[:, None].expand_as(self.response_mask)[self.response_mask]  # [N]
        longest_response = int(self.response_lengths[keep].max())
        longest_sequence = int((self.response_lengths + self.prompt_lengths)[keep].max())
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or field.name == "rollout_heads":
                values[field.name] = value
            elif field.name.removeprefix("rollout_") in TOKEN_TENSORS:
                values[field.name] = value[flat_keep]
            elif field.name == "input_ids":
                values[field.name] = value[keep, :longest_sequence]
            elif value.dim() == 2:
                values[field.name] = value[keep, :longest_response]
            else:
                values[field.name] = value[keep]
        return replace(self, **values)

    def split(self, max_tokens: int, *, packed: bool = False) -> Iterator["RolloutBatch"]:
        """Divide into micro-batches of consecutive sequences with at most ``max_tokens`` tokens each.

        Args:
            max_tokens: budget of tokens; a longer sequence gets a micro-batch to itself.
            packed: whether padding is left out of the count, because it will be left out of the computation.

        Yields:
            Micro-batches that together hold every sequence once, in order.
        """
        for start, end in self.spans(max_tokens, packed=packed):
            keep = torch.zeros(self.num_sequences, dtype=torch.bool, device=self.input_ids.device)
            keep[start:end] = True
            yield self.select(keep)

    def spans(self, max_tokens: int, *, packed: bool = False) -> list[tuple[int, int]]:
        """Say where `split` cuts: the first sequence of each micro-batch, and the one after its last."""
        lengths = (self.prompt_lengths + self.response_lengths).tolist()
        spans = []
        start, longest, tokens = 0, 0, 0
        for index, length in enumerate(lengths):
            longest, tokens = max(longest, length), tokens + length
            size = tokens if packed else longest * (index + 1 - start)
            if index > start and size > max_tokens:
                spans.append((start, index))
                start, longest, tokens = index, length, length
        return [*spans, (start, self.num_sequences)]

    def to(self, device: torch.device | str) -> "RolloutBatch":
        """Move every tensor to a device."""
        values = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}
        heads: Mapping[int, Tensor] | None = values.pop("rollout_heads", None)
        moved_heads = heads and {version: head.to(device) for version, head in heads.items()}
        return replace(self, rollout_heads=moved_heads, **{name: v.to(device) for name, v in values.items()})

    def dense(self, flat: Tensor, fill: float = 0.0) -> Tensor:
        """Spread ``[N]`` values of response tokens to ``[B, T]``, with ``fill`` on padding."""
        dense = flat.new_full(self.response_mask.shape, fill)
        return dense.masked_scatter(self.response_mask, flat)


def _pad(rows: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _cat_all_or_none(values: Sequence[Tensor | None], name: str) -> Tensor | None:
    present = [value for value in values if value is not None]
    if not present:
        return None
    if len(present) != len(values):
        raise ValueError(f"{name} is present in {len(present)} of {len(values)} rollouts; all or none must have it")
    return torch.cat(present)
