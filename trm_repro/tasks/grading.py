r"""One strict rule for integer answers: the last complete answer marker of a response decides.

A marker is ``\boxed{...}`` or a line ``Answer: ...``. What stands in it, or behind its last equals sign, must be one
integer, up to wrappers (dollar signs, ``\text{}``, colour, degrees), Unicode forms, leading zeros and thousands
separators. A list, a comparison or several equations are no integer. Text is scanned in linear time and nothing is
evaluated: fractions and powers are not worked out.
"""

import re
import unicodedata

from trm_repro.tasks.problems import Grade

MAX_RESPONSE_CHARACTERS = 1_000_000
"""Only the end of a longer response is read."""
MAX_ANSWER_CHARACTERS = 200
"""A longer marked answer is not an integer of any problem here."""

_BRACE = re.compile(r"\\boxed *\{|\\.|[{}]", re.DOTALL)  # an escaped brace is matched with its backslash
_ANSWER_LINE = re.compile(r"\banswer[ \t*_]*[:\uff1a][ \t*_]*\n?([^\n]*)$", re.IGNORECASE | re.MULTILINE)
_WRAPPER = re.compile(
    r"^\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|bm|boldsymbol|underline|boxed|fbox"
    r"|textcolor\s*\{[a-zA-Z]*\})\s*\{(.*)\}$",
    re.DOTALL,
)
_SWITCH = re.compile(r"^\\(?:displaystyle|bf|rm|color\s*\{[a-zA-Z]*\})(?![a-zA-Z])(.*)$", re.DOTALL)
_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,;: !]|,\\!|\{,\}|~)(?=\d{3}(?!\d))", re.ASCII)
_INTEGER = re.compile(r"^([+-]?) ?(\d+|\d{1,3}(?:,\d{3})+)$", re.ASCII)
_SECOND_EQUATION = re.compile(r",(?!\d{3})|;|\b(?:or|and)\b")  # beside an equals sign already read
_PARENTHESES = re.compile(r"\([^()]*\)")
_MINUS_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "\ufe63": "-", "\uff0d": "-"})
_SPACES = ("\\,", "\\;", "\\:", "\\ ", "\\!", "~")
_UNITS = ("^\\circ", "^{\\circ}", "\\degree", "\u00b0", "\\%", "%")
_RAISED = ("<super>", "<sub>", "<circle>", "<fraction>")
"""How Unicode names forms that NFKC would turn into plain digits: 7 with a superscript two is 49, not 72."""


def normalize_integer(text: str) -> str | None:
    r"""Read one integer out of an answer's text.

    Args:
        text: such as ``$336^\circ$``, ``\text{-07}`` or ``1,024``.

    Returns:
        Its digits without leading zeros, with a minus where negative (``336``, ``-7``, ``1024``); None when the
        text is anything but one integer.
    """
    if len(text) > MAX_ANSWER_CHARACTERS:
        return None
    text = _right_side("".join(map(_plain_form, text.translate(_MINUS_SIGNS))))
    previous = None
    while text != previous:
        previous = text
        text = text.strip().removeprefix("\\$").strip("$").strip().rstrip(".").strip("*_` \t\n")
        text = text.removeprefix("\\(").removesuffix("\\)").removeprefix("\\[").removesuffix("\\]")
        for space in _SPACES:
            text = text.removeprefix(space).removesuffix(space.rstrip())  # strip() took the blank of "\\ "
        for unit in _UNITS:
            text = text.removesuffix(unit)
        if wrapped := _WRAPPER.match(text) or _SWITCH.match(text):
            text = wrapped.group(1)
        elif text.startswith("{") and text.endswith("}"):
            text = text[1:-1]
    text = _THOUSANDS.sub(",", text)
    matched = _INTEGER.match(text)
    if matched is None:
        return None
    digits = matched.group(2).replace(",", "").lstrip("0") or "0"
    return f"-{digits}" if matched.group(1) == "-" and digits != "0" else digits


def last_marked_answer(response: str) -> str | None:
    r"""Find the text in the last complete answer marker.

    Args:
        response: a model's response.

    Returns:
        What stands in the last ``\boxed{...}`` whose braces close, or on the last ``Answer:`` line, whichever
        begins later; None when there is neither.
    """
    response = response[-MAX_RESPONSE_CHARACTERS:]
    lines = list(_ANSWER_LINE.finditer(response))
    line = lines[-1] if lines else None
    box_start, box = _last_box(response)
    if line is not None and line.start() > box_start:
        inner = _last_box(line.group(1))[1]
        return inner if inner is not None else line.group(1)
    return box


def grade_integer(answer: str, response: str, *, finished: bool = True) -> Grade:
    """Grade a response to a problem whose answer is an integer.

    Args:
        answer: the right integer, as text.
        response: a model's response.
        finished: whether the response ended by itself; one cut off is wrong.

    Returns:
        Reward 1 where the last marked answer is the right integer, else 0.

    Raises:
        ValueError: if ``answer`` is no integer.
    """
    gold = normalize_integer(answer)
    if gold is None:
        raise ValueError(f"the right answer must be an integer, got {answer[:80]!r}")
    if not finished:
        return Grade(reward=0.0, answer=None, reason="cut off")
    marked = last_marked_answer(response)
    if marked is None:
        return Grade(reward=0.0, answer=None, reason="no marked answer")
    found = normalize_integer(marked)
    if found is None:
        return Grade(reward=0.0, answer=marked[:MAX_ANSWER_CHARACTERS].strip(), reason="not one integer")
    return Grade(reward=float(found == gold), answer=found, reason="correct" if found == gold else "wrong answer")


def _last_box(text: str) -> tuple[int, str | None]:
    """Find the last box whose braces close and that no other closed box holds: its start and content, or (-1, None)."""
    last_start, last_end, content = -1, -1, None
    for start, inner, end in sorted(_closed_boxes(text)):
        if start > last_end:  # a box inside a closed one is part of that one's answer
            last_start, last_end, content = start, end, (inner, end)
    return last_start, None if content is None else text[slice(*content)]


def _closed_boxes(text: str) -> list[tuple[int, int, int]]:
    """List the boxes whose braces close: start of the command, start of the content, end of the content."""
    closed: list[tuple[int, int, int]] = []
    open_boxes: list[tuple[int, int, int]] = []  # start of the command, start of the content, depth outside
    depth = 0
    for brace in _BRACE.finditer(text):
        token = brace.group()
        if token == "}":
            depth -= 1
            if open_boxes and open_boxes[-1][2] == depth:
                start, inner, _ = open_boxes.pop()
                closed.append((start, inner, brace.start()))
        elif token[-1] == "{" and token != "\\{":
            if token != "{":
                open_boxes.append((brace.start(), brace.end(), depth))
            depth += 1
    return closed


def _plain_form(character: str) -> str:
    """Write a full-width or bold character plainly; leave one whose place or frame means something."""
    if unicodedata.decomposition(character).startswith(_RAISED):
        return character
    return unicodedata.normalize("NFKC", character)


def _right_side(text: str) -> str:
    """Take what stands behind the last equals sign of one chain of equalities; nothing of a list or a comparison."""
    left, equals, right = text.rpartition("=")
    if not equals:
        return text
    _, earlier_equals, rest = _PARENTHESES.sub("", left).partition("=")
    if left.rstrip().endswith(("<", ">", "!", "\\not")) or (earlier_equals and _SECOND_EQUATION.search(rest)):
        return ""
    return right
