"""Running out of memory, told as the configuration key that asked for it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trm_repro.errors import FaultError

NO_MEMORY = ("can't allocate memory", "out of memory", "unable to allocate")
"""What torch, CUDA and numpy say; on a CPU torch raises a plain RuntimeError."""
MASK_KEYS = "lower update.tokens_per_micro_batch"
UPDATE_KEYS = (
    "lower update.tokens_per_micro_batch, set trainer.activation_checkpointing=true or, on a GPU, "
    "trainer.cpu_offload=true"
)
ROLLOUT_KEYS = "lower rollout.max_concurrent_sequences or rollout.kv_cache_bytes"
CACHE_TOO_SMALL = ("no available memory for the cache blocks", "kv cache is needed, which is larger than")
"""What vLLM says when its cache does not hold one sequence of the greatest length."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error).lower() for words in NO_MEMORY)
    )


@contextmanager
def memory_limited(stage: str, keys: str) -> Iterator[None]:
    """Turn running out of memory into a message that names what to change.

    Args:
        stage: what is being done.
        keys: what to change.

    Raises:
        FaultError: when memory runs out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise FaultError(f"the {stage} stage ran out of memory ({reason}); {keys}") from error


def engine_start_problem(text: str, kv_cache_bytes: int, max_length: int) -> str | None:
    """Say which key is wrong when an engine did not start for want of memory.

    Args:
        text: what the engine said.
        kv_cache_bytes: the memory its key-value cache was given.
        max_length: longest prompt and response together, tokens.

    Returns:
        One line; None where memory was not the matter.
    """
    said = text.lower()
    if any(words in said for words in CACHE_TOO_SMALL):
        return (
            f"rollout.kv_cache_bytes={kv_cache_bytes} does not hold one sequence of {max_length} tokens; raise it, or "
            "lower rollout.max_prompt_tokens, rollout.max_response_tokens or evaluation.max_response_tokens"
        )
    if any(words in said for words in NO_MEMORY):
        return (
            f"the engine ran out of memory while it started; lower rollout.kv_cache_bytes={kv_cache_bytes} or "
            "rollout.max_concurrent_sequences"
        )
    return None
