r"""The rule that verl scores DAPO-Math and AIME responses by, so that runs of both compare.

The last ``Answer:`` of the last 300 characters decides; it and the right answer are rewritten alike and compared as
text. Boxes are not looked for, and being cut off does not count. Source: verl, verl/utils/reward_score/math_dapo.py
(Apache-2.0), the rule without its strict-box option; it goes back to Lewkowycz et al. 2022 (Minerva). Ours gives
reward 0 where verl gives -1. Later revisions of verl also read a box in the last 100 characters where there is no
``Answer:``; DAPO's published runs, and this rule, do not.
"""

import re

from trm_repro.tasks.problems import Grade

MAX_SCORED_CHARACTERS = 300
"""Only the end of a response is read."""

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_REWRITTEN = (
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
)
_DELETED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
"""Deleted in this order, wherever they stand, also inside a word."""


def normalize_verl_answer(text: str) -> str:
    r"""Rewrite an answer as verl does before it compares two of them.

    Args:
        text: such as ``$x = 1{,}024$ dollars``.

    Returns:
        What is left, here ``1024``; leading zeros stay. Commas go only where all else is digits: ``1,024`` becomes
        ``1024``, ``-1,024`` stays.
    """
    text = text.rpartition("=")[2]
    for found, replacement in _REWRITTEN:
        text = text.replace(found, replacement)
    for found in _DELETED:
        text = text.replace(found, "")
    text = "\n".join(_unwrap(line) for line in text.split("\n"))
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    without_commas = text.replace(",", "")
    return (without_commas if without_commas.isdigit() else text).strip()


def grade_by_verl(answer: str, response: str) -> Grade:
    """Grade a response as verl's DAPO rule does.

    Args:
        answer: the right answer, any text.
        response: a model's response.

    Returns:
        Reward 1 where the last answer is the right one, else 0.

    Raises:
        ValueError: if nothing is left of ``answer`` once it is rewritten.
    """
    gold = normalize_verl_answer(answer)
    if not gold:
        raise ValueError(f"the right answer must not be empty, got {answer[:80]!r}")
    found = _ANSWER.findall(response[-MAX_SCORED_CHARACTERS:])
    if not found:
        return Grade(reward=0.0, answer=None, reason=f"no Answer: in the last {MAX_SCORED_CHARACTERS} characters")
    prediction = normalize_verl_answer(found[-1])
    is_right = prediction == gold
    return Grade(reward=float(is_right), answer=prediction, reason="correct" if is_right else "wrong answer")


def _unwrap(line: str) -> str:
    """Keep one line's first formula, and take the braces off the four commands that verl takes them off."""
    formula = line.split("$", 2)
    if len(formula) == 3:
        line = f"${formula[1]}$"
    for command in ("\\text{", "\\textbf{", "\\overline{"):
        line = _without_command(line, command)
    before, box, after = line.partition("\\boxed{")
    inside, brace, rest = after.rpartition("}")
    return before + inside + rest if box and brace else line


def _without_command(line: str, command: str) -> str:
    """Replace every ``command...}`` by what stands up to its first closing brace, in linear time."""
    kept: list[str] = []
    position = 0
    while (start := line.find(command, position)) >= 0 and (end := line.find("}", start + len(command))) >= 0:
        kept += (line[position:start], line[start + len(command) : end])
        position = end + 1
    return "".join(kept) + line[position:]
