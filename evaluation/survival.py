"""Survival curves: the share of runs that have not collapsed by a step, with runs that ended before they could."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evaluation.outcomes import RunOutcome
from evaluation.statistics import FloatArray


@dataclass(frozen=True, kw_only=True)
class SurvivalCurve:
    """A step function: ``survival[i]`` from ``times[i]`` up to ``times[i + 1]``; 1 before ``times[0]``.

    Example: times (6, 7) and survival (0.86, 0.75): from step 6 on 86% go on, from step 7 on 75%.

    Attributes:
        times: ``[K]``, rising; steps at which something ended.
        survival: ``[K]``, share still going on.
        low: ``[K]``, lower end of the pointwise interval.
        high: ``[K]``, its upper end.
        num_at_risk: ``[K]``, units observed just before each time.
        num_events: ``[K]``, units that ended at it.
    """

    times: FloatArray
    survival: FloatArray
    low: FloatArray
    high: FloatArray
    num_at_risk: FloatArray
    num_events: FloatArray


def survival_curve(durations: Sequence[float], is_event: Sequence[bool], *, z: float = 1.959964) -> SurvivalCurve:
    """Estimate the share that survives each time, from units some of which were only watched for a while.

    S(t) = prod over event times t_i <= t of 1 - d_i / n_i. The interval is pointwise, on the log(-log S) scale with
    Greenwood's variance sum d_i / (n_i (n_i - d_i)), and so stays in [0, 1]; where S is 0 it is [0, 0], which is no
    statement about other units. A unit watched until t still counts as at risk at t.

    Source: Kaplan and Meier, "Nonparametric Estimation from Incomplete Observations" (JASA 1958); the interval as in
    Kalbfleisch and Prentice, "The Statistical Analysis of Failure Time Data".

    Args:
        durations: ``[N]``; when each unit ended, or how long it was watched; finite, >= 0.
        is_event: ``[N]``; whether it ended.
        z: normal quantile of the interval; the default is that of 95%.

    Returns:
        The curve at the times of events; empty where nothing ended.

    Raises:
        ValueError: if there is no unit, the two differ in length, or a duration is negative or not finite.
    """
    times, ended = np.asarray(durations, dtype=np.float64), np.asarray(is_event, dtype=bool)
    if times.ndim != 1 or not len(times) or times.shape != ended.shape:
        raise ValueError(f"durations and is_event must be [N] alike, N >= 1, got {times.shape} and {ended.shape}")
    if not np.all(np.isfinite(times) & (times >= 0)):
        raise ValueError("durations must be finite and >= 0")
    at = np.unique(times[ended])  # [K]
    num_events = (times[ended][None] == at[:, None]).sum(axis=1).astype(np.float64)
    num_at_risk = (times[None] >= at[:, None]).sum(axis=1).astype(np.float64)
    survival = np.cumprod(1.0 - num_events / num_at_risk)
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = np.cumsum(num_events / (num_at_risk * (num_at_risk - num_events)))
        spread = np.exp(z * np.sqrt(variance) / np.log(survival))  # below 1
        low, high = survival ** (1.0 / spread), survival**spread
    is_gone = survival == 0
    return SurvivalCurve(
        times=at,
        survival=survival,
        low=np.where(is_gone, 0.0, low),
        high=np.where(is_gone, 0.0, high),
        num_at_risk=num_at_risk,
        num_events=num_events,
    )


def collapse_curve(outcomes: Sequence[RunOutcome]) -> SurvivalCurve | None:
    """Estimate the share of an arm's runs that have not collapsed by each step.

    Args:
        outcomes: of one arm; those that cannot say are left out.

    Returns:
        The curve, or None where no run can say.
    """
    known = [outcome for outcome in outcomes if outcome.has_collapsed is not None]
    if not known:
        return None
    durations = [run.num_steps if run.collapse_step is None else run.collapse_step for run in known]
    return survival_curve(durations, [run.collapse_step is not None for run in known])
