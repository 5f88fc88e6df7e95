"""The paper's figures from our runs: perplexity gap (log scale) and score against the training step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.outcomes import GAP, SCORE
from evaluation.statistics import mean_interval
from evaluation.themes import as_label

COLOURS = {
    "token_is": "#56B4E9",
    "ppo_clip": "#D55E00",
    "trm_max_0.05": "#0072B2",
    "trm_avg_0.001": "#009E73",
    "trm_max_0.1": "#CC79A7",
    "trm_avg_0.002": "#E69F00",
    "trm_max_0.1_avg_0.002": "#000000",
    "random_as_trm_avg_0.001": "#999999",
}
BAND_FROM_SEEDS = 5
FEWEST_ARMS = 2
"""A figure compares: with fewer of its arms it is left out."""
LINE_STYLES = ("-", "--", ":", "-.")


@dataclass(frozen=True, kw_only=True)
class FigurePlan:
    """Which arms a figure compares.

    Attributes:
        name: stem of its files.
        title: what it compares.
        arms: in the order of the legend.
    """

    name: str
    title: str
    arms: tuple[str, ...]

    def missing_arms(self, points: pd.DataFrame) -> list[str]:
        """List those of its arms that have no points."""
        there = set(points.arm)
        return [arm for arm in self.arms if arm not in there]

    def can_compare(self, points: pd.DataFrame) -> bool:
        """Whether at least two of its arms have points."""
        return len(self.arms) - len(self.missing_arms(points)) >= FEWEST_ARMS


FIGURES = (
    FigurePlan(name="figure_1", title="Figure 1: importance sampling and PPO clipping", arms=("token_is", "ppo_clip")),
    FigurePlan(
        name="figure_2",
        title="Figure 2: PPO clipping and Trust Region Masking",
        arms=("ppo_clip", "trm_max_0.05", "trm_avg_0.001"),
    ),
    FigurePlan(
        name="figure_3",
        title="Figure 3: loose criteria alone and together",
        arms=("trm_max_0.1", "trm_avg_0.002", "trm_max_0.1_avg_0.002"),
    ),
    FigurePlan(
        name="control",
        title="Control: rejecting as many sequences at random",
        arms=("ppo_clip", "random_as_trm_avg_0.001", "trm_avg_0.001"),
    ),
)


def draw_figure(points: pd.DataFrame, plan: FigurePlan, *, score_name: str) -> Figure | None:
    """Draw one figure: two panels, one colour per arm; seeds as single curves below five, a band from five.

    Args:
        points: frame of points (arm, seed, run_id, metric, step, value).
        plan: which arms.
        score_name: label of the score.

    Returns:
        The figure, or None where fewer than two of its arms have points.
    """
    if not plan.can_compare(points):
        return None
    chosen = points[points.arm.isin(plan.arms)]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    gap_axes, score_axes = figure.subplots(1, 2)
    for arm in plan.arms:
        draw_arm(gap_axes, chosen[(chosen.arm == arm) & (chosen.metric == GAP)], arm)
        draw_arm(score_axes, chosen[(chosen.arm == arm) & (chosen.metric == SCORE)], arm)
    gap_axes.set(yscale="log", xlabel="training step", ylabel="log absolute PPL gap (nats per token)")
    score_axes.set(xlabel="training step", ylabel=score_name, ylim=(0, 1))
    for axes in (gap_axes, score_axes):
        axes.grid(alpha=0.25)
    score_axes.legend(fontsize=8)
    figure.suptitle(plan.title)
    return figure


def save_figures(points: pd.DataFrame, folder: Path, *, score_name: str) -> list[Path]:
    """Draw every figure that has two arms, as PNG and PDF, with its points and their MLflow run ids as CSV.

    Files that an earlier report left of the others are removed.

    Args:
        points: frame of points.
        folder: where to write; made if it is not there.
        score_name: label of the score.

    Returns:
        The files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for plan in FIGURES:
        figure = draw_figure(points, plan, score_name=score_name)
        files = {suffix: folder / f"{plan.name}.{suffix}" for suffix in ("png", "pdf", "csv")}
        if figure is None:
            for file in files.values():
                file.unlink(missing_ok=True)
            continue
        chosen = points[points.arm.isin(plan.arms) & points.metric.isin([GAP, SCORE])]
        run_ids = ", ".join(sorted(chosen.run_id.unique()))
        figure.savefig(files["png"], dpi=150, metadata={"Description": f"MLflow runs: {run_ids}"})
        figure.savefig(files["pdf"], metadata={"Keywords": f"MLflow runs: {run_ids}"})
        chosen.to_csv(files["csv"], index=False)
        written += list(files.values())
    return written


def draw_arm(axes: Axes, points: pd.DataFrame, arm: str) -> None:
    """Draw one arm's curves of one metric: each seed below five, their mean with a band from five on."""
    if points.empty:
        return
    colour = COLOURS.get(arm)
    table = points.pivot_table(index="step", columns="seed", values="value")
    if table.shape[1] < BAND_FROM_SEEDS:
        for number, seed in enumerate(table.columns):
            style = LINE_STYLES[number % len(LINE_STYLES)]
            label = f"{as_label(arm)}, seed {seed}"
            axes.plot(table.index, table[seed], color=colour, linestyle=style, label=label, linewidth=1.4)
        return
    table = table.dropna()  # a step that not every seed has would be a mean of the survivors
    low, high = mean_interval(table.to_numpy())
    axes.plot(table.index, table.mean(axis=1), color=colour, label=f"{as_label(arm)}, mean of {table.shape[1]} seeds")
    axes.fill_between(table.index, low, high, color=colour, alpha=0.2, linewidth=0)


def arm_order(arms: Sequence[str]) -> list[str]:
    """List each arm once, as the figures do; arms that are in none come last, by name."""
    known = list(COLOURS)
    return sorted(set(arms), key=lambda arm: (known.index(arm) if arm in known else len(known), arm))
