"""Logits of one chunk of tokens, over the whole vocabulary or one process's shard of it.

Shape letters: n tokens of a chunk, N tokens, H hidden size, V vocabulary (of a shard: its rows). Everything is
computed in float32 whatever the inputs' dtype; float64 inputs stay float64.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

CPU_CHUNK_ELEMENTS = 20 * 2**20
"""Logits that exist at a time: 80 MiB in float32, 138 tokens of a vocabulary of 151,936."""
CUDA_CHUNK_ELEMENTS = 2**27
"""Larger on a GPU, so that few kernels are launched."""
TILE_ROWS = 2048
"""Rows of the head worked on at a time on a CPU: 32 MiB where they are lifted to float32 at a hidden size of 4096."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VocabularyShard:
    """The rows of the output head that this process holds; the other processes of the group hold the rest.

    Every process of the group must call with the same tokens and chunk sizes. Example: V = 10 on two processes:
    rank 0 has ``first_token=0`` and 5 rows, rank 1 ``first_token=5`` and 5 rows; shards may differ in size.

    Attributes:
        first_token: id of the token of the shard's first row.
        group: the process group over which sums are taken, or None for the default group.
    """

    first_token: int
    group: dist.ProcessGroup | None = None

    def max(self, values: Tensor) -> Tensor:
        """Take the largest over all shards, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def sum(self, values: Tensor) -> Tensor:
        """Add up over all shards, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.SUM, group=self.group)
        return values


def accumulation_dtype(hidden: Tensor, head_weight: Tensor) -> torch.dtype:
    """Return float64 for float64 inputs, else float32."""
    return torch.float64 if torch.float64 in (hidden.dtype, head_weight.dtype) else torch.float32


def num_logits(vocab_size: int, chunk_tokens: int | None, device: torch.device) -> int:
    """Say how many logits may exist at a time: those of ``chunk_tokens`` tokens, or None for what fits the device."""
    if chunk_tokens is not None:
        return chunk_tokens * vocab_size
    return CUDA_CHUNK_ELEMENTS if device.type == "cuda" else CPU_CHUNK_ELEMENTS


def token_chunks(num_tokens: int, vocab_size: int, chunk_tokens: int | None, device: torch.device) -> Iterator[slice]:
    """Divide N tokens into chunks of nearly equal size, each with the whole vocabulary.

    Args:
        num_tokens: N >= 0.
        vocab_size: logits of one token.
        chunk_tokens: largest chunk, or None for as many as the device's number of logits allows.
        device: where the logits are to be.

    Yields:
        Slices that cover the tokens in order; none for N = 0.
    """
    largest = max(1, num_logits(vocab_size, chunk_tokens, device) // vocab_size)
    num_chunks = max(1, -(-num_tokens // largest))
    size = max(1, -(-num_tokens // num_chunks))
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))


def row_tiles(num_rows: int, largest: int | None = None) -> Iterator[slice]:
    """Divide the rows of the head into tiles of `TILE_ROWS`, or of ``largest``."""
    size = largest or TILE_ROWS
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


def tile_rows(num_rows: int, num_tokens: int, chunk_tokens: int | None, device: torch.device) -> int:
    """Say how many rows of the head all N tokens can be multiplied with at a time."""
    rows = num_logits(num_rows, chunk_tokens, device) // max(1, num_tokens)
    return max(1, min(rows, num_rows if device.type == "cuda" else TILE_ROWS))


def product_dtype(hidden: Tensor, head_weight: Tensor) -> torch.dtype:
    """Return the dtype in which to multiply: on a GPU the inputs' own, where a product is accumulated in float32.

    On a CPU, a bfloat16 product would be rounded, so that its inputs are lifted first.
    """
    if hidden.is_cuda and hidden.dtype == head_weight.dtype:
        return hidden.dtype
    return accumulation_dtype(hidden, head_weight)


def multiply(left: Tensor, right: Tensor, *, out: Tensor, is_added: bool = False) -> None:
    """Write or add ``left @ right``, accumulated in float32 or float64, to ``out``, whatever the dtype of that is."""
    if left.dtype == out.dtype:
        torch.addmm(out, left, right, beta=1 if is_added else 0, out=out)
        return
    if out.is_cuda and out.dtype == torch.float32 and not is_added:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
        return
    product = torch.mm(left, right, out_dtype=torch.float32) if out.is_cuda else torch.mm(left, right)
    if is_added:
        out.add_(product)
    else:
        out.copy_(product)


def write_logits(out: Tensor, hidden: Tensor, head_weight: Tensor) -> None:
    """Compute logits into a buffer, accumulated and kept in the buffer's dtype.

    Args:
        out: ``[n, V]`` float32 or float64; overwritten.
        hidden: ``[n, H]``.
        head_weight: ``[V, H]``.
    """
    dtype = product_dtype(hidden, head_weight)
    states = hidden.to(dtype)
    if head_weight.dtype == dtype:
        multiply(states, head_weight.t(), out=out)
        return
    for rows in row_tiles(head_weight.shape[0]):  # room for one tile of the head in the wider dtype
        multiply(states, head_weight[rows].to(dtype).t(), out=out[:, rows])


def round_like(out: Tensor, dtype: torch.dtype) -> None:
    """Round logits in place to what a narrower dtype can hold, as an engine that returns them in it does."""
    if dtype != out.dtype:
        for rows in row_tiles(out.shape[1]):
            out[:, rows] = out[:, rows].to(dtype)


def log_normalizer(logits: Tensor, shard: VocabularyShard | None) -> Tensor:
    """Compute the logarithm of the sum of exponentials, tile by tile in room for one tile.

    Float32 sums over 151,936 terms in one run are off by up to 5e-4 nats; over tiles by 1e-6.

    Args:
        logits: ``[n, V]``.
        shard: the process's part of the vocabulary, or None for all of it.

    Returns:
        ``[n]``, over the whole vocabulary.
    """
    top = logits.amax(dim=-1)  # [n]
    top = top if shard is None else shard.max(top)
    total = torch.zeros_like(top)
    for rows in row_tiles(logits.shape[1]):
        total += (logits[:, rows] - top[:, None]).exp_().sum(dim=-1)
    total = total if shard is None else shard.sum(total)
    return top + total.log()


def token_logits(logits: Tensor, token_ids: Tensor, shard: VocabularyShard | None) -> Tensor:
    """Pick each token's own logit, from whichever shard holds it: ``[n, V]``, ``[n]`` -> ``[n]``."""
    if shard is None:
        return logits.gather(-1, token_ids[:, None])[:, 0]
    columns, is_here = local_columns(token_ids, logits.shape[1], shard)
    chosen = logits.gather(-1, columns[:, None])[:, 0]
    return shard.sum(torch.where(is_here, chosen, torch.zeros_like(chosen)))


def local_columns(token_ids: Tensor, num_rows: int, shard: VocabularyShard | None) -> tuple[Tensor, Tensor]:
    """Find each token's row in a shard.

    Args:
        token_ids: ``[n]`` int64.
        num_rows: rows of the shard.
        shard: the process's part of the vocabulary, or None for all of it.

    Returns:
        ``[n]`` int64 rows (0 where the token is elsewhere), and ``[n]`` bool: whether it is here.
    """
    rows = token_ids if shard is None else token_ids - shard.first_token
    is_here = (rows >= 0) & (rows < num_rows)
    return torch.where(is_here, rows, torch.zeros_like(rows)), is_here
