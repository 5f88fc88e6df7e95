"""From final hidden states to statistics and gradients over the vocabulary, in chunks that never hold ``[N, V]``."""

from trm_repro.vocab.chunks import VocabularyShard
from trm_repro.vocab.gradients import token_logprobs
from trm_repro.vocab.statistics import HiddenRollout, TokenStatistics, token_statistics

__all__ = [
    "HiddenRollout",
    "TokenStatistics",
    "VocabularyShard",
    "token_logprobs",
    "token_statistics",
]
