"""The figure of `trm-repro bounds --plot`. matplotlib is imported when it is drawn."""

import os
from pathlib import Path

import numpy as np

from trm_repro.bounds import PAPER_UNIFIED, Constants, KnownLimits, every_bound, unified_bound
from trm_repro.errors import InputError

PLOT_FORMATS = (".png", ".svg", ".pdf")
PLOTTED = ("classical", "trivial", *PAPER_UNIFIED, "prefix_adaptive", "unified")


def refuse_target(path: Path) -> None:
    """Refuse what a plot cannot be written to, or would take the place of.

    Raises:
        InputError: if the path is a folder or a device, or its ending is no format.
    """
    if path.is_dir():
        raise InputError(f"--plot: {str(path)!r} is a folder; expected the name of a file, such as bounds.png")
    if path.exists() and not path.is_file():
        raise InputError(f"--plot: {path} is a device or pipe; expected the name of a file, such as bounds.png")
    if path.suffix.lower() not in PLOT_FORMATS:
        raise InputError(f"--plot: {path} ends in {path.suffix!r}; expected {', '.join(PLOT_FORMATS)}")


def plot_bounds(path: Path, numbers: dict[str, float], constants: list[Constants]) -> None:
    """Draw the bounds of `PLOTTED` against T at the given delta, and against delta at the given T.

    Args:
        path: the file to write; its ending says the format.
        numbers: length and delta, and any of epsilon, kl_seq, tv_seq.
        constants: the first is drawn for every bound; with two, the second adds its unified bound.

    Raises:
        InputError: if the file cannot be written.
    """
    from matplotlib.figure import Figure

    length, delta = int(numbers["length"]), float(numbers["delta"])
    known = KnownLimits(**{name: value for name, value in numbers.items() if name not in ("length", "delta")})
    lengths = np.unique(np.geomspace(2, max(1e5, 10 * length), 300).round())
    deltas = np.geomspace(min(1e-8, delta / 10), max(1.0, delta), 300)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, values, divergences, label, mark in (
        (figure.add_subplot(1, 2, 1), lengths, known.at(lengths, delta), f"T, at delta = {delta:g}", length),
        (figure.add_subplot(1, 2, 2), deltas, known.at(length, deltas), f"delta in nats, at T = {length}", delta),
    ):
        bounds = every_bound(divergences, constants=constants[0])
        for name in PLOTTED:
            style = {"linewidth": 2.5, "color": "black"} if name == "unified" else {"linewidth": 1.2}
            axes.plot(values, np.broadcast_to(bounds[name], values.shape), label=name.replace("_", " "), **style)
        for other in constants[1:]:
            unified = unified_bound(divergences, constants=other)
            axes.plot(values, unified, color="black", linestyle="--", label=f"unified, {other} constants")
        axes.axhline(1.0, color="grey", linestyle=":", label="reward range")
        axes.axvline(mark, color="grey", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel="bound on |error|, reward units")
    figure.axes[1].legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(f"Bounds with {constants[0]} constants", fontsize="medium")
    partial = path.with_name(f"{path.name}.partial")
    try:
        figure.savefig(partial, dpi=150, format=path.suffix.lower().removeprefix("."))
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"--plot: {path} cannot be written ({error.strerror or error})") from None
