"""Progress: a bar in a terminal; in a log a line at the start, one now and then, and one at the end."""

import io
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

LOG_SECONDS = 60.0
CURSOR_UP = "\x1b[A"


def progress_bar(
    description: str,
    total: int | None,
    unit: str,
    *,
    initial: int = 0,
    smoothing: float = 0.3,
    is_hidden: bool = False,
    seconds: float = LOG_SECONDS,
) -> "tqdm[Any]":
    """Open a bar on standard error.

    Args:
        description: what is going on.
        total: units in all; None if that is not known.
        unit: what is counted, such as step.
        initial: units done before.
        smoothing: of the rate, from 0 (mean of all) to 1 (the last one's).
        is_hidden: draw nothing.
        seconds: least time between two lines of a log.

    Returns:
        The bar. ``update(0)`` shows a changed postfix when it is time to.
    """
    from tqdm import tqdm

    common: dict[str, Any] = {
        "desc": description,
        "total": total,
        "unit": unit,
        "initial": initial,
        "smoothing": smoothing,
        "disable": is_hidden,
        "miniters": 0,
    }
    if sys.stderr.isatty():
        return tqdm(**common)
    log = LogLines(sys.stderr)
    return tqdm(**common, file=log, mininterval=seconds, maxinterval=2 * seconds, ncols=0)  # numbers without a bar


class LogLines(io.TextIOBase):
    """What tqdm draws over and over in one place, each as a line of its own."""

    def __init__(self, stream: TextIO) -> None:
        """Name the log."""
        self.stream = stream
        self.last = ""

    def write(self, text: str) -> int:
        """Write a line if there is one and it is not the last one again."""
        line = text.replace(CURSOR_UP, "").strip()
        if line and line != self.last:
            self.stream.write(f"{line}\n")
            self.last = line
        return len(text)

    def flush(self) -> None:
        """Pass everything on."""
        self.stream.flush()
