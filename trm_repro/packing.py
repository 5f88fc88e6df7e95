"""Sequences one after another in a single row, without padding, for one forward pass.

Positions begin at 0 in every sequence. Where they fall back, transformers keeps attention within a sequence: by
sequence boundaries in flash attention, by a block-diagonal mask in the other kernels.
Shape letters: B sequences, S tokens of all sequences, N response tokens of all sequences.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from trm_repro.batch import RolloutBatch


class PackedTokens(NamedTuple):
    """A batch without padding.

    Example: prompts of 2 and 1 tokens with responses of 2 and 3 give ``position_ids [[0, 1, 2, 3, 0, 1, 2, 3]]`` and
    ``predicting [1, 2, 4, 5, 6]``.

    Attributes:
        input_ids: ``[1, S]`` int64.
        position_ids: ``[1, S]`` int64; of each token within its sequence.
        predicting: ``[N]`` int64; where in S each response token is predicted, in the order of ``response_mask``.
    """

    input_ids: Tensor
    position_ids: Tensor
    predicting: Tensor


def pack(batch: RolloutBatch) -> PackedTokens:
    """Remove the padding of a batch.

    Args:
        batch: B sequences.

    Returns:
        Its tokens in a row.
    """
    lengths = batch.prompt_lengths + batch.response_lengths  # [B]
    positions = torch.arange(batch.input_ids.shape[1], device=lengths.device).expand_as(batch.input_ids)  # [B, longest]
    is_token = positions < lengths[:, None]
    starts = lengths.cumsum(dim=0) - lengths  # [B]
    offsets = torch.arange(batch.response_mask.shape[1], device=lengths.device)  # [T]
    predicting = (starts + batch.prompt_lengths - 1)[:, None] + offsets  # [B, T]
    return PackedTokens(
        input_ids=batch.input_ids[is_token][None],
        position_ids=positions[is_token][None],
        predicting=predicting[batch.response_mask],
    )
