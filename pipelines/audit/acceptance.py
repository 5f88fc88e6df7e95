"""What the paper's gates keep, at given and swept thresholds, and how gates and thresholds are written.

The paper's gates are thresholds on one number a sequence, so their counts come from those numbers, exactly, at any
threshold. The registry's other gates are in `gate_counts`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.audit.columns import Array, Flags
from pipelines.audit.drift import MAX_STEPS
from pipelines.audit.slices import NUM_DOUBLINGS, doubling_bin
from pipelines.audit.statistics import Float64, Sequences
from trm_repro.errors import InputError
from trm_repro.gate_specs import fill_thresholds, find_spec

DEFAULT_ARMS = (
    "trm_max_0.05", "trm_max_0.1", "trm_avg_0.001", "trm_avg_0.002", "trm_max_0.1_avg_0.002", "trm_max_0.05_avg_0.001",
    "ln_trm_0.05", "ser_0.05",
)  # fmt: skip

ARM = re.compile(r"(?:trm_max_(?P<max>[^_]+)|trm_avg_(?P<avg>[^_]+)|ln_trm_(?P<ln>[^_]+)|ser_(?P<ser>[^_]+))$")
COMBINED = re.compile(r"trm_max_(?P<max>[^_]+)_avg_(?P<avg>[^_]+)$")

SWEEP = np.logspace(-8, 3, 11 * 16 + 1)
"""Thresholds at which acceptance is counted: 16 a decade."""


@dataclass(frozen=True)
class Arm:
    """A gate of the paper with its thresholds; infinite where it has none."""

    name: str
    limits: dict[str, float]

    def mask(self, criteria: dict[str, Float64]) -> Flags:
        """Say which sequences are kept: ``[B]`` bool from numbers a sequence, ``[B]`` each."""
        masks = [criteria[name] <= limit for name, limit in self.limits.items()]
        return np.logical_and.reduce(masks)


def parse_arm(name: str) -> Arm:
    """Read an arm's name, such as trm_max_0.1_avg_0.002.

    Raises:
        InputError: if it is none of the paper's gates with thresholds above 0.
    """
    match = COMBINED.match(name) or ARM.match(name)
    try:
        limits = {key: float(value) for key, value in (match.groupdict() if match else {}).items() if value is not None}
    except ValueError:
        limits = {}
    if not limits or not all(0 < limit < math.inf for limit in limits.values()):
        raise InputError(
            f"--arms {name!r}: expected trm_max_D, trm_avg_D, trm_max_D_avg_D, ln_trm_D or ser_D with finite "
            "thresholds > 0"
        )
    return Arm(name, limits)


def parse_gate(text: str) -> tuple[str, str, dict[str, float]]:
    """Read a gate of the registry with thresholds, such as sequence_mis:low=0,high=3.

    Returns:
        The text as the name to report it by, the gate, and the thresholds given.

    Raises:
        InputError: if there is no such gate or threshold.
    """
    name, _, settings = text.partition(":")
    given = {}
    try:
        for setting in filter(None, settings.split(",")):
            key, _, value = setting.partition("=")
            given[key] = float(value)
        spec = find_spec(name)
        filled = fill_thresholds(spec, given)
        for threshold, limit in given.items():
            if math.isinf(limit):
                raise ValueError(f"threshold {threshold} must be finite, got {limit}")
        if spec.direction.startswith("keeps low <=") and filled["low"] > filled["high"]:
            raise ValueError(f"low {filled['low']:g} is above high {filled['high']:g}, which keeps nothing")
    except ValueError as error:
        raise InputError(f"--gates {text!r}: {error}") from None
    return text, name, given


def criteria_of(sequences: Sequences) -> dict[str, Float64]:
    """Give the numbers that the paper's gates compare with thresholds: ``[B]`` each, exact KL where it is known."""
    divisor = sequences.divisor
    is_exact = sequences.kl_max is not None and sequences.kl_sum is not None
    return {
        "max": sequences.kl_max if is_exact else sequences.k2_max,  # type: ignore[dict-item]
        "avg": (sequences.kl_sum if is_exact else sequences.k3_sum) / divisor,  # type: ignore[operator]
        "ln": sequences.weighted_deviation,
        "ser": sequences.deviation_sum / divisor,
        "sequence_log_ratio": np.abs(sequences.log_ratio_sum),
        "geometric_log_ratio": np.abs(sequences.log_ratio_sum) / divisor,
    }


class StepCounts:
    """Sequences by step, and how many of them each gate keeps."""

    def __init__(self) -> None:
        """Start without a step."""
        self.rows: dict[int, Float64] = {}

    def add(self, steps: Array | None, masks: list[Flags]) -> None:
        """Add sequences: their steps, ``[B]`` int64 or None, and for each gate which are kept, ``[B]`` bool."""
        if steps is None or not len(steps):
            return
        known, which = np.unique(steps, return_inverse=True)
        counts = [np.bincount(which, minlength=len(known))]
        counts += [np.bincount(which, weights=mask, minlength=len(known)) for mask in masks]
        for step, row in zip(known.tolist(), np.stack(counts, axis=1).astype(np.float64), strict=True):
            if step in self.rows:
                self.rows[step] += row
            elif len(self.rows) < MAX_STEPS:
                self.rows[step] = row


