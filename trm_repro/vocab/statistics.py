"""One pass over the vocabulary without gradient: log-probs, entropy, and exact divergence from the rollout policy.

The rollout policy's distribution is given as stored log-probs, or rebuilt from the engine's final hidden states and
the output head it held. Shape letters: n tokens of a chunk, N tokens, H hidden size, V vocabulary (of a shard: its
rows), K stored entries.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trm_repro.certified import TopLogprobs, certified_kl_interval, default_normalizer_error
from trm_repro.vocab.chunks import (
    VocabularyShard,
    accumulation_dtype,
    log_normalizer,
    round_like,
    row_tiles,
    token_chunks,
    token_logits,
    write_logits,
)


class TokenStatistics(NamedTuple):
    """What one no-gradient pass over the vocabulary gives per token.

    Attributes:
        logprobs: ``[N]`` float32, nats; log pi_theta of the sampled tokens.
        entropy: ``[N]`` float32, nats; entropy of pi_theta.
        normalizers: ``[N]`` float32, nats; log of the sum over the vocabulary of exponentials of pi_theta's logits,
            divided by the temperature: what `token_logprobs` needs to spare itself a pass.
        kl: ``[N]`` float32, nats; exact KL(pi_roll || pi_theta), or None without the whole of pi_roll.
        total_variation: ``[N]`` float32 in [0, 1]; exact TV, or None likewise.
        kl_low: ``[N]`` float64, nats; what KL is at least, or None without the top of pi_roll.
        kl_high: ``[N]`` float64, nats; what KL is at most, or None likewise.
        rebuilt_logprobs: ``[N]`` float32, nats; log pi_roll of the sampled tokens as rebuilt from hidden states, or
            None without them.
        rebuilt_tolerance: ``[N]`` float32, nats; how far rounding can put those from what the engine returned.
    """

    logprobs: Tensor
    entropy: Tensor
    normalizers: Tensor
    kl: Tensor | None = None
    total_variation: Tensor | None = None
    kl_low: Tensor | None = None
    kl_high: Tensor | None = None
    rebuilt_logprobs: Tensor | None = None
    rebuilt_tolerance: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class HiddenRollout:
    """The rollout policy at N tokens, as final hidden states and the head that turns them into logits.

    Example: two tokens from weights of version 3 and one of version 4, H = 2, V = 5: ``hidden [3, 2]``,
    ``versions=[3, 3, 4]``, ``heads={3: [5, 2], 4: [5, 2]}``.

    Attributes:
        hidden: ``[N, H]``, in the engine's dtype; after the last norm, at the positions that predict the tokens.
        versions: ``[N]`` int64; weight version each token was sampled from.
        heads: ``[V, H]`` by weight version, in the engine's dtype.
    """

    hidden: Tensor
    versions: Tensor
    heads: Mapping[int, Tensor]

    def write_logits(self, out: Tensor, chunk: slice) -> None:
        """Compute the engine's logits of some tokens into ``out [n, V]``, rounded to its dtype as the engine does."""
        hidden, versions = self.hidden[chunk], self.versions[chunk]
        for version in versions.unique().tolist():
            head_weight = self.heads[version]
            is_of_version = versions == version
            if bool(is_of_version.all()):
                write_logits(out, hidden, head_weight)
            else:
                part = out.new_empty(int(is_of_version.sum()), out.shape[1])
                write_logits(part, hidden[is_of_version], head_weight)
                out[is_of_version] = part
        round_like(out, self.hidden.dtype)


@torch.no_grad()
def token_statistics(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    *,
    rollout: Tensor | TopLogprobs | HiddenRollout | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    shard: VocabularyShard | None = None,
) -> TokenStatistics:
    """Compute per-token statistics of the policy and its exact divergence from the rollout policy.

    Args:
        hidden: ``[N, H]``; final hidden states of the positions that predict the tokens.
        head_weight: ``[V, H]``; output head.
        token_ids: ``[N]`` int64; the sampled tokens.
        rollout: what is known of pi_roll: ``[N, V]`` float32 log-probs, nats; or hidden states with their heads; or
            the N tokens' largest log-probs, which need the whole vocabulary in this process; or nothing.
        temperature: logits are divided by it, the rollout policy's too where they are rebuilt.
        chunk_tokens: tokens whose logits exist at the same time; None fits them to the device.
        shard: which rows ``head_weight`` (and the rollout's log-probs or heads) are, where several processes share
            the vocabulary.

    Returns:
        The statistics, without gradient; the same in every process.
    """
    dtype, device, vocab_size = accumulation_dtype(hidden, head_weight), hidden.device, head_weight.shape[0]
    num_buffers = 2 if isinstance(rollout, HiddenRollout) else 1
    parts: dict[str, list[Tensor]] = {}
    buffers: Tensor | None = None
    with torch.autocast(device.type, enabled=False):
        for chunk in token_chunks(hidden.shape[0], num_buffers * vocab_size, chunk_tokens, device):
            num_tokens = chunk.stop - chunk.start
            if buffers is None:
                buffers = torch.empty(num_buffers, num_tokens, vocab_size, dtype=dtype, device=device)
            policy = buffers[0, :num_tokens]  # [n, V]
            write_logits(policy, hidden[chunk], head_weight)
            normalizers = _log_distribution_in_place(policy, temperature, shard)
            values = {"logprobs": token_logits(policy, token_ids[chunk], shard), "normalizers": normalizers}
            rollout_rows = None
            if isinstance(rollout, Tensor):
                rollout_rows = rollout[chunk]
            elif isinstance(rollout, HiddenRollout):
                rollout_rows = buffers[1, :num_tokens]
                rollout.write_logits(rollout_rows, chunk)
                values["rebuilt_tolerance"] = _rounding(rollout_rows, rollout.hidden.dtype, temperature, shard)
                _log_distribution_in_place(rollout_rows, temperature, shard)
                values["rebuilt_logprobs"] = token_logits(rollout_rows, token_ids[chunk], shard)
            elif isinstance(rollout, TopLogprobs):
                interval = certified_kl_interval(rollout.rows(chunk), policy)
                values |= {"kl_low": interval.low, "kl_high": interval.high}
            values |= _sums_over_vocabulary(policy, rollout_rows, shard)
            for name, value in values.items():
                parts.setdefault(name, []).append(value)
    return TokenStatistics(**{name: torch.cat(chunks) for name, chunks in _or_empty(parts, hidden).items()})


