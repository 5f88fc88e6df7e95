"""Bounds on the error of the surrogate objective over a whole response: the paper's, and three results of ours.

Shape letters: T response tokens (the length limit); ``...`` any leading axes, which broadcast. Numpy and the
standard library only; everything is float64, KL is in nats, rewards lie in [0, 1]. The bounded error is
|J(pi_theta) - J(pi_roll) - L'(pi_theta)|. Every bound takes `Divergences` and which constants to use, and returns
``[...]`` in reward units: a closed form, or a sum over positions where a profile is given. Proofs: docs/theory.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
Constants = Literal["paper", "sharp"]
"""``paper``: the constants as published; ``sharp``: half of them, which is enough for rewards in [0, 1]."""

ABSOLUTE_SLACK, RELATIVE_SLACK = 1e-12, 1e-9  # rounding forgiven before inputs are called inconsistent

_CONSTANT = {"paper": 4.0, "sharp": 2.0}
_TINY = 1e-300  # stands for 0 in a denominator whose quotient is capped right after
_EXACT_ROOT_SUMS = np.concatenate(([0.0], np.cumsum(np.sqrt(np.arange(1.0, 64.0)))))
_ZETA_OF_MINUS_HALF = -0.2078862249773545


@dataclass(frozen=True, kw_only=True, eq=False)
class Divergences:
    """How far pi_theta lies from pi_roll, over all prompts and all contexts that pi_roll can reach.

    Every bound needs pi_theta to put no mass where pi_roll has none, which cannot be seen from these numbers.
    Build it with `at_most`. Example: ``Divergences.at_most(4096, 1e-4)`` has epsilon 0.00707, KL_seq 0.41,
    TV_seq 0.453, and at every position Dbar_t = 0.00707 and Kbar_t = 1e-4. A value out of its range, or above
    what another one allows, raises ValueError.
    """

    length: FloatArray
    """``[...]``: T, the response-length limit; whole numbers from 1."""
    delta: FloatArray
    """``[...]``: largest token KL(pi_roll || pi_theta); infinite where pi_theta drops a token of pi_roll."""
    epsilon: FloatArray
    """``[...]``: largest token TV, in [0, 1]."""
    kl_seq: FloatArray
    """``[...]``: KL of the two response distributions, averaged over prompts."""
    tv_seq: FloatArray
    """``[...]``: TV of the two response distributions, averaged over prompts, in [0, 1]."""
    mean_tv: FloatArray
    """``[..., T]``: Dbar_t, expected token TV at t, 0 after a response's end; ``[..., 1]``: the same at every t."""
    mean_kl: FloatArray
    """``[..., T]``: Kbar_t, expected token KL at t, 0 after a response's end; ``[..., 1]``: the same at every t."""

    def __post_init__(self) -> None:
        """Refuse what no pair of policies can have."""
        _check_length(self.length)
        for name in ("delta", "epsilon", "mean_tv", "mean_kl", "kl_seq", "tv_seq"):
            _check_not_negative(name, getattr(self, name))
        for name in ("epsilon", "tv_seq", "mean_tv"):
            _check_at_most(name, getattr(self, name), np.ones(()))
        for name in ("mean_tv", "mean_kl"):
            num_values = getattr(self, name).shape[-1]
            if num_values != 1 and np.any(self.length != num_values):
                raise ValueError(f"{name} must have 1 or length = {self.length.max():g} values, got {num_values}")
        _check_at_most("mean_tv", self.mean_tv, self.epsilon[..., None], "epsilon = ")
        _check_at_most("mean_kl", self.mean_kl, self.delta[..., None], "delta = ")
        _check_at_most("kl_seq", self.kl_seq, self.length * self.delta, "length * delta = ")
        _check_at_most("kl_seq", self.kl_seq, _total(self.mean_kl, self.length), "the sum of mean_kl = ")
        _check_at_most("tv_seq", self.tv_seq, self.length * self.epsilon, "length * epsilon = ")
        _check_at_most("tv_seq", self.tv_seq, _total(self.mean_tv, self.length), "the sum of mean_tv = ")

    @classmethod
    def at_most(
        cls,
        length: ArrayLike,
        delta: ArrayLike = np.inf,
        *,
        epsilon: ArrayLike | None = None,
        kl_seq: ArrayLike | None = None,
        tv_seq: ArrayLike | None = None,
        mean_tv: ArrayLike | None = None,
        mean_kl: ArrayLike | None = None,
    ) -> "Divergences":
        """Take what is known and fill the rest with the largest value that the known ones allow.

        Unknown epsilon becomes sqrt(delta/2) (Pinsker); Dbar_t the smaller of the two; Kbar_t delta; KL_seq the
        sum of Kbar_t; TV_seq the smallest of 1, sqrt(KL_seq/2) and the sum of Dbar_t. The arguments are the
        fields of the class; a number as mean_tv or mean_kl holds at every position.

        Raises:
            ValueError: for a value out of its range, or above what another one allows; rounding is forgiven.
        """
        steps, largest_kl = _float_array(length), _float_array(delta)
        _check_length(steps)
        largest_tv = pinsker_tv(largest_kl) if epsilon is None else _float_array(epsilon)
        worst_tv = np.minimum(largest_tv, pinsker_tv(largest_kl))
        tv_profile = worst_tv[..., None] if mean_tv is None else np.atleast_1d(_float_array(mean_tv))
        kl_profile = largest_kl[..., None] if mean_kl is None else np.atleast_1d(_float_array(mean_kl))
        total_kl = _total(kl_profile, steps) if kl_seq is None else _float_array(kl_seq)
        worst_shift = np.minimum(pinsker_tv(total_kl), _total(tv_profile, steps))
        return cls(
            length=steps,
            delta=largest_kl,
            epsilon=largest_tv,
            kl_seq=total_kl,
            tv_seq=worst_shift if tv_seq is None else _float_array(tv_seq),
            mean_tv=tv_profile,
            mean_kl=kl_profile,
        )


