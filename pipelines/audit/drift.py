"""Drift over all chunks: sums, tails and per-step rows that add up, and what they say in the end.

Everything here is of sampled tokens; exact KL has its own sums where it is given.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipelines.audit.statistics import Chunk, Float64, Sequences, Tokens, inner_product
from pipelines.audit.tails import Tail

MAX_STEPS = 100_000
"""Steps that get a row of their own; sequences of further ones count in the totals alone."""

MAX_EXPONENT = 700.0
"""exp of more is beyond a float."""

Payload = dict[str, Any]

STEP_FIELDS = (
    "num_sequences", "num_tokens", "ppl_gap", "k1", "k2", "k3", "k2_max", "reward", "num_rewards", "kl", "kl_max",
)  # fmt: skip


class LogSum:
    """log sum exp of many values, without overflow."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.largest, self.scaled = -math.inf, 0.0

    def add(self, values: Float64) -> None:
        """Add finite values."""
        if len(values):
            largest = max(self.largest, float(values.max()))
            self.scaled = self.scaled * math.exp(self.largest - largest) + float(np.exp(values - largest).sum())
            self.largest = largest

    @property
    def value(self) -> float:
        """The logarithm of the sum; -inf of nothing."""
        return self.largest + math.log(self.scaled) if self.scaled > 0 else -math.inf


