"""Exact checks of the bounds: random autoregressive trees, small enough to enumerate every response.

A tree is a pair of policies: the next-token distributions of pi_roll and pi_theta in every context.

Shape letters: N pairs, P prompts, V vocabulary, T response tokens, C = V^(t-1) contexts at position t,
S = V^T responses; context c followed by token v is context c V + v one position later. A finished response
repeats token 0 with probability 1 under both policies. Numpy and the standard library only; float64.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trm_repro.bounds import ABSOLUTE_SLACK, RELATIVE_SLACK, Constants, Divergences, FloatArray, every_bound

BoolArray = NDArray[np.bool_]

MAX_LENGTH = 10
"""Largest T drawn; no more than 2^10 responses are enumerated."""

_SMALLEST_WEIGHT = 1e-30  # keeps a product of ten probabilities above underflow


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyPairs:
    """N pairs of policies (trees) with the same vocabulary, length and number of prompts.

    Example, one pair with one prompt, V = 2 and T = 1: ``prompt_weights = [[1.]]``,
    ``rollout = ([[[[0.5, 0.5]]]],)``, ``policy = ([[[[0.6, 0.4]]]],)``.
    """

    prompt_weights: FloatArray
    """``[N, P]``: probability of each prompt."""
    rollout: tuple[FloatArray, ...]
    """T arrays ``[N, P, C, V]``: pi_roll of the next token in each context."""
    policy: tuple[FloatArray, ...]
    """T arrays ``[N, P, C, V]``: pi_theta, likewise."""

    @property
    def length(self) -> int:
        """T."""
        return len(self.rollout)


@dataclass(frozen=True, kw_only=True)
class BoundCheck:
    """How one bound fared against exact errors."""

    num_violations: int = 0
    """Pairs whose worst error is above the bound."""
    worst_ratio: float = 0.0
    """Largest error / bound; 1 is a bound that cannot be improved."""

    def merged(self, other: "BoundCheck") -> "BoundCheck":
        """Join the checks of two sets of pairs."""
        return BoundCheck(
            num_violations=self.num_violations + other.num_violations,
            worst_ratio=max(self.worst_ratio, other.worst_ratio),
        )


def draw_policy_pairs(
    rng: np.random.Generator, num_pairs: int, *, length: int | None = None, has_holes: bool = False
) -> PolicyPairs:
    """Draw pairs of one random shape and kind of difference.

    Vocabulary 2 to 4, length 2 to 6 unless given, 1 to 3 prompts; early ends or not; tokens that neither policy
    takes; differences everywhere or in few contexts; pi_theta a tilted, a mixed or an unrelated distribution, or
    one with an equal mass moved in every context, for which the bounds are tightest.

    Args:
        rng: source of all randomness.
        num_pairs: N.
        length: T; None draws it.
        has_holes: whether pi_roll drops tokens that pi_theta takes, which voids the bounds.

    Returns:
        N pairs.

    Raises:
        ValueError: if the length is not from 1 to `MAX_LENGTH`.
    """
    num_tokens, length = _draw_shape(rng, length)
    num_prompts = int(rng.integers(1, 4))
    ends_early = bool(rng.random() < 0.5)
    kind = str(rng.choice(["tilt", "mixture", "unrelated", "moved_mass"]))
    density = float(rng.choice([1.0, 0.3]))
    concentration = 10 ** rng.uniform(-0.7, 1.0, (num_pairs, 1, 1, 1))
    scale = 10 ** rng.uniform(-2.0, 0.5, (num_pairs, 1, 1, 1))
    rollout, policy = [], []
    is_finished = np.zeros((1, 1, 1), dtype=bool)  # [1, 1, C]
    for position in range(length):
        shape = (num_pairs, num_prompts, num_tokens**position, num_tokens)
        p = _normalise(np.maximum(rng.standard_gamma(np.broadcast_to(concentration, shape)), _SMALLEST_WEIGHT))
        q = _draw_policy(rng, p, kind, scale)
        q = np.where(rng.random((*shape[:-1], 1)) < density, q, p)
        p, q = _drop_tokens(rng, p, q, has_holes=has_holes)
        end = np.eye(num_tokens)[0]  # [V]
        rollout.append(np.where(is_finished[..., None], end, p))
        policy.append(np.where(is_finished[..., None], end, q))
        ends_here = np.eye(num_tokens, dtype=bool)[0] & ends_early  # [V]
        is_finished = (is_finished[..., None] | ends_here).reshape(1, 1, -1)
    weights = _normalise(rng.standard_gamma(1.0, (num_pairs, num_prompts)))
    return PolicyPairs(prompt_weights=weights, rollout=tuple(rollout), policy=tuple(policy))


def prefix_probabilities(prompt_weights: FloatArray, policy: tuple[FloatArray, ...]) -> list[FloatArray]:
    """Compute the joint probability of prompt and first t tokens, for t = 0..T: arrays ``[N, P, V^t]``."""
    prefixes = [prompt_weights[..., None]]
    for next_token in policy:
        children = prefixes[-1][..., None] * next_token  # [N, P, C, V]
        prefixes.append(children.reshape(*children.shape[:2], -1))
    return prefixes


def unsupported_mass(pairs: PolicyPairs) -> FloatArray:
    """Compute the largest pi_theta mass on tokens that pi_roll never takes, over contexts it reaches: ``[N]``."""
    missed = [(q * (p == 0)).sum(axis=-1) for p, q in zip(pairs.rollout, pairs.policy, strict=True)]
    return _largest(_reached(pairs, missed))


def token_kl(pairs: PolicyPairs) -> list[FloatArray]:
    """Compute KL(pi_roll || pi_theta) at every context: T arrays ``[N, P, C]``; infinite if a token is dropped."""
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = [np.where(p > 0, p * np.log(p / q), 0.0) for p, q in zip(pairs.rollout, pairs.policy, strict=True)]
    return [np.maximum(term.sum(axis=-1), 0.0) for term in terms]


def token_tv(pairs: PolicyPairs) -> list[FloatArray]:
    """Compute the total variation at every context: T arrays ``[N, P, C]``."""
    distances = [np.abs(q - p).sum(axis=-1) / 2 for p, q in zip(pairs.rollout, pairs.policy, strict=True)]
    return [np.minimum(distance, 1.0) for distance in distances]


def measure_divergences(pairs: PolicyPairs) -> Divergences:
    """Compute the exact divergences of each pair, over the contexts that pi_roll reaches.

    Args:
        pairs: N pairs.

    Returns:
        Divergences with ``[N]`` numbers and ``[N, T]`` profiles.

    Raises:
        ValueError: if pi_theta has mass where pi_roll has none: no bound holds then.
    """
    missed = unsupported_mass(pairs)
    if np.any(missed > 0):
        raise ValueError(f"pi_theta must have no mass where pi_roll has none, got {missed.max():g}")
    prefixes = prefix_probabilities(pairs.prompt_weights, pairs.rollout)
    kl, tv = _reached(pairs, token_kl(pairs)), _reached(pairs, token_tv(pairs))
    response_shift = prefix_probabilities(pairs.prompt_weights, pairs.policy)[-1] - prefixes[-1]  # [N, P, S]
    return Divergences.at_most(
        pairs.length,
        _largest(kl),
        epsilon=_largest(tv),
        tv_seq=np.minimum(np.abs(response_shift).sum(axis=(1, 2)) / 2, 1.0),
        mean_tv=np.stack([(w * d).sum(axis=(1, 2)) for w, d in zip(prefixes[:-1], tv, strict=True)], axis=-1),
        mean_kl=np.stack([(w * d).sum(axis=(1, 2)) for w, d in zip(prefixes[:-1], kl, strict=True)], axis=-1),
    )


def response_ratio_sums(pairs: PolicyPairs) -> FloatArray:
    """Compute sum_t (rho_t - 1), rho = pi_theta / pi_roll, of every response: ``[N, P, S]``; 0/0 counts as 1."""
    sums = np.zeros((*pairs.prompt_weights.shape, 1))
    for p, q in zip(pairs.rollout, pairs.policy, strict=True):
        children = sums[..., None] + _ratio(p, q) - 1  # [N, P, C, V]
        sums = children.reshape(*children.shape[:2], -1)
    return sums


def largest_response_kl(pairs: PolicyPairs) -> FloatArray:
    """Compute max_t KL(c_t) of every response, the quantity of TRM-Max: ``[N, P, S]``, nats."""
    return np.asarray(_per_response(pairs, [kl[..., None] for kl in token_kl(pairs)]).max(axis=-1))


def advantages(pairs: PolicyPairs, rewards: FloatArray) -> FloatArray:
    """Compute R - E_roll[R | prompt] from rewards ``[N, P, S]``: ``[N, P, S]``."""
    probability = prefix_probabilities(np.ones_like(pairs.prompt_weights), pairs.rollout)[-1]  # given the prompt
    return np.asarray(rewards - (probability * rewards).sum(axis=-1, keepdims=True))


def improvement(pairs: PolicyPairs, rewards: FloatArray) -> FloatArray:
    """Compute J(pi_theta) - J(pi_roll) for rewards ``[N, P, S]``: ``[N]``."""
    before = prefix_probabilities(pairs.prompt_weights, pairs.rollout)[-1]
    after = prefix_probabilities(pairs.prompt_weights, pairs.policy)[-1]
    return np.asarray(((after - before) * rewards).sum(axis=(1, 2)))


def surrogate(pairs: PolicyPairs, rewards: FloatArray, is_kept: BoolArray | None = None) -> FloatArray:
    """Compute L' = E_roll[M A sum_t (rho_t - 1)] in reward units.

    Args:
        pairs: N pairs.
        rewards: ``[N, P, S]`` in [0, 1].
        is_kept: ``[N, P, S]``, the mask M; None keeps every response.

    Returns:
        ``[N]``.
    """
    probability = prefix_probabilities(pairs.prompt_weights, pairs.rollout)[-1]  # [N, P, S]
    terms = probability * advantages(pairs, rewards) * response_ratio_sums(pairs)
    return np.asarray((terms if is_kept is None else terms * is_kept).sum(axis=(1, 2)))


def error_weights(pairs: PolicyPairs) -> FloatArray:
    """Compute the weight of each response's reward in J(pi_theta) - J(pi_roll) - L': ``[N, P, S]``."""
    before = prefix_probabilities(pairs.prompt_weights, pairs.rollout)[-1]
    after = prefix_probabilities(pairs.prompt_weights, pairs.policy)[-1]
    return after - before - before * response_ratio_sums(pairs)


def worst_error(pairs: PolicyPairs) -> FloatArray:
    """Compute the largest |error| over all rewards in [0, 1]: ``[N]``.

    The worst reward is 1 where `error_weights` has one sign and 0 elsewhere. Without holes in pi_roll the weights
    sum to 0 and both signs are as bad; with holes the larger one counts.
    """
    weights = error_weights(pairs)
    return np.asarray(np.maximum(np.maximum(weights, 0).sum(axis=(1, 2)), np.maximum(-weights, 0).sum(axis=(1, 2))))


def check_bounds(error: FloatArray, divergences: Divergences, *, constants: Constants) -> dict[str, BoundCheck]:
    """Compare worst errors with every bound.

    Args:
        error: ``[N]``, from `worst_error`.
        divergences: of the same pairs, from `measure_divergences`.
        constants: as published, or halved.

    Returns:
        A check for each bound's name.
    """
    checks = {}
    for name, bound in every_bound(divergences, constants=constants).items():
        is_violated = error > bound * (1 + RELATIVE_SLACK) + ABSOLUTE_SLACK
        ratio = np.divide(error, bound, out=np.zeros_like(error), where=bound > ABSOLUTE_SLACK)
        checks[name] = BoundCheck(num_violations=int(is_violated.sum()), worst_ratio=float(ratio.max()))
    return checks


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientReach:
    """What still moves pi_theta under one way of masking or clipping."""

    max_kl: FloatArray
    """``[N]``: largest token KL in the responses that keep at least one token; 0 when none does."""
    largest_opposed_ratio: FloatArray
    """``[N]``: largest importance ratio among kept tokens with a negative advantage; 0 when there is none."""


def gradient_reach(
    pairs: PolicyPairs, rewards: FloatArray, *, clip_range: float = 0.2, delta: float = 0.05
) -> dict[str, GradientReach]:
    """Enumerate which tokens keep a gradient without a mask, by PPO's clip, by a token mask and by TRM-Max.

    PPO's clip drops a token whose ratio has left [1 - clip_range, 1 + clip_range] in the direction its advantage
    asks for; the token mask drops it in either direction; TRM-Max drops whole responses with a token KL above delta.
    Source: TRM (arXiv 2512.23075v3), why token-level methods fail.

    Args:
        pairs: N pairs.
        rewards: ``[N, P, S]`` in [0, 1]; the advantage is the reward minus its mean under pi_roll.
        clip_range: half width of the interval of ratios.
        delta: threshold of TRM-Max, nats.

    Returns:
        For ``no_mask``, ``ppo_clip``, ``token_mask`` and ``trm_max``: what is left.
    """
    ratio = _per_response(pairs, [_ratio(p, q) for p, q in zip(pairs.rollout, pairs.policy, strict=True)])
    is_choice = _per_response(pairs, [q.max(axis=-1, keepdims=True) < 1 for q in pairs.policy])  # no gradient else
    advantage = advantages(pairs, rewards)[..., None]  # [N, P, S, 1]
    probability = prefix_probabilities(pairs.prompt_weights, pairs.rollout)[-1]  # [N, P, S]
    is_sampled = (probability > 0)[..., None] & is_choice.astype(bool) & (advantage != 0)  # [N, P, S, T]
    max_kl = largest_response_kl(pairs)  # [N, P, S]
    too_high, too_low = ratio > 1 + clip_range, ratio < 1 - clip_range
    kept = {
        "no_mask": is_sampled,
        "ppo_clip": is_sampled & ~((advantage > 0) & too_high) & ~((advantage < 0) & too_low),
        "token_mask": is_sampled & ~too_high & ~too_low,
        "trm_max": is_sampled & (max_kl <= delta)[..., None],
    }
    return {
        name: GradientReach(
            max_kl=np.where(is_kept.any(axis=-1), max_kl, 0.0).max(axis=(1, 2)),
            largest_opposed_ratio=np.where(is_kept & (advantage < 0), ratio, 0.0).max(axis=(1, 2, 3)),
        )
        for name, is_kept in kept.items()
    }


def routing_flips(rollout_probability: FloatArray) -> tuple[PolicyPairs, FloatArray]:
    """Build pairs that agree closely but in one context, where pi_theta gives one token 0.9 and pi_roll less.

    One prompt, V = 3, T = 4. Everywhere else pi_roll is (0.5, 0.3, 0.2) and pi_theta (0.48, 0.31, 0.21). After a
    first token 0, pi_roll gives token 2 the probability asked for and the other two half of the rest each.

    Args:
        rollout_probability: ``[N]`` in (0, 1).

    Returns:
        The pairs, and rewards ``[N, 1, 81]`` that are 0 for responses with the flipped token and 1 for the others.
    """
    flipped = np.asarray(rollout_probability, dtype=np.float64)
    rollout, policy = [], []
    for position in range(4):
        shape = (flipped.size, 1, 3**position, 3)
        rollout.append(np.broadcast_to([0.5, 0.3, 0.2], shape).copy())
        policy.append(np.broadcast_to([0.48, 0.31, 0.21], shape).copy())
    rollout[1][:, 0, 0] = np.stack([(1 - flipped) / 2, (1 - flipped) / 2, flipped], axis=-1)
    policy[1][:, 0, 0] = [0.05, 0.05, 0.9]
    rewards = np.ones((flipped.size, 3, 3, 9))
    rewards[:, 0, 2] = 0.0
    weights = np.ones((flipped.size, 1))
    pairs = PolicyPairs(prompt_weights=weights, rollout=tuple(rollout), policy=tuple(policy))
    return pairs, rewards.reshape(flipped.size, 1, 81)


def _draw_shape(rng: np.random.Generator, length: int | None) -> tuple[int, int]:
    """Draw V and T, fewer tokens where the length would leave too many responses."""
    num_tokens = int(rng.integers(2, 5))
    if length is None:
        length = int(rng.integers(2, 7))
    if not 1 <= length <= MAX_LENGTH:
        raise ValueError(f"length must be from 1 to {MAX_LENGTH}, got {length}")
    while num_tokens**length > 2**MAX_LENGTH:
        num_tokens -= 1
    return num_tokens, length


def _draw_policy(rng: np.random.Generator, p: FloatArray, kind: str, scale: FloatArray) -> FloatArray:
    """Draw pi_theta around pi_roll ``[N, P, C, V]``; scale ``[N, 1, 1, 1]`` says how far."""
    if kind == "tilt":
        return _normalise(p * np.exp(np.minimum(scale, 3.0) * rng.standard_normal(p.shape)))
    fresh = _normalise(np.maximum(rng.standard_gamma(1.0, p.shape), _SMALLEST_WEIGHT))
    if kind == "mixture":
        share = np.minimum(scale, 1.0)
        return (1 - share) * p + share * fresh
    if kind == "unrelated":
        return fresh
    from_token = p.argmax(axis=-1, keepdims=True)  # it has at least 1/V
    offset = rng.integers(1, p.shape[-1], from_token.shape)
    moved = np.minimum(scale, 1.0) / p.shape[-1]
    q = p.copy()
    np.put_along_axis(q, from_token, np.take_along_axis(p, from_token, -1) - moved, -1)
    to_token = (from_token + offset) % p.shape[-1]
    np.put_along_axis(q, to_token, np.take_along_axis(p, to_token, -1) + moved, -1)
    return q


def _drop_tokens(
    rng: np.random.Generator, p: FloatArray, q: FloatArray, *, has_holes: bool
) -> tuple[FloatArray, FloatArray]:
    """Drop tokens from both policies, some from pi_theta alone and, with holes, some from pi_roll alone."""
    chance = rng.choice([0.0, 0.2])
    is_safe = np.eye(p.shape[-1], dtype=bool)[-1]  # [V]; the last token stays, so that something is left
    both, policy_only, rollout_only = (~is_safe & (rng.random(p.shape) < share) for share in (chance, chance / 4, 0.2))
    p = np.where(both | (rollout_only & has_holes), 0.0, p)
    q = np.where(both | policy_only, 0.0, q)
    return _normalise(p), _normalise(q)


def _normalise(weights: FloatArray) -> FloatArray:
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def _ratio(p: FloatArray, q: FloatArray) -> FloatArray:
    return np.divide(q, p, out=np.ones_like(q), where=p > 0)


def _per_response(pairs: PolicyPairs, values: list[FloatArray]) -> FloatArray:
    """Spread T arrays ``[N, P, C, V]`` or ``[N, P, C, 1]`` over the responses: ``[N, P, S, T]``."""
    num_responses = pairs.rollout[-1].shape[-2] * pairs.rollout[-1].shape[-1]
    flat = [value.reshape(*value.shape[:2], -1) for value in values]
    return np.stack([np.repeat(value, num_responses // value.shape[-1], axis=-1) for value in flat], axis=-1)


def _reached(pairs: PolicyPairs, values: list[FloatArray]) -> list[FloatArray]:
    """Set T arrays ``[N, P, C]`` to 0 where pi_roll never comes."""
    prefixes = prefix_probabilities(pairs.prompt_weights, pairs.rollout)[:-1]
    return [np.where(prefix > 0, value, 0.0) for prefix, value in zip(prefixes, values, strict=True)]


def _largest(values: list[FloatArray]) -> FloatArray:
    """Take the largest entry of T arrays ``[N, P, C]`` for each pair: ``[N]``."""
    return np.asarray(np.max([value.max(axis=(1, 2)) for value in values], axis=0))
