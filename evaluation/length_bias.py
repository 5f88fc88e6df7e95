"""Rejection against response length, the paper's Table 2: which gates punish long responses for being long.

Source: TRM (arXiv 2512.23075v3), Table 2: TRM-Max rejects with probability 1 - (1 - p)^T where tokens violate it
independently with probability p; TRM-Avg, LN-TRM and SER are roughly flat in T.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from torch import Tensor

from evaluation.figures import LINE_STYLES


@dataclass(frozen=True, kw_only=True)
class LengthRow:
    """Responses of one problem size and one seed.

    Attributes:
        seed: of the policies that were measured.
        num_operands: operands of the problems.
        num_sequences: responses sampled.
        mean_length: their mean length, tokens.
        token_violation_fraction: share of their tokens whose exact KL is above TRM-Max's threshold.
        predicted_rejection: mean of 1 - (1 - p)^T, p the share over responses of every size.
        rejection: share of responses rejected, by gate.
    """

    seed: int
    num_operands: int
    num_sequences: int
    mean_length: float
    token_violation_fraction: float
    predicted_rejection: float
    rejection: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class LengthSample:
    """Masks and divergences of responses of one problem size: ``[B, T]``, ``[B, T]``, and ``[B]`` by gate."""

    num_operands: int
    kl: Tensor
    response_mask: Tensor
    masks: Mapping[str, Tensor]


def length_rows(samples: Sequence[LengthSample], threshold: float, *, seed: int) -> list[LengthRow]:
    """Tabulate rejection by problem size.

    Args:
        samples: one for each size.
        threshold: TRM-Max's, nats.
        seed: of the policies that were measured.

    Returns:
        A row for each size.
    """
    num_violating = sum(float(((s.kl > threshold) & s.response_mask).sum()) for s in samples)
    num_tokens = sum(float(s.response_mask.sum()) for s in samples)
    violation = num_violating / num_tokens
    rows = []
    for sample in samples:
        lengths = sample.response_mask.sum(dim=-1).double()  # [B]
        is_violating = (sample.kl > threshold)[sample.response_mask]
        rows.append(
            LengthRow(
                seed=seed,
                num_operands=sample.num_operands,
                num_sequences=len(lengths),
                mean_length=float(lengths.mean()),
                token_violation_fraction=float(is_violating.double().mean()),
                predicted_rejection=float((1 - (1 - violation) ** lengths).mean()),
                rejection={name: 1.0 - float(mask.double().mean()) for name, mask in sample.masks.items()},
            )
        )
    return rows


def length_table(rows: Sequence[LengthRow]) -> str:
    """Lay the rows out as a Markdown table, a line a size; several seeds as their mean, smallest and largest."""
    gates = list(rows[0].rejection)
    heads = ["operands", "seeds", "responses", "mean length", "tokens above", "1-(1-p)^T", *gates]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for num_operands, group in rows_by_size(rows).items():
        cells = [
            f"{num_operands}",
            f"{len(group)}",
            f"{sum(row.num_sequences for row in group)}",
            _over_seeds([row.mean_length for row in group], ".0f"),
            _over_seeds([row.token_violation_fraction for row in group], ".4f"),
            _over_seeds([row.predicted_rejection for row in group], ".2f"),
            *(_over_seeds([row.rejection[gate] for row in group], ".2f") for gate in gates),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rows_by_size(rows: Sequence[LengthRow]) -> dict[int, list[LengthRow]]:
    """Group the rows of all seeds by problem size, smallest first."""
    groups: dict[int, list[LengthRow]] = {}
    for row in sorted(rows, key=lambda row: (row.num_operands, row.seed)):
        groups.setdefault(row.num_operands, []).append(row)
    return groups


def rows_by_seed(rows: Sequence[LengthRow]) -> dict[int, list[LengthRow]]:
    """Group the rows by seed."""
    groups: dict[int, list[LengthRow]] = {}
    for row in rows:
        groups.setdefault(row.seed, []).append(row)
    return groups


def draw_length_bias(rows: Sequence[LengthRow]) -> Figure:
    """Draw rejection against mean length, one curve a gate, with the independent-token prediction.

    Several seeds are drawn as their mean, with a bar from the smallest to the largest.
    """
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    groups = list(rows_by_size(rows).values())
    lengths = [_mean([row.mean_length for row in group]) for group in groups]
    for number, gate in enumerate(rows[0].rejection):
        style = LINE_STYLES[number % len(LINE_STYLES)]
        shares = [[row.rejection[gate] for row in group] for group in groups]
        means = [_mean(values) for values in shares]
        (line,) = axes.plot(lengths, means, marker="o", linestyle=style, label=gate)
        axes.vlines(lengths, [min(v) for v in shares], [max(v) for v in shares], color=line.get_color(), alpha=0.5)
    predicted = [_mean([row.predicted_rejection for row in group]) for group in groups]
    axes.plot(lengths, predicted, color="black", linewidth=0.8, label="1 - (1 - p)^T")
    axes.set(xlabel="mean response length (tokens)", ylabel="rejected fraction", ylim=(0, 1.02))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    num_seeds = len(rows_by_seed(rows))
    seeds = f" (mean of {num_seeds} seeds, smallest to largest)" if num_seeds > 1 else ""
    figure.suptitle(f"Table 2: rejection against length{seeds}")
    return figure


def _over_seeds(values: Sequence[float], spec: str) -> str:
    mean = f"{_mean(values):{spec}}"
    return mean if len(values) == 1 else f"{mean} ({min(values):{spec}} to {max(values):{spec}})"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
