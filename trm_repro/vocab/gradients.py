"""Log-probabilities of sampled tokens with gradients, a chunk of tokens at a time.

The gradient of log pi_theta(y) in the logits is (onehot(y) - pi_theta) / temperature. In the hidden state it could be
scaled by a later upstream gradient, but in the head it is summed over tokens, each with an upstream gradient of its
own. Two functions follow from that:

* `token_objective` is told the per-token objective, a function of the log-prob alone, so that it knows each token's
  upstream gradient while the chunk's logits exist and forms both gradients there: three matrix products, as the naive
  form. The backward pass only scales them by one number.
* `token_logprobs` takes any upstream gradient, exactly, by computing the logits again in the backward pass: four.

Shape letters: n tokens of a chunk, N tokens, H hidden size, V vocabulary (of a shard: its rows).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trm_repro.vocab.chunks import (
    VocabularyShard,
    accumulation_dtype,
    local_columns,
    log_normalizer,
    row_tiles,
    token_chunks,
    token_logits,
    write_logits,
)

TokenObjective = Callable[[Tensor, slice], Tensor]
"""From log-probs ``[n]`` of some of the N tokens, and which they are, to their objectives ``[n]``, token by token."""


class _Settings(NamedTuple):
    temperature: float
    chunk_tokens: int | None
    shard: VocabularyShard | None


def token_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Compute the log-probability of each token, differentiably, for any use of the result.

    Args:
        hidden: ``[N, H]``; final hidden states of the positions that predict the tokens.
        head_weight: ``[V, H]``; output head.
        token_ids: ``[N]`` int64.
        temperature: logits are divided by it.
        chunk_tokens: tokens whose logits exist at the same time; None fits them to the device.
        shard: which rows ``head_weight`` is, where several processes share the vocabulary; the gradient of
            ``hidden`` is then the whole one in every process.

    Returns:
        ``[N]`` float32, nats.
    """
    result: Tensor = _TokenLogprobs.apply(hidden, head_weight, token_ids, _Settings(temperature, chunk_tokens, shard))
    return result


