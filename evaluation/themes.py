"""A figure as SVG, once for a light page and once for a dark one: drawn once, its colours exchanged."""

import io
import re
from contextlib import AbstractContextManager

import matplotlib
from matplotlib.figure import Figure

DARK_TEXT, DARK_PAGE = "#e4e8ef", "#1b212b"
DARK_COLOURS = {
    "#000000": DARK_TEXT,
    "#ffffff": DARK_PAGE,
    "#b0b0b0": "#5a6475",  # grid
    "#cccccc": "#4a5568",  # frame of a legend
    "#0072b2": "#4aa3e6",  # too dim on a dark page
    "#009e73": "#2cc096",
}


def styled() -> AbstractContextManager[None]:
    """Set what the figures of a report have in common, while they are drawn and written."""
    return matplotlib.rc_context(
        {
            "font.size": 10.0,
            "svg.fonttype": "path",  # asks for no font
            "svg.hashsalt": "figure",  # the same figure is the same file
        }
    )


def as_label(name: str) -> str:
    """Keep a name with a dollar sign from being read as a formula."""
    return name.replace("$", r"\$")


def light_and_dark(figure: Figure) -> tuple[bytes, bytes]:
    """Write a figure for both themes.

    Args:
        figure: with a white background and black text.

    Returns:
        SVG for a light and for a dark page.
    """
    file = io.BytesIO()
    with styled():
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    light = file.getvalue().decode("utf-8")
    pattern = re.compile("|".join(DARK_COLOURS))
    dark = pattern.sub(lambda found: DARK_COLOURS[found.group()], light)
    # Letters have no colour of their own: they take the root's.
    return light.encode(), dark.replace("<svg ", f'<svg fill="{DARK_TEXT}" ', 1).encode()