@dataclass
class Counts:
    """Sequences kept by the paper's gates, overall, by length and by threshold."""

    arms: list[Arm]
    is_exact: bool = False
    num_sequences: int = 0
    steps: StepCounts = field(default_factory=StepCounts)
    kept: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    kept_tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_DOUBLINGS, dtype=np.int64))
    sweeps: dict[str, NDArray[np.int64]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start with nothing kept."""
        self.kept = np.zeros((len(self.arms), NUM_DOUBLINGS), dtype=np.int64)
        self.kept_tokens = np.zeros(len(self.arms), dtype=np.int64)

    def add(self, sequences: Sequences, steps: Array | None = None) -> None:
        """Add a chunk's sequences, and their steps, ``[B]`` int64, where they are known."""
        self.num_sequences += len(sequences.length)
        self.is_exact = sequences.kl_max is not None
        criteria = criteria_of(sequences)
        bins = doubling_bin(np.maximum(sequences.length, 1))
        self.lengths += np.bincount(bins, minlength=NUM_DOUBLINGS)
        masks = [arm.mask(criteria) for arm in self.arms]
        self.steps.add(steps, masks)
        for index, mask in enumerate(masks):
            self.kept[index] += np.bincount(bins[mask], minlength=NUM_DOUBLINGS)
            self.kept_tokens[index] += int(sequences.length[mask].sum())
        for name, values in criteria.items():
            # A value at a threshold is kept: it counts from that threshold on.
            counts = np.bincount(np.searchsorted(SWEEP, values, side="left"), minlength=len(SWEEP) + 1)
            self.sweeps[name] = self.sweeps.get(name, 0) + counts

    def step_acceptance(self, step: int, num_rejected: float = 0) -> dict[str, float]:
        """Give each arm's fraction of kept sequences of a step, ``num_rejected`` more being rejected by all."""
        num_sequences, *kept = self.steps.rows.get(step, np.zeros(1 + len(self.arms))).tolist()
        total = max(1, num_sequences + num_rejected)
        return {arm.name: count / total for arm, count in zip(self.arms, kept, strict=True)}

    def acceptance(self, num_rejected: int) -> dict[str, float]:
        """Give each arm's fraction of kept sequences; ``num_rejected`` more were rejected by all, not finite."""
        total = max(1, self.num_sequences + num_rejected)
        return {arm.name: int(self.kept[i].sum()) / total for i, arm in enumerate(self.arms)}

    def by_length(self, num_rejected: Mapping[int, int]) -> list[dict[str, Any]]:
        """Give each arm's rejected fraction in each bin of length; so many more of a bin were rejected by all."""
        rows = []
        totals = self.lengths + np.array([num_rejected.get(index, 0) for index in range(NUM_DOUBLINGS)])
        for index in np.flatnonzero(totals).tolist():
            rejected = {arm.name: 1 - int(self.kept[i, index]) / int(totals[index]) for i, arm in enumerate(self.arms)}
            lengths = "1" if index == 0 else f"{1 << index} to {(2 << index) - 1}"
            rows.append({"length": lengths, "num_sequences": int(totals[index]), "rejected": rejected})
        return rows

    def sweep(self, name: str, num_rejected: int) -> list[tuple[float, float]]:
        """Give acceptance at each threshold of `SWEEP`, without those where it is 0 or does not move any more."""
        counts = self.sweeps.get(name)
        if counts is None:
            return []
        fractions = np.cumsum(counts[:-1]) / max(1, self.num_sequences + num_rejected)
        first = max(0, int(np.searchsorted(fractions, 0.0, side="right")) - 1)
        last = int(np.searchsorted(fractions, fractions[-1], side="left")) + 1
        return list(zip(SWEEP[first:last].tolist(), fractions[first:last].tolist(), strict=True))


def parse_thresholds(texts: list[str]) -> list[Arm]:
    """Read thresholds, such as trm_max=0.02,0.2, as arms.

    Raises:
        InputError: if a gate is none of trm_max, trm_avg, ln_trm and ser, or a value no threshold.
    """
    arms = []
    for text in texts:
        gate, equals, values = text.partition("=")
        if not equals or gate not in ("trm_max", "trm_avg", "ln_trm", "ser"):
            raise InputError(
                f"--thresholds {text!r}: expected trm_max=, trm_avg=, ln_trm= or ser= and values with commas"
            )
        try:
            arms += [parse_arm(f"{gate}_{value}") for value in values.split(",")]
        except InputError:
            raise InputError(f"--thresholds {text!r}: expected finite numbers > 0, with commas between") from None
    return arms
