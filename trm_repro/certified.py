"""A certified interval for exact KL from the K largest rollout log-probs, and the decision it allows.

Shape letters: B sequences, T response tokens, N response tokens without padding, K stored entries, V vocabulary.
Known of pi_roll are its K largest log-probs and the sampled token's; of pi_theta everything. The rest of
pi_roll, its tail, may be any distribution of the remaining mass with no token above the K-th. The interval
holds the KL of every such pi_roll, so the true one too. Everything is float64 inside. Ours: the paper
(TRM, arXiv 2512.23075v3) has exact KL or estimates from sampled tokens.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trm_repro.divergence import masked_mean

FLOAT32_ROUNDING = 2.0**-23
"""A log-prob stored in float32 is within this times its size of the true one, besides the normalizer's error."""

CHUNK_ELEMENTS = 2**23
"""Entries of the ``[N, V]`` table worked on at a time: 64 MiB in float64, a few times over."""

_TINY = 1e-300  # smallest probability told from 0


@dataclass(frozen=True, kw_only=True, eq=False)
class TopLogprobs:
    """What is stored of pi_roll at N tokens.

    Example, V = 5 and K = 2: ``ids=[[3, 0]]``, ``logprobs=[[-0.51, -1.61]]`` (0.6 and 0.2), ``sampled_ids=[4]``,
    ``sampled_logprobs=[-2.30]`` (0.1): three tokens are known, and the other two share a mass of 0.1.

    Attributes:
        ids: ``[N, K]`` int64; tokens of the K largest log-probs in any order, each once.
        logprobs: ``[N, K]`` float, nats; log pi_roll of those tokens; -inf for a token that cannot be sampled.
        sampled_ids: ``[N]`` int64; the sampled token, among the K or not.
        sampled_logprobs: ``[N]`` float, nats; log pi_roll of the sampled token.
    """

    ids: Tensor
    logprobs: Tensor
    sampled_ids: Tensor
    sampled_logprobs: Tensor

    def __post_init__(self) -> None:
        """Check that shapes agree."""
        num_tokens, num_top = self.ids.shape
        if num_top == 0:
            raise ValueError("ids must hold at least one token in a row, got none")
        if self.logprobs.shape != self.ids.shape:
            raise ValueError(f"logprobs must be {tuple(self.ids.shape)} as ids, got {tuple(self.logprobs.shape)}")
        for name in ("sampled_ids", "sampled_logprobs"):
            if getattr(self, name).shape != (num_tokens,):
                raise ValueError(f"{name} must be ({num_tokens},), got {tuple(getattr(self, name).shape)}")

    def rows(self, chunk: slice) -> "TopLogprobs":
        """Take some of the N tokens."""
        return TopLogprobs(
            ids=self.ids[chunk],
            logprobs=self.logprobs[chunk],
            sampled_ids=self.sampled_ids[chunk],
            sampled_logprobs=self.sampled_logprobs[chunk],
        )


class KLInterval(NamedTuple):
    """Bounds on KL(pi_roll || pi_theta), of one shape, nats.

    Attributes:
        low: what KL is at least; >= 0, infinite where pi_theta drops a token of pi_roll.
        high: what KL is at most; infinite where pi_theta may drop one. Both are NaN where nothing is certified.
    """

    low: Tensor
    high: Tensor


class CertifiedMask(NamedTuple):
    """A decision about each sequence; exactly one of the three is True.

    Attributes:
        accepted: ``[B]`` bool; exact KL would accept.
        rejected: ``[B]`` bool; exact KL would reject, or nothing is certified of some token.
        undecided: ``[B]`` bool; the stored log-probs do not settle it.
    """

    accepted: Tensor
    rejected: Tensor
    undecided: Tensor


def default_normalizer_error(vocabulary_size: int) -> float:
    """Bound the error of a float32 log-softmax that all log-probs of a row share, in nats.

    A sum of V positive terms in 8 running sums of float32, as torch.log_softmax makes it on a CPU, is off by at
    most V / 8 half-units in the last place: 1.1e-3 at V = 151,936, where 5e-4 occurs. Log-probs taken as
    ``logits - logits.logsumexp(-1, keepdim=True)`` come within 2e-6 there.
    """
    return (16 + vocabulary_size / 16) * FLOAT32_ROUNDING


