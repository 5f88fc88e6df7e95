"""What the paper leaves open, and what was chosen: a table whose values come from the configuration that was run.

Source of what it leaves open: TRM (arXiv 2512.23075v3), Experiments.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evaluation.document import Cell, Table

_KEY = re.compile(r"\{([\w.]+)\}")
_ONE = re.compile(r"(?<![\w.])1 (step|update|token|time|disjoint minibatch)(?:es|s)\b")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One thing that the paper does not say.

    Attributes:
        question: what is open.
        answer: what was chosen; a key in braces stands for its value.
        keys: that hold the choice; none where the code does.
    """

    question: str
    answer: str
    keys: tuple[str, ...] = ()


CHOICES = (
    Choice(
        question="policy, and where training starts",
        answer="policy.path {policy.path}; with null a small Qwen3-MoE, trained on solutions until the share written "
        "exactly is {warm_start.target_pass_rate}",
        keys=("policy", "warm_start"),
    ),
    Choice(
        question="number of steps; prompts and responses of each",
        answer="{num_steps}; {rollout.num_prompts} and {rollout.group_size}",
        keys=("num_steps", "rollout.num_prompts", "rollout.group_size"),
    ),
    Choice(
        question="seeds",
        answer="{reproduce.seeds}; each has its own start, prompts and held-out problems",
        keys=("reproduce.seeds",),
    ),
    Choice(
        question="age of the rollout weights",
        answer="{rollout.staleness_steps} steps",
        keys=("rollout.staleness_steps",),
    ),
    Choice(
        question="updates per rollout batch",
        answer="{update.num_updates_per_rollout} disjoint minibatches, passes: {update.num_epochs}; N is the "
        "minibatch's number of sequences",
        keys=("update.num_updates_per_rollout", "update.num_epochs"),
    ),
    Choice(
        question="optimizer, learning rate, warm-up, gradient clipping",
        answer="{update.optimizer} {update.learning_rate}, {update.warmup_updates} updates, global norm "
        "{update.max_gradient_norm}",
        keys=("update",),
    ),
    Choice(
        question="PPO's clip range",
        answer="{loss.clip_low} below 1 and {loss.clip_high} above it, on policy over rollout",
        keys=("loss.clip_low", "loss.clip_high"),
    ),
    Choice(
        question="length normalisation",
        answer="token sums divided by the constant {loss.length_normalizer}; 1 is Algorithm 1 to the letter",
        keys=("loss.length_normalizer",),
    ),
    Choice(
        question="denominator",
        answer="{loss.denominator} sequences of the update (all: rejected ones, too, Algorithm 1)",
        keys=("loss.denominator",),
    ),
    Choice(
        question="estimator behind each criterion",
        answer="{mask.max_estimator} for TRM-Max, {mask.avg_estimator} for TRM-Avg",
        keys=("mask.max_estimator", "mask.avg_estimator"),
    ),
    Choice(
        question="when the mask is computed",
        answer="{mask.timing} (each_update: against the current policy, Algorithm 1)",
        keys=("mask.timing",),
    ),
    Choice(
        question="which sequences count in their group's mean and deviation",
        answer="{loss.baseline} (all: rejected ones, too)",
        keys=("loss.baseline",),
    ),
    Choice(
        question="deviation of a group",
        answer="population, plus {loss.advantage_epsilon}",
        keys=("loss.advantage_epsilon",),
    ),
    Choice(
        question="optimizer step when nothing is kept",
        answer="skipped: {update.skip_empty}; AdamW would move by momentum and decay alone",
        keys=("update.skip_empty",),
    ),
    Choice(
        question="a group in which all rewards are equal",
        answer="advantage 0, left out of the backward pass, which changes nothing",
    ),
    Choice(
        question="non-finite log-probs",
        answer="reject their sequence under every arm, and are counted",
    ),
    Choice(
        question="log-ratio before exp",
        answer="clamped to +-20, counted; a clamped token has no gradient",
    ),
    Choice(
        question="length limit, unfinished responses",
        answer="{rollout.max_response_tokens} tokens; reward 0",
        keys=("rollout.max_response_tokens",),
    ),
    Choice(
        question="tokens that end a response",
        answer="the model's own, of tokenizer and generation_config.json; others: {rollout.stop_tokens}",
        keys=("rollout.stop_tokens",),
    ),
    Choice(
        question="engine precision",
        answer="{rollout.precision} weights and activations, against a float32 trainer",
        keys=("rollout.precision",),
    ),
    Choice(
        question="held-out problems, and how they are answered",
        answer="{evaluation.task}, {evaluation.num_problems} greedily; {evaluation.num_sampled_problems} sampled "
        "{evaluation.num_samples} times at temperature {evaluation.temperature}, top-p {evaluation.top_p}; after the "
        "last step at least {evaluation.num_final_problems} of each",
        keys=("evaluation",),
    ),
    Choice(
        question="prompt around a problem",
        answer="{evaluation.prompt_template}",
        keys=("evaluation.prompt_template",),
    ),
    Choice(
        question="grading of integers",
        answer="{evaluation.grading} (strict: the last complete boxed or Answer line must be one integer, cut off is "
        "wrong)",
        keys=("evaluation.grading",),
    ),
)


def choices_table(settings: Mapping[str, str], choices: Sequence[Choice] = CHOICES) -> Table:
    """Tabulate the choices with the values that were run.

    Args:
        settings: every key with its value, as text.
        choices: to be tabulated.

    Returns:
        A row a choice; a value that no setting holds is called not recorded.
    """
    rows: list[list[str | Cell]] = []
    for choice in choices:
        answer = _KEY.sub(lambda found: in_words(settings.get(found.group(1), "(not recorded)")), choice.answer)
        rows.append([choice.question, _ONE.sub(r"1 \1", answer), Cell(text=", ".join(choice.keys), is_code=True)])
    return Table(columns=["question", "our choice", "key"], rows=rows, is_stacked=True)


def in_words(value: str) -> str:
    """Write a setting's text as a reader would: null for nothing, and the entries of a list one after the other.

    Args:
        value: as Python or YAML writes it, such as ``None`` or ``(101, 102)``.

    Returns:
        Text, such as ``null`` or ``101 and 102``.
    """
    if value == "None":
        return "null"
    entries = _entries(value)
    if not entries:
        return value if entries is None else "none"
    *others, last = (in_words(str(entry)) for entry in entries)
    return f"{', '.join(others)} and {last}" if others else last


def as_yaml(value: str) -> str:
    """Write a setting's text as a configuration file would, so that it can be copied into one."""
    if value in ("None", "True", "False"):
        return {"None": "null", "True": "true", "False": "false"}[value]
    entries = _entries(value)
    return value if entries is None else f"[{', '.join(as_yaml(str(entry)) for entry in entries)}]"


def _entries(value: str) -> Sequence[object] | None:
    """Read a list or tuple; None for any other text."""
    if not value.startswith(("(", "[")):
        return None
    try:
        read = ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return read if isinstance(read, list | tuple) else None
