"""Log-probabilities of sampled tokens with gradients, a tile of the vocabulary at a time.

log pi_theta(y) = logit(y) - log Z, all logits divided by the temperature. Its value needs one row of the head and
log Z; its gradient in the logits, (onehot(y) - pi_theta) / temperature, needs every logit, but with log Z known no sum
over the vocabulary first. So the backward pass takes all tokens at once through one tile of the head after another:
logits, probabilities, both gradients, each row of the head read once and its gradient written once. The pass that made
the mask has found log Z with the same weights: given it, forward and backward together cost three matrix products, as
many as the naive form.

Shape letters: N tokens, H hidden size, V vocabulary (of a shard: its rows), v rows of a tile.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trm_repro.errors import FaultError
from trm_repro.vocab.chunks import (
    VocabularyShard,
    accumulation_dtype,
    local_columns,
    log_normalizer,
    multiply,
    product_dtype,
    row_tiles,
    tile_rows,
    token_chunks,
    write_logits,
)

MASS_TOLERANCE = 1e-3
"""Float32 hidden states of the same tokens in a batch of another shape move the sum of probabilities by some 1e-5."""
GATHERED_TOKENS = 1024
"""Tokens whose rows of the head are gathered at a time."""


class _Settings(NamedTuple):
    temperature: float
    chunk_tokens: int | None
    shard: VocabularyShard | None


def token_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    *,
    normalizers: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Compute the log-probability of each token, differentiably, for any use of the result.

    Args:
        hidden: ``[N, H]``; final hidden states of the positions that predict the tokens.
        head_weight: ``[V, H]``; output head.
        token_ids: ``[N]`` int64.
        normalizers: ``[N]``, nats; log Z of these tokens under these weights and this temperature, as
            `token_statistics` gives it, from hidden states that are the same but for float32 rounding; None computes
            it here, with a fourth matrix product.
        temperature: logits are divided by it.
        chunk_tokens: as many logits exist at a time as these tokens have; None fits them to the device.
        shard: which rows ``head_weight`` is, where several processes share the vocabulary; the gradient of
            ``hidden`` is then the whole one in every process.

    Returns:
        ``[N]`` float32 (float64 for float64 inputs), nats. Can be differentiated once.

    Raises:
        FaultError: in the backward pass, if probabilities do not add up to 1: the normalizers are other weights'.
    """
    settings = _Settings(temperature, chunk_tokens, shard)
    with torch.autocast(hidden.device.type, enabled=False):
        if normalizers is None:
            normalizers = _normalizers(hidden.detach(), head_weight.detach(), settings)
        result: Tensor = _TokenLogprobs.apply(hidden, head_weight, token_ids, normalizers.detach(), settings)
    return result


@torch.no_grad()
def _normalizers(hidden: Tensor, head_weight: Tensor, settings: _Settings) -> Tensor:
    vocab_size = head_weight.shape[0]
    normalizers = hidden.new_empty(hidden.shape[0], dtype=accumulation_dtype(hidden, head_weight))
    buffer: Tensor | None = None
    for chunk in token_chunks(hidden.shape[0], vocab_size, settings.chunk_tokens, hidden.device):
        num_tokens = chunk.stop - chunk.start
        if buffer is None:
            buffer = normalizers.new_empty(num_tokens, vocab_size)
        logits = buffer[:num_tokens]
        write_logits(logits, hidden[chunk], head_weight)
        normalizers[chunk] = log_normalizer(logits.div_(settings.temperature), settings.shard)
    return normalizers


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        head_weight: Tensor,
        token_ids: Tensor,
        normalizers: Tensor,
        settings: _Settings,
    ) -> Tensor:
        ctx.save_for_backward(hidden, head_weight, token_ids, normalizers)
        ctx.settings = settings
        return _own_logits(hidden, head_weight, token_ids, settings) - normalizers

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        upstream: Tensor,
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, head_weight, token_ids, normalizers = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            of_hidden, of_head = _gradients(
                hidden, head_weight, token_ids, normalizers, upstream, ctx.settings, ctx.needs_input_grad
            )
        return of_hidden, of_head, None, None, None


