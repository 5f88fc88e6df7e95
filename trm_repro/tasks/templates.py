r"""Prompt templates: the text around a question, kept apart from the question itself.

A data set's own template is taken off when it is read (`question_of`), and the chosen one put on (`render_prompts`),
so that the same questions can be asked in any of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trm_repro.config_sections.task import PromptTemplate
from trm_repro.errors import InputError
from trm_repro.tasks.problems import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOXED = ("", "\n\nReason step by step, and put the final answer within \\boxed{}.")
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n",
    '\n\nRemember to put your answer on its own line after "Answer:".',
)
"""What stands around every question of DAPO-Math-17k as published (Apache-2.0)."""
AROUND: dict[PromptTemplate, tuple[str, str]] = {
    "plain": ("", ""),
    "boxed": BOXED,
    "dapo": DAPO,
    "chat": BOXED,
    "dapo_chat": DAPO,
}
CHAT_TEMPLATES = ("chat", "dapo_chat")


def question_of(text: str) -> str:
    """Take DAPO's published template off a prompt.

    Args:
        text: a prompt of any data set.

    Returns:
        The question alone, without white space around it.
    """
    before, after = DAPO
    text = text.strip()
    if text.startswith(before.rstrip()) and text.endswith(after.lstrip()):
        text = text[len(before.rstrip()) : -len(after.lstrip())]
    return text.strip()


def render_prompts(
    problems: Sequence[Problem], template: PromptTemplate, tokenizer: "PreTrainedTokenizerFast", key: str
) -> list[Problem]:
    """Put a template around each question.

    Args:
        problems: whose prompts are questions.
        template: plain is the question alone; boxed and dapo put an instruction around it; chat and dapo_chat make
            boxed's and dapo's text one user turn of the tokenizer's chat template.
        tokenizer: of the policy.
        key: the key the template was set by, for messages.

    Returns:
        The problems with the text given to the policy as their prompts.

    Raises:
        InputError: if the tokenizer has no chat template where one is asked for, or its template fails.
    """
    before, after = AROUND[template]
    texts = [f"{before}{problem.prompt}{after}" for problem in problems]
    if template in CHAT_TEMPLATES:
        without_chat = "boxed" if template == "chat" else "dapo"
        if tokenizer.chat_template is None:
            raise InputError(
                f"{key}={template}, but the policy's tokenizer has no chat template; use {without_chat} or plain"
            )
        try:
            texts = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
                )
                for text in texts
            ]
        except Exception as error:  # jinja's, or whatever the template raises
            raise InputError(
                f"{key}={template}, but the tokenizer's chat template fails ({str(error)[:200]}); use {without_chat} "
                "or plain"
            ) from error
    return [replace(problem, prompt=text) for problem, text in zip(problems, texts, strict=True)]