def pinsker_tv(kl: ArrayLike) -> FloatArray:
    """Bound the TV of two distributions by min(1, sqrt(KL/2)); a KL below 0 by rounding counts as 0."""
    return np.asarray(np.sqrt(np.clip(kl, 0.0, 2.0) / 2))


def classical_bound(divergences: Divergences, *, constants: Constants = "paper") -> FloatArray:
    """Compute 2 T (T-1) epsilon^2. Source: TRM (arXiv 2512.23075v3), Classical bound."""
    length, epsilon = divergences.length, divergences.epsilon
    return _constant(constants) * length * (length - 1) / 2 * epsilon**2


def coupling_bound(divergences: Divergences, *, constants: Constants = "paper") -> FloatArray:
    """Compute 4 eps sum_t min(1, (t-1) eps). Source: TRM (arXiv 2512.23075v3), Coupling bound."""
    epsilon = divergences.epsilon
    return _constant(constants) * epsilon * _sum_of_shifts(divergences.length, per_token=epsilon)


def pinsker_marginal_kl_bound(divergences: Divergences, *, constants: Constants = "paper") -> FloatArray:
    """Compute 4 sqrt(delta/2) sum_t min(1, sqrt((t-1) delta/2)), each root at most 1.

    Source: TRM (arXiv 2512.23075v3), Pinsker-Marginal bound, KL form.
    """
    root = pinsker_tv(divergences.delta)
    return _constant(constants) * root * _sum_of_shifts(divergences.length, root=root)


def pinsker_marginal_tv_bound(divergences: Divergences, *, constants: Constants = "paper") -> FloatArray:
    """Compute 4 eps sum_t min(1, sqrt((t-1) delta/2)).

    Source: TRM (arXiv 2512.23075v3), Pinsker-Marginal bound, TV form.
    """
    shifts = _sum_of_shifts(divergences.length, root=pinsker_tv(divergences.delta))
    return _constant(constants) * divergences.epsilon * shifts


def simplified_pinsker_marginal_kl_bound(divergences: Divergences, *, constants: Constants = "paper") -> FloatArray:
    """Compute 4/3 T^1.5 delta, never below the sum; a delta above 2 counts as 2, where Pinsker's TV reaches 1.

    Source: TRM (arXiv 2512.23075v3), Pinsker-Marginal bound, KL form, simplified.
    """
    return _constant(constants) * 2 / 3 * divergences.length**1.5 * pinsker_tv(divergences.delta) ** 2


def simplified_pinsker_marginal_tv_bound(divergences: Divergences, *, constants: Constants = "paper") -> FloatArray:
    """Compute 8/3 T^1.5 eps sqrt(delta/2), never below the sum; a delta above 2 counts as 2.

    Source: TRM (arXiv 2512.23075v3), Pinsker-Marginal bound, TV form, simplified.
    """
    tv_product = divergences.epsilon * pinsker_tv(divergences.delta)
    return _constant(constants) * 2 / 3 * divergences.length**1.5 * tv_product


