"""Where the drift sits: by position, rollout probability, length, reward, advantage sign and token id.

A slice counts tokens and sums k1, k2, k3 and keeps the largest k2. Bins of position and length double in width.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.audit.columns import Array, Offsets
from pipelines.audit.statistics import Chunk, Float64, Sequences, Tokens

PROBABILITY_EDGES = (0.01, 0.1, 0.5, 0.9, 0.99)
NUM_DOUBLINGS = 25
RELATIVE_BINS = 10
MAX_TOKEN_ID = 1 << 20
"""Ids from here on are not told apart."""

NUM_WORST_TOKENS = 20


class Sliced:
    """Sums of tokens by bin: ``[K]`` each."""

    def __init__(self, num_bins: int) -> None:
        """Start with empty bins."""
        self.num_tokens: NDArray[np.int64] = np.zeros(num_bins, dtype=np.int64)
        self.sums: NDArray[np.float64] = np.zeros((3, num_bins))
        self.k2_max: Float64 = np.zeros(num_bins)

    def add_tokens(self, bins: Offsets, tokens: Tokens) -> None:
        """Add tokens, ``[N]``, each to its bin: by torch, which adds in place and without the interpreter lock."""
        import torch

        index = torch.from_numpy(bins)
        torch.from_numpy(self.num_tokens).index_add_(0, index, torch.ones(1, dtype=torch.int64).expand(len(index)))
        for sums, values in zip(self.sums, (tokens.log_ratio, tokens.k2, tokens.k3), strict=True):
            torch.from_numpy(sums).index_add_(0, index, torch.from_numpy(values))
        torch.from_numpy(self.k2_max).scatter_reduce_(0, index, torch.from_numpy(tokens.k2), "amax")

    def add_runs(self, bins: Offsets, boundaries: Offsets, tokens: Tokens) -> None:
        """Add runs of tokens, each to its bin: run k, of ``[K]``, lies between boundaries k and k + 1."""
        num_tokens = np.diff(boundaries)
        is_some = num_tokens > 0
        if is_some.any():
            starts = boundaries[:-1][is_some]
            sums = [np.add.reduceat(values, starts) for values in (tokens.log_ratio, tokens.k2, tokens.k3)]
            self._add(bins[is_some], num_tokens[is_some], sums, np.maximum.reduceat(tokens.k2, starts))

    def add_sequences(self, bins: Offsets, sequences: Sequences) -> None:
        """Add whole sequences, ``[B]``, each to its bin."""
        sums = [sequences.log_ratio_sum, sequences.k2_sum, sequences.k3_sum]
        self._add(bins, sequences.length, sums, sequences.k2_max)

    def _add(self, bins: Offsets, num_tokens: Offsets, sums: list[Float64], k2_max: Float64) -> None:
        size = len(self.num_tokens)
        self.num_tokens += np.bincount(bins, weights=num_tokens, minlength=size).astype(np.int64)
        for row, values in enumerate(sums):
            self.sums[row] += np.bincount(bins, weights=values, minlength=size)
        np.maximum.at(self.k2_max, bins, k2_max)

    def row(self, index: int) -> dict[str, Any]:
        """Give a bin's numbers."""
        count = max(1, int(self.num_tokens[index]))
        log_ratio, k2, k3 = (self.sums[:, index] / count).tolist()
        return {
            "num_tokens": int(self.num_tokens[index]),
            "k1_mean": -log_ratio,
            "k2_mean": k2,
            "k3_mean": k3,
            "k2_max": float(self.k2_max[index]),
        }