class Drift:
    """Sums over tokens and sequences."""

    def __init__(self, *, is_quick: bool = False) -> None:
        """Start with nothing; a quick one leaves the quantiles of k3 out."""
        self.is_quick = is_quick
        self.num_sequences = self.num_tokens = self.num_clamped = 0
        self.sums: dict[str, float] = defaultdict(float)
        self.maxima: dict[str, float] = defaultdict(float)
        self.longest = 0
        self.log_ratio, self.k3, self.kl = Tail(), Tail(), Tail()
        self.weights, self.squares = LogSum(), LogSum()
        self.steps: dict[int, Float64] = {}
        self.lost_steps = 0

    def add(self, chunk: Chunk, tokens: Tokens, sequences: Sequences) -> None:
        """Add a chunk."""
        self.num_sequences += len(sequences.length)
        self.num_tokens += len(tokens.log_ratio)
        if not len(sequences.length):
            return
        self.longest = max(self.longest, int(sequences.length.max()))
        gap = np.abs(sequences.log_ratio_sum) / sequences.divisor  # [B]
        absolute = np.abs(tokens.log_ratio)  # [N]
        ratio = tokens.ratio_minus_1
        self.num_clamped += int((absolute > 20).sum()) if absolute.max(initial=0.0) > 20 else 0
        added = {
            "gap": gap.sum(),
            "k1": -sequences.log_ratio_sum.sum(),
            "k2": sequences.k2_sum.sum(),
            "k3": sequences.k3_sum.sum(),
            "absolute": absolute.sum(),
            "rho-1": ratio.sum(),
            "(rho-1)^2": inner_product(ratio, ratio),
            "deviation": sequences.deviation_sum.sum(),
        }
        for name, value in added.items():
            self.sums[name] += float(value)
        self.log_ratio.add(absolute)
        if not self.is_quick:
            self.k3.add(np.maximum(tokens.k3, 0.0))  # rounding leaves -1e-17
        self.weights.add(sequences.log_ratio_sum)
        self.squares.add(2 * sequences.log_ratio_sum)
        if sequences.kl_max is not None and sequences.kl_sum is not None and chunk.token_kl is not None:
            self.sums["kl"] += float(sequences.kl_sum.sum())
            self.sums["num_kl"] += len(chunk.token_kl)
            self.kl.add(np.maximum(np.asarray(chunk.token_kl, dtype=np.float64), 0.0))
        if chunk.step is not None:
            self._add_steps(chunk, sequences, gap)

    def _add_steps(self, chunk: Chunk, sequences: Sequences, gap: Float64) -> None:
        assert chunk.step is not None
        steps, which = np.unique(chunk.step, return_inverse=True)
        zeros = np.zeros(len(gap))
        reward = zeros if chunk.reward is None else np.nan_to_num(chunk.reward)
        kl_sum = zeros if sequences.kl_sum is None else sequences.kl_sum
        summed = [
            zeros + 1, sequences.length, gap, -sequences.log_ratio_sum, sequences.k2_sum, sequences.k3_sum, zeros,
            reward, zeros if chunk.reward is None else np.isfinite(chunk.reward), kl_sum, zeros,
        ]  # fmt: skip
        rows = np.stack([np.bincount(which, weights=values, minlength=len(steps)) for values in summed], axis=1)
        np.maximum.at(rows[:, STEP_FIELDS.index("k2_max")], which, sequences.k2_max)
        if sequences.kl_max is not None:
            np.maximum.at(rows[:, STEP_FIELDS.index("kl_max")], which, sequences.kl_max)
        is_max = np.array([name.endswith("_max") for name in STEP_FIELDS])
        for step, row in zip(steps.tolist(), rows, strict=True):
            known = self.steps.get(step)
            if known is None and len(self.steps) >= MAX_STEPS:
                self.lost_steps += 1
            else:
                self.steps[step] = row if known is None else np.where(is_max, np.maximum(known, row), known + row)

    def summary(self) -> Payload:
        """Say what the sums come to; nats, None where nothing was seen."""
        tokens, sums = max(self.num_tokens, 1), self.sums
        mean_ratio = sums["rho-1"] / tokens + 1
        mean_square = (sums["(rho-1)^2"] + 2 * sums["rho-1"]) / tokens + 1
        deviation = math.sqrt(max(0.0, sums["(rho-1)^2"] / tokens - (sums["rho-1"] / tokens) ** 2))
        ess = 2 * self.weights.value - self.squares.value if self.num_sequences else 0.0
        quantiles = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
        absolute = {name: self.log_ratio.quantile(level) for name, level in quantiles.items()}
        largest = self.log_ratio.maximum
        return {
            "ppl_gap": sums["gap"] / max(self.num_sequences, 1),
            "k1_mean": sums["k1"] / tokens,
            "k2_mean": sums["k2"] / tokens,
            "k3_mean": sums["k3"] / tokens,
            "k2_max": None if largest is None else largest**2 / 2,
            **{f"k2_{name}": None if value is None else value**2 / 2 for name, value in absolute.items()},
            "k3_max": self.k3.maximum,
            **{f"k3_{name}": self.k3.quantile(level) for name, level in quantiles.items()},
            "log_ratio_abs_mean": sums["absolute"] / tokens,
            "log_ratio_abs_max": largest,
            **{f"log_ratio_abs_{name}": value for name, value in absolute.items()},
            "ratio_mean": mean_ratio,
            "ratio_standard_error": deviation / math.sqrt(tokens),
            "ratio_deviation_mean": sums["deviation"] / tokens,
            "chi_square": mean_square - 1,
            "chi_square_sequence": self._mean_square_of_sequences() - 1,
            "ess_token_fraction": mean_ratio**2 / mean_square if mean_square > 0 else None,
            "ess_sequence_fraction": math.exp(ess) / self.num_sequences if self.num_sequences else None,
            "hill_index": self.log_ratio.hill_index(),
            "num_clamped_tokens": self.num_clamped,
            "longest": self.longest,
            **self._exact(),
        }

    def _mean_square_of_sequences(self) -> float:
        """Average the square of the product of ratios; infinite where that is beyond a float."""
        if not self.num_sequences:
            return 1.0
        log_mean = self.squares.value - math.log(self.num_sequences)
        return math.exp(log_mean) if log_mean < MAX_EXPONENT else math.inf

    def _exact(self) -> Payload:
        if not self.sums["num_kl"]:
            return {}
        return {
            "kl_mean": self.sums["kl"] / self.sums["num_kl"],
            "kl_p99": self.kl.quantile(0.99),
            "kl_p999": self.kl.quantile(0.999),
            "kl_max": self.kl.maximum,
        }

    def step_rows(self, num_lost: Mapping[int, int], lost_tokens: Mapping[int, int]) -> list[Payload]:
        """Give each step's numbers, in order of steps.

        Args:
            num_lost: sequences that are not finite, by step: counted, in no mean; a step with no other has None there.
            lost_tokens: their tokens, by step.

        Returns:
            A row a step.
        """
        rows = []
        nothing = np.zeros(len(STEP_FIELDS))
        lost = sorted(set(num_lost) - set(self.steps))[: max(0, MAX_STEPS - len(self.steps))]
        for step in sorted([*self.steps, *lost]):
            values = dict(zip(STEP_FIELDS, self.steps.get(step, nothing).tolist(), strict=True))
            num_finite, num_tokens = values["num_sequences"], max(values["num_tokens"], 1.0)
            row: Payload = {
                "step": step,
                "num_sequences": int(num_finite) + num_lost.get(step, 0),
                "num_tokens": int(values["num_tokens"]) + lost_tokens.get(step, 0),
                "num_nonfinite_sequences": num_lost.get(step, 0),
                "ppl_gap": values["ppl_gap"] / num_finite if num_finite else None,
                **{f"{name}_mean": values[name] / num_tokens if num_finite else None for name in ("k1", "k2", "k3")},
                "k2_max": values["k2_max"] if num_finite else None,
                "reward_mean": values["reward"] / values["num_rewards"] if values["num_rewards"] else None,
            }
            if self.sums["num_kl"] and num_finite:
                row |= {"kl_mean": values["kl"] / num_tokens, "kl_max": values["kl_max"]}
            rows.append(row)
        return rows