def mixed_kl_bound(divergences: Divergences, *, constants: Constants = "paper") -> FloatArray:
    """Compute 4 T sqrt(delta/2) sqrt(KL_seq/2), each root at most 1: 2 T sqrt(delta KL_seq) when both are.

    Source: TRM (arXiv 2512.23075v3), Mixed bound, KL form.
    """
    roots = pinsker_tv(divergences.delta) * pinsker_tv(divergences.kl_seq)
    return _constant(constants) * divergences.length * roots


def mixed_tv_bound(divergences: Divergences, *, constants: Constants = "paper") -> FloatArray:
    """Compute 4 T eps TV_seq. Source: TRM (arXiv 2512.23075v3), Mixed bound, TV form."""
    return _constant(constants) * divergences.length * divergences.epsilon * divergences.tv_seq


def adaptive_kl_bound(divergences: Divergences, *, constants: Constants = "paper") -> FloatArray:
    """Compute 4 sum_t Dbar_t min(1, sqrt((T-t) delta/2)). Source: TRM (arXiv 2512.23075v3), Adaptive bound, KL form."""
    return _constant(constants) * _adaptive_sum(divergences, root=pinsker_tv(divergences.delta))


def adaptive_tv_bound(divergences: Divergences, *, constants: Constants = "paper") -> FloatArray:
    """Compute 4 sum_t Dbar_t min(1, (T-t) eps). Source: TRM (arXiv 2512.23075v3), Adaptive bound, TV form."""
    return _constant(constants) * _adaptive_sum(divergences, per_token=divergences.epsilon)


def adaptive_hybrid_bound(divergences: Divergences, *, constants: Constants = "paper") -> FloatArray:
    """Compute 4 sum_t Dbar_t min(1, (T-t) eps, sqrt((T-t) delta/2)).

    Source: TRM (arXiv 2512.23075v3), Adaptive bound, hybrid.
    """
    root = pinsker_tv(divergences.delta)
    return _constant(constants) * _adaptive_sum(divergences, per_token=divergences.epsilon, root=root)


def prefix_adaptive_bound(divergences: Divergences, *, constants: Constants = "paper") -> FloatArray:
    """Compute 4 min(eps, sqrt(delta/2)) sum_t of the smallest known bound on the TV of the contexts at t.

    That is min(1, TV_seq, sqrt(KL_seq/2), sum_{s<t} Dbar_s, sqrt(sum_{s<t} Kbar_s / 2)), so the result is never
    above Coupling, Pinsker-Marginal or Mixed. Ours, not the paper's.
    """
    advantage = np.minimum(divergences.epsilon, pinsker_tv(divergences.delta))  # [...]
    cap = np.minimum(divergences.tv_seq, pinsker_tv(divergences.kl_seq))  # [...]
    mean_tv, mean_kl = divergences.mean_tv, divergences.mean_kl
    num_positions = max(mean_tv.shape[-1], mean_kl.shape[-1])
    if num_positions == 1:
        root = pinsker_tv(mean_kl[..., 0])
        shifts = _sum_of_shifts(divergences.length, per_token=mean_tv[..., 0], root=root, cap=cap)
    else:
        prefix_tv, prefix_kl = _prefix_sums(mean_tv, num_positions), _prefix_sums(mean_kl, num_positions)  # [..., T]
        shifts = np.minimum(cap[..., None], np.minimum(prefix_tv, pinsker_tv(prefix_kl))).sum(axis=-1)  # [...]
    return _constant(constants) * advantage * shifts


def trivial_bound(divergences: Divergences) -> FloatArray:
    """Compute TV_seq + min(sum_t Dbar_t, sqrt(T KL_seq / 2)): largest |J difference| plus largest |L'|. Ours."""
    most_by_kl = np.sqrt(divergences.length * np.maximum(divergences.kl_seq, 0.0) / 2)
    return np.asarray(divergences.tv_seq + np.minimum(_total(divergences.mean_tv, divergences.length), most_by_kl))