def _log_distribution_in_place(logits: Tensor, temperature: float, shard: VocabularyShard | None) -> Tensor:
    """Turn logits into log-probs; return their normalizers ``[n]``."""
    if temperature != 1.0:
        logits.div_(temperature)
    normalizers = log_normalizer(logits, shard)
    logits.sub_(normalizers[:, None])
    return normalizers


def _sums_over_vocabulary(policy: Tensor, rollout: Tensor | None, shard: VocabularyShard | None) -> dict[str, Tensor]:
    """Add up entropy, KL and TV tile by tile.

    KL is summed as ``p (log p - log q) - p + q``: every term is >= 0 and the two last cancel in all, as both
    distributions sum to 1. An error shared by a whole row of log-probs then counts in second order only.
    Source: TRM (arXiv 2512.23075v3), Divergences; the form of the sum is ours.

    Args:
        policy: ``[n, V]``, nats; log pi_theta, the q above.
        rollout: ``[n, V]``, nats; log pi_roll, the p above; -inf for a token that cannot be sampled. Or None.
        shard: the process's part of the vocabulary, or None for all of it.

    Returns:
        ``[n]`` each; KL is infinite where pi_theta drops a token of pi_roll, and NaN where an input is NaN.
    """
    names = ("entropy",) if rollout is None else ("entropy", "kl", "total_variation")
    sums = policy.new_zeros(len(names), policy.shape[0])
    for rows in row_tiles(policy.shape[1]):
        log_q = policy[:, rows]
        q = log_q.exp()  # [n, tile]
        sums[0] -= torch.special.xlogy(q, q).sum(dim=-1)
        if rollout is not None:
            log_p = rollout[:, rows]
            p = log_p.exp()
            difference = q - p
            terms = p.mul_(log_p - log_q).masked_fill_(log_p == -torch.inf, 0.0).add_(difference)
            sums[1] += terms.sum(dim=-1)
            sums[2] += difference.abs_().sum(dim=-1).mul_(0.5)
    if shard is not None:
        sums = shard.sum(sums)
    values = dict(zip(names, sums, strict=True))
    if rollout is not None:
        values["kl"] = values["kl"].clamp(min=0.0)
    return values


def _rounding(logits: Tensor, dtype: torch.dtype, temperature: float, shard: VocabularyShard | None) -> Tensor:
    """Bound how far two computations of the same log-prob can lie apart.

    Both round each logit to the engine's dtype; sums taken in another order can round to the neighbouring number,
    one unit in the last place away, the sampled token's one way and all the others the other way. To that comes
    the error of the engine's own float32 normalizer.

    Args:
        logits: ``[n, V]``, as rounded, before the temperature.
        dtype: the engine's.
        temperature: logits are divided by it.
        shard: the process's part of the vocabulary, or None for all of it.

    Returns:
        ``[n]``, nats.
    """
    largest = torch.maximum(logits.amax(dim=-1), -logits.amin(dim=-1))  # [n]
    vocab_size = logits.shape[1]
    if shard is not None:
        largest = shard.max(largest)
        vocab_size = int(shard.sum(torch.tensor(vocab_size, device=logits.device)))
    accumulation = 32 * torch.finfo(torch.float32).eps  # of a dot product of some thousand terms, with room
    relative = 2 * (torch.finfo(dtype).eps + accumulation)
    return relative * largest / temperature + default_normalizer_error(vocab_size)


def _or_empty(parts: dict[str, list[Tensor]], hidden: Tensor) -> dict[str, list[Tensor]]:
    return parts or {
        name: [hidden.new_zeros(0, dtype=torch.float32)] for name in ("logprobs", "entropy", "normalizers")
    }
