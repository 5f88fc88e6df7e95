"""What training on a data set reads before its first step: training prompts that fit, and held-out problems."""

import logging
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerFast

from trm_repro.config import RunConfig, derive_seed
from trm_repro.errors import InputError
from trm_repro.rollout.probe import probe_contexts
from trm_repro.tasks import DatasetReport, DatasetTask, MathTask, Problem, load_problems
from trm_repro.tasks.catalog import evaluation_source, training_source
from trm_repro.tasks.templates import render_prompts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MathProblems:
    """Training and held-out problems of a run, their prompts rendered.

    Attributes:
        task: draws and grades training problems.
        held_out: problems to evaluate on.
        held_out_task: grades those.
        report: counts of the training problems.
        held_out_report: counts of the held-out ones.
    """

    task: MathTask
    held_out: list[Problem]
    held_out_task: DatasetTask
    report: DatasetReport
    held_out_report: DatasetReport

    def as_record(self) -> dict[str, str | int | None]:
        """Say what was read and what the first prompt of each looks like, for the run's files."""
        return {
            "training": str(self.report),
            "held_out": str(self.held_out_report),
            "first_training_prompt": self.task.problems[0].prompt,
            "first_held_out_prompt": self.held_out[0].prompt,
        }


def read_math_problems(config: RunConfig, tokenizer: PreTrainedTokenizerFast) -> MathProblems:
    """Read a run's data sets.

    Questions that are also held out are not trained on, and prompts of more than ``rollout.max_prompt_tokens`` tokens
    are dropped; both are counted.

    Args:
        config: the run, with task.name math.
        tokenizer: of the policy.

    Returns:
        The problems.

    Raises:
        InputError: if a data set cannot be read, or no training problem is left.
    """
    held_out, held_out_report = load_problems(evaluation_source(config.evaluation))
    count = config.evaluation.num_held_out
    problems, report = load_problems(training_source(config.task))
    held_out_questions = {" ".join(problem.prompt.split()) for problem in held_out}
    trained = [problem for problem in problems if " ".join(problem.prompt.split()) not in held_out_questions]
    rendered = render_prompts(trained, config.task.prompt_template, tokenizer, "task.prompt_template")
    limit = config.rollout.max_prompt_tokens
    fitting = [problem for problem in rendered if 0 < len(prompt_token_ids(problem.prompt, tokenizer)) <= limit]
    report = replace(report, num_held_out=len(problems) - len(trained), num_over_length=len(rendered) - len(fitting))
    if not fitting:
        raise InputError(f"{report}; none is left to train on: raise rollout.max_prompt_tokens={limit}")
    read = MathProblems(
        task=MathTask(fitting, seed=config.seed, grading=config.task.grading),
        held_out=render_prompts(
            held_out[:count], config.evaluation.prompt_template, tokenizer, "evaluation.prompt_template"
        ),
        held_out_task=DatasetTask(config.evaluation.grading),
        report=report,
        held_out_report=held_out_report,
    )
    for name, value in read.as_record().items():
        logger.info("%s: %s", name, value)
    return read


def math_probe_contexts(config: RunConfig, tokenizer: PreTrainedTokenizerFast) -> list[tuple[int, ...]]:
    """Make the probe's contexts for a run on a data set: beginnings of held-out prompts, rendered as in training.

    Args:
        config: the run, with task.name math.
        tokenizer: of the policy.

    Returns:
        ``rollout.probe_contexts`` contexts, the same for every run on these problems.

    Raises:
        InputError: if the data set cannot be read, or no prompt has two tokens.
    """
    problems, _ = load_problems(evaluation_source(config.evaluation))
    template, count = config.task.prompt_template, config.rollout.probe_contexts
    rendered = render_prompts(problems[:count], template, tokenizer, "task.prompt_template")
    texts = [prompt_token_ids(problem.prompt, tokenizer)[: config.rollout.max_prompt_tokens] for problem in rendered]
    texts = [text for text in texts if len(text) > 1]
    if not texts:
        raise InputError(
            "evaluation.task: no held-out prompt has two tokens, so the weight-sync probe has no context; name another"
        )
    return probe_contexts(texts, count, derive_seed(0, "probe contexts"))


def prompt_token_ids(prompt: str, tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """Tokenize a prompt; one whose template already wrote the beginning-of-sequence token does not get a second."""
    has_bos = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
    return tuple(tokenizer(prompt, add_special_tokens=not has_bos).input_ids)
