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
    """Responses of one problem size.

    Attributes:
        num_operands: operands of the problems.
        num_sequences: responses sampled.
        mean_length: their mean length, tokens.
        token_violation_fraction: share of their tokens whose exact KL is above TRM-Max's threshold.
        predicted_rejection: mean of 1 - (1 - p)^T, p the share over responses of every size.
        rejection: share of responses rejected, by gate.
    """

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


def length_rows(samples: Sequence[LengthSample], threshold: float) -> list[LengthRow]:
    """Tabulate rejection by problem size.

    Args:
        samples: one for each size.
        threshold: TRM-Max's, nats.

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
    """Lay the rows out as a Markdown table."""
    gates = list(rows[0].rejection)
    heads = ["operands", "responses", "mean length", "tokens above", "1-(1-p)^T", *gates]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = [
            f"{row.num_operands}",
            f"{row.num_sequences}",
            f"{row.mean_length:.0f}",
            f"{row.token_violation_fraction:.4f}",
            f"{row.predicted_rejection:.2f}",
            *(f"{row.rejection[gate]:.2f}" for gate in gates),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw_length_bias(rows: Sequence[LengthRow]) -> Figure:
    """Draw rejection against mean length, one curve a gate, with the independent-token prediction."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    lengths = [row.mean_length for row in rows]
    for number, gate in enumerate(rows[0].rejection):
        style = LINE_STYLES[number % len(LINE_STYLES)]
        axes.plot(lengths, [row.rejection[gate] for row in rows], marker="o", linestyle=style, label=gate)
    axes.plot(lengths, [row.predicted_rejection for row in rows], color="black", linewidth=0.8, label="1 - (1 - p)^T")
    axes.set(xlabel="mean response length (tokens)", ylabel="rejected fraction", ylim=(0, 1.02))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    figure.suptitle("Table 2: rejection against length")
    return figure
