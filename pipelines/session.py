"""What a process opens once and uses for every run: threads, tokenizer, inference engine."""

import dataclasses
import logging
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from trm_repro.config import RunConfig
from trm_repro.policy import build_policy, load_tokenizer
from trm_repro.rollout.math_problems import math_probe_contexts
from trm_repro.rollout.sampler import chain_probe_contexts
from trm_repro.rollout.stopping import check_turn_ends
from trm_repro.rollout.synced_engine import SyncedEngine, open_engine, open_shared_engine


@dataclass(frozen=True, kw_only=True)
class Session:
    """An engine and the tokenizer of the models it serves."""

    engine: SyncedEngine
    tokenizer: PreTrainedTokenizerFast


def set_threads(num_threads: int) -> None:
    """Limit this process to a number of CPU threads, and keep libraries from chattering."""
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch

    torch.set_num_threads(num_threads)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")


def open_session(config: RunConfig, model_path: Path) -> Session:
    """Start the engine on a saved model, and probe it.

    Args:
        config: the run.
        model_path: directory with weights, configuration and tokenizer.

    Returns:
        The session.

    Raises:
        InputError: if the engine is not installed or the directory holds no model.
        FaultError: if engine and policy disagree on the model.
    """
    tokenizer = load_tokenizer(model_path)
    check_turn_ends(config, tokenizer, model_path)
    make_contexts = math_probe_contexts if config.task.name == "math" else chain_probe_contexts
    contexts = make_contexts(config, tokenizer)
    max_length = config.rollout.max_prompt_tokens + max(
        config.rollout.max_response_tokens, config.evaluation.max_response_tokens
    )
    if config.trainer.is_sharded:
        engine = open_shared_engine(config, model_path, contexts, max_length)
        return Session(engine=engine, tokenizer=tokenizer)
    policy = build_policy(dataclasses.replace(config.policy, path=str(model_path)), tokenizer, seed=0)
    engine = open_engine(config, model_path, policy, contexts, max_length)
    return Session(engine=engine, tokenizer=tokenizer)
