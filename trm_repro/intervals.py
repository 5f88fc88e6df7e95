"""Finite-sample intervals for averages of bounded samples, with no assumption on their distribution.

Shape letters: N independent samples; ``...`` any leading axes. Numpy and the standard library only. Tokens of
one response depend on each other, and responses to one prompt share it: a sample here is a response
given its prompt, or a prompt's average when prompts are drawn too.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

ROUNDING_SLACK = 1e-6  # of the range; rounding forgiven before a sample counts as out of range


class MeanInterval(NamedTuple):
    """A sample mean and the interval that holds the expectation, ``[...]`` each.

    Attributes:
        mean: average of the samples.
        low: lower end, at least the smallest possible value.
        high: upper end, at most the largest possible value.
    """

    mean: FloatArray
    low: FloatArray
    high: FloatArray


def empirical_bernstein_interval(
    samples: ArrayLike, *, smallest: float = 0.0, largest: float = 1.0, confidence: float = 0.95
) -> MeanInterval:
    """Bound the expectation of bounded samples from both sides by their mean and variance.

    With sample variance v (divisor N - 1) and range r, the half-width is sqrt(2 v L / N) + 7 r L / (3 (N - 1)), where
    L = log(4 / (1 - confidence)): log(2 / error) at half of the error for each side. It holds for every N, and is
    shorter than Hoeffding's where the variance is small. One sample gives the whole range.

    Source: Maurer and Pontil, "Empirical Bernstein Bounds and Sample Variance Penalization" (COLT 2009,
    arXiv 0907.3740), Theorem 4, scaled to the range and used on both sides.

    Args:
        samples: ``[..., N]``; independent along the last axis, each in [smallest, largest]; one outside by less than
            a millionth of the range, as float32 sums are, counts as the end itself.
        smallest: smallest value a sample could have taken, known beforehand and not read off the samples.
        largest: largest such value; finite, so KL needs a stated limit where TV has 1.
        confidence: probability that the interval holds the expectation, in (0, 1); of each leading entry by itself.

    Returns:
        ``[...]`` float64, in the samples' unit.

    Raises:
        ValueError: if there is no sample, one is NaN or out of range, or a number is out of range.
    """
    values = np.asarray(samples, dtype=np.float64)  # [..., N]
    slack = ROUNDING_SLACK * (largest - smallest)
    num_samples = values.shape[-1] if values.ndim else 0
    if num_samples == 0:
        raise ValueError("an interval needs at least one sample along the last axis, got none")
    if not (math.isfinite(smallest) and math.isfinite(largest) and smallest < largest):
        raise ValueError(f"smallest must be below largest and both finite, got {smallest} and {largest}")
    _check_confidence(confidence)
    if not np.all((values >= smallest - slack) & (values <= largest + slack)):  # also catches NaN
        raise ValueError(f"samples must be in [{smallest}, {largest}], got {values.min():g} to {values.max():g}")
    values = values.clip(smallest, largest)
    mean = values.mean(axis=-1)  # [...]
    if num_samples == 1:
        return MeanInterval(mean, np.full_like(mean, smallest), np.full_like(mean, largest))
    log_term = math.log(4 / (1 - confidence))
    variance_part = np.sqrt(2 * values.var(axis=-1, ddof=1) * log_term / num_samples)  # [...]
    half_width = variance_part + 7 * (largest - smallest) * log_term / (3 * (num_samples - 1))
    low, high = np.maximum(mean - half_width, smallest), np.minimum(mean + half_width, largest)
    return MeanInterval(mean, np.asarray(low), np.asarray(high))


def no_event_upper_bound(num_samples: int, *, confidence: float = 0.95) -> float:
    """Bound the probability of an event that none of N independent samples showed.

    Exactly 1 - (1 - confidence)^(1/N): the probability at which N samples without the event have probability
    1 - confidence. Close to `rule_of_three` at 95%, and never above it.

    Source: Clopper and Pearson, "The Use of Confidence or Fiducial Limits" (Biometrika 1934), at zero events.

    Args:
        num_samples: N >= 0; without samples the bound is 1.
        confidence: in (0, 1).

    Returns:
        A probability.

    Raises:
        ValueError: if a number is out of range.
    """
    _check_num_samples(num_samples)
    _check_confidence(confidence)
    return -math.expm1(math.log1p(-confidence) / num_samples) if num_samples else 1.0


def rule_of_three(num_samples: int) -> float:
    """Approximate `no_event_upper_bound` at 95% by min(1, 3 / N): log(0.05) is -2.996.

    Source: Hanley and Lippman-Hand, "If Nothing Goes Wrong, Is Everything All Right?" (JAMA 1983).

    Args:
        num_samples: N >= 0.

    Returns:
        A probability.

    Raises:
        ValueError: if ``num_samples`` is negative.
    """
    _check_num_samples(num_samples)
    return min(1.0, 3 / num_samples) if num_samples else 1.0


def _check_num_samples(num_samples: int) -> None:
    if not num_samples >= 0:
        raise ValueError(f"num_samples must be >= 0, got {num_samples}")


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
