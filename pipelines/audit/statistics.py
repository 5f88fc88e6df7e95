"""Statistics of a chunk: of each token, of each sequence, and sums that add up over chunks.

Shape letters: B sequences, N tokens. Sequences lie one after the other in flat arrays; sums over a sequence are
`reduceat` calls over its offsets, so no loop runs over sequences. Natural logs; log-ratio is policy over rollout.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.audit.columns import Array, Floats, Offsets

Float64 = NDArray[np.float64]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp, as in `trm_repro.divergence`; exp(20) is 5e8."""


@dataclass
class Chunk:
    """Sequences whose log-ratios are all finite.

    Example: two sequences of 2 and 1 tokens have offsets ``[0, 2, 3]`` and 3 values in every token array.

    Attributes:
        offsets: ``[B+1]`` int64.
        rollout_logprobs: ``[N]`` float, nats.
        policy_logprobs: ``[N]`` float, nats.
        reward: ``[B]`` float, or None; likewise advantage and step.
        advantage: ``[B]`` float, or None.
        step: ``[B]`` int64, or None.
        prompt_id: ``[B]`` of any type, or None.
        token_ids: ``[N]`` int, or None.
        token_kl: ``[N]`` float, nats, exact KL(pi_roll || pi_theta), or None.
        interval: what top-K log-probs certify, or None.
    """

    offsets: Offsets
    rollout_logprobs: Floats
    policy_logprobs: Floats
    reward: Floats | None = None
    advantage: Floats | None = None
    step: Array | None = None
    prompt_id: Array | None = None
    token_ids: Array | None = None
    token_kl: Floats | None = None
    interval: "TokenInterval | None" = None

    @property
    def lengths(self) -> Offsets:
        """``[B]``: tokens of each sequence."""
        return np.diff(self.offsets)


@dataclass
class TokenInterval:
    """What is certified of each token, ``[N]`` each.

    Attributes:
        kl_low: nats; what KL(pi_roll || pi_theta) is at least.
        kl_high: nats; what it is at most, infinite where that is not known.
        tv_low: what the total variation is at least.
        tv_high: what it is at most.
        total_variation: of the known tokens and one bucket for all others, as DPPO's Top-K TV is.
        is_contradictory: bool; stored log-probs are those of no distribution, so that nothing is certified.
    """

    kl_low: Float64
    kl_high: Float64
    tv_low: Float64
    tv_high: Float64
    total_variation: Float64
    is_contradictory: NDArray[np.bool_]


@dataclass
class Tokens:
    """``[N]`` float64 each, nats: the log-ratio x, rho - 1 = expm1(x), k2 = x^2 / 2 and k3 = rho - 1 - x."""

    log_ratio: Float64
    ratio_minus_1: Float64
    k2: Float64
    k3: Float64


@dataclass
class Sequences:
    """``[B]`` each: what the gates of the paper and the sums look at.

    Attributes:
        length: tokens.
        log_ratio_sum: sum of x, the log of the product of ratios.
        k2_sum: sum of k2.
        k3_sum: sum of k3.
        k2_max: largest k2; 0 of an empty sequence.
        deviation_sum: sum of |rho - 1|.
        weighted_deviation: W / Z of LN-TRM.
        kl_max: largest exact KL, or None.
        kl_sum: sum of exact KL, or None.
    """

    length: Offsets
    log_ratio_sum: Float64
    k2_sum: Float64
    k3_sum: Float64
    k2_max: Float64
    deviation_sum: Float64
    weighted_deviation: Float64
    kl_max: Float64 | None = None
    kl_sum: Float64 | None = None

    @property
    def divisor(self) -> Float64:
        """``[B]``: length, 1 of an empty sequence, whose means are 0."""
        return np.maximum(self.length, 1).astype(np.float64)


def token_statistics(chunk: Chunk) -> Tokens:
    """Compute the statistics of every token.

    Source: TRM (arXiv 2512.23075v3), sample-based estimators. The log-ratio is clamped before exp at +-MAX_LOG_RATIO.
    """
    log_ratio = np.subtract(chunk.policy_logprobs, chunk.rollout_logprobs, dtype=np.float64)
    largest = max(-log_ratio.min(initial=0.0), log_ratio.max(initial=0.0))
    clamped = log_ratio if largest <= MAX_LOG_RATIO else np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_minus_1 = np.expm1(clamped)
    k2 = np.square(log_ratio)
    k2 *= 0.5
    # As in trm_repro.divergence, k3 clamps above alone; below -20 rho - 1 is -1 either way.
    k3 = ratio_minus_1 - np.minimum(log_ratio, MAX_LOG_RATIO) if clamped is not log_ratio else ratio_minus_1 - log_ratio
    return Tokens(log_ratio, ratio_minus_1, k2, k3)


