from typing import get_args

import pytest

from tests.unit.builders import TOKENIZER
from trm_repro.config_sections import PromptTemplate
from trm_repro.errors import InputError
from trm_repro.tasks import Problem
from trm_repro.tasks.templates import AROUND, question_of, render_prompts

QUESTION = "What is $1+1$?"
BOXED = "What is $1+1$?\n\nReason step by step, and put the final answer within \\boxed{}."
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is $1+1$?\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def rendered(template, tokenizer=TOKENIZER):
    problem = Problem(id="a", prompt=QUESTION, answer="2")
    (result,) = render_prompts([problem], template, tokenizer, "task.prompt_template")
    assert (result.id, result.answer) == ("a", "2")
    return result.prompt


def test_every_choice_of_the_configuration_has_a_template():
    assert set(AROUND) == set(get_args(PromptTemplate))


@pytest.mark.parametrize(("template", "text"), [("plain", QUESTION), ("boxed", BOXED), ("dapo", DAPO)])
def test_templates_without_chat_are_text_around_the_question(template, text):
    assert rendered(template) == text


@pytest.mark.parametrize(("template", "text"), [("chat", BOXED), ("dapo_chat", DAPO)])
def test_chat_templates_are_one_user_turn_that_leaves_the_word_to_the_assistant(template, text, qwen3_tokenizer):
    assert rendered(template, qwen3_tokenizer) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(("template", "instead"), [("chat", "boxed"), ("dapo_chat", "dapo")])
def test_a_chat_is_refused_where_the_tokenizer_has_no_chat_template(template, instead):
    with pytest.raises(
        InputError, match=f"task.prompt_template={template}, but .* has no chat template; use {instead}"
    ):
        rendered(template)


def test_a_chat_template_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(TOKENIZER, "chat_template", "{{ raise_exception('no roles') }}")
    with pytest.raises(InputError, match=r"chat template fails \(no roles\); use boxed or plain"):
        rendered("chat")


@pytest.mark.parametrize("text", [DAPO, f"  {DAPO}\n", QUESTION, f"\n{QUESTION} "])
def test_the_question_is_found_inside_the_published_template_or_without_it(text):
    assert question_of(text) == QUESTION


def test_half_a_template_is_part_of_the_question():
    text = DAPO.removesuffix(' "Answer:".')
    assert question_of(text) == text
