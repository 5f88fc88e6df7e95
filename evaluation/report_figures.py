"""The report's pictures: the panels of the paper's figures, who is kept, and the bounds, step by step."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from evaluation.document import Picture
from evaluation.figures import FigurePlan, arm_order, draw_arm
from evaluation.outcomes import GAP, SCORE
from evaluation.themes import light_and_dark, styled

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

    Args:
        points: frame of points.
        plan: which arms.
        folder: where to write; made if it is not there.
        score_name: label of the score.

    Returns:
        The pictures; none where no arm of the figure has points.
    """
    chosen = points[points.arm.isin(plan.arms)]
    arms = [arm for arm in plan.arms if arm in set(chosen.arm)]
    pictures = []
    for metric, label, stem in ((GAP, "PPL gap (nats per token)", "gap"), (SCORE, score_name, "score")):
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


def grid_picture(points: pd.DataFrame, labels: dict[str, str], file: Path, *, title: str) -> Picture | None:
    """Draw several metrics step by step, a panel an arm: median over seeds, with smallest and largest.

    Args:
        points: frame of points.
        labels: what each metric is called.
        file: SVG to write.
        title: what is shown.

    Returns:
        The picture; None where no arm has these metrics.
    """
    chosen = points[points.metric.isin(list(labels))]
    arms = arm_order(list(chosen.arm))
    if not arms:
        return None
    colours = dict(zip(labels, KEPT_COLOURS if labels is KEPT else BOUND_COLOURS, strict=True))
    num_columns = min(2, len(arms))
    num_rows = -(-len(arms) // num_columns)
    with styled():
        figure = Figure(figsize=(3.6 * num_columns, 2.4 * num_rows + 0.8), layout="constrained")
        panels = figure.subplots(num_rows, num_columns, squeeze=False, sharex=True, sharey=True).ravel()
        for axes, arm in zip(panels, arms, strict=False):
            for metric, colour in colours.items():
                table = chosen[(chosen.arm == arm) & (chosen.metric == metric)].pivot_table(
                    index="step", columns="seed", values="value"
                )
                if table.empty:
                    continue
                axes.plot(table.index, table.median(axis=1), color=colour, linewidth=1.3)
                axes.fill_between(table.index, table.min(axis=1), table.max(axis=1), color=colour, alpha=0.15)
            axes.set_title(arm, fontsize=10)
            axes.grid(alpha=0.25)
        for axes in panels[len(arms) :]:
            axes.set_visible(False)
        if labels is KEPT:
            panels[0].set_ylim(-0.02, 1.02)
        else:
            panels[0].set_yscale("symlog", linthresh=1e-2)
        figure.supxlabel("training step", fontsize=10)
        handles = [Line2D([], [], color=colours[metric], label=label) for metric, label in labels.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9)
    alt = f"{title}, step by step, a panel for each of {', '.join(arms)}: {', '.join(labels.values())}."
    return _picture(figure, file, alt=alt)


def file_picture(figure: Figure, file: Path, *, alt: str) -> Picture:
    """Write a figure as SVG and take it into the report."""
    return _picture(figure, file, alt=alt)


def _panel(draw: Callable[[Axes], None]) -> Figure:
    with styled():
        figure = Figure(figsize=(5.2, 4.0), layout="constrained")
        axes = figure.subplots()
        draw(axes)
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
        arm = str(handle.get_label()).rpartition(", seed ")[0]
        arms.setdefault(arm, Line2D([], [], color=handle.get_color(), label=f"{arm}, a line for each seed"))
    return list(arms.values())


def _ends(curve: pd.DataFrame, arm: str) -> str:
    if curve.empty:
        return f"{arm} not measured"
    first, last = (curve[curve.step == step].value for step in (curve.step.min(), curve.step.max()))
    return f"{arm} from {first.mean():.2g} to {last.mean():.2g} over {curve.seed.nunique()} seeds"


def _picture(figure: Figure, file: Path, *, alt: str) -> Picture:
    light, dark = light_and_dark(figure)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(light)
    return Picture(image=light, dark_image=dark, alt=alt, path=f"{file.parent.name}/{file.name}")
