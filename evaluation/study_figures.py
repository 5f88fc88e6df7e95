"""Figures of a study: stable learning rates, survival and curves of the cells that confirm, and length. Pure."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.figures import COLOURS, arm_order
from evaluation.outcomes import ACCEPTANCE, GAP, SCORE
from evaluation.statistics import mean_interval
from evaluation.study_runs import StudyRun, confirming_cells, outcomes_of
from evaluation.study_tables import USUAL_OPERANDS, by_surroundings, early
from evaluation.survival import collapse_curve
from evaluation.themes import as_label

CONTROLLED = "_bounded_step"


def draw_stable_rates(runs: Sequence[StudyRun]) -> Figure | None:
    """Draw arms x learning rate, a panel for each optimizer, staleness and engine.

    Colour is the share of seeds that did not collapse; below it stands the final score, a mean over seeds.

    Args:
        runs: of the study.

    Returns:
        The figure; None where no surroundings have two learning rates.
    """
    groups = by_surroundings(runs)
    if not groups:
        return None
    num_columns = min(2, len(groups))
    num_rows = -(-len(groups) // num_columns)
    tallest = max(len({run.arm for run in group}) for group in groups.values())
    figure = Figure(figsize=(6.4 * num_columns, (0.9 + 0.42 * tallest) * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for axes, (name, group) in zip(panels, groups.items(), strict=False):
        _draw_rates(axes, name, group)
    for axes in panels[len(groups) :]:
        axes.set_visible(False)
    figure.suptitle("seeds that do not collapse / seeds, final score", fontsize=10)
    return figure


def _draw_rates(axes: Axes, name: str, runs: Sequence[StudyRun]) -> None:
    arms = arm_order([run.arm for run in runs])
    rates = sorted({run.setting.learning_rate for run in runs})
    lasting = np.full((len(arms), len(rates)), np.nan)
    for row, arm in enumerate(arms):
        for column, rate in enumerate(rates):
            here = [run.outcome for run in runs if run.arm == arm and run.setting.learning_rate == rate]
            known = [not run.has_collapsed for run in here if run.has_collapsed is not None]
            if not here:
                continue
            lasting[row, column] = np.mean(known) if known else np.nan
            score = np.mean([run.final_score for run in here])
            text = f"{sum(known)}/{len(known)}  {score:.2f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color="#000000")
    axes.imshow(lasting, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto", alpha=0.7)
    axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axes.set_yticks(range(len(arms)), [as_label(arm) for arm in arms], fontsize=8)
    axes.set_xlabel("learning rate")
    axes.set_title(as_label(name), fontsize=9)


def draw_survival(runs: Sequence[StudyRun]) -> Figure | None:
    """Draw the share of seeds that have not collapsed by each step, a panel for each cell that confirms.

    Args:
        runs: of the study.

    Returns:
        The figure; None where no cell confirms.
    """
    cells = confirming_cells(runs)
    if not cells:
        return None
    figure = Figure(figsize=(6.6, 3.6 * len(cells)), layout="constrained")
    for axes, (cell, members) in zip(figure.subplots(len(cells), squeeze=False).ravel(), cells.items(), strict=True):
        last = max(run.outcome.num_steps for run in members)
        for number, arm in enumerate(arm_order([run.arm for run in members])):
            curve = collapse_curve(outcomes_of([run for run in members if run.arm == arm]))
            if curve is None:
                continue
            shift = 0.006 * number  # curves that coincide stay visible
            steps = [0.0, *curve.times.tolist(), float(last)]
            shares = [1.0, *curve.survival.tolist(), curve.survival[-1] if len(curve.survival) else 1.0]
            colour, style = _line(arm)
            axes.step(steps, np.subtract(shares, shift), style, where="post", label=as_label(arm), color=colour)
        axes.set(
            xlabel="training step", ylabel="seeds that have not collapsed", ylim=(-0.06, 1.04), title=as_label(cell)
        )
        axes.grid(alpha=0.25)
        axes.legend(fontsize=7)
    return figure


def draw_curves(runs: Sequence[StudyRun]) -> Figure | None:
    """Draw gap and score of every arm of the cells that confirm: mean over seeds with its interval.

    Args:
        runs: of the study.

    Returns:
        The figure; None where no cell confirms.
    """
    cells = confirming_cells(runs)
    if not cells:
        return None
    figure = Figure(figsize=(11, 4.2 * len(cells)), layout="constrained")
    panels = figure.subplots(len(cells), 2, squeeze=False)
    for (gap_axes, score_axes), (cell, members) in zip(panels, cells.items(), strict=True):
        for arm in arm_order([run.arm for run in members]):
            of_arm = [run for run in members if run.arm == arm]
            _draw_mean(gap_axes, of_arm, GAP, arm)
            _draw_mean(score_axes, of_arm, SCORE, arm)
        gap_axes.set(
            yscale="log", xlabel="training step", ylabel="absolute PPL gap (nats per token)", title=as_label(cell)
        )
        score_axes.set(xlabel="training step", ylabel="score (greedy, held out)", ylim=(0, 1), title="mean over seeds")
        for axes in (gap_axes, score_axes):
            axes.grid(alpha=0.25)
        score_axes.legend(fontsize=7)
    return figure


def _draw_mean(axes: Axes, runs: Sequence[StudyRun], metric: str, arm: str) -> None:
    table = pd.DataFrame({run.seed: dict(run.curves[metric]) for run in runs}).sort_index().dropna()
    if table.empty:
        return
    colour, style = _line(arm)
    axes.plot(table.index, table.mean(axis=1), style, label=as_label(arm), linewidth=1.4, color=colour)
    if table.shape[1] > 1:
        low, high = mean_interval(table.to_numpy())
        axes.fill_between(table.index, low, high, color=colour, alpha=0.12, linewidth=0)


def draw_horizon(runs: Sequence[StudyRun]) -> Figure | None:
    """Draw kept fraction and gap of the first steps, and the final score over the first, against mean length.

    Args:
        runs: of the study.

    Returns:
        The figure; None where only one problem size was run.
    """
    longer = [run for run in runs if run.setting.max_operands != USUAL_OPERANDS]
    if not longer:
        return None
    beside = {(run.setting.surroundings, run.setting.learning_rate) for run in longer}
    arms = arm_order([run.arm for run in longer])
    chosen = [run for run in runs if (run.setting.surroundings, run.setting.learning_rate) in beside]
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    kept_axes, gap_axes, score_axes = figure.subplots(1, 3)
    for arm in arms:
        of_arm = [run for run in chosen if run.arm == arm]
        lengths = [early(run, "rollout/response_length_mean") for run in of_arm]
        for axes, values in (
            (kept_axes, [early(run, ACCEPTANCE) for run in of_arm]),
            (gap_axes, [early(run, GAP) for run in of_arm]),
            (score_axes, [run.outcome.final_score - run.outcome.start_score for run in of_arm]),
        ):
            marker = "s" if arm.endswith(CONTROLLED) else "o"
            axes.plot(lengths, values, marker, color=_line(arm)[0], label=as_label(arm), alpha=0.8, markersize=5)
    kept_axes.set(ylabel="kept fraction, steps 1 to 4", ylim=(-0.02, 1.02))
    gap_axes.set(ylabel="absolute PPL gap, steps 1 to 4", yscale="log")
    score_axes.set(ylabel="final score minus score before")
    for axes in (kept_axes, gap_axes, score_axes):
        axes.set_xlabel("mean response length (tokens)")
        axes.grid(alpha=0.25)
    score_axes.legend(fontsize=7)
    return figure


def _line(arm: str) -> tuple[str, str]:
    """Colour and style: an arm with step control has its arm's colour, dashed."""
    return COLOURS.get(arm.removesuffix(CONTROLLED), "#666666"), "--" if arm.endswith(CONTROLLED) else "-"


STUDY_FIGURES = {
    "stable_rates": draw_stable_rates,
    "survival": draw_survival,
    "curves": draw_curves,
    "length_figure": draw_horizon,
}
"""Stem of the file to what draws it."""
