"""The tail of a token statistic from one pass: quantiles, the largest values, and the Hill index.

Quantiles come from a histogram over the leading bits of float32 numbers, so that every bin is 2^-9 = 0.2% wide
relative to its value, over the whole range; the largest values are kept exactly.
"""

import math

import numpy as np
from numpy.typing import NDArray

from pipelines.audit.statistics import Float64

MANTISSA_BITS = 9
SHIFT = 23 - MANTISSA_BITS
NUM_BINS = 0x7F800000 >> SHIFT
QUANTILE_ERROR = 2.0**-MANTISSA_BITS
"""Largest relative error of a quantile."""

NUM_LARGEST = 1001
"""Values kept exactly; one more than the most order statistics that the Hill index uses."""


class Tail:
    """Sums up non-negative values; ``merge`` adds another one up."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.counts: NDArray[np.int64] = np.zeros(NUM_BINS + 1, dtype=np.int64)
        self.largest: Float64 = np.zeros(0)

    def add(self, values: Float64) -> None:
        """Add values, ``[N]`` float64, >= 0 and finite."""
        bits = values.astype(np.float32).view(np.uint32) >> SHIFT
        counts = np.bincount(bits)
        self.counts[: len(counts)] += counts
        floor = self.largest[0] if len(self.largest) == NUM_LARGEST else -1.0
        self._keep(values[values > floor])

    def merge(self, other: "Tail") -> None:
        """Add what another one has seen."""
        self.counts += other.counts
        self._keep(other.largest)

    def _keep(self, values: Float64) -> None:
        if len(values) > NUM_LARGEST:
            values = np.partition(values, len(values) - NUM_LARGEST)[-NUM_LARGEST:]
        self.largest = np.sort(np.concatenate((self.largest, values)))[-NUM_LARGEST:]

    @property
    def num_values(self) -> int:
        """N."""
        return int(self.counts.sum())

    @property
    def maximum(self) -> float | None:
        """The largest value, exactly."""
        return float(self.largest[-1]) if len(self.largest) else None

    def quantile(self, level: float) -> float | None:
        """Return the smallest value that at least a fraction ``level`` of all are at most.

        Exact where it is among the `NUM_LARGEST` largest, else within a relative `QUANTILE_ERROR`.
        """
        total = self.num_values
        if total == 0:
            return None
        rank = max(1, math.ceil(level * total))  # from 1, ascending
        from_top = total - rank
        if from_top < len(self.largest):
            return float(self.largest[-1 - from_top])
        index = int(np.searchsorted(np.cumsum(self.counts), rank))
        edges = (np.array([index, index + 1], dtype=np.uint32) << SHIFT).view(np.float32)
        return float(edges.astype(np.float64).mean())

    def hill_index(self) -> float | None:
        """Estimate the exponent a of a tail P(X > x) ~ x^-a from the k largest values.

        k is 1% of the values, at least 10 and at most 1,000. Below 1 the mean of such a tail is infinite, below 2 its
        variance. Source: Hill 1975.

        Returns:
            The index; None where there are fewer than 100 values or the k-th is 0.
        """
        k = max(10, min(NUM_LARGEST - 1, self.num_values // 100))
        if self.num_values < 100 or self.largest[-k - 1] <= 0:
            return None
        excess = float(np.log(self.largest[-k:] / self.largest[-k - 1]).sum())
        return k / excess if excess > 0 else None