@torch.no_grad()
def certified_kl_interval(
    rollout: TopLogprobs,
    policy_log_distribution: Tensor,
    *,
    rounding: float = FLOAT32_ROUNDING,
    normalizer_error: float | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> KLInterval:
    """Bound KL(pi_roll || pi_theta) per token from the K largest rollout log-probs.

    With tail mass m, tail Q of pi_theta and p_K the K-th largest probability:
    KL_low takes the tail as one bucket, m log(m / Q) (log-sum inequality). KL_high uses that KL is convex in the
    tail, so that its largest value over {0 <= p_v <= p_K, sum = m} puts p_K on the tokens with the smallest pi_theta.
    A token with pi_theta = 0 in the tail makes KL_high infinite, unless p_K = 0. The width is about m log(p_K / q)
    at the smallest pi_theta = q: small where the K hold nearly all the mass, and not where pi_roll is broad.

    Margin: a stored log-prob l is taken to lie within ``rounding * |l|`` of the true one, plus an error of at most
    ``normalizer_error`` that its row shares. So m = 1 - sum is known up to about ``normalizer_error``, and within 0 and
    the p_K times number of tail tokens; the interval covers all of that. Rows of pi_theta are normalized here in
    float64. At K = V the row's error is found and removed, and both ends equal exact KL up to ``rounding``.

    Source: ours; the paper (TRM, arXiv 2512.23075v3) needs the whole distribution for exact KL.

    Args:
        rollout: pi_roll at N tokens.
        policy_log_distribution: ``[N, V]`` float, nats; log pi_theta at the sampling temperature.
        rounding: relative precision of log-probs, > 0; 2^-11 for float16.
        normalizer_error: nats, >= 0, or None for `default_normalizer_error`.
        chunk_elements: entries of ``[N, V]`` worked on at a time; a row at least.

    Returns:
        ``[N]`` float64 ends. NaN where a log-prob is NaN or the stored ones cannot be the largest K of a
        distribution: they sum to more than 1, leave more mass than the tail can hold, or disagree with
        the sampled token's. Counting NaN counts these tokens.

    Raises:
        ValueError: for shapes that differ, a token outside the vocabulary or twice in a row, or a number out of range.
    """
    num_tokens, vocabulary_size = policy_log_distribution.shape
    if normalizer_error is None:
        normalizer_error = default_normalizer_error(vocabulary_size)
    _check(rollout, num_tokens, vocabulary_size)
    if not 0 < rounding < 1:
        raise ValueError(f"rounding must be between 0 and 1, got {rounding}")
    if not 0 <= normalizer_error < 1:
        raise ValueError(f"normalizer_error must be in [0, 1), got {normalizer_error}")
    chunk_tokens = max(1, chunk_elements // vocabulary_size)
    low = torch.empty(num_tokens, dtype=torch.float64, device=policy_log_distribution.device)
    high = torch.empty_like(low)
    for start in range(0, num_tokens, chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        low[chunk], high[chunk] = _chunk_interval(
            rollout.rows(chunk), policy_log_distribution[chunk], rounding, normalizer_error
        )
    return KLInterval(low, high)


@torch.no_grad()
def certified_mask(
    interval: KLInterval,
    response_mask: Tensor,
    *,
    max_threshold: float | None = None,
    avg_threshold: float | None = None,
) -> CertifiedMask:
    """Decide which sequences exact KL would keep (TRM-Max, TRM-Avg, or both), as far as an interval tells.

    A sequence is accepted when every criterion holds of KL_high, rejected when one fails of KL_low, else
    undecided. An empty response is accepted; a NaN token rejects. Source of the criteria: TRM
    (arXiv 2512.23075v3), Algorithm 1; the interval is ours.

    Args:
        interval: ``[B, T]`` ends, nats.
        response_mask: ``[B, T]`` bool.
        max_threshold: delta of TRM-Max, nats, > 0, or None to leave it out.
        avg_threshold: delta_avg of TRM-Avg, nats, > 0, or None to leave it out.

    Returns:
        The decision.

    Raises:
        ValueError: if no threshold is given, one is not positive, or the shapes differ.
    """
    if max_threshold is None and avg_threshold is None:
        raise ValueError("give max_threshold, avg_threshold or both")
    for threshold in (max_threshold, avg_threshold):
        if threshold is not None and not threshold > 0:
            raise ValueError(f"the threshold must be > 0, got {threshold}")
    if not interval.low.shape == interval.high.shape == response_mask.shape:
        raise ValueError(
            f"low {tuple(interval.low.shape)}, high {tuple(interval.high.shape)} and response_mask "
            f"{tuple(response_mask.shape)} differ in shape"
        )
    low_holds, high_holds = (_holds(end, response_mask, max_threshold, avg_threshold) for end in interval)
    is_nan = ((interval.low.isnan() | interval.high.isnan()) & response_mask).any(dim=-1)  # [B]
    rejected = ~low_holds | is_nan
    accepted = high_holds & ~rejected
    return CertifiedMask(accepted=accepted, rejected=rejected, undecided=~accepted & ~rejected)


def _holds(
    divergence: Tensor, response_mask: Tensor, max_threshold: float | None, avg_threshold: float | None
) -> Tensor:
    holds = torch.ones(divergence.shape[0], dtype=torch.bool, device=divergence.device)
    if max_threshold is not None:
        holds &= ((divergence <= max_threshold) | ~response_mask).all(dim=-1)
    if avg_threshold is not None:
        holds &= masked_mean(divergence, response_mask, dim=-1) <= avg_threshold
    return holds


def _check(rollout: TopLogprobs, num_tokens: int, vocabulary_size: int) -> None:
    if rollout.ids.shape[0] != num_tokens:
        raise ValueError(f"the rollout has {rollout.ids.shape[0]} tokens, the policy {num_tokens}")
    for ids in (rollout.ids, rollout.sampled_ids):
        if num_tokens and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary_size):
            raise ValueError(f"ids must be in [0, {vocabulary_size}), got {int(ids.min())} to {int(ids.max())}")


class _Tail(NamedTuple):
    """What the stored log-probs say of the rest of pi_roll, ``[N]`` each; zeros where they contradict themselves."""

    num_tokens: Tensor
    least_mass: Tensor  # for any log-probs within the margin
    most_mass: Tensor
    cap: Tensor  # largest probability of one token
    is_consistent: Tensor


def _chunk_interval(
    rollout: TopLogprobs, policy: Tensor, rounding: float, normalizer_error: float
) -> tuple[Tensor, Tensor]:
    """Bound KL at N tokens, ``[N]`` each.

    With m the tail mass and k the KL of the stored part, normalized to 1, to pi_theta, KL = (1 - m) (log(1 - m) + k)
    + tail part. The error that a row shares changes m alone.
    """
    policy = policy.double()
    policy = policy - policy.logsumexp(dim=-1, keepdim=True)  # [N, V]
    # Its own rounding, and what the rounding of the other tokens does to it through the sum over the vocabulary.
    log_vocabulary = math.log(policy.shape[-1])
    policy_error = rounding * (policy.abs() + log_vocabulary)  # [N, V]
    is_repeated = (rollout.ids == rollout.sampled_ids[:, None]).any(dim=-1)  # [N]
    ids = torch.cat((rollout.ids, rollout.sampled_ids[:, None]), dim=-1)  # [N, K+1]
    sampled = rollout.sampled_logprobs.double().masked_fill(is_repeated, -torch.inf)  # counted once
    logprobs = torch.cat((rollout.logprobs.double(), sampled[:, None]), dim=-1)  # [N, K+1]
    is_tail = torch.ones_like(policy, dtype=torch.bool).scatter_(-1, ids, value=False)  # [N, V]
    num_tail = is_tail.sum(dim=-1)  # [N]
    if bool((num_tail + ids.shape[-1] - is_repeated.long() != policy.shape[-1]).any()):
        raise ValueError("ids must hold each token once in a row, got one twice")

    tail = _tail(rollout, logprobs, num_tail, rounding, normalizer_error)
    stored_low, stored_high = _stored_kl(logprobs, policy.gather(-1, ids), policy_error.gather(-1, ids), rounding)
    tail_policy = policy.masked_fill(~is_tail, -torch.inf).logsumexp(dim=-1)  # [N]
    low = _low(tail, stored_low, (1 - rounding) * tail_policy + 2 * rounding * log_vocabulary)
    high = _high(tail, stored_high, (policy - policy_error).masked_fill_(~is_tail, torch.inf))
    nothing = torch.full_like(low, torch.nan)
    return (
        torch.where(tail.is_consistent, low.clamp(min=0), nothing),
        torch.where(tail.is_consistent, high.clamp(min=0), nothing),
    )


def _tail(rollout: TopLogprobs, logprobs: Tensor, num_tail: Tensor, rounding: float, normalizer_error: float) -> _Tail:
    """Bound the mass of the tail and of each of its tokens, and check that a distribution fits."""
    error = _rounding_error(logprobs, rounding)  # [N, K+1]
    stored = logprobs.logsumexp(dim=-1)  # [N]
    margin = normalizer_error + (logprobs + error).logsumexp(dim=-1) - stored  # [N], NaN where nothing is stored
    least_stored, most_stored = (stored - margin).exp(), (stored + margin).exp()
    smallest = rollout.logprobs.double().amin(dim=-1)  # [N]
    shared = torch.full_like(smallest, normalizer_error).masked_fill(smallest == -torch.inf, 0.0)
    log_cap = smallest + _rounding_error(smallest, rounding) + shared
    cap = log_cap.exp().clamp(min=_TINY).masked_fill(smallest == -torch.inf, 0.0)
    least, most = (1 - most_stored).clamp(min=0), torch.minimum(1 - least_stored, num_tail * cap)

    is_sampled = rollout.ids == rollout.sampled_ids[:, None]  # [N, K]
    sampled = rollout.sampled_logprobs.double()
    difference = (rollout.logprobs.double() - sampled[:, None]).abs()  # [N, K]
    is_misplaced = (is_sampled & (difference > 2 * _rounding_error(sampled, rounding)[:, None])).any(dim=-1)
    is_too_large = ~is_sampled.any(dim=-1) & (sampled > log_cap)
    is_consistent = (least_stored <= 1) & (least <= num_tail * cap) & ~is_misplaced & ~is_too_large & ~sampled.isnan()
    least, most, cap = (torch.where(is_consistent, value, 0.0) for value in (least, most, cap))
    return _Tail(num_tail, least, most, cap, is_consistent)


def _stored_kl(logprobs: Tensor, policy: Tensor, policy_error: Tensor, rounding: float) -> tuple[Tensor, Tensor]:
    """Bound the KL of the stored part of pi_roll, normalized to 1, to pi_theta as it is: ``[N]`` each."""
    error = _rounding_error(logprobs, rounding)  # [N, K+1]
    stored = logprobs.logsumexp(dim=-1, keepdim=True)  # [N, 1]
    shape = logprobs - stored  # [N, K+1]
    shape_error = error + (shape + error).logsumexp(dim=-1, keepdim=True)  # [N, K+1]
    gain = shape - policy  # [N, K+1]
    is_absent = logprobs == -torch.inf
    terms = (shape.exp() * gain).masked_fill(is_absent, 0.0)
    change = torch.expm1(shape_error) * gain.abs() + shape_error.exp() * (shape_error + policy_error)
    slack = (shape.exp() * change).masked_fill(is_absent | gain.isinf(), 0.0)  # infinite KL has no rounding
    return (terms - slack).sum(dim=-1), (terms + slack).sum(dim=-1)


def _low(tail: _Tail, stored_kl: Tensor, log_tail_policy: Tensor) -> Tensor:
    """Minimize over the tail mass the KL of pi_roll with its tail in one bucket: ``[N]``."""
    best = torch.sigmoid(stored_kl + log_tail_policy)  # [N]; where the derivative in m is 0
    mass = best.nan_to_num(0.0).clamp(tail.least_mass, tail.most_mass)  # NaN: both are infinite, and KL is too
    bucket = torch.where(mass > 0, mass * (mass.log() - log_tail_policy), 0.0)
    return (1 - mass) * (torch.log1p(-mass) + stored_kl) + bucket


def _high(tail: _Tail, stored_kl: Tensor, tail_policy: Tensor) -> Tensor:
    """Maximize KL over the tail mass and all tails below the cap, ``[N]``; tail_policy ``[N, V]`` is +inf elsewhere.

    The stored part is convex in the mass, so at most a line from its value at the least mass; the line's slope is
    given to the tail, whose tokens then add p (log p - log q + slope) each. That is largest with every token at 0 or
    at the cap but one. When the masses allow exactly the tokens that gain at the cap, no sorting is needed.
    """
    line = -torch.log1p(-tail.most_mass) - 1 - stored_kl  # [N]
    line = torch.where(line.isfinite(), line, 0.0)  # an infinite or NaN stored part decides alone
    gains = (tail.cap.log() + line)[:, None] - tail_policy  # [N, V] at the cap, for each unit of mass
    num_gaining = (gains > 0).sum(dim=-1)  # [N]
    fewest, most = _counts(tail)
    is_free = (fewest <= num_gaining) & (num_gaining <= most) & (tail.cap > 0)
    largest = torch.where(is_free, tail.cap * gains.clamp(min=0).sum(dim=-1), 0.0)
    rows = (~is_free & (tail.most_mass > 0)).nonzero().flatten()
    if rows.numel():
        limits = _Tail(*(value[rows] for value in tail))
        largest[rows] = _largest_tail_part(limits, line[rows], gains[rows], num_gaining[rows])
    stored = (1 - tail.least_mass) * (torch.log1p(-tail.least_mass) + stored_kl)
    return stored + largest - line * tail.least_mass


def _largest_tail_part(tail: _Tail, line: Tensor, gains: Tensor, num_gaining: Tensor) -> Tensor:
    """Maximize the tail's sum of p (log p - log q + line) for R tokens, ``[R]``, by filling it from the largest gain.

    Between two whole numbers of filled tokens the sum is convex in the mass, and at the whole numbers it is concave:
    the largest is at the least or the most mass, or at the whole number nearest to the tokens that gain.
    """
    fewest, most = _counts(tail)
    nearest = torch.minimum(torch.maximum(num_gaining, fewest), most) * tail.cap
    masses = torch.stack((tail.least_mass, tail.most_mass, nearest.clamp(tail.least_mass, tail.most_mass)), dim=-1)
    cap = tail.cap[:, None]  # [R, 1]
    filled = torch.minimum((masses / cap).floor(), tail.num_tokens[:, None] - 1.0).long()  # [R, 3]
    best = gains.topk(int(filled.max()) + 1, dim=-1).values  # [R, most filled + 1]
    sums = torch.nn.functional.pad(cap * best.cumsum(dim=-1), (1, 0))  # [R, most filled + 2]
    rest = (masses - filled * cap).clamp(min=0)  # [R, 3], of one token
    rest_sum = rest * (rest.log() - cap.log() + best.gather(-1, filled))
    return (sums.gather(-1, filled) + torch.where(rest > 0, rest_sum, 0.0)).amax(dim=-1)


def _counts(tail: _Tail) -> tuple[Tensor, Tensor]:
    """Count the tokens that the least mass touches and the most mass fills, each at the cap: ``[N]`` float."""
    cap = tail.cap.clamp(min=_TINY)
    return (tail.least_mass / cap).ceil(), (tail.most_mass / cap).floor()


def _rounding_error(logprobs: Tensor, rounding: float) -> Tensor:
    return (rounding * logprobs.abs()).masked_fill(logprobs == -torch.inf, 0.0)  # a probability of 0 is exact
