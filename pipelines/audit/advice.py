"""Bounds as far as the data allow, and thresholds to start from, with the reasoning.

Acceptance rises with a threshold and the bound rises with it too. So "above 70% accepted" is a floor under the
threshold and "the bound says something" a ceiling over it; there may be nothing between the two.
"""

import math
from typing import Any

import numpy as np

from pipelines.audit.acceptance import Counts
from pipelines.audit.statistics import Float64
from pipelines.audit.wording import counted
from trm_repro.bounds import Divergences, KnownLimits, every_bound, largest_delta, pinsker_tv, unified_bound

TARGET = 0.7
"""Acceptance that TRM (arXiv 2512.23075v3) recommends to stay above."""

MIN_SEQUENCES = 30
"""Sequences with tokens below which no threshold is advised: 70% of 30 has a standard error of 8 points."""

MISLEADING = ("log_base", "shifted", "identical", "swapped", "top_p", "temperature")
"""Findings after which the drift is that of the data's form, so that a threshold on it means nothing."""

Payload = dict[str, Any]


def bounds_of(drift: Payload, kl_profile: Float64, num_sequences: int, length: int) -> Payload:
    """Compute the bounds that the observed exact KL gives, or say why there is none.

    Args:
        drift: summary of the drift.
        kl_profile: ``[T]`` sums over sequences of exact KL at each position; empty where it is not known.
        num_sequences: that the sums are over.
        length: T, the length limit.

    Returns:
        Inputs and bounds, or the reason.
    """
    largest = drift.get("kl_max")
    if largest is None:
        return {
            "available": False,
            "reason": "log-probs of sampled tokens allow no bound: delta is the largest KL over the vocabulary and all "
            "contexts, and a token that was not sampled can hide any of it; k2 and k3 are detectors",
        }
    if not math.isfinite(largest):
        return {"available": False, "reason": "KL is infinite at some token: the policy drops a token of the rollout"}
    profile = np.zeros(length)
    profile[: len(kl_profile)] = np.maximum(kl_profile, 0.0) / max(num_sequences, 1)
    profile = np.minimum(profile, largest)
    divergences = Divergences.at_most(length, largest, mean_kl=profile, mean_tv=pinsker_tv(profile))
    return {
        "available": True,
        "reason": "exact KL at the contexts that were sampled: delta is the largest one seen, at most the largest "
        "there is, so these are estimates of the bounds and no guarantee",
        "inputs": {"length": length, "delta": largest, "kl_seq": float(divergences.kl_seq)},
        **{
            constants: {name: float(value) for name, value in every_bound(divergences, constants=constants).items()}
            for constants in ("paper", "sharp")
        },
    }


def advise(counts: Counts, num_rejected: int, length: int) -> Payload:
    """Choose thresholds for TRM-Max, TRM-Avg and both.

    Args:
        counts: of the paper's gates.
        num_rejected: sequences that every gate rejects.
        length: T, the length limit.

    Returns:
        For each criterion the smallest threshold above 70% acceptance (floor), the largest delta at which the unified
        bound is below 1, the reward range (ceiling), what is advised and why.
    """
    floors = {
        (name, target): _smallest(counts.sweep(name, num_rejected), target)
        for name in ("max", "avg")
        for target in (TARGET, (1 + TARGET) / 2)
    }
    ceiling = largest_delta(length, KnownLimits(), constants="sharp") if length > 1 else math.inf
    return {
        "target_acceptance": TARGET,
        "length": length,
        "trm_max": _advise_max(floors["max", TARGET], ceiling, length),
        "trm_avg": _advise_avg(floors["avg", TARGET]),
        "trm_max_avg": _advise_both(floors["max", (1 + TARGET) / 2], floors["avg", (1 + TARGET) / 2], length),
    }


def withheld(num_sequences: int, codes: list[str]) -> str | None:
    """Say why no threshold can be advised.

    Args:
        num_sequences: those with tokens.
        codes: of the findings.

    Returns:
        One line, or None where nothing stands against advice.
    """
    misleading = [code for code in codes if code in MISLEADING]
    if misleading:
        return f"no threshold is advised: with the finding {misleading[0]} the drift is not the mismatch; mend it first"
    if num_sequences < MIN_SEQUENCES:
        return f"no threshold is advised: {counted(num_sequences, 'sequence')} with tokens, {MIN_SEQUENCES} are needed"
    return None


def without_advice(reason: str) -> Payload:
    """Give advice that advises nothing."""
    none = {"advised": None, "reason": reason}
    return {"withheld": reason, "trm_max": none, "trm_avg": none, "trm_max_avg": none}


def bound_at(delta: float, length: int, avg: float | None = None) -> float:
    """Compute the unified bound, sharp constants, if KL stayed at delta, and on average at avg, in every context."""
    if avg is None:
        return float(unified_bound(Divergences.at_most(length, delta), constants="sharp"))
    mean = min(avg, delta)
    return float(
        unified_bound(Divergences.at_most(length, delta, mean_kl=mean, mean_tv=pinsker_tv(mean)), constants="sharp")
    )


def _advise_max(floor: float | None, ceiling: float, length: int) -> Payload:
    if floor is None:
        return _nothing()
    is_both = floor <= ceiling
    advised = (ceiling if math.isfinite(ceiling) else floor) if is_both else floor
    bound = bound_at(advised, length)
    reason = (
        f"every threshold from {floor:.3g} keeps above {TARGET:.0%}; up to {ceiling:.3g} the unified bound at T = "
        f"{length:,} is below 1, the range of the reward; the largest that does both is advised"
        if is_both
        else f"no threshold keeps {TARGET:.0%} and bounds the error below 1: above {TARGET:.0%} acceptance starts at "
        f"{floor:.3g}, and the unified bound at T = {length:,} is below 1 only up to {ceiling:.3g}; the smallest that "
        f"keeps enough is advised. The bound there is {bound:,.3g}: finite, and above the reward's range, so it "
        "certifies nothing; shorten responses or reduce the mismatch for a bound that does"
    )
    return {"floor": floor, "ceiling": _finite(ceiling), "advised": advised, "bound": bound, "reason": reason}


def _advise_avg(floor: float | None) -> Payload:
    if floor is None:
        return _nothing()
    reason = (
        f"above {TARGET:.0%} acceptance starts at {floor:.3g}; the average alone leaves the largest KL open, so no "
        "threshold of it has a bound: combine it with trm_max"
    )
    return {"floor": floor, "ceiling": None, "advised": floor, "bound": None, "reason": reason}


def _advise_both(max_floor: float | None, avg_floor: float | None, length: int) -> Payload:
    if max_floor is None or avg_floor is None:
        return _nothing()
    bound = bound_at(max_floor, length, avg_floor)
    each = (1 + TARGET) / 2
    reason = (
        f"each alone keeps above {each:.0%}, so both together keep above {TARGET:.0%}; if KL stayed within them in "
        f"every context the unified bound at T = {length:,} would be {bound:,.3g}"
    )
    return {"max": max_floor, "avg": avg_floor, "bound": bound, "reason": reason}


def _smallest(sweep: list[tuple[float, float]], target: float) -> float | None:
    return next((threshold for threshold, fraction in sweep if fraction > target), None)


def _nothing() -> Payload:
    return {"advised": None, "reason": f"no threshold keeps above {TARGET:.0%}: too many log-probs are not finite"}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
