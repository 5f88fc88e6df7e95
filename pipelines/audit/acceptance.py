"""What each gate keeps: the paper's at given and swept thresholds, and every gate of the registry at its defaults.

The paper's gates are thresholds on one number a sequence, so their counts come from those numbers, exactly, at any
threshold. The registry's gates run as they are, on padded groups of sequences of like length.
"""

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.audit.columns import Flags
from pipelines.audit.slices import NUM_DOUBLINGS, doubling_bin
from pipelines.audit.statistics import Chunk, Float64, Sequences
from trm_repro.errors import InputError
from trm_repro.gate_specs import GATE_SPECS, fill_thresholds, find_spec

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_ARMS = (
    "trm_max_0.05", "trm_max_0.1", "trm_avg_0.001", "trm_avg_0.002", "trm_max_0.1_avg_0.002", "trm_max_0.05_avg_0.001",
    "ln_trm_0.05", "ser_0.05",
)  # fmt: skip

ARM = re.compile(r"(?:trm_max_(?P<max>[^_]+)|trm_avg_(?P<avg>[^_]+)|ln_trm_(?P<ln>[^_]+)|ser_(?P<ser>[^_]+))$")
COMBINED = re.compile(r"trm_max_(?P<max>[^_]+)_avg_(?P<avg>[^_]+)$")

SWEEP = np.logspace(-8, 3, 11 * 16 + 1)
"""Thresholds at which acceptance is counted: 16 a decade."""

MAX_PADDED = 1 << 21
"""Cells of a padded group, at most, unless one sequence alone has more."""

FULL_TOKENS, SHARE = 1 << 21, 4
"""The registry's gates see all of the first tokens, then one chunk in so many; the paper's see everything."""

BATCH_TOKENS = 1 << 16
"""Tokens of a chunk that are one batch to a gate whose decisions depend on the batch."""

PEER_SETTINGS = ("sequence_mis:low=0,high=3", "opsm:threshold=0.0001")
"""Defaults of trainers that share a gate of the registry and not its thresholds: TRL's sequence mask, slime's OPSM."""

PAPER_GATES = ("none", "trm_max", "trm_avg", "trm_max_avg", "ln_trm", "ser")


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