def token_objective(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    objective: TokenObjective,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum a per-token objective of the tokens' log-probs, forming its gradients while the logits exist.

    Can be differentiated once. Arguments are those of `token_logprobs`, and:

    Args:
        hidden: ``[N, H]``.
        head_weight: ``[V, H]``.
        token_ids: ``[N]`` int64.
        objective: differentiable; a token's objective may depend on its own log-prob only.
        temperature: logits are divided by it.
        chunk_tokens: tokens whose logits exist at the same time; None fits them to the device.
        shard: which rows ``head_weight`` is.

    Returns:
        The sum, a float32 scalar with gradient; and ``[N]`` float32 log-probs, nats, without.
    """
    if not torch.is_grad_enabled():
        hidden, head_weight = hidden.detach(), head_weight.detach()  # or gradients would be formed for nobody
    total, logprobs = _TokenObjective.apply(
        hidden, head_weight, token_ids, objective, _Settings(temperature, chunk_tokens, shard)
    )
    return total, logprobs


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head_weight: Tensor, token_ids: Tensor, settings: _Settings) -> Tensor:  # noqa: ANN401
        dtype = accumulation_dtype(hidden, head_weight)
        logprobs = torch.empty(hidden.shape[0], dtype=dtype, device=hidden.device)
        normalizers = torch.empty_like(logprobs)
        for chunk, logits in _chunk_logits(hidden, head_weight, settings):
            normalizers[chunk] = log_normalizer(logits, settings.shard)
            logprobs[chunk] = token_logits(logits, token_ids[chunk], settings.shard) - normalizers[chunk]
        ctx.save_for_backward(hidden, head_weight, token_ids, normalizers)
        ctx.settings = settings
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # noqa: ANN401
        hidden, head_weight, token_ids, normalizers = ctx.saved_tensors
        gradients = _Gradients(hidden, head_weight, ctx.needs_input_grad, ctx.settings)
        for chunk, logits in _chunk_logits(hidden, head_weight, ctx.settings):
            gradients.add(chunk, logits, token_ids[chunk], normalizers[chunk], upstream[chunk])
        return gradients.hidden_gradient(), gradients.head_gradient(), None, None


class _TokenObjective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        head_weight: Tensor,
        token_ids: Tensor,
        objective: TokenObjective,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(hidden, head_weight)
        logprobs = torch.empty(hidden.shape[0], dtype=dtype, device=hidden.device)
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        gradients = _Gradients(hidden, head_weight, ctx.needs_input_grad, settings)
        for chunk, logits in _chunk_logits(hidden, head_weight, settings):
            normalizers = log_normalizer(logits, settings.shard)
            logprobs[chunk] = token_logits(logits, token_ids[chunk], settings.shard) - normalizers
            with torch.enable_grad():
                leaf = logprobs[chunk].clone().requires_grad_()
                value = objective(leaf, chunk).sum()
            (upstream,) = torch.autograd.grad(value, leaf)
            total += value.detach()
            gradients.add(chunk, logits, token_ids[chunk], normalizers, upstream)
        ctx.mark_non_differentiable(logprobs)
        ctx.gradients = gradients
        return total, logprobs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        upstream: Tensor,
        _: Tensor,
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if ctx.gradients is None:
            raise RuntimeError("token_objective can be differentiated once; call it again for another backward pass")
        gradients, ctx.gradients = ctx.gradients, None
        return gradients.hidden_gradient(upstream), gradients.head_gradient(upstream), None, None, None


def _chunk_logits(hidden: Tensor, head_weight: Tensor, settings: _Settings) -> Iterator[tuple[slice, Tensor]]:
    """Yield each chunk with its tempered logits ``[n, V]``, which the caller may overwrite: they share one buffer."""
    buffer: Tensor | None = None
    vocab_size = head_weight.shape[0]
    with torch.autocast(hidden.device.type, enabled=False):
        for chunk in token_chunks(hidden.shape[0], vocab_size, settings.chunk_tokens, hidden.device):
            num_tokens = chunk.stop - chunk.start
            if buffer is None:
                dtype = accumulation_dtype(hidden, head_weight)
                buffer = torch.empty(num_tokens, vocab_size, dtype=dtype, device=hidden.device)
            logits = buffer[:num_tokens]
            write_logits(logits, hidden[chunk], head_weight)
            if settings.temperature != 1.0:
                logits.div_(settings.temperature)
            yield chunk, logits


class _Gradients:
    """Gradients of hidden states and head, added up over chunks in float32."""

    def __init__(self, hidden: Tensor, head_weight: Tensor, needed: tuple[bool, ...], settings: _Settings) -> None:
        dtype = accumulation_dtype(hidden, head_weight)
        self.inputs = (hidden, head_weight)
        self.settings = settings
        self.of_hidden = torch.empty_like(hidden, dtype=dtype) if needed[0] else None
        self.of_head = torch.empty_like(head_weight, dtype=dtype) if needed[1] else None
        if self.of_head is not None and hidden.shape[0] == 0:
            self.of_head.zero_()  # no chunk will write it

    def add(self, chunk: slice, logits: Tensor, token_ids: Tensor, normalizers: Tensor, upstream: Tensor) -> None:
        """Add one chunk's gradients; its logits are overwritten by those of the logits."""
        if self.of_hidden is None and self.of_head is None:
            return
        scale = upstream / self.settings.temperature  # [n]
        logits.sub_(normalizers[:, None]).exp_().mul_(-scale[:, None])  # [n, V]; -upstream pi_theta / temperature
        columns, is_here = local_columns(token_ids, logits.shape[1], self.settings.shard)
        logits.scatter_add_(-1, columns[:, None], torch.where(is_here, scale, torch.zeros_like(scale))[:, None])
        hidden, head_weight = self.inputs
        if self.of_hidden is not None:
            _add_product(self.of_hidden[chunk], logits, head_weight, is_first=True)
        if self.of_head is not None:
            _add_product(self.of_head, logits.t(), hidden[chunk], is_first=chunk.start == 0)

    def hidden_gradient(self, scale: Tensor | None = None) -> Tensor | None:
        """Return the gradient of the hidden states, over all shards: ``[N, H]`` in their dtype."""
        if self.of_hidden is None:
            return None
        shard = self.settings.shard
        whole = self.of_hidden if shard is None else shard.sum(self.of_hidden)
        return _scaled(whole, scale).to(self.inputs[0].dtype)

    def head_gradient(self, scale: Tensor | None = None) -> Tensor | None:
        """Return the gradient of this process's rows of the head: ``[V, H]`` in its dtype."""
        return None if self.of_head is None else _scaled(self.of_head, scale).to(self.inputs[1].dtype)


def _scaled(gradient: Tensor, scale: Tensor | None) -> Tensor:
    # A pass over the head's gradient costs a twentieth of the step on a CPU, and the scale is nearly always 1 there;
    # on a GPU asking for its value would stall, and the pass is cheap.
    if scale is None or (not scale.is_cuda and float(scale) == 1.0):
        return gradient
    return gradient.mul_(scale)


def _add_product(out: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
    """Add ``left @ right`` to ``out``, or write it there if first, in the dtype of ``out``; ``right`` may be narrower.

    Writing spares a pass that would only set a gradient of the head's size to zero.
    """
    if right.dtype == out.dtype:
        torch.addmm(out, left, right, beta=0 if is_first else 1, out=out)
    elif out.is_cuda:
        for rows in row_tiles(out.shape[0]):
            product = torch.mm(left[rows].to(right.dtype), right, out_dtype=out.dtype)
            out[rows] = product if is_first else product.add_(out[rows])
    else:
        for rows in row_tiles(right.shape[0]):
            beta = 0 if is_first and rows.start == 0 else 1
            torch.addmm(out, left[:, rows], right[rows].to(out.dtype), beta=beta, out=out)
