"""Which tokens end a response: one answer for every engine, the check of its responses, and the trainer's mask.

A response holds its ending token, so that the policy learns to end; the grader sees the text before it.
"""

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerFast

from trm_repro.config import RunConfig
from trm_repro.errors import InputError
from trm_repro.policy import load_tokenizer
from trm_repro.tasks.templates import CHAT_TEMPLATES

MARK = "MARK"


def stop_token_ids(
    stop_tokens: Sequence[str], model_path: str | Path, tokenizer: PreTrainedTokenizerFast | None = None
) -> tuple[int, ...]:
    """List the tokens that end a response of a model.

    Args:
        stop_tokens: rollout.stop_tokens.
        model_path: directory or hub name; its tokenizer's end-of-sequence token counts, and those of its
            generation_config.json, or of config.json where there is none.
        tokenizer: of the model, where it has been loaded.

    Returns:
        Token ids, ascending.

    Raises:
        InputError: if one of ``stop_tokens`` is no single token of the tokenizer.
    """
    tokenizer = tokenizer or load_tokenizer(model_path)
    try:
        settings = GenerationConfig.from_pretrained(model_path)
    except OSError:  # no such file
        settings = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    found = settings.eos_token_id
    ids = {tokenizer.eos_token_id, *(found if isinstance(found, list) else [found])}
    vocabulary = tokenizer.get_vocab()
    for token in stop_tokens:
        if token not in vocabulary:
            raise InputError(f"rollout.stop_tokens: {token!r} is no token of {model_path}'s tokenizer; name one it has")
        ids.add(vocabulary[token])
    return tuple(sorted(ids - {None}))


def check_turn_ends(config: RunConfig, tokenizer: PreTrainedTokenizerFast, model_path: str | Path) -> None:
    """Check that a response to a chat prompt can end where the chat template ends a turn.

    A base model's own ending token is another than its chat template's: without it responses run to the limit.

    Args:
        config: the run.
        tokenizer: of the policy.
        model_path: directory or hub name.

    Raises:
        InputError: if the template's ending token is none of those that end a response.
    """
    templates = {
        "task.prompt_template": config.task.prompt_template if config.task.name == "math" else None,
        "evaluation.prompt_template": (
            config.evaluation.prompt_template if config.evaluation.task != "chain_arithmetic" else None
        ),
    }
    for key, template in templates.items():
        if template in CHAT_TEMPLATES and tokenizer.chat_template is not None:
            ending = turn_end(tokenizer)
            ids = stop_token_ids(config.rollout.stop_tokens, model_path, tokenizer)
            if ending is not None and ending not in ids:
                name = tokenizer.convert_ids_to_tokens(ending)
                found = ", ".join(map(str, tokenizer.convert_ids_to_tokens(list(ids))))
                raise InputError(
                    f"{key}={template}: the chat template ends a turn with {name}, but responses end with {found}; set "
                    f"rollout.stop_tokens=[{name}]"
                )


def turn_end(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Find the token of its own that a chat template puts right behind an answer, or None."""
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": MARK}]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    after = tokenizer(text.rpartition(MARK)[2].lstrip(), add_special_tokens=False).input_ids
    return after[0] if after and after[0] in tokenizer.added_tokens_decoder else None
