"""What an engine must have returned, checked before anything is learned from it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trm_repro.batch import LOGPROB_ROUNDING
from trm_repro.errors import FaultError
from trm_repro.rollout.engine import Completion, SamplingRequest, SamplingSettings

UNTRUSTED = "rollouts of this engine cannot be trusted"


def check_completions(
    completions: Sequence[Completion],
    requests: Sequence[SamplingRequest],
    settings: SamplingSettings,
    vocab_size: int,
    stop_ids: Sequence[int] = (),
) -> None:
    """Stop when an engine returned other than what it was asked for.

    Log-probs that are not finite pass: the mask rejects and counts their sequences.

    Args:
        completions: what the engine returned.
        requests: what it was asked.
        settings: how to sample.
        vocab_size: V of the policy.
        stop_ids: tokens that end a response; without any, where responses end is not looked at.

    Raises:
        FaultError: naming the first response that is wrong, and how.
    """
    if len(completions) != len(requests):
        raise FaultError(f"the engine returned {len(completions)} responses to {len(requests)} requests")
    for index, completion in enumerate(completions):
        check_length(len(completion.token_ids), settings.max_tokens, f"the engine's response {index}")
        problem = _problem(completion, settings, vocab_size) or _ending_problem(completion, stop_ids)
        if problem is not None:
            raise FaultError(f"the engine's response {index} {problem}; {UNTRUSTED}")


def check_length(num_tokens: int, max_tokens: int, name: str) -> None:
    """Stop when a response is empty or longer than was asked for.

    Args:
        num_tokens: T of the response.
        max_tokens: the longest that was asked for.
        name: of the response, for the message.

    Raises:
        FaultError: if so.
    """
    if not 1 <= num_tokens <= max_tokens:
        raise FaultError(f"{name} has {num_tokens} tokens, 1 to {max_tokens} were asked for; {UNTRUSTED}")


def _problem(completion: Completion, settings: SamplingSettings, vocab_size: int) -> str | None:
    length = len(completion.token_ids)
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
    if bool((completion.logprobs > LOGPROB_ROUNDING).any()):
        return f"has a log-prob of {float(completion.logprobs.max()):.3g}, above 0"
    if completion.log_distribution is not None:
        chosen = completion.log_distribution.gather(-1, torch.tensor(completion.token_ids)[:, None]).squeeze(-1)
        both = chosen.isfinite() & completion.logprobs.isfinite()
        if bool(((chosen - completion.logprobs).abs()[both] > LOGPROB_ROUNDING).any()):
            return "has sampled log-probs that are not those of its own distribution"
    return None


def _ending_problem(completion: Completion, stop_ids: Sequence[int]) -> str | None:
    if not stop_ids:
        return None
    if completion.finished and completion.token_ids[-1] not in stop_ids:
        return f"ended with token {completion.token_ids[-1]}, which ends no response ({list(stop_ids)} do)"
    early = [position for position, token in enumerate(completion.token_ids[:-1]) if token in stop_ids]
    if early or (not completion.finished and completion.token_ids[-1] in stop_ids):
        return "went on after a token that ends a response"
    return None
