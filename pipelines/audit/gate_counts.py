"""What the registry's gates keep: they run as they are, on padded groups of sequences of like length."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.audit.acceptance import StepCounts, parse_gate
from pipelines.audit.columns import Flags
from pipelines.audit.statistics import Chunk
from trm_repro.gate_specs import GATE_SPECS, fill_thresholds

if TYPE_CHECKING:
    from torch import Tensor

MAX_PADDED = 1 << 17
"""Cells of a padded group, at most, unless one sequence alone has more: few enough to stay in a core's cache."""

FULL_TOKENS, SHARE = 1 << 20, 16
"""The registry's gates see all of the first tokens, then one chunk in so many; the paper's see everything."""

BATCH_TOKENS = 1 << 16
"""Tokens of a chunk that are one batch to a gate whose decisions depend on the batch."""

BATCH_SHARE = 2
"""Such gates see one in so many of the chunks that the others see."""

PEER_SETTINGS = ("sequence_mis:low=0,high=3", "opsm:threshold=0.0001")
"""Defaults of trainers that share a gate of the registry and not its thresholds: TRL's sequence mask, slime's OPSM."""

PAPER_GATES = ("none", "trm_max", "trm_avg", "trm_max_avg", "ln_trm", "ser")


class GateCounts:
    """What the gates of the registry keep, of a share of the chunks; imports torch with the first chunk."""

    def __init__(self, gates: list[tuple[str, str, dict[str, float]]]) -> None:
        """Take gates as `parse_gate` reads them."""
        self.gates = gates
        self.rows: dict[str, dict[str, float]] = {
            text: {"sequences": 0.0, "tokens": 0.0, "weight": 0.0} for text, *_ in gates
        }
        self.num_sequences = self.num_tokens = self.num_batch_tokens = self.num_chunks = 0
        self.num_batch_sequences = self.num_seen = 0
        self.skipped: dict[str, str] = {}
        self.steps, self.batch_steps = StepCounts(), StepCounts()

    def add(self, chunk: Chunk) -> None:
        """Add a chunk."""
        self.num_chunks += 1
        if self.num_tokens >= FULL_TOKENS and self.num_chunks % SHARE:
            return
        import torch

        from trm_repro.masks.gates import TokenStatistics

        torch.set_num_threads(1)  # threads of ours share the cores; torch's own would wait for each other
        self.num_sequences += len(chunk.lengths)
        self.num_tokens += len(chunk.rollout_logprobs)
        order = np.argsort(chunk.lengths, kind="stable")
        for group in _groups(chunk.lengths[order]):
            self._apply_all(chunk, order[group], self.steps, TokenStatistics, is_batch_wide=False)
        self.num_seen += 1
        is_any = any(GATE_SPECS[name].is_batch_wide for _, name, _ in self.gates)
        if is_any and self.num_seen % BATCH_SHARE == 1:
            rows = np.arange(_batch_size(chunk.lengths))
            self.num_batch_sequences += len(rows)
            self.num_batch_tokens += int(chunk.lengths[rows].sum())
            self._apply_all(chunk, rows, self.batch_steps, TokenStatistics, is_batch_wide=True)

    def _apply_all(
        self,
        chunk: Chunk,
        rows: NDArray[np.int64],
        steps: StepCounts,
        make: Any,  # noqa: ANN401
        *,
        is_batch_wide: bool,
    ) -> None:
        statistics = _padded(chunk, rows, make)
        masks = [
            self._apply(text, name, given, statistics)
            for text, name, given in self.gates
            if GATE_SPECS[name].is_batch_wide == is_batch_wide
        ]
        steps.add(None if chunk.step is None else chunk.step[rows], masks)

    def _apply(self, text: str, name: str, given: dict[str, float], statistics: Any) -> Flags:  # noqa: ANN401
        """Count what a gate keeps; return the sequences it keeps any of, ``[B]`` bool."""
        import torch

        from trm_repro.masks.gates import gate_mask

        spec = GATE_SPECS[name]
        missing = sorted(spec.needs - statistics.available)
        if missing:
            self.skipped[text] = f"needs {', '.join(missing)}"
            return np.zeros(len(statistics.response_mask), dtype=bool)
        result: Tensor = gate_mask(name, statistics, **given)
        row, mask = self.rows[text], statistics.response_mask
        kept = result if spec.level == "sequence" else result.any(dim=-1)  # [B]
        row["sequences"] += int(kept.sum())
        if spec.level == "sequence":
            row["tokens"] += int((mask.sum(dim=-1) * result).sum())
        else:
            row["tokens"] += int((result >= 1 if spec.is_weight else result).count_nonzero())
        if spec.is_weight:
            row["weight"] += float(result.sum(dtype=torch.float64))
        return np.asarray(kept)

    def step_fractions(self, step: int, lost_to_finite: float) -> dict[str, float]:
        """Give for each gate that was applied its fraction of kept sequences of a step, of those that it saw.

        To each finite one of the step come ``lost_to_finite`` that are not and that every gate rejects.
        """
        fractions: dict[str, float] = {}
        for is_batch_wide, steps in ((False, self.steps), (True, self.batch_steps)):
            names = [text for text, name, _ in self.gates if GATE_SPECS[name].is_batch_wide == is_batch_wide]
            if step in steps.rows:
                num_sequences, *kept = steps.rows[step].tolist()
                fractions |= {
                    name: count / (num_sequences * (1 + lost_to_finite))
                    for name, count in zip(names, kept, strict=True)
                }
        return {name: value for name, value in fractions.items() if name not in self.skipped}

    def summary(self, num_finite: int, num_lost: int, lost_tokens: int) -> dict[str, dict[str, Any]]:
        """Give for each gate the fractions of sequences and tokens it keeps, or why it was not applied.

        Args:
            num_finite: sequences of all chunks whose log-probs are finite.
            num_lost: those that are not, all of them rejected: they count as often as they would in the share that a
                gate saw of the others.
            lost_tokens: their tokens.

        Returns:
            A row a gate.
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
            num_seen, num_tokens = self.num_sequences, self.num_tokens
            if spec.is_batch_wide:
                num_seen, num_tokens = self.num_batch_sequences, self.num_batch_tokens
            share = num_seen / max(1, num_finite)
            all_tokens = max(1.0, num_tokens + lost_tokens * share)
            rows[text]["sequence_fraction"] = counts["sequences"] / max(1, num_seen + num_lost * share)
            rows[text]["token_fraction"] = counts["tokens"] / all_tokens
            if spec.is_weight:
                rows[text]["weight_mean"] = counts["weight"] / all_tokens
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


@np.errstate(over="ignore")  # a difference beyond float32 is infinite there
def _padded(chunk: Chunk, rows: NDArray[np.int64], statistics: Any) -> Any:  # noqa: ANN401
    import torch

    lengths = chunk.lengths[rows]
    columns = np.arange(int(lengths.max(initial=1)))
    mask = columns[None, :] < lengths[:, None]  # [B, T]
    index = chunk.offsets[:-1][rows][:, None] + columns[None, :]  # [B, T]; on padding some other token's

    def taken(values: Any) -> Any:  # noqa: ANN401
        return values.take(index, mode="clip") if len(values) else np.zeros(index.shape)

    def dense(values: Any) -> Any:  # noqa: ANN401
        return torch.from_numpy(taken(values).astype(np.float32, copy=False))

    rollout, policy = taken(chunk.rollout_logprobs), taken(chunk.policy_logprobs)
    log_ratio = np.subtract(policy, rollout, dtype=np.float64)  # before either is rounded

    return statistics(
        log_ratio=torch.from_numpy(log_ratio.astype(np.float32)),
        response_mask=torch.from_numpy(mask),
        rollout_logprobs=torch.from_numpy(rollout.astype(np.float32, copy=False)),
        policy_logprobs=torch.from_numpy(policy.astype(np.float32, copy=False)),
        kl=None if chunk.token_kl is None else dense(chunk.token_kl),
        total_variation=None if chunk.interval is None else dense(chunk.interval.total_variation),
        advantages=None if chunk.advantage is None else torch.from_numpy(chunk.advantage[rows].astype(np.float32)),
    )


def _batch_size(lengths: NDArray[np.int64]) -> int:
    """Count the first sequences, ``[B]``, that make at most `BATCH_TOKENS` tokens; one where that is none."""
    num_cells = np.maximum.accumulate(np.maximum(lengths, 1)) * np.arange(1, len(lengths) + 1)
    fits = (np.cumsum(lengths) <= BATCH_TOKENS) & (num_cells <= MAX_PADDED)
    return max(1, int(fits.sum())) if len(lengths) else 0


def _finite(thresholds: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in thresholds.items()}