class Slices:
    """All the ways in which tokens are told apart."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.position, self.relative = Sliced(NUM_DOUBLINGS), Sliced(RELATIVE_BINS)
        self.probability = Sliced(len(PROBABILITY_EDGES) + 1)
        self.length = Sliced(NUM_DOUBLINGS)
        self.correct, self.advantage = Sliced(2), Sliced(3)
        self.token: Sliced | None = None
        self.num_untold_tokens = 0
        self.kl_profile: Float64 = np.zeros(0)

    def add(self, chunk: Chunk, tokens: Tokens, sequences: Sequences) -> None:
        """Add a chunk."""
        lengths, offsets = sequences.length, chunk.offsets
        self.position.add_runs(*_doubling_runs(lengths, offsets), tokens)
        self.relative.add_runs(*_tenth_runs(lengths, offsets), tokens)
        self.probability.add_tokens(_probability_bin(chunk.rollout_logprobs), tokens)
        self.length.add_sequences(doubling_bin(np.maximum(lengths, 1)), sequences)
        if chunk.reward is not None:
            self.correct.add_sequences((chunk.reward > 0).astype(np.int64), sequences)
        if chunk.advantage is not None:
            self.advantage.add_sequences((np.sign(np.nan_to_num(chunk.advantage)) + 1).astype(np.int64), sequences)
        if chunk.token_ids is not None:
            self._add_token_ids(chunk.token_ids, tokens)
        if chunk.token_kl is not None:
            self._add_profile(chunk.token_kl, lengths, offsets)

    def _add_token_ids(self, token_ids: Array, tokens: Tokens) -> None:
        if token_ids.min(initial=0) < 0 or token_ids.max(initial=0) >= MAX_TOKEN_ID:
            is_told = (token_ids >= 0) & (token_ids < MAX_TOKEN_ID)
            self.num_untold_tokens += int((~is_told).sum())
            tokens = Tokens(*(values[is_told] for values in vars(tokens).values()))
            token_ids = token_ids[is_told]
        size = int(token_ids.max(initial=0)) + 1
        if self.token is None or len(self.token.num_tokens) < size:
            grown = Sliced(min(MAX_TOKEN_ID, 1 << max(10, (size - 1).bit_length())))
            if self.token is not None:
                known = len(self.token.num_tokens)
                grown.num_tokens[:known] = self.token.num_tokens
                grown.sums[:, :known] = self.token.sums
                grown.k2_max[:known] = self.token.k2_max
            self.token = grown
        self.token.add_tokens(token_ids, tokens)

    def _add_profile(self, token_kl: Array, lengths: Offsets, offsets: Offsets) -> None:
        longest = int(lengths.max(initial=0))
        position = np.arange(len(token_kl)) - np.repeat(offsets[:-1], lengths)  # [N], from 0
        if longest > len(self.kl_profile):
            self.kl_profile = np.concatenate((self.kl_profile, np.zeros(longest - len(self.kl_profile))))
        sums = np.bincount(position, weights=token_kl)
        self.kl_profile[: len(sums)] += sums

    def summary(self) -> dict[str, list[dict[str, Any]]]:
        """Give the rows of every slice that has tokens, bins in order; token ids by their share of all k3."""
        edges = ["0", *(f"{edge:g}" for edge in PROBABILITY_EDGES), "1"]
        named = {
            "position": (self.position, _doublings()),
            "position_fraction": (
                self.relative,
                [f"{i / 10:g} to {(i + 1) / 10:g}" for i in range(RELATIVE_BINS)],
            ),
            "probability": (self.probability, [f"{a} to {b}" for a, b in pairwise(edges)]),
            "length": (self.length, _doublings()),
            "correct": (self.correct, ["reward <= 0", "reward > 0"]),
            "advantage": (self.advantage, ["negative", "zero", "positive"]),
        }
        found = {
            name: [{"bin": label} | sliced.row(i) for i, label in enumerate(labels) if sliced.num_tokens[i]]
            for name, (sliced, labels) in named.items()
        }
        if self.token is not None:
            total = max(float(self.token.sums[2].sum()), 1e-300)
            worst = np.argsort(-self.token.sums[2], kind="stable")[:NUM_WORST_TOKENS]
            found["token_id"] = [
                {"bin": str(i)} | self.token.row(i) | {"share_of_k3": float(self.token.sums[2, i]) / total}
                for i in worst.tolist()
                if self.token.num_tokens[i]
            ]
        return {name: rows for name, rows in found.items() if rows}


def _doubling_runs(lengths: Offsets, offsets: Offsets) -> tuple[Offsets, Offsets]:
    """Cut sequences where floor(log2) of the position, from 1, changes: bins ``[K]`` and boundaries ``[K+1]``."""
    counts = np.where(lengths > 0, doubling_bin(np.maximum(lengths, 1)) + 1, 0)
    bins = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(offsets[:-1], counts) + (1 << bins) - 1
    return bins, np.append(starts, offsets[-1])


def _tenth_runs(lengths: Offsets, offsets: Offsets) -> tuple[Offsets, Offsets]:
    """Cut sequences into tenths, a token counting where its middle lies: bins ``[K]`` and boundaries ``[K+1]``.

    Position t, from 0, is in tenth j from (t + 1/2) / T >= j / 10 on, so from t = ceil((j T - 5) / 10) on.
    """
    tenths = np.arange(RELATIVE_BINS)
    starts = offsets[:-1, None] + (tenths * lengths[:, None] + 4) // RELATIVE_BINS  # [B, 10]
    return np.tile(tenths, len(lengths)), np.append(starts.reshape(-1), offsets[-1])


def _probability_bin(logprobs: Array) -> Offsets:
    """Return how many of `PROBABILITY_EDGES` a log-prob is at or above: a few comparisons beat a search."""
    bins = np.zeros(len(logprobs), dtype=np.int8)
    for edge in np.log(PROBABILITY_EDGES).astype(logprobs.dtype):
        bins += logprobs >= edge
    return bins.astype(np.int64)


def doubling_bin(numbers: Array) -> Array:
    """Return floor(log2) of whole numbers from 1, at most `NUM_DOUBLINGS` - 1."""
    return np.minimum(np.frexp(numbers.astype(np.float64))[1] - 1, NUM_DOUBLINGS - 1)


def _doublings() -> list[str]:
    return ["1", *(f"{1 << i} to {(2 << i) - 1}" for i in range(1, NUM_DOUBLINGS))]