BOUNDS: dict[str, Callable[..., FloatArray]] = {
    "classical": classical_bound,
    "coupling": coupling_bound,
    "pinsker_marginal_kl": pinsker_marginal_kl_bound,
    "pinsker_marginal_tv": pinsker_marginal_tv_bound,
    "simplified_pinsker_marginal_kl": simplified_pinsker_marginal_kl_bound,
    "simplified_pinsker_marginal_tv": simplified_pinsker_marginal_tv_bound,
    "mixed_kl": mixed_kl_bound,
    "mixed_tv": mixed_tv_bound,
    "adaptive_kl": adaptive_kl_bound,
    "adaptive_tv": adaptive_tv_bound,
    "adaptive_hybrid": adaptive_hybrid_bound,
    "prefix_adaptive": prefix_adaptive_bound,
}
"""Every bound that has a constant to halve."""

PAPER_UNIFIED = ("coupling", "pinsker_marginal_kl", "pinsker_marginal_tv", "mixed_kl", "mixed_tv", "adaptive_hybrid")
"""The six whose minimum the paper calls Unified."""


def unified_bound(divergences: Divergences, *, constants: Constants = "paper") -> FloatArray:
    """Compute the smallest bound: with paper constants of the paper's six, with sharp ones also of our other two.

    Source: TRM (arXiv 2512.23075v3), Unified bound; Prefix-Adaptive and Trivial under ``sharp`` are ours.
    """
    return every_bound(divergences, constants=constants)["unified"]


def every_bound(divergences: Divergences, *, constants: Constants = "paper") -> dict[str, FloatArray]:
    """Compute all bounds by name: those of `BOUNDS`, then ``trivial`` and ``unified``; each ``[...]``."""
    bounds = {name: bound(divergences, constants=constants) for name, bound in BOUNDS.items()}
    bounds["trivial"] = trivial_bound(divergences)
    names = PAPER_UNIFIED if constants == "paper" else (*PAPER_UNIFIED, "prefix_adaptive", "trivial")
    bounds["unified"] = np.asarray(np.min(np.broadcast_arrays(*(bounds[name] for name in names)), axis=0))
    return bounds


@dataclass(frozen=True, kw_only=True)
class KnownLimits:
    """What is known of two policies while length or delta is moved; None where nothing is."""

    epsilon: float | None = None
    """Largest token TV, in [0, 1]."""
    kl_seq: float | None = None
    """KL of the response distributions, nats; lowered to T delta where it is above."""
    tv_seq: float | None = None
    """TV of the response distributions, in [0, 1]; lowered to the sum of the token TVs where it is above."""

    def __post_init__(self) -> None:
        """Refuse a TV above 1, which lowering would hide."""
        _check_at_most("tv_seq", _float_array(self.tv_seq or 0.0), np.ones(()))

    def at(self, length: ArrayLike, delta: ArrayLike) -> Divergences:
        """Build the divergences ``[...]`` at one or many lengths and deltas."""
        widest = Divergences.at_most(length, delta, epsilon=self.epsilon)
        kl_seq = None if self.kl_seq is None else np.minimum(self.kl_seq, widest.kl_seq)
        total_tv = _total(widest.mean_tv, widest.length)
        tv_seq = None if self.tv_seq is None else np.minimum(self.tv_seq, total_tv)
        return Divergences.at_most(length, delta, epsilon=self.epsilon, kl_seq=kl_seq, tv_seq=tv_seq)


def largest_delta(length: int, known: KnownLimits, *, constants: Constants = "paper") -> float:
    """Find by bisection the delta below which the unified bound is below 1.

    Args:
        length: T.
        known: what does not move with delta.
        constants: as published, or halved.

    Returns:
        Nats, to 12 digits; infinity when the bound is below 1 whatever delta is.
    """
    # From delta = 2 on Pinsker says nothing and the bound stays the same.
    return _last_below_one(lambda delta: known.at(length, delta), 1e-40, 2.0, constants)


def largest_length(delta: float, known: KnownLimits, *, constants: Constants = "paper") -> float:
    """Find by bisection the largest T at which the unified bound is below 1.

    Args:
        delta: nats; infinity when unknown.
        known: what does not move with T.
        constants: as published, or halved.

    Returns:
        A whole number >= 1 (at T = 1 there is no error); infinity when it is above 1e12.
    """
    length = _last_below_one(lambda steps: known.at(np.floor(steps), delta), 1.0, 1e12, constants)
    return float(np.floor(length))


def _last_below_one(
    divergences_at: Callable[[float], Divergences], low: float, high: float, constants: Constants
) -> float:
    """Bisect, in logarithms, for where the unified bound reaches 1; infinity when it does not up to high."""

    def is_below(value: float) -> bool:
        return bool(unified_bound(divergences_at(value), constants=constants) < 1)

    if is_below(high):
        return float(np.inf)
    while high / low > 1 + 1e-13:
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low


