import re

import pytest

from evaluation.choices import CHOICES, Choice, choices_table
from evaluation.document import table_markdown
from pipelines.cli import main
from tests.conftest import ROOT
from trm_repro.config import flat_items, load_config, to_yaml


def all_keys():
    from omegaconf import OmegaConf

    return {key for key, _ in flat_items(OmegaConf.create(to_yaml(load_config())))}


def test_the_table_in_the_docs_is_what_the_command_prints(capsys):
    text = (ROOT / "docs" / "choices.md").read_text()
    (table,) = re.findall(r"<!-- choices -->\n(.*)<!-- end of choices -->", text, re.DOTALL)
    assert main(["config", "--choices"]) == 0
    assert capsys.readouterr().out == table


def test_the_command_prints_the_values_of_the_configuration_it_is_given(capsys):
    assert main(["config", "--choices", "rollout.staleness_steps=9"]) == 0
    assert "| age of the rollout weights | 9 steps | `rollout.staleness_steps` |" in capsys.readouterr().out


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.question)
def test_every_key_of_a_choice_is_a_key_or_a_section(choice: Choice):
    keys = all_keys()
    sections = {key.partition(".")[0] for key in keys}
    assert set(choice.keys) <= keys | sections
    for key in re.findall(r"\{([\w.]+)\}", choice.answer):
        assert key in keys
        assert key in choice.keys or key.partition(".")[0] in choice.keys


@pytest.mark.parametrize(
    ("answer", "value", "words"),
    [
        ("with {a}", "None", "with null"),
        ("{a}", "(101, 102)", "101 and 102"),
        ("{a}", "(1,)", "1"),
        ("{a}", "[1, 2, 3]", "1, 2 and 3"),
        ("{a}", "()", "none"),
        ("{a}", "(not recorded)", "(not recorded)"),
        ("{a} steps", "1", "1 step"),
        ("{a} steps", "11", "11 steps"),
        ("{a} steps", "0.1", "0.1 steps"),
        ("{a} disjoint minibatches, passes: 1", "1", "1 disjoint minibatch, passes: 1"),
    ],
)
def test_values_are_written_for_a_reader(answer, value, words):
    ((_, written, _),) = choices_table({"a": value}, [Choice(question="", answer=answer)]).rows
    assert written == words


def test_a_value_comes_from_the_settings_and_one_that_is_not_there_is_not_made_up():
    choice = Choice(question="rate", answer="{update.learning_rate} after {update.warmup_updates}", keys=("update",))
    text = table_markdown(choices_table({"update.learning_rate": "0.25"}, [choice]))
    assert "| rate | 0.25 after (not recorded) | `update` |" in text