@dataclass
class Counts:
    """Sequences kept by the paper's gates, overall, by length and by threshold."""

    arms: list[Arm]
    is_exact: bool = False
    num_sequences: int = 0
    kept: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    kept_tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_DOUBLINGS, dtype=np.int64))
    sweeps: dict[str, NDArray[np.int64]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start with nothing kept."""
        self.kept = np.zeros((len(self.arms), NUM_DOUBLINGS), dtype=np.int64)
        self.kept_tokens = np.zeros(len(self.arms), dtype=np.int64)

    def add(self, sequences: Sequences) -> None:
        """Add a chunk's sequences."""
        self.num_sequences += len(sequences.length)
        self.is_exact = sequences.kl_max is not None
        criteria = criteria_of(sequences)
        bins = doubling_bin(np.maximum(sequences.length, 1))
        self.lengths += np.bincount(bins, minlength=NUM_DOUBLINGS)
        for index, arm in enumerate(self.arms):
            mask = arm.mask(criteria)
            self.kept[index] += np.bincount(bins[mask], minlength=NUM_DOUBLINGS)
            self.kept_tokens[index] += int(sequences.length[mask].sum())
        for name, values in criteria.items():
            # A value at a threshold is kept: it counts from that threshold on.
            counts = np.bincount(np.searchsorted(SWEEP, values, side="left"), minlength=len(SWEEP) + 1)
            self.sweeps[name] = self.sweeps.get(name, 0) + counts

    def acceptance(self, num_rejected: int) -> dict[str, float]:
        """Give each arm's fraction of kept sequences; ``num_rejected`` more were rejected by all, not finite."""
        total = max(1, self.num_sequences + num_rejected)
        return {arm.name: int(self.kept[i].sum()) / total for i, arm in enumerate(self.arms)}

    def by_length(self) -> list[dict[str, Any]]:
        """Give each arm's rejected fraction in each bin of length that has sequences."""
        rows = []
        for index in np.flatnonzero(self.lengths).tolist():
            rejected = {
                arm.name: 1 - int(self.kept[i, index]) / int(self.lengths[index]) for i, arm in enumerate(self.arms)
            }
            lengths = "1" if index == 0 else f"{1 << index} to {(2 << index) - 1}"
            rows.append({"length": lengths, "num_sequences": int(self.lengths[index]), "rejected": rejected})
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


class GateCounts:
    """What the gates of the registry keep, of a share of the chunks; imports torch when made."""

    def __init__(self, gates: list[tuple[str, str, dict[str, float]]]) -> None:
        """Take gates as `parse_gate` reads them."""
        import torch

        torch.set_num_threads(1)  # two threads of ours share the cores; torch's own would wait for each other
        self.gates = gates
        self.rows: dict[str, dict[str, float]] = {
            text: {"sequences": 0.0, "tokens": 0.0, "weight": 0.0} for text, *_ in gates
        }
        self.num_sequences = self.num_tokens = self.num_batch_tokens = self.num_chunks = 0
        self.num_batch_sequences = 0
        self.skipped: dict[str, str] = {}

    def add(self, chunk: Chunk) -> None:
        """Add a chunk."""
        from trm_repro.masks.gates import TokenStatistics

        self.num_chunks += 1
        if self.num_tokens >= FULL_TOKENS and self.num_chunks % SHARE:
            return
        self.num_sequences += len(chunk.lengths)
        self.num_tokens += len(chunk.rollout_logprobs)
        order = np.argsort(chunk.lengths, kind="stable")
        for group in _groups(chunk.lengths[order]):
            statistics = _padded(chunk, order[group], TokenStatistics)
            for text, name, given in self.gates:
                if not GATE_SPECS[name].is_batch_wide:
                    self._apply(text, name, given, statistics)
        if any(GATE_SPECS[name].is_batch_wide for _, name, _ in self.gates):
            rows = np.arange(_batch_size(chunk.lengths))
            self.num_batch_sequences += len(rows)
            self.num_batch_tokens += int(chunk.lengths[rows].sum())
            statistics = _padded(chunk, rows, TokenStatistics)
            for text, name, given in self.gates:
                if GATE_SPECS[name].is_batch_wide:
                    self._apply(text, name, given, statistics)

    def _apply(self, text: str, name: str, given: dict[str, float], statistics: Any) -> None:  # noqa: ANN401
        from trm_repro.masks.gates import gate_mask

        spec = GATE_SPECS[name]
        missing = sorted(spec.needs - statistics.available)
        if missing:
            self.skipped[text] = f"needs {', '.join(missing)}"
            return
        result: Tensor = gate_mask(name, statistics, **given)
        row, mask = self.rows[text], statistics.response_mask
        if spec.level == "sequence":
            row["sequences"] += int(result.sum())
            row["tokens"] += int((mask & result[:, None]).sum())
            return
        row["sequences"] += int((result != 0).any(dim=-1).sum())
        row["tokens"] += int((result >= 1).sum() if spec.is_weight else result.sum())
        row["weight"] += float(result.double().sum())

    def summary(self, num_rejected: float, num_rejected_tokens: float) -> dict[str, dict[str, Any]]:
        """Give for each gate the fractions of sequences and tokens it keeps, or why it was not applied.

        Sequences that are not finite, all of them rejected, count as often as they would in the share that was seen.
        """
        rows: dict[str, dict[str, Any]] = {}
        for text, name, given in self.gates:
            spec = GATE_SPECS[name]
            rows[text] = {
                "level": spec.level,
                "thresholds": _finite(fill_thresholds(spec, given)),
                "keeps": spec.direction,
                "source": spec.source,
            }
            if text in self.skipped:
                rows[text]["not_applied"] = self.skipped[text]
                continue
            counts = self.rows[text]
            num_sequences, num_tokens = self.num_sequences + num_rejected, self.num_tokens + num_rejected_tokens
            if spec.is_batch_wide:
                num_sequences, num_tokens = self.num_batch_sequences, self.num_batch_tokens
            num_tokens = max(1, num_tokens)
            rows[text]["sequence_fraction"] = counts["sequences"] / max(1, num_sequences)
            rows[text]["token_fraction"] = counts["tokens"] / num_tokens
            if spec.is_weight:
                rows[text]["weight_mean"] = counts["weight"] / num_tokens
        return rows


def default_gates() -> list[tuple[str, str, dict[str, float]]]:
    """List the registry's gates that are not the paper's and need no other gate's decisions, at their defaults."""
    own: list[tuple[str, str, dict[str, float]]] = [
        (name, name, {})
        for name, spec in GATE_SPECS.items()
        if name not in PAPER_GATES and "reference_mask" not in spec.needs
    ]
    return sorted([*own, *map(parse_gate, PEER_SETTINGS)], key=lambda gate: list(GATE_SPECS).index(gate[1]))


def _groups(lengths: NDArray[np.int64]) -> list[slice]:
    """Cut ascending lengths, ``[B]``, into runs that fill at most `MAX_PADDED` cells when padded."""
    groups, start = [], 0
    while start < len(lengths):
        sizes = np.maximum(lengths[start:], 1) * np.arange(1, len(lengths) - start + 1)
        count = max(1, int(np.searchsorted(sizes, MAX_PADDED, side="right")))
        # Padding costs as much as tokens do: also stop where a sequence is far longer than the first one.
        count = max(
            1, min(count, int(np.searchsorted(lengths[start:], max(64, 3 * lengths[start] // 2), side="right")))
        )
        groups.append(slice(start, start + count))
        start += count
    return groups


def _padded(chunk: Chunk, rows: NDArray[np.int64], statistics: Any) -> Any:  # noqa: ANN401
    import torch

    lengths = chunk.lengths[rows]
    mask = np.arange(int(lengths.max(initial=1)))[None, :] < lengths[:, None]  # [B, T]
    index = np.repeat(chunk.offsets[:-1][rows] - np.concatenate(([0], np.cumsum(lengths[:-1]))), lengths)
    index += np.arange(len(index))

    def dense(values: Any) -> Any:  # noqa: ANN401
        filled = np.zeros(mask.shape, dtype=np.float32)
        filled[mask] = values[index]
        return torch.from_numpy(filled)

    return statistics(
        log_ratio=dense(np.subtract(chunk.policy_logprobs, chunk.rollout_logprobs, dtype=np.float64)),
        response_mask=torch.from_numpy(mask),
        rollout_logprobs=dense(chunk.rollout_logprobs),
        policy_logprobs=dense(chunk.policy_logprobs),
        kl=None if chunk.token_kl is None else dense(chunk.token_kl),
        advantages=None if chunk.advantage is None else torch.from_numpy(chunk.advantage[rows].astype(np.float32)),
    )


def _batch_size(lengths: NDArray[np.int64]) -> int:
    """Count the first sequences, ``[B]``, that make at most `BATCH_TOKENS` tokens; one where that is none."""
    num_cells = np.maximum.accumulate(np.maximum(lengths, 1)) * np.arange(1, len(lengths) + 1)
    fits = (np.cumsum(lengths) <= BATCH_TOKENS) & (num_cells <= MAX_PADDED)
    return max(1, int(fits.sum())) if len(lengths) else 0


def _finite(thresholds: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in thresholds.items()}


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
        arms += [parse_arm(f"{gate}_{value}") for value in values.split(",")]
    return arms