def _float_array(values: ArrayLike) -> FloatArray:
    return np.asarray(values, dtype=np.float64)


def _constant(constants: Constants) -> float:
    if constants not in _CONSTANT:
        raise ValueError(f"constants must be paper or sharp, got {constants}")
    return _CONSTANT[constants]


def _check_length(length: FloatArray) -> None:
    if not np.all((length >= 1) & (length == np.floor(length))):
        raise ValueError(f"length must be a whole number >= 1, got {length.min():g}")


def _check_not_negative(name: str, values: FloatArray) -> None:
    if not np.all(values >= -ABSOLUTE_SLACK):  # also catches NaN
        raise ValueError(f"{name} must be >= 0, got {values.min():g}")


def _check_at_most(name: str, values: FloatArray, limits: FloatArray, limit_name: str = "") -> None:
    is_above = values > np.maximum(limits, 0.0) * (1 + RELATIVE_SLACK) + ABSOLUTE_SLACK
    if np.any(is_above):
        value, limit = (array[is_above][0] for array in np.broadcast_arrays(values, limits))
        raise ValueError(f"{name} must be <= {limit_name}{limit:g}, got {value:g}")


def _total(profile: FloatArray, length: FloatArray) -> FloatArray:
    """Sum a profile ``[..., T]`` or ``[..., 1]`` over all positions: ``[...]``."""
    return length * profile[..., 0] if profile.shape[-1] == 1 else profile.sum(axis=-1)


def _prefix_sums(profile: FloatArray, num_positions: int) -> FloatArray:
    """Sum a profile over the positions before each one: ``[..., T]``, 0 at the first."""
    profile = np.broadcast_to(profile, (*profile.shape[:-1], num_positions))
    sums = np.cumsum(profile[..., :-1], axis=-1)  # [..., T-1]
    return np.concatenate((np.zeros_like(sums[..., :1]), sums), axis=-1)


def _sum_of_roots(count: FloatArray) -> FloatArray:
    """Sum sqrt(k) over k = 1..count: from a table below 64, else by Euler-Maclaurin (error below 1e-15)."""
    n = np.maximum(count, 64.0)
    series = 2 / 3 * n**1.5 + np.sqrt(n) / 2 + _ZETA_OF_MINUS_HALF + n**-0.5 / 24 - n**-2.5 / 1920
    return np.where(count < 64, _EXACT_ROOT_SUMS[np.minimum(count, 63).astype(np.int64)], series)


def _sum_of_shifts(
    length: FloatArray, *, per_token: ArrayLike = 1.0, root: ArrayLike = 1.0, cap: ArrayLike = 1.0
) -> FloatArray:
    """Sum min(cap, k per_token, sqrt(k) root) over k = 0..T-1: first linear, then a root, then the cap.

    A per_token or root of 1 says nothing beyond cap <= 1. The root takes over at k = (root/per_token)^2.
    """
    per_token, root, cap = (np.maximum(_float_array(value), _TINY) for value in (per_token, root, cap))
    last = length - 1
    with np.errstate(over="ignore"):
        linear_end = np.floor(np.minimum(last, np.minimum((root / per_token) ** 2, cap / per_token)))
        root_end = np.maximum(linear_end, np.floor(np.minimum(last, (cap / root) ** 2)))
    linear_part = per_token * linear_end * (linear_end + 1) / 2
    root_part = root * (_sum_of_roots(root_end) - _sum_of_roots(linear_end))
    return np.asarray(linear_part + root_part + cap * (last - root_end))


def _adaptive_sum(divergences: Divergences, *, per_token: ArrayLike = 1.0, root: ArrayLike = 1.0) -> FloatArray:
    """Sum Dbar_t min(1, (T-t) per_token, sqrt(T-t) root) over t: ``[...]``."""
    mean_tv = divergences.mean_tv
    if mean_tv.shape[-1] == 1:
        return np.asarray(mean_tv[..., 0] * _sum_of_shifts(divergences.length, per_token=per_token, root=root))
    remaining = np.arange(mean_tv.shape[-1] - 1, -1.0, -1.0)  # [T]
    linear = remaining * _float_array(per_token)[..., None]  # [..., T]
    future_tv = np.minimum(1.0, np.minimum(linear, np.sqrt(remaining) * _float_array(root)[..., None]))  # [..., T]
    return np.asarray((mean_tv * future_tv).sum(axis=-1))
