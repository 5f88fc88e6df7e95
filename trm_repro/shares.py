"""Which sequences of a step this rank computes, and how the ranks' measurements become one.

Every rank knows every sequence of the step, without the large tensors of its rollout distribution, so that masks,
denominators and metrics are those of one process. The forward and backward passes are divided.
Shape letters: B sequences of a minibatch, T response tokens, W ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from trm_repro import ranks
from trm_repro.batch import RolloutBatch
from trm_repro.certified import KLInterval
from trm_repro.measurement import Measurement, measure
from trm_repro.policy import Policy


class Share:
    """The sequences of one step that this rank computes; all of them where there is one rank."""

    def __init__(self, sequences: RolloutBatch | None = None) -> None:
        """Take this rank's sequences.

        Args:
            sequences: with all tensors, best in the order of their lengths, as micro-batches are made of neighbours
                and padded to their longest; None stands for every sequence.
        """
        self.sequences = sequences

    def to(self, device: torch.device | str) -> None:
        """Move the sequences to a device."""
        if self.sequences is not None:
            self.sequences = self.sequences.to(device)

    def part(self, batch: RolloutBatch) -> RolloutBatch | None:
        """Take this rank's sequences of a batch, with what the update gave the batch; None where there are none.

        Args:
            batch: B sequences in the order of their ids.
        """
        if self.sequences is None:
            return batch
        own = torch.isin(self.sequences.sequence_ids, batch.sequence_ids)
        if not bool(own.any()):
            return None
        part = self.sequences.select(own)
        rows = torch.searchsorted(batch.sequence_ids, part.sequence_ids)
        given: dict[str, Any] = {"advantages": batch.advantages[rows]}
        for name in ("token_weights", "policy_normalizers"):  # [B, T]
            value = getattr(batch, name)
            given[name] = None if value is None else value[rows, : part.response_mask.shape[1]]
        return replace(part, **given)

    def filler(self) -> RolloutBatch:
        """Return the shortest sequence, for passes that only keep the ranks' collectives in step."""
        assert self.sequences is not None
        lengths = self.sequences.prompt_lengths + self.sequences.response_lengths
        return self.sequences.select(torch.arange(len(lengths), device=lengths.device) == lengths.argmin())

    def passes(self, batch: RolloutBatch, max_tokens: int, *, packed: bool) -> tuple[list[RolloutBatch], int]:
        """Divide this rank's part of a batch into micro-batches.

        Args:
            batch: B sequences.
            max_tokens: budget of a micro-batch.
            packed: whether padding is left out of the count.

        Returns:
            The micro-batches, and how many passes over the filler make their number that of the busiest rank.
        """
        part = self.part(batch)
        parts = [] if part is None else list(part.split(max_tokens, packed=packed))
        return parts, int(ranks.largest(len(parts))) - len(parts)


def measure_shared(
    policy: Policy, batch: RolloutBatch, share: Share, *, temperature: float, tokens_per_micro_batch: int
) -> Measurement:
    """Score a batch with the current policy, each rank its share, and give the whole measurement to all.

    Args:
        policy: pi_theta.
        batch: B sequences.
        share: this rank's.
        temperature: sampling temperature of the rollouts.
        tokens_per_micro_batch: budget of one forward pass.

    Returns:
        The measurement of all B sequences, on every rank.
    """
    options: dict[str, Any] = {"temperature": temperature, "tokens_per_micro_batch": tokens_per_micro_batch}
    if share.sequences is None:
        return measure(policy, batch, **options)
    part = share.part(batch)
    _, num_fillers = share.passes(batch, tokens_per_micro_batch, packed=policy.is_packing)
    own = [] if part is None else [(part.sequence_ids, measure(policy, part, **options))]
    with torch.no_grad():
        for _ in range(num_fillers):
            policy(share.filler(), temperature=temperature, measure=True)
    return gather_measurements(batch, own)


def gather_measurements(batch: RolloutBatch, own: Sequence[tuple[Tensor, Measurement]]) -> Measurement:
    """Give the measurements of every rank's parts of a batch to all.

    Args:
        batch: B sequences.
        own: sequence ids and measurement of each part that this rank measured.

    Returns:
        The measurement of all B sequences.
    """
    length = batch.response_mask.shape[1]
    if ranks.num_ranks() == 1:
        return merge_measurements(batch.sequence_ids, length, own)
    moved = [(ids.cpu(), move(measurement, lambda tensor: tensor.cpu())) for ids, measurement in own]
    pieces = [piece for pieces in ranks.gather_to_all(moved) for piece in pieces]
    merged = merge_measurements(batch.sequence_ids.cpu(), length, pieces)
    return move(merged, lambda tensor: tensor.to(batch.rewards.device))


def merge_measurements(sequence_ids: Tensor, length: int, pieces: Sequence[tuple[Tensor, Measurement]]) -> Measurement:
    """Put measurements of parts of a batch together.

    Args:
        sequence_ids: ``[B]``; of the whole batch.
        length: T of the whole batch.
        pieces: sequence ids and measurement of each part; together they hold every sequence once.

    Returns:
        The measurement of the batch, 0 on padding.
    """
    rows = [torch.searchsorted(sequence_ids, ids) for ids, _ in pieces]

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        whole = tensors[0].new_zeros(len(sequence_ids), length)  # [B, T]
        for row, tensor in zip(rows, tensors, strict=True):
            whole[row, : tensor.shape[1]] = tensor
        return whole

    values: dict[str, Any] = {}
    for field in fields(Measurement):
        found = [getattr(piece, field.name) for _, piece in pieces]
        if found[0] is None:
            values[field.name] = None
        elif isinstance(found[0], KLInterval):
            values[field.name] = KLInterval(*(joined(ends) for ends in zip(*found, strict=True)))
        else:
            values[field.name] = joined(found)
    return Measurement(**values)


def move(measurement: Measurement, change: Callable[[Tensor], Tensor]) -> Measurement:
    """Apply a change, such as a move to a device, to every tensor of a measurement."""
    values: dict[str, Any] = {}
    for field in fields(Measurement):
        value = getattr(measurement, field.name)
        if isinstance(value, Tensor):
            value = change(value)
        elif isinstance(value, KLInterval):
            value = KLInterval(*(change(end) for end in value))
        values[field.name] = value
    return Measurement(**values)


def divide(batches: Sequence[RolloutBatch], num_parts: int) -> list[list[int]]:
    """Divide the sequences of a step among ranks, so that each minibatch costs every rank about the same.

    Sequences of a minibatch are dealt out by length, forth and back.

    Args:
        batches: disjoint minibatches that hold every sequence once.
        num_parts: W.

    Returns:
        Sequence ids of each rank, ascending.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    order = [*range(num_parts), *reversed(range(num_parts))]
    for batch in batches:
        lengths = batch.prompt_lengths + batch.response_lengths
        by_length = batch.sequence_ids[lengths.argsort(descending=True, stable=True)].tolist()
        for index, sequence in enumerate(by_length):
            parts[order[index % len(order)]].append(sequence)
    return [sorted(part) for part in parts]
