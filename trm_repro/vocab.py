"""From final hidden states to log-probabilities over the vocabulary, in chunks of tokens.

Shape letters: N response tokens, H hidden size, V vocabulary. No function holds ``[N, V]``: at most
``[chunk_tokens, V]`` exists at a time, in the backward pass too.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trm_repro.certified import TopLogprobs, certified_kl_interval
from trm_repro.divergence import exact_kl_divergence, exact_total_variation

CHUNK_TOKENS = 4096


class TokenStatistics(NamedTuple):
    """What one no-gradient pass over the vocabulary gives per token.

    Attributes:
        logprobs: ``[N]`` float32, nats; log pi_theta of the sampled tokens.
        entropy: ``[N]`` float32, nats; entropy of pi_theta.
        kl: ``[N]`` float32, nats; exact KL(pi_roll || pi_theta), or None without the whole of pi_roll.
        total_variation: ``[N]`` float32 in [0, 1]; exact TV, or None likewise.
        kl_low: ``[N]`` float64, nats; what KL is at least, or None without the top of pi_roll.
        kl_high: ``[N]`` float64, nats; what KL is at most, or None likewise.
    """

    logprobs: Tensor
    entropy: Tensor
    kl: Tensor | None = None
    total_variation: Tensor | None = None
    kl_low: Tensor | None = None
    kl_high: Tensor | None = None


def log_distribution(hidden: Tensor, head_weight: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute the log-distribution over the vocabulary.

    Args:
        hidden: ``[N, H]``; final hidden states after the last norm.
        head_weight: ``[V, H]``; output head.
        temperature: logits are divided by it.

    Returns:
        ``[N, V]`` float32, nats.
    """
    logits = torch.nn.functional.linear(hidden, head_weight).float() / temperature  # [N, V]
    # torch's float32 log_softmax on a CPU is off by up to 5e-4 nats at V = 151,936; this form by 1e-6.
    return logits - logits.logsumexp(dim=-1, keepdim=True)


def token_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Tensor:
    """Compute the log-probability of each token, differentiably.

    Each chunk's logits are recomputed in the backward pass instead of being kept.

    Args:
        hidden: ``[N, H]``; final hidden states of the positions that predict the tokens.
        head_weight: ``[V, H]``; output head.
        token_ids: ``[N]`` int64.
        temperature: logits are divided by it.
        chunk_tokens: tokens whose logits exist at the same time.

    Returns:
        ``[N]`` float32, nats.
    """
    if hidden.shape[0] <= chunk_tokens:
        return _chunk_logprobs(hidden, head_weight, token_ids, temperature)
    chunks = [
        checkpoint(_chunk_logprobs, chunk, head_weight, ids, temperature, use_reentrant=False)
        for chunk, ids in zip(hidden.split(chunk_tokens), token_ids.split(chunk_tokens), strict=True)
    ]
    return torch.cat(chunks)


@torch.no_grad()
def token_statistics(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    *,
    rollout_log_distribution: Tensor | None = None,
    rollout_top: TopLogprobs | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> TokenStatistics:
    """Compute per-token statistics of the policy and its exact divergence from the rollout policy.

    Args:
        hidden: ``[N, H]``; final hidden states of the positions that predict the tokens.
        head_weight: ``[V, H]``; output head.
        token_ids: ``[N]`` int64; the sampled tokens.
        rollout_log_distribution: ``[N, V]`` float32, nats; log pi_roll, or None.
        rollout_top: the N tokens' largest rollout log-probs, or None.
        temperature: logits are divided by it.
        chunk_tokens: tokens whose logits exist at the same time.

    Returns:
        The statistics, without gradient.
    """
    parts: dict[str, list[Tensor]] = {}
    for start in range(0, hidden.shape[0], chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        policy = log_distribution(hidden[chunk], head_weight, temperature)  # [chunk, V]
        values = {
            "logprobs": policy.gather(-1, token_ids[chunk, None]).squeeze(-1),  # [chunk]
            "entropy": -torch.special.xlogy(policy.exp(), policy.exp()).sum(dim=-1),  # [chunk]
        }
        if rollout_log_distribution is not None:
            rollout = rollout_log_distribution[chunk]  # [chunk, V]
            values["kl"] = exact_kl_divergence(rollout, policy)
            values["total_variation"] = exact_total_variation(rollout, policy)
        if rollout_top is not None:
            interval = certified_kl_interval(rollout_top.rows(chunk), policy)
            values |= {"kl_low": interval.low, "kl_high": interval.high}
        for name, value in values.items():
            parts.setdefault(name, []).append(value)
    return TokenStatistics(**{name: torch.cat(chunks) for name, chunks in parts.items()})


def _chunk_logprobs(hidden: Tensor, head_weight: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    return log_distribution(hidden, head_weight, temperature).gather(-1, token_ids[:, None]).squeeze(-1)
