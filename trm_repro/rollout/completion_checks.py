"""What an engine must have returned, checked before anything is learned from it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trm_repro.errors import FaultError
from trm_repro.rollout.engine import Completion, SamplingRequest, SamplingSettings

ROUNDING = 1e-3  # nats a log-prob may lie above 0


def check_completions(
    completions: Sequence[Completion],
    requests: Sequence[SamplingRequest],
    settings: SamplingSettings,
    vocab_size: int,
) -> None:
    """Stop when an engine returned other than what it was asked for.

    Log-probs that are not finite pass: the mask rejects and counts their sequences.

    Args:
        completions: what the engine returned.
        requests: what it was asked.
        settings: how to sample.
        vocab_size: V of the policy.

    Raises:
        FaultError: naming the first response that is wrong, and how.
    """
    if len(completions) != len(requests):
        raise FaultError(f"the engine returned {len(completions)} responses to {len(requests)} requests")
    for index, completion in enumerate(completions):
        problem = _problem(completion, settings, vocab_size)
        if problem is not None:
            raise FaultError(f"the engine's response {index} {problem}; rollouts of this engine cannot be trusted")


def _problem(completion: Completion, settings: SamplingSettings, vocab_size: int) -> str | None:
    length = len(completion.token_ids)
    if not 1 <= length <= settings.max_tokens:
        return f"has {length} tokens, 1 to {settings.max_tokens} were asked for"
    if not completion.finished and length < settings.max_tokens:
        return f"was cut off at {length} of {settings.max_tokens} tokens"
    outside = [token for token in completion.token_ids if not 0 <= token < vocab_size]
    if outside:
        return f"has token {outside[0]}, the policy's vocabulary has {vocab_size}"
    per_token: dict[str, Tensor | None] = {
        "log-probs": completion.logprobs,
        "log-distributions": completion.log_distribution,
        "hidden states": completion.hidden,
        "top log-probs": completion.top_logprobs,
        "routed experts": completion.experts,
    }
    for name, values in per_token.items():
        if values is not None and values.shape[0] != length:
            return f"has {values.shape[0]} {name} for {length} tokens"
    wanted = {"full": "log-distributions", "hidden": "hidden states", "top_k": "top log-probs"}.get(
        settings.distribution
    )
    if wanted is not None and per_token[wanted] is None:
        return f"has no {wanted}, rollout.distribution={settings.distribution} needs them"
    if bool((completion.logprobs > ROUNDING).any()):
        return f"has a log-prob of {float(completion.logprobs.max()):.3g}, above 0"
    if completion.log_distribution is not None:
        chosen = completion.log_distribution.gather(-1, torch.tensor(completion.token_ids)[:, None]).squeeze(-1)
        both = chosen.isfinite() & completion.logprobs.isfinite()
        if bool(((chosen - completion.logprobs).abs()[both] > ROUNDING).any()):
            return "has sampled log-probs that are not those of its own distribution"
    return None