def _own_logits(hidden: Tensor, head_weight: Tensor, token_ids: Tensor, settings: _Settings) -> Tensor:
    """Compute each token's own logit from its row of the head, wherever that is: ``[N]``."""
    dtype = accumulation_dtype(hidden, head_weight)
    rows, is_here = local_columns(token_ids, head_weight.shape[0], settings.shard)
    logits = hidden.new_empty(hidden.shape[0], dtype=dtype)
    for start in range(0, hidden.shape[0], GATHERED_TOKENS):
        part = slice(start, start + GATHERED_TOKENS)
        logits[part] = torch.einsum("nh,nh->n", hidden[part].to(dtype), head_weight[rows[part]].to(dtype))
    if settings.shard is not None:
        logits = settings.shard.sum(torch.where(is_here, logits, torch.zeros_like(logits)))
    return logits / settings.temperature


def _gradients(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    normalizers: Tensor,
    upstream: Tensor,
    settings: _Settings,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of hidden states ``[N, H]`` and head ``[V, H]`` that are needed, in their dtypes."""
    dtype, lifted = accumulation_dtype(hidden, head_weight), product_dtype(hidden, head_weight)
    num_tokens = hidden.shape[0]
    of_hidden = torch.zeros_like(hidden, dtype=dtype) if needed[0] else None
    of_head = torch.empty_like(head_weight) if needed[1] else None
    states = hidden.to(lifted)
    scale = upstream.to(dtype) / settings.temperature  # [N]
    columns, is_here = local_columns(token_ids, head_weight.shape[0], settings.shard)
    mass = hidden.new_zeros(num_tokens, dtype=dtype)
    size = tile_rows(head_weight.shape[0], num_tokens, settings.chunk_tokens, hidden.device)
    buffer = hidden.new_empty(num_tokens * size, dtype=dtype)
    for rows in row_tiles(head_weight.shape[0], size):
        weight = head_weight[rows].to(lifted)  # [v, H]
        tile = buffer[: num_tokens * weight.shape[0]].view(num_tokens, weight.shape[0])  # [N, v]
        multiply(states, weight.t(), out=tile)
        if settings.temperature != 1.0:
            tile.div_(settings.temperature)
        mass += tile.sub_(normalizers[:, None]).exp_().sum(dim=-1)
        tile.mul_(-scale[:, None])
        is_in_tile = is_here & (columns >= rows.start) & (columns < rows.stop)
        own = torch.where(is_in_tile, scale, torch.zeros_like(scale))
        tile.scatter_add_(-1, torch.where(is_in_tile, columns - rows.start, 0)[:, None], own[:, None])
        of_tile = tile.to(lifted)
        if of_hidden is not None:
            multiply(of_tile, weight, out=of_hidden, is_added=True)
        if of_head is not None:
            multiply(of_tile.t(), states, out=of_head[rows])
    shard = settings.shard
    _check_mass(mass if shard is None else shard.sum(mass))
    if of_hidden is not None:
        of_hidden = (of_hidden if shard is None else shard.sum(of_hidden)).to(hidden.dtype)
    return of_hidden, of_head


def _check_mass(mass: Tensor) -> None:
    """Check that most tokens' probabilities add up to 1, but for rounding.

    Not all: in a mixture of experts, a tie broken otherwise in another batch gives one token other hidden states.
    """
    if mass.numel() and float((mass - 1.0).abs().median()) > MASS_TOLERANCE:  # NaN is for the checks of the loss
        raise FaultError(
            f"the probabilities of tokens add up to {float(mass.median()):.4f}, not 1: their normalizers were found "
            "with other weights or another temperature; measure and update with the same"
        )
