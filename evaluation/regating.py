"""Re-gating: replay stored updates under any gate, and say what it would have kept and what that changes.

Shape letters: B sequences, T response tokens. Nothing is trained: each update is taken as the run saw it, with the
policy that the run's own mask had led to, so the numbers say what a gate does at that point and not where a run under
it would have gone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from evaluation.figures import LINE_STYLES
from trm_repro.divergence import importance_ratio
from trm_repro.masks import TokenStatistics, finite_mask


@dataclass(frozen=True, kw_only=True)
class StoredUpdate:
    """One update of a stored run.

    Attributes:
        step: index of its step, from 0.
        update: index within the step, from 0.
        statistics: of its B sequences; with the run's advantages, and its own decisions as reference mask.
        rewards: ``[B]`` float32.
        groups: ``[B]`` int64; sequences with the same number share a prompt.
        num_missing: sequences of the step that are in none of its updates.
    """

    step: int
    update: int
    statistics: TokenStatistics
    rewards: Tensor
    groups: Tensor
    num_missing: int = 0


GateFunction = Callable[[StoredUpdate], Tensor]
"""Gives the factor of each token's surrogate, ``[B, T]`` float32, 0 on padding and where nothing is kept."""


@dataclass(frozen=True, kw_only=True)
class GateRow:
    """What one gate makes of one step, over all its updates.

    With weight w (0 or 1 of a mask), ratio rho = policy over rollout, advantage A as the trainer had it, a = reward
    minus the mean reward of the group, N sequences:

    Attributes:
        step: index of the step, from 0.
        gate: its label.
        num_sequences: N.
        kept_sequence_fraction: share of sequences with a token of w > 0.
        kept_token_fraction: share of tokens with w > 0.
        gradient_mass_fraction: sum w rho |A| / sum rho |A|, the size of the gradient's coefficients that stays; above
            1 where weights are; None where every A is 0.
        objective_bias: 1/N sum_i A_i sum_t (w - 1) rho, what the gate takes from the objective that is maximised.
        surrogate_bias: 1/N sum_i a_i sum_t (w - 1) (rho - 1), the same of the paper's surrogate L', in reward units.
        surrogate: 1/N sum_i a_i sum_t (rho - 1), L' without any gate.
    """

    step: int
    gate: str
    num_sequences: int
    kept_sequence_fraction: float
    kept_token_fraction: float
    gradient_mass_fraction: float | None
    objective_bias: float
    surrogate_bias: float
    surrogate: float


def regate(updates: Sequence[StoredUpdate], gates: Mapping[str, GateFunction]) -> list[GateRow]:
    """Replay stored updates under gates.

    Sequences with a non-finite log-ratio are left out of objective, surrogate and mass, with a gate and without: they
    have none.

    Args:
        updates: at least one.
        gates: by label.

    Returns:
        A row for each step and gate, steps ascending, gates in their order.
    """
    steps: dict[int, list[StoredUpdate]] = {}
    for update in sorted(updates, key=lambda update: (update.step, update.update)):
        steps.setdefault(update.step, []).append(update)
    return [_row(step, label, gate, parts) for step, parts in steps.items() for label, gate in gates.items()]


def _row(step: int, label: str, gate: GateFunction, updates: Sequence[StoredUpdate]) -> GateRow:
    totals = torch.zeros(8, dtype=torch.float64)
    for update in updates:
        totals += _sums(update, gate(update))
    sequences, kept_sequences, tokens, kept_tokens, mass, kept_mass, objective, surrogate = totals.tolist()
    return GateRow(
        step=step,
        gate=label,
        num_sequences=int(sequences),
        kept_sequence_fraction=kept_sequences / sequences,
        kept_token_fraction=kept_tokens / tokens,
        gradient_mass_fraction=kept_mass / mass if mass > 0 else None,
        objective_bias=objective / sequences,
        surrogate_bias=surrogate / sequences,
        surrogate=sum(float(_surrogate_terms(update).sum()) for update in updates) / sequences,
    )