def inner_product(left: Float64, right: Float64) -> float:
    """Sum the products of two vectors, ``[N]``, on this thread: BLAS would wake threads that wait for each other."""
    return float(np.einsum("i,i->", left, right))


def segment_sum(values: Floats, offsets: Offsets) -> Float64:
    """Sum values over each sequence: ``[B]`` from ``[N]``; 0 of an empty one."""
    return _reduce(np.add, values, offsets)


def segment_max(values: Floats, offsets: Offsets) -> Float64:
    """Find the largest value >= 0 of each sequence: ``[B]`` from ``[N]``; 0 of an empty one."""
    return _reduce(np.maximum, values, offsets)


def _reduce(operation: np.ufunc, values: Floats, offsets: Offsets) -> Float64:
    lengths = np.diff(offsets)
    result = np.zeros(len(lengths))
    is_some = lengths > 0
    if is_some.any():  # reduceat gives an empty segment the value at its start
        result[is_some] = operation.reduceat(values, offsets[:-1][is_some])
    return result


class FutureWeights:
    """Weights w_t = min(1, (T - t) epsilon, sqrt((T - t) delta / 2)) of LN-TRM as a table over T - t.

    From T - t = 1 / epsilon and 2 / delta on a weight is 1, so only the last tokens of a response need the table.

    Source: TRM (arXiv 2512.23075v3), LN-TRM criterion.
    """

    def __init__(self, epsilon: float, delta: float) -> None:
        """Make the table."""
        remaining = np.arange(math.ceil(max(1 / epsilon, 2 / delta)), dtype=np.float64)
        self.table = np.minimum(1.0, np.minimum(remaining * epsilon, np.sqrt(remaining * delta / 2)))
        self.sums = np.cumsum(self.table)

    def deviation(self, ratio_minus_1: Float64, offsets: Offsets) -> tuple[Float64, Float64]:
        """Sum |rho - 1|, ``[N]``, over each sequence, and compute its W / Z, 0 of one token or none: ``[B]`` each."""
        deviation, lengths = np.abs(ratio_minus_1), np.diff(offsets)
        tails = np.minimum(lengths, len(self.table))  # [B]: tokens with a weight of the table
        boundaries = np.append(np.stack((offsets[:-1], offsets[1:] - tails), axis=1).reshape(-1), offsets[-1])
        body, tail = segment_sum(deviation, boundaries).reshape(-1, 2).T
        tail_offsets = np.concatenate(([0], np.cumsum(tails)))
        remaining = np.repeat(tail_offsets[1:] - 1, tails) - np.arange(tail_offsets[-1])  # [M]
        last = deviation[np.repeat(offsets[1:] - 1, tails) - remaining]
        weighted = body + segment_sum(last * self.table[remaining], tail_offsets)
        total = self.sums[np.maximum(tails - 1, 0)] + (lengths - tails)
        return body + tail, np.divide(weighted, total, out=np.zeros_like(weighted), where=total > 0)


def sequence_statistics(chunk: Chunk, tokens: Tokens, weights: FutureWeights) -> Sequences:
    """Compute the statistics of every sequence."""
    deviation_sum, weighted_deviation = weights.deviation(tokens.ratio_minus_1, chunk.offsets)
    exact = chunk.token_kl
    return Sequences(
        length=chunk.lengths,
        log_ratio_sum=segment_sum(tokens.log_ratio, chunk.offsets),
        k2_sum=segment_sum(tokens.k2, chunk.offsets),
        k3_sum=segment_sum(tokens.k3, chunk.offsets),
        k2_max=segment_max(tokens.k2, chunk.offsets),
        deviation_sum=deviation_sum,
        weighted_deviation=weighted_deviation,
        kl_max=None if exact is None else segment_max(exact, chunk.offsets),
        kl_sum=None if exact is None else segment_sum(np.asarray(exact, dtype=np.float64), chunk.offsets),
    )
