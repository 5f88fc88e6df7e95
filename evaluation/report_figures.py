"""The report's pictures: the panels of the paper's figures, who is kept, and the bounds, step by step."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from evaluation.document import Picture
from evaluation.figures import COLOURS, LINE_STYLES, FigurePlan, arm_order, draw_arm
from evaluation.outcomes import GAP, SCORE, RunOutcome
from evaluation.survival import collapse_curve
from evaluation.themes import as_label, light_and_dark, styled

MOST_LABELS = 6
KEPT = {
    "mask/kept_correct_fraction": "correct",
    "mask/kept_wrong_fraction": "wrong",
    "mask/kept_short_fraction": "short",
    "mask/kept_long_fraction": "long",
}
BOUNDS = {
    "bounds/unified_paper": "unified bound, paper",
    "bounds/unified_sharp": "unified bound, sharp",
    "bounds/trivial": "trivial bound",
    "bounds/surrogate": "surrogate L'",
}
KEPT_COLOURS = ("#009E73", "#D55E00", "#0072B2", "#E69F00")
BOUND_COLOURS = ("#D55E00", "#E69F00", "#0072B2", "#000000")


def plan_pictures(points: pd.DataFrame, plan: FigurePlan, folder: Path, *, score_name: str) -> list[Picture]:
    """Draw both panels of one of the paper's figures, and write them as SVG.

    Files that an earlier report left of a figure that is not drawn are removed.

    Args:
        points: frame of points.
        plan: which arms.
        folder: where to write; made if it is not there.
        score_name: label of the score.

    Returns:
        The pictures; none where fewer than two arms of the figure have points.
    """
    panels = ((GAP, "PPL gap (nats per token)", "gap"), (SCORE, score_name, "score"))
    if not plan.can_compare(points):
        for _, _, stem in panels:
            (folder / f"{plan.name}_{stem}.svg").unlink(missing_ok=True)
        return []
    chosen = points[points.arm.isin(plan.arms)]
    arms = [arm for arm in plan.arms if arm in set(chosen.arm)]
    pictures = []
    for metric, label, stem in panels:
        curves = chosen[chosen.metric == metric]
        if curves.empty:
            continue

        def draw(axes: Axes, curves: pd.DataFrame = curves, label: str = label, metric: str = metric) -> None:
            for arm in arms:
                draw_arm(axes, curves[curves.arm == arm], arm)
            axes.set(xlabel="training step", ylabel=label)
            axes.set(yscale="log") if metric == GAP else axes.set(ylim=(0, 1))

        ends = "; ".join(_ends(curves[curves.arm == arm], arm) for arm in arms)
        alt = f"{plan.title}: {label} against the training step. {ends}."
        pictures.append(_picture(_panel(draw), folder / f"{plan.name}_{stem}.svg", alt=alt))
    return pictures


def arm_pictures(points: pd.DataFrame, labels: dict[str, str], folder: Path, *, name: str, title: str) -> list[Picture]:
    """Draw several metrics step by step, a picture an arm: median over seeds, with smallest and largest.

    Args:
        points: frame of points.
        labels: what each metric is called.
        folder: where to write; made if it is not there.
        name: what the files' names begin with.
        title: what is shown.

    Returns:
        A picture for each arm that has these metrics.
    """
    chosen = points[points.metric.isin(list(labels))]
    pictures = []
    for number, arm in enumerate(arm_order(list(chosen.arm)), start=1):
        figure = _arm_panel(chosen[chosen.arm == arm], labels, arm)
        alt = f"{title} under {arm}, step by step: {', '.join(labels.values())}."
        pictures.append(_picture(figure, folder / f"{name}_{number}.svg", alt=alt))
    return pictures


def survival_picture(outcomes: Sequence[RunOutcome], folder: Path, *, min_seeds: int) -> Picture | None:
    """Draw the share of runs that have not collapsed by each step, a line an arm, and write it as SVG.

    Args:
        outcomes: of all runs.
        folder: where to write; made if it is not there.
        min_seeds: runs an arm needs that can say whether they collapsed; arms with fewer are left out.

    Returns:
        The picture; None where no arm has as many, and then a file that an earlier report left is removed.
    """
    file = folder / "survival.svg"
    curves = {}
    for arm in arm_order([outcome.arm for outcome in outcomes]):
        known = [run for run in outcomes if run.arm == arm and run.has_collapsed is not None]
        curve = collapse_curve(known) if len(known) >= min_seeds else None
        if curve is not None:
            curves[arm] = [0.0, *curve.times, max(run.num_steps for run in known)], [1.0, *curve.survival]
    if not curves:
        file.unlink(missing_ok=True)
        return None

    def draw(axes: Axes) -> None:
        for number, (arm, (steps, shares)) in enumerate(curves.items()):
            style = LINE_STYLES[number % len(LINE_STYLES)]  # lines at 1 lie on one another
            ends = [*shares, shares[-1]]
            label = as_label(arm)
            axes.step(steps, ends, where="post", color=COLOURS.get(arm), linestyle=style, label=label, linewidth=1.6)
        axes.set(xlabel="training step", ylabel="share of runs not yet collapsed", ylim=(-0.02, 1.02))

    ends = "; ".join(f"{arm} {shares[-1]:.2g} at the end" for arm, (_, shares) in curves.items())
    return _picture(_panel(draw), file, alt=f"Share of runs not yet collapsed against the training step. {ends}.")


def _arm_panel(points: pd.DataFrame, labels: dict[str, str], arm: str) -> Figure:
    with styled():
        figure = Figure(figsize=(4.2, 3.1), layout="constrained")
        axes = figure.subplots()
        for (metric, label), colour in zip(
            labels.items(), KEPT_COLOURS if labels is KEPT else BOUND_COLOURS, strict=True
        ):
            table = points[points.metric == metric].pivot_table(index="step", columns="seed", values="value")
            if not table.empty:
                axes.plot(table.index, table.median(axis=1), color=colour, linewidth=1.3, label=label)
                axes.fill_between(table.index, table.min(axis=1), table.max(axis=1), color=colour, alpha=0.15)
        axes.set_title(as_label(arm), fontsize=10)
        axes.set_xlabel("training step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        if labels is KEPT:
            axes.set(ylim=(-0.02, 1.02), ylabel="share kept")
        else:
            axes.set_yscale("symlog", linthresh=1e-2)
            axes.set_ylabel("reward")
        figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def file_picture(figure: Figure, file: Path, *, alt: str) -> Picture:
    """Write a figure of several panels as SVG and take it into the report."""
    return replace(_picture(figure, file, alt=alt), is_wide=True)


def _panel(draw: Callable[[Axes], None]) -> Figure:
    with styled():
        figure = Figure(figsize=(5.2, 4.0), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        handles = _few(axes.get_lines())
        figure.legend(handles=handles, loc="outside lower center", ncols=1 if len(handles) < 4 else 2, fontsize=9)
    return figure


def _few(handles: Sequence[Line2D]) -> list[Line2D]:
    """One entry a curve, or, where there are many, one an arm."""
    if len(handles) <= MOST_LABELS:
        return list(handles)
    arms: dict[str, Line2D] = {}
    for handle in handles:
        arm, is_seed, _ = str(handle.get_label()).partition(", seed ")
        one = Line2D([], [], color=handle.get_color(), label=f"{arm}, a line for each seed") if is_seed else handle
        arms.setdefault(arm, one)
    return list(arms.values())


def _ends(curve: pd.DataFrame, arm: str) -> str:
    if curve.empty:
        return f"{arm} not measured"
    num_seeds = curve.seed.nunique()
    first, last = (curve[curve.step == step].value for step in (curve.step.min(), curve.step.max()))
    return f"{arm} from {first.mean():.2g} to {last.mean():.2g} over {num_seeds} seed{'' if num_seeds == 1 else 's'}"


def _picture(figure: Figure, file: Path, *, alt: str) -> Picture:
    light, dark = light_and_dark(figure)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(light)
    return Picture(image=light, dark_image=dark, alt=alt, path=f"{file.parent.name}/{file.name}")
