"""Signatures of data that are not what they seem: units, swapped columns, temperature, top-p, copies, rounding.

Each compares what the sampled tokens show with what must hold of any two policies. When tokens are drawn from
pi_roll, the mean of rho is 1 and the mean of k1 is not below 0; a signature is reported when these fail by more than
chance, or when one side is a plain function of the other.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.audit.loading import Reading
from pipelines.audit.statistics import Chunk, Tokens, inner_product
from pipelines.audit.wording import counted

LOG_BASES = {"log2": 1 / math.log(2), "log10": 1 / math.log(10)}
NUM_DEVIATIONS = 5.0
"""Standard errors from which chance is ruled out."""

SHIFT_TOKENS = 1 << 18
"""Tokens looked at for a shift by one position, and for everything in a quick audit."""

FULL_TOKENS, CHUNK_TOKENS = 1 << 20, 1 << 15
"""All of the first tokens are looked at, then this many of each chunk: a signature shows in any sample."""

EXPLAINED_BY = {
    "log_base": ("top_p", "swapped", "ratio_mean"),
    "shifted": ("top_p", "swapped", "ratio_mean"),
    "top_p": ("swapped", "ratio_mean"),
    "temperature": ("swapped", "ratio_mean"),
    "swapped": ("ratio_mean",),
}
"""What each finding brings with it, which is then not said again."""


@dataclass(frozen=True)
class Finding:
    """Something the reader should know before trusting the numbers.

    Attributes:
        code: short name, for programs.
        level: "warning" where numbers are likely wrong, "note" where they are only qualified.
        message: one or two sentences.
    """

    code: str
    level: str
    message: str

    def row(self) -> dict[str, str]:
        """Give the finding for JSON."""
        return {"code": self.code, "level": self.level, "message": self.message}


class Signatures:
    """Moments of the two log-probs, and counts that tell the signatures apart."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.num_tokens = 0
        self.moments = np.zeros((3, 3))  # of (1, rollout, policy)
        self.num_above = self.num_certain = self.num_equal = self.num_unrounded = 0
        self.k1_square = self.inverse = self.inverse_square = 0.0
        self.shifts = np.zeros(3)
        self.num_shift_tokens = 0

    def add(self, chunk: Chunk, tokens: Tokens) -> None:
        """Add a chunk."""
        end = None if self.num_tokens < FULL_TOKENS else CHUNK_TOKENS
        rollout, policy = (np.asarray(v[:end], np.float64) for v in (chunk.rollout_logprobs, chunk.policy_logprobs))
        if not len(rollout):
            return
        log_ratio, ratio_minus_1 = tokens.log_ratio[:end], tokens.ratio_minus_1[:end]
        self.num_tokens += len(rollout)
        sides = (rollout, policy)
        self.moments[0, 0] += len(rollout)
        for i, a in enumerate(sides, start=1):
            self.moments[0, i] += a.sum()
            for j, b in enumerate(sides, start=1):
                self.moments[i, j] += inner_product(a, b) if j >= i else 0.0
        self.num_above += int((log_ratio > 1e-6).sum())
        self.num_certain += int((rollout == 0).sum())
        self.num_equal += int((log_ratio == 0).sum())
        self.k1_square += inner_product(log_ratio, log_ratio)
        inverse = 1.0 / (ratio_minus_1 + 1.0)
        self.inverse += float(inverse.sum())
        self.inverse_square += inner_product(inverse, inverse)
        if self.num_shift_tokens < SHIFT_TOKENS:
            self._add_shifts(chunk, rollout[:SHIFT_TOKENS], policy[:SHIFT_TOKENS])
            bits = np.concatenate([v[:SHIFT_TOKENS] for v in sides]).astype(np.float32).view(np.uint32)
            self.num_unrounded += int(((bits & 0xFFFF) != 0).sum())

    def _add_shifts(self, chunk: Chunk, rollout: Any, policy: Any) -> None:  # noqa: ANN401
        starts = chunk.offsets[1:-1]
        is_inner = np.ones(len(rollout), dtype=bool)  # tokens with both neighbours in their own sequence
        is_inner[[0, -1]] = False
        is_inner[starts[starts < len(rollout)]] = False
        is_inner[starts[(starts > 0) & (starts <= len(rollout))] - 1] = False
        for index, step in enumerate((0, 1, -1)):
            self.shifts[index] += float(np.abs(np.roll(policy, step) - rollout)[is_inner].sum())
        self.num_shift_tokens += len(rollout)

    def findings(self, drift: dict[str, Any], reading: Reading) -> list[Finding]:
        """List what is found, the gravest first."""
        if not self.num_tokens:
            return self._reading_notes(reading, drift)
        checks = (
            self._scale(),
            self._copy(),
            self._shift(),
            self._top_p(drift),
            self._swap(),
            self._normal(drift),
        )
        found = [finding for finding in checks if finding is not None]
        codes = {finding.code for finding in found}
        temperature = self._temperature(drift)
        if temperature is not None and not codes & {"log_base", "shifted", "top_p"}:
            found.append(temperature)
            codes.add(temperature.code)
        explained = {code for cause in codes for code in EXPLAINED_BY.get(cause, ())}
        return [*(f for f in found if f.code not in explained), *self._reading_notes(reading, drift)]

    def _line(self) -> tuple[float, float, float]:
        """Fit policy = slope x rollout + intercept; give slope, intercept and R^2."""
        n, r, p = self.moments[0, 0], self.moments[0, 1], self.moments[0, 2]
        variance = self.moments[1, 1] - r * r / n
        other = self.moments[2, 2] - p * p / n
        both = self.moments[1, 2] - r * p / n
        if variance <= 0 or other <= 0:
            return 1.0, 0.0, 0.0
        slope = both / variance
        return slope, (p - slope * r) / n, both * both / (variance * other)

    def _scale(self) -> Finding | None:
        slope, intercept, fit = self._line()
        if fit < 0.98 or abs(intercept) > 0.05:
            return None
        for base, factor in LOG_BASES.items():
            for found, side in ((factor, "policy"), (1 / factor, "rollout")):
                if abs(slope / found - 1) < 0.03:
                    return Finding(
                        "log_base",
                        "warning",
                        f"the {side} log-probs look like {base} where the others are natural logs (policy is "
                        f"{slope:.4f} x rollout); convert them before trusting any number here",
                    )
        return None

    def _copy(self) -> Finding | None:
        if self.num_equal < self.num_tokens:
            return None
        return Finding(
            "identical",
            "warning",
            "rollout and policy log-probs are the same values at every token: one was probably copied from the "
            "other (a trainer that does not recompute log-probs does that), so nothing is measured here",
        )

    def _shift(self) -> Finding | None:
        same, later, earlier = self.shifts
        best = min(later, earlier)
        if self.num_shift_tokens < 100 or not best < 0.2 * same:
            return None
        where = "before" if later < earlier else "after"
        return Finding(
            "shifted",
            "warning",
            f"policy log-probs fit rollout log-probs far better one position over (mean difference "
            f"{best / self.num_shift_tokens:.3g} against {same / self.num_shift_tokens:.3g}): they seem to stand one "
            f"position {where} their token",
        )

    def _top_p(self, drift: dict[str, Any]) -> Finding | None:
        """Kept mass m < 1: rho = m at every token for an exact engine, so it is hardly ever above 1 and averages m."""
        mean, error = drift["ratio_mean"], drift["ratio_standard_error"]
        is_below = self.num_above / self.num_tokens < 0.1
        if not (mean < 1 - NUM_DEVIATIONS * error and mean < 0.9995 and is_below):
            return None
        return Finding(
            "top_p",
            "warning",
            f"the policy gives the sampled token less than the rollout policy nearly everywhere (mean ratio "
            f"{mean:.4f}, above 1 at {self.num_above / self.num_tokens:.1%} of tokens; "
            f"{self.num_certain / self.num_tokens:.1%} have rollout probability 1): the rollout log-probs are those of "
            f"top-p, top-k or min-p sampling, renormalised over a kept mass of about {mean:.3f}. "
            "Sample at top-p 1, or compare with the policy over the same kept tokens",
        )

    def _temperature(self, drift: dict[str, Any]) -> Finding | None:
        """A temperature moves likely tokens one way and unlikely ones the other: log-ratio goes with log-prob."""
        slope, _, fit = self._line()
        variance = self.moments[1, 1] - self.moments[0, 1] ** 2 / self.moments[0, 0]
        ratio_mean = self.moments[0, 2] - self.moments[0, 1]
        ratio_variance = self.k1_square - ratio_mean**2 / self.moments[0, 0]
        if variance <= 0 or ratio_variance <= 0 or drift["k2_mean"] < 1e-4 or abs(slope - 1) < 0.05:
            return None
        explained = (slope - 1) ** 2 * variance / ratio_variance
        if explained < 0.5 or fit < 0.8:
            return None
        sharper = "policy" if slope > 1 else "rollout"
        return Finding(
            "temperature",
            "warning",
            f"{explained:.0%} of the log-ratio is explained by the rollout log-prob itself (policy is about "
            f"{slope:.2f} x rollout), the {sharper} side being the sharper: the two sides seem to be at "
            "different temperatures; compare log-probs that are processed the same way",
        )

    def _swap(self) -> Finding | None:
        n = self.num_tokens
        k1 = float(self.moments[0, 1] - self.moments[0, 2]) / n  # of the tokens looked at, as the error is
        k1_error = math.sqrt(max(self.k1_square / n - k1**2, 0.0) / n)
        mean_inverse = self.inverse / n
        inverse_error = math.sqrt(max(self.inverse_square / n - mean_inverse**2, 0.0) / n)
        is_negative = k1 < -NUM_DEVIATIONS * k1_error and k1 < -1e-6
        if not is_negative or abs(mean_inverse - 1) > NUM_DEVIATIONS * inverse_error:
            return None
        return Finding(
            "swapped",
            "warning",
            f"mean k1 is {k1:.3g}, which no policy gives on tokens that it did not see, and the mean of 1/rho is "
            f"{mean_inverse:.4f}: rollout and policy are probably swapped, or the log-ratio has the other sign",
        )

    def _normal(self, drift: dict[str, Any]) -> Finding | None:
        mean, error = drift["ratio_mean"], drift["ratio_standard_error"]
        if self.num_tokens < 2 or abs(mean - 1) <= NUM_DEVIATIONS * error or abs(mean - 1) < 1e-3:
            return None
        return Finding(
            "ratio_mean",
            "note",
            f"the mean ratio is {mean:.4f} +- {error:.1g} where tokens drawn from the rollout policy give 1: the "
            "policy has been trained on these tokens since, or one side's log-probs are not of the "
            "distribution sampled from",
        )

    def _reading_notes(self, reading: Reading, drift: dict[str, Any]) -> list[Finding]:
        counts, found = reading.counts, []
        if self.num_unrounded == 0 and self.num_equal < self.num_tokens:
            found.append(
                Finding(
                    "bfloat16",
                    "warning",
                    "every log-prob has the 8 significant bits of bfloat16: its rounding, up to 0.4% of a log-prob, is "
                    "part of the drift measured",
                )
            )
        if len(reading.dtypes) > 1:
            found.append(Finding("mixed_dtypes", "note", f"log-probs are of types {', '.join(sorted(reading.dtypes))}"))
        for code, message in sorted(reading.notes.items()):
            found.append(Finding(code, "note", message))
        if counts["empty_sequences"] and not drift["longest"]:
            found.append(
                Finding("no_tokens", "warning", "no sequence has a token, so nothing is measured; see the mask")
            )
        messages = {
            "bad_rows": ("bad row was left out", "bad rows were left out"),
            "nonfinite_sequences": (
                "sequence holds a log-prob of -inf: every gate rejects it, no mean counts it",
                "sequences hold a log-prob of -inf: every gate rejects them, no mean counts them",
            ),
            "padding_tokens": (
                "position of prompts and padding was left out",
                "positions of prompts and padding were left out",
            ),
            "empty_sequences": (
                "sequence has no token; every gate keeps it",
                "sequences have no token; every gate keeps them",
            ),
        }
        for code, (one, many) in messages.items():
            if counts[code]:
                level = "warning" if code == "bad_rows" else "note"
                found.append(Finding(code, level, counted(counts[code], one, many)))
        if drift["num_clamped_tokens"]:
            one, many = (f"beyond +-20 {verb} clamped before exp" for verb in ("was", "were"))
            message = counted(drift["num_clamped_tokens"], f"log-ratio {one}", f"log-ratios {many}")
            found.append(Finding("clamped", "note", message))
        if reading.unused:
            found.append(Finding("unused_columns", "note", f"columns not used: {', '.join(sorted(reading.unused))}"))
        return found