def _sums(update: StoredUpdate, weights: Tensor) -> Tensor:
    statistics = update.statistics
    assert statistics.advantages is not None
    weights = weights.double()
    counted = _counted(statistics)
    ratio = torch.where(counted, importance_ratio(statistics.log_ratio.double()), 0.0)  # [B, T]
    advantages = statistics.advantages.double()[:, None]
    lost = torch.where(counted, weights - 1, 0.0)  # [B, T]
    values = [
        torch.tensor(len(advantages)),
        (weights > 0).any(dim=-1).sum(),
        statistics.response_mask.sum(),
        (weights > 0).sum(),
        (ratio * advantages.abs()).sum(),
        (weights * ratio * advantages.abs()).sum(),
        (lost * ratio * advantages).sum(),
        (lost * _surrogate_terms(update)).sum(),
    ]
    return torch.stack([value.double() for value in values])


def _surrogate_terms(update: StoredUpdate) -> Tensor:
    """Terms a (rho - 1) of the paper's L', ``[B, T]`` float64, a = reward minus its group's mean."""
    centred = update.rewards.double()
    for group in update.groups.unique():
        members = update.groups == group
        centred = torch.where(members, centred - update.rewards[members].double().mean(), centred)
    counted = _counted(update.statistics)
    change = torch.where(counted, importance_ratio(update.statistics.log_ratio.double()) - 1, 0.0)
    return change * centred[:, None]


def _counted(statistics: TokenStatistics) -> Tensor:
    is_finite = finite_mask(statistics.log_ratio, statistics.response_mask)
    return statistics.response_mask & is_finite[:, None]  # [B, T]


def regating_document(rows: Sequence[GateRow]) -> dict[str, object]:
    """Lay the rows out for JSON: the rows by step, and each gate's means over steps."""
    return {"gates": gate_means(rows), "steps": [asdict(row) for row in rows]}


def gate_means(rows: Sequence[GateRow]) -> dict[str, dict[str, float | None]]:
    """Average each gate's rows over steps, all steps alike; None where no step has the value."""
    names = [name for name in GateRow.__dataclass_fields__ if name not in ("step", "gate", "num_sequences")]
    means: dict[str, dict[str, float | None]] = {}
    for label in dict.fromkeys(row.gate for row in rows):
        means[label] = {}
        for name in names:
            values = [getattr(row, name) for row in rows if row.gate == label and getattr(row, name) is not None]
            means[label][name] = sum(values) / len(values) if values else None
    return means


def regating_table(rows: Sequence[GateRow]) -> str:
    """Lay each gate's means over steps out as a Markdown table."""
    heads = ["gate", "sequences kept", "tokens kept", "gradient mass kept", "objective bias", "surrogate bias"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for label, means in gate_means(rows).items():
        shares = [means[f"kept_{unit}_fraction"] for unit in ("sequence", "token")]
        cells = [label, *(f"{share:.3f}" for share in shares)]
        mass = means["gradient_mass_fraction"]
        cells += ["-" if mass is None else f"{mass:.3f}"]
        cells += [f"{means[name]:+.4f}" for name in ("objective_bias", "surrogate_bias")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw_regating(rows: Sequence[GateRow]) -> Figure:
    """Draw acceptance, gradient mass and bias against the step, one curve a gate."""
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    panels = {
        "kept_sequence_fraction": "sequences kept",
        "gradient_mass_fraction": "gradient mass kept",
        "surrogate_bias": "surrogate bias (reward)",
    }
    all_axes = figure.subplots(1, len(panels))
    for axes, (name, label) in zip(all_axes, panels.items(), strict=True):
        for number, gate in enumerate(dict.fromkeys(row.gate for row in rows)):
            own = [row for row in rows if row.gate == gate and getattr(row, name) is not None]
            axes.plot(
                [row.step for row in own],
                [getattr(row, name) for row in own],
                marker=".",
                linestyle=LINE_STYLES[(number // 10) % len(LINE_STYLES)],
                label=gate,
            )
        axes.set(xlabel="step", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
    all_axes[0].set_ylim(-0.02, 1.02)
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.suptitle("Stored updates under other gates")
    return figure
