"""Intervals, tests and scores of repeated samples: what stands beside every mean in a table.

Shape letters: P problems, K answers per problem, S seeds, N units that were drawn independently (problems or seeds);
``...`` any leading axes. Numpy only. Resampling takes a ``np.random.Generator``: the same one gives the same numbers.
Problems and seeds are resampled whole: the answers to one problem, and the steps of one run, depend on each other.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
Alternative = Literal["two-sided", "greater", "less"]

MAX_EXACT_PAIRS = 14
"""Up to this many pairs all sign patterns are enumerated (16,384); above, patterns are drawn."""
_TIE_SLACK = 1e-12  # of the mean absolute difference; rounding forgiven before two sums count as different


class Interval(NamedTuple):
    """An estimate and the interval around it, ``[...]`` each.

    Attributes:
        estimate: the statistic of the data itself.
        low: lower end.
        high: upper end.
    """

    estimate: FloatArray
    low: FloatArray
    high: FloatArray


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """Two arms on the same seeds, or on the same problems.

    Example: first (0.6, 0.7), second (0.5, 0.5) has ``num_pairs = 2``, ``mean_difference = 0.15``, the interval
    (0.1, 0.2) and a two-sided p-value of 2/4.

    Attributes:
        num_pairs: N.
        mean_difference: mean of first minus second.
        low: lower end of its bootstrap interval.
        high: upper end.
        p_value: of the sign-flip test.
    """

    num_pairs: int
    mean_difference: float
    low: float
    high: float
    p_value: float


def bootstrap_mean(
    values: ArrayLike, rng: np.random.Generator, *, num_resamples: int = 10_000, confidence: float = 0.95
) -> Interval:
    """Bootstrap an interval of the mean over the last axis, by percentiles.

    N units are drawn with replacement out of N; the ends are the (1 -+ confidence) / 2 quantiles of the resamples'
    means. All leading entries share the resamples, so that a curve is resampled by whole runs. It is pointwise: each
    entry by itself. With few units it is too short: of 95% intervals of N normal values, 84% hold the mean at N = 5,
    90% at N = 10, 93% at N = 20. One unit gives an interval of length 0, which says nothing.

    Source: Efron, "Bootstrap Methods: Another Look at the Jackknife" (Annals of Statistics 1979), percentile interval.

    Args:
        values: ``[..., N]``: a scalar per seed ``[S]``, a curve ``[steps, S]``, a score per problem ``[P]``; finite.
        rng: source of the resamples.
        num_resamples: how many are drawn.
        confidence: in (0, 1).

    Returns:
        ``[...]`` each.

    Raises:
        ValueError: if there is no unit, a value is not finite, or a number is out of range.
    """
    array = _finite(values, "values")  # [..., N]
    if array.ndim == 0:
        raise ValueError("values must have an axis of seeds or problems, got a number")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    if num_resamples < 1:
        raise ValueError(f"num_resamples must be >= 1, got {num_resamples}")
    num_units = array.shape[-1]
    chosen = rng.integers(0, num_units, size=(num_resamples, num_units))  # [resamples, N]
    means = array[..., chosen].mean(axis=-1)  # [..., resamples]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2], axis=-1)
    return Interval(np.asarray(array.mean(axis=-1)), np.asarray(low), np.asarray(high))


def mean_interval(values: FloatArray, *, num_resamples: int = 2000, seed: int = 0) -> tuple[FloatArray, FloatArray]:
    """Bootstrap a 95% interval of the mean over seeds, at each step of a curve.

    Args:
        values: ``[steps, S]``.
        num_resamples: resamples of the seeds.
        seed: seed of the resampling.

    Returns:
        Lower and upper ends, ``[steps]`` each.
    """
    interval = bootstrap_mean(values, np.random.default_rng(seed), num_resamples=num_resamples)
    return interval.low, interval.high


def average_at_k_interval(
    rewards: ArrayLike, rng: np.random.Generator, *, num_resamples: int = 10_000, confidence: float = 0.95
) -> Interval:
    """Bootstrap avg@k, the mean over problems of the mean over answers, by whole problems.

    A problem drawn brings all its K answers: the interval is about other problems of the same kind, answered again.
    Resampling single answers would leave out how much problems differ, and be too short.

    Source: Field and Welsh, "Bootstrapping clustered data" (JRSS B 2007), the cluster bootstrap.

    Args:
        rewards: ``[P, K]``, each in [0, 1]; every problem has K answers.
        rng: source of the resamples.
        num_resamples: how many are drawn.
        confidence: in (0, 1).

    Returns:
        Scalars.

    Raises:
        ValueError: if the array is not ``[P, K]`` with P, K >= 1, or a value is not finite.
    """
    array = _finite(rewards, "rewards")
    if array.ndim != 2:
        raise ValueError(f"rewards must be [problems, answers], got {array.ndim} axes")
    return bootstrap_mean(array.mean(axis=1), rng, num_resamples=num_resamples, confidence=confidence)


def pass_at_k(num_correct: ArrayLike, num_samples: ArrayLike, k: int) -> FloatArray:
    """Estimate, without bias, the chance that at least one of k answers to a problem is right.

    1 - C(n - c, k) / C(n, k), computed as 1 - prod_{j<k} (1 - c / (n - j)) in logarithms: no binomial coefficient
    overflows and a small chance keeps its digits. 1 - (1 - c/n)^k would be too low.

    Source: Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374), equation 1.

    Args:
        num_correct: c, ``[...]``; whole numbers, 0 <= c <= n.
        num_samples: n, ``[...]``, broadcasting; whole numbers >= k.
        k: >= 1.

    Returns:
        ``[...]`` in [0, 1], a problem each; pass@k is their mean.

    Raises:
        ValueError: if a number is out of range or not whole.
    """
    correct, samples = (_finite(value, "counts")[..., None] for value in (num_correct, num_samples))  # [..., 1]
    if np.any(correct != np.floor(correct)) or np.any(samples != np.floor(samples)):
        raise ValueError("num_correct and num_samples must be whole numbers")
    if k < 1 or np.any(samples < k):
        raise ValueError(f"k must be from 1 to num_samples = {samples.min():g}, got {k}")
    if np.any((correct < 0) | (correct > samples)):
        raise ValueError("num_correct must be from 0 to num_samples")
    share = correct / (samples - np.arange(k))  # [..., k]; of the answers left after j, those that are right
    with np.errstate(divide="ignore"):
        log_none = np.log1p(-np.minimum(share, 1.0)).sum(axis=-1)  # [...]; -inf where k answers must hold a right one
    return np.asarray(-np.expm1(log_none) + 0.0)  # no -0.0


def majority_at_k(answers: Sequence[Sequence[Hashable | None]], rewards: ArrayLike) -> FloatArray:
    """Grade the answer most of K samples agree on, for each problem.

    None does not vote; a problem without a vote scores 0. Among answers with equally many votes one is taken at
    random: the score is the mean of theirs, the expectation over that choice, so that the order of the samples does
    not matter. An answer scores the largest reward any of its samples has.

    Source: Wang et al., "Self-Consistency Improves Chain of Thought Reasoning" (arXiv 2203.11171); the ties are ours.

    Args:
        answers: P problems of K answers, compared by equality: normalise them first.
        rewards: ``[P, K]``.

    Returns:
        ``[P]``; maj@k is their mean.

    Raises:
        ValueError: if the shapes differ or a reward is not finite.
    """
    array = _finite(rewards, "rewards")
    if array.ndim != 2 or [len(row) for row in answers] != [array.shape[1]] * array.shape[0]:
        raise ValueError(f"answers and rewards must be [problems, answers] alike, got rewards {array.shape}")
    return np.array([_majority(row, scores) for row, scores in zip(answers, array, strict=True)])


def compare_paired(
    first: ArrayLike,
    second: ArrayLike,
    rng: np.random.Generator,
    *,
    alternative: Alternative = "two-sided",
    num_resamples: int = 10_000,
    confidence: float = 0.95,
) -> PairedComparison:
    """Compare two arms on the same seeds or the same problems, pair by pair.

    Args:
        first: ``[N]``, one value per seed or problem; for problems the mean over their answers.
        second: ``[N]``, the other arm's, in the same order.
        rng: source of the resamples.
        alternative: what the p-value tests for, of first minus second.
        num_resamples: of the interval, and of the test where it is not exact.
        confidence: of the interval, in (0, 1).

    Returns:
        The mean of first minus second with its bootstrap interval and the p-value of the sign-flip test.

    Raises:
        ValueError: if the two differ in shape, are empty or not finite.
    """
    one, other = _finite(first, "first"), _finite(second, "second")
    if one.shape != other.shape or one.ndim != 1:
        raise ValueError(f"first and second must be [pairs] alike, got {one.shape} and {other.shape}")
    differences = one - other  # [N]
    interval = bootstrap_mean(differences, rng, num_resamples=num_resamples, confidence=confidence)
    p_value = sign_flip_p_value(differences, rng, alternative=alternative, num_resamples=num_resamples)
    return PairedComparison(
        num_pairs=len(differences),
        mean_difference=float(interval.estimate),
        low=float(interval.low),
        high=float(interval.high),
        p_value=p_value,
    )


def problem_comparison(
    differences: Sequence[ArrayLike],
    rng: np.random.Generator,
    *,
    num_resamples: int = 10_000,
    confidence: float = 0.95,
) -> tuple[float, float]:
    """Bootstrap the difference of two arms over the problems of the few seeds they share, clustered by seed.

    Two stages: seeds are drawn whole, then problems within each seed drawn; a resample is the mean over its seeds of
    the mean over its problems. With one seed only its problems are drawn, and the interval is about other problems
    for these two policies, not about other runs. With two to four it is still too short for that: so few seeds show
    little of how far seeds differ.

    Source: Field and Welsh, "Bootstrapping clustered data" (JRSS B 2007), the two-stage bootstrap.

    Args:
        differences: for each of S seeds ``[P]``, first minus second arm's score of each problem; P may differ.
        rng: source of the resamples.
        num_resamples: how many are drawn.
        confidence: in (0, 1).

    Returns:
        Lower and upper end.

    Raises:
        ValueError: if there is no seed, or one has no problem or a value that is not finite.
    """
    if not differences:
        raise ValueError("differences must hold at least one seed")
    seeds = [_finite(values, "differences") for values in differences]
    chosen = rng.integers(0, len(seeds), size=(num_resamples, len(seeds)))  # [resamples, S]
    means = np.empty(chosen.shape)
    for index, values in enumerate(seeds):
        is_seed = chosen == index
        # Drawing P of P problems with replacement is a multinomial draw of how often each turns up.
        counts = rng.multinomial(len(values), np.full(len(values), 1 / len(values)), size=int(is_seed.sum()))
        means[is_seed] = counts @ values / len(values)
    low, high = np.quantile(means.mean(axis=1), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def sign_flip_p_value(
    differences: ArrayLike,
    rng: np.random.Generator,
    *,
    alternative: Alternative = "two-sided",
    num_resamples: int = 10_000,
) -> float:
    """Test whether paired differences are centred at 0, by flipping their signs.

    Under the null hypothesis each difference is as likely d as -d (symmetric about 0). The p-value is the share of
    sign patterns whose mean is at least as extreme as the observed one, which counts itself. Up to `MAX_EXACT_PAIRS`
    pairs all 2^N patterns are enumerated; above, B are drawn and p = (1 + extreme) / (1 + B). N pairs give no p below
    2^-N one-sided or 2^(1-N) two-sided: 1/32 and 1/16 for five.

    Source: Fisher, "The Design of Experiments" (1935), section 21; Phipson and Smyth, "Permutation P-values Should
    Never Be Zero" (SAGMB 2010), for the drawn form.

    Args:
        differences: ``[N]``, finite.
        rng: source of the patterns; not used where all are enumerated.
        alternative: ``greater`` tests for a mean above 0, ``less`` for one below.
        num_resamples: patterns drawn where there are too many to enumerate.

    Returns:
        In (0, 1].

    Raises:
        ValueError: if there is no pair, a difference is not finite, or the alternative is unknown.
    """
    values = _finite(differences, "differences")  # [N]
    if values.ndim != 1:
        raise ValueError(f"differences must be [pairs], got {values.ndim} axes")
    num_pairs = len(values)
    is_exact = num_pairs <= MAX_EXACT_PAIRS
    if is_exact:
        bits = np.arange(2**num_pairs)[:, None] >> np.arange(num_pairs) & 1  # [patterns, N]
    else:
        bits = rng.integers(0, 2, size=(num_resamples, num_pairs))
    means = (1 - 2 * bits) @ values / num_pairs  # [patterns]
    observed, slack = values.mean(), _TIE_SLACK * np.abs(values).mean()
    if alternative == "two-sided":
        is_extreme = np.abs(means) >= abs(observed) - slack
    elif alternative == "greater":
        is_extreme = means >= observed - slack
    elif alternative == "less":
        is_extreme = means <= observed + slack
    else:
        raise ValueError(f"alternative must be two-sided, greater or less, got {alternative}")
    num_extreme = int(is_extreme.sum())
    return num_extreme / len(means) if is_exact else (1 + num_extreme) / (1 + len(means))


def holm(p_values: ArrayLike) -> FloatArray:
    """Adjust the p-values of several claims so that the chance of any false one stays below the level.

    Sorted, p_(i) becomes max over j <= i of min(1, (m - j + 1) p_(j)); holds however the tests depend on each other.

    Source: Holm, "A Simple Sequentially Rejective Multiple Test Procedure" (Scandinavian Journal of Statistics 1979).

    Args:
        p_values: ``[m]``, each in [0, 1]; none is allowed.

    Returns:
        ``[m]``, in the order given.

    Raises:
        ValueError: if a value is not in [0, 1].
    """
    values = np.asarray(p_values, dtype=np.float64)
    if not np.all((values >= 0) & (values <= 1)):  # also catches NaN
        raise ValueError("p_values must be in [0, 1]")
    order = np.argsort(values, kind="stable")
    factors = np.arange(len(values), 0, -1)  # m, m - 1, ..., 1
    adjusted = np.empty_like(values)
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, factors * values[order]))
    return adjusted


def _majority(answers: Sequence[Hashable | None], rewards: FloatArray) -> float:
    votes: dict[Hashable, int] = defaultdict(int)
    scores: dict[Hashable, float] = defaultdict(float)
    for answer, reward in zip(answers, rewards, strict=True):
        if answer is not None:
            votes[answer] += 1
            scores[answer] = max(scores[answer], float(reward))
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [scores[answer] for answer, count in votes.items() if count == most]
    return sum(winners) / len(winners)


def _finite(values: ArrayLike, name: str) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise ValueError(f"{name} must not be empty")
    if not np.all(np.isfinite(array)):
        raise ValueError(f"{name} must be finite")
    return array
