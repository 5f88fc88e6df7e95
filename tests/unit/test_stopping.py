"""Which tokens end a response, and that engines, their check and the grader agree on it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.unit.builders import TOKENIZER, tiny_policy
from trm_repro.config import RunConfig, load_config
from trm_repro.config_sections import RolloutConfig
from trm_repro.errors import FaultError, InputError
from trm_repro.policy import save_policy
from trm_repro.rollout import Completion, SamplingRequest, SamplingSettings
from trm_repro.rollout.completion_checks import check_completions
from trm_repro.rollout.stopping import check_turn_ends, stop_token_ids
from trm_repro.rollout.transformers_engine import TransformersEngine

EOS = TOKENIZER.eos_token_id
SEVEN = TOKENIZER.convert_tokens_to_ids("7")
EQUALS = TOKENIZER.convert_tokens_to_ids("=")


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    save_policy(tiny_policy(), TOKENIZER, tmp_path / "model")
    return tmp_path / "model"


def test_a_response_ends_with_the_tokenizers_token_the_generation_settings_and_the_configurations(model_path: Path):
    assert stop_token_ids((), model_path) == (EOS,)
    (model_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EQUALS, EOS]}))
    assert stop_token_ids((), model_path) == (EOS, EQUALS)
    assert stop_token_ids(("7",), model_path) == (EOS, SEVEN, EQUALS)
    (model_path / "generation_config.json").unlink()
    assert stop_token_ids((), model_path) == (EOS,)


def test_a_stop_token_that_the_tokenizer_lacks_is_refused(model_path: Path):
    with pytest.raises(InputError, match=r"rollout\.stop_tokens: '<\|im_end\|>' is no token of .*model's tokenizer"):
        stop_token_ids(("<|im_end|>",), model_path)


def test_the_transformers_engine_ends_responses_there_and_keeps_the_token(model_path: Path):
    engine = TransformersEngine(RolloutConfig(engine="transformers", stop_tokens=("7",)), model_path)
    requests = [SamplingRequest(prompt_ids=(1, 8, 14, 9), seed=seed) for seed in range(16)]
    settings = SamplingSettings(max_tokens=30)
    completions = engine.sample(requests, settings)
    check_completions(completions, requests, settings, engine.vocab_size, engine.stop_ids)
    assert any(completion.token_ids[-1] == SEVEN and completion.finished for completion in completions)
    assert not any({EOS, SEVEN} & set(completion.token_ids[:-1]) for completion in completions)


def test_the_grader_reads_the_text_before_the_ending_token():
    ended, cut = (
        Completion(token_ids=(EQUALS, SEVEN), logprobs=-torch.ones(2), finished=finished) for finished in (True, False)
    )
    assert TOKENIZER.decode(ended.text_ids, skip_special_tokens=True) == "="
    assert TOKENIZER.decode(cut.text_ids, skip_special_tokens=True) == "=7"


@pytest.mark.parametrize(
    ("token_ids", "finished", "message"),
    [
        ((5, 6, SEVEN), True, "ended with token"),
        ((5, EOS, 6), False, "went on after a token that ends a response"),
        ((5, 6, EOS), False, "went on after a token that ends a response"),
        ((5, 6, EOS), True, None),
        ((5, 6, SEVEN), False, None),
    ],
)
def test_a_response_that_ends_elsewhere_is_a_fault(token_ids: tuple[int, ...], finished: bool, message: str | None):
    completion = Completion(token_ids=token_ids, logprobs=-torch.ones(3), finished=finished)
    arguments = ([completion], [SamplingRequest(prompt_ids=(1,), seed=0)], SamplingSettings(max_tokens=3))
    if message is None:
        check_completions(*arguments, 30, (EOS,))
        return
    with pytest.raises(FaultError, match=message):
        check_completions(*arguments, 30, (EOS,))


@pytest.fixture
def base_model(test_data: Path, tmp_path: Path) -> Path:
    """Qwen3's tokenizer, with the ending token of Qwen3-8B-Base."""
    shutil.copytree(test_data / "qwen3-tokenizer", tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": 151643}))
    return tmp_path / "base"


def chat_run(*overrides: str) -> RunConfig:
    fixed = ("task.name=math", "policy.path=x", "evaluation.task=aime25", "evaluation.length_operands=[]")
    return load_config([], [*fixed, *overrides])


def test_a_base_model_under_a_chat_template_needs_the_templates_ending_token(base_model: Path, qwen3_tokenizer):
    assert stop_token_ids((), base_model) == (151643,)
    assert stop_token_ids(("<|im_end|>",), base_model, qwen3_tokenizer) == (151643, 151645)
    for key in ("task.prompt_template", "evaluation.prompt_template"):
        config = chat_run(f"{key}=dapo_chat")
        with pytest.raises(InputError) as refused:
            check_turn_ends(config, qwen3_tokenizer, base_model)
        assert f"{key}=dapo_chat: the chat template ends a turn with <|im_end|>" in str(refused.value)
        mend = str(refused.value).rpartition("set ")[2]
        check_turn_ends(chat_run(f"{key}=dapo_chat", mend.replace("'", "")), qwen3_tokenizer, base_model)
    check_turn_ends(chat_run("task.prompt_template=dapo"), qwen3_tokenizer, base_model)


def test_a_chat_model_that_ends_its_turns_itself_needs_nothing(base_model: Path, qwen3_tokenizer):
    (base_model / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    check_turn_ends(chat_run("task.prompt_template=chat"), qwen3_tokenizer, base_model)
    other = replace(chat_run(), evaluation=replace(chat_run().evaluation, prompt_template="chat"))
    check_turn_ends(other, qwen3_tokenizer, base_model)
