"""What top-K log-probs certify of each token's KL and TV, whatever the tokens are whose log-probs are not stored.

Shape letters: B sequences, N tokens, K stored log-probs a token, M tokens whose log-prob both sides state, V
vocabulary. Known tokens stand alone and the rest of the vocabulary is one bucket, which can only lower KL
(log-sum inequality) and TV; the rest of TV is largest where the two tails share no token. KL has an upper end only
where the policy's whole distribution is given: a tail token may have policy probability 0 otherwise.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.audit.checks import Rows
from pipelines.audit.columns import Array, Column, Flags
from pipelines.audit.statistics import Float64, Sequences, TokenInterval, segment_max, segment_sum

NORMALIZER_ERROR = 1e-5
"""Nats by which a row of stored log-probs may be off together, besides the rounding of its number format."""

FIELDS = ("rollout_top_ids", "rollout_top_logprobs", "policy_top_ids", "policy_top_logprobs")


def check_top(columns: dict[str, Column], fields: dict[str, str], rows: Rows) -> None:
    """Drop rows that have not K entries a token, the same K in all rows, or ids that are no whole numbers from 0."""
    lengths = columns["rollout_logprobs"].lengths
    sides = [columns.get(f"{side}_top_logprobs") for side in ("rollout", "policy")]
    if "policy_top_ids" not in columns and sides[0] is not None and sides[1] is not None:
        sizes = [side.lengths for side in sides if side is not None]
        rows.drop(
            sizes[0] != sizes[1],
            lambda i: (
                f"{sizes[0][i]} {fields['rollout_top_logprobs']} but {sizes[1][i]} "
                f"{fields['policy_top_logprobs']}; give policy_top_ids where the policy's list is its own"
            ),
        )
    for name in FIELDS:
        column = columns.get(name)
        if column is None:
            continue
        if column.offsets is None or column.values.dtype.kind not in "fiu":
            rows.drop(np.ones(len(lengths), dtype=bool), f"{fields[name]} is no list of numbers; expected K a token")
            continue
        flat, theirs = column.flat(), column.lengths
        assert flat.offsets is not None
        size = num_entries(column, lengths)
        rows.drop(
            theirs != size * lengths,
            lambda i, n=name, f=theirs, s=size: f"{f[i]} {fields[n]} for {lengths[i]} tokens; expected {s} a token",
        )
        is_bad = flat.values > 1e-4 if name.endswith("logprobs") else ~(flat.values == np.floor(flat.values))
        if name.endswith("ids"):
            is_bad |= ~((flat.values >= 0) & (flat.values < 2**31))
        if is_bad.any():
            what = "a positive log-prob" if name.endswith("logprobs") else "no token id"
            rows.drop(segment_sum(is_bad.astype(np.float64), flat.offsets) > 0, f"{fields[name]} holds {what}")


def num_entries(column: Column, lengths: Array) -> int:
    """Return K, the entries a token that most rows have; 1 where no row has a token."""
    is_some = lengths > 0
    ratios = column.lengths[is_some] // np.maximum(lengths[is_some], 1)
    return max(1, int(np.bincount(ratios).argmax())) if len(ratios) else 1


def unused(fields: dict[str, str]) -> str | None:
    """Say why top-K columns that are there cannot be used; None where they can, or where there are none."""
    given = [fields[name] for name in FIELDS if name in fields]
    if not given:
        return None
    if not {"rollout_top_ids", "rollout_top_logprobs"} <= set(fields):
        return f"{', '.join(given)}: not used; rollout_top_ids and rollout_top_logprobs are both needed"
    if not {"policy_top_logprobs", "policy_log_distribution", "token_ids"} & set(fields):
        return (
            f"{', '.join(given)}: not used; nothing is known of the policy at these tokens: give policy_top_logprobs, "
            "policy_log_distribution, or token_ids for the sampled token alone"
        )
    return None


def intervals(columns: dict[str, Column], sampled_ids: Array | None) -> TokenInterval | None:
    """Bound every token's KL and TV.

    Args:
        columns: of good rows, response tokens alone, flat.
        sampled_ids: ``[N]`` int64, or None; with them the sampled token is a known one beside the K.

    Returns:
        The interval, or None where the rollout's top-K is not given or nothing is known of the policy at it.
    """
    table = {name: columns[name].flat().values for name in FIELDS if name in columns}
    rollout, policy = (columns[f"{side}_logprobs"].flat().values for side in ("rollout", "policy"))
    num_tokens = len(rollout)
    if not {"rollout_top_ids", "rollout_top_logprobs"} <= set(table) or not num_tokens:
        return None
    ids = table["rollout_top_ids"].reshape(num_tokens, -1).astype(np.int64)  # [N, K]
    top = table["rollout_top_logprobs"].reshape(num_tokens, -1)  # [N, K]
    rounding = max(_rounding(values) for values in (top, rollout, policy))
    log_distribution = columns.get("policy_log_distribution")
    whole = None if log_distribution is None else log_distribution.flat().values.reshape(num_tokens, -1)
    if whole is not None:
        theirs = np.take_along_axis(whole, np.minimum(ids, whole.shape[1] - 1), axis=1).astype(np.float64)
    elif "policy_top_logprobs" in table:
        theirs = _matched(ids, table.get("policy_top_ids"), table["policy_top_logprobs"].reshape(num_tokens, -1))
    else:
        theirs = np.full(ids.shape, np.nan)
    is_twice = (np.diff(np.sort(ids, axis=1), axis=1) == 0).any(axis=1)
    ours = np.where(np.isnan(theirs), np.nan, top.astype(np.float64))
    if sampled_ids is not None:
        is_sampled = ids == sampled_ids[:, None]  # [N, K]
        ours, theirs = (
            np.concatenate((np.where(is_sampled, np.nan, known), own[:, None]), axis=1)
            for known, own in ((ours, rollout), (theirs, policy))
        )
    if np.isnan(ours).all():
        return None
    interval = bucket_interval(ours, theirs, rounding, is_twice)
    if whole is not None and sampled_ids is not None:
        stored = {"ids": ids, "logprobs": top, "sampled_ids": sampled_ids, "sampled_logprobs": rollout}
        _add_upper_end(interval, stored, whole, max(rounding, _rounding(whole)))
    return interval


def _add_upper_end(interval: TokenInterval, stored: dict[str, Array], whole: Array, rounding: float) -> None:
    """Narrow the interval by the policy's whole distribution, ``[N, V]``; ``stored`` is named as in `TopLogprobs`."""
    import torch

    from trm_repro.certified import TopLogprobs, certified_kl_interval

    def tensor(values: Array) -> Any:  # noqa: ANN401
        return torch.from_numpy(np.ascontiguousarray(values))

    largest_id = np.maximum(stored["ids"].max(axis=1), stored["sampled_ids"])  # [N]
    usable = np.flatnonzero(~interval.is_contradictory & (largest_id < whole.shape[1]))
    top = TopLogprobs(**{name: tensor(values[usable]) for name, values in stored.items()})
    ends = certified_kl_interval(top, tensor(whole[usable]), rounding=rounding)
    low, high = (end.numpy() for end in ends)
    is_certified = ~np.isnan(low)
    index, dropped = usable[is_certified], usable[~is_certified]
    interval.kl_low[index] = np.maximum(low[is_certified], interval.kl_low[index])
    interval.kl_high[index] = high[is_certified]
    interval.is_contradictory[dropped] = True
    for values, nothing in (
        (interval.kl_low, 0.0),
        (interval.tv_low, 0.0),
        (interval.tv_high, 1.0),
        (interval.total_variation, 0.0),
    ):
        values[dropped] = nothing


def bucket_interval(rollout: Float64, policy: Float64, rounding: float, is_twice: Flags) -> TokenInterval:
    """Bound KL and TV from known tokens and one bucket.

    A log-prob l is taken to be within ``rounding * |l| + NORMALIZER_ERROR`` of the true one, and the ends cover that.

    Args:
        rollout: ``[N, M]``, nats; NaN where an entry is not known.
        policy: ``[N, M]`` of the same tokens.
        rounding: relative precision of the log-probs.
        is_twice: ``[N]``, tokens whose list names an id twice.

    Returns:
        The interval; where the stored mass is above 1, or an id stands twice, nothing is certified and that is counted.
    """
    is_known = ~(np.isnan(rollout) | np.isnan(policy))
    p, q = (np.where(is_known, np.exp(side), 0.0) for side in (rollout, policy))  # [N, M]
    p_error, q_error = (
        np.where(
            chance > 0, chance * np.expm1(rounding * np.abs(np.where(chance > 0, side, 0.0)) + NORMALIZER_ERROR), 0
        )
        for chance, side in ((p, rollout), (q, policy))
    )
    p_slack, q_slack = p_error.sum(axis=1), q_error.sum(axis=1)  # [N]
    p_rest, q_rest = 1 - p.sum(axis=1), 1 - q.sum(axis=1)  # [N]
    is_contradictory = (p_rest < -p_slack) | (q_rest < -q_slack) | is_twice
    p_rest, q_rest = np.maximum(p_rest, 0.0), np.maximum(q_rest, 0.0)

    apart = np.abs(p - q).sum(axis=1)  # [N]
    slack = p_slack + q_slack
    tv_bucket = 0.5 * (apart + np.abs(p_rest - q_rest))
    tv_low = np.maximum(0.5 * (np.maximum(apart - slack, 0) + np.maximum(np.abs(p_rest - q_rest) - slack, 0)), 0.0)
    tv_high = np.minimum(0.5 * (apart + slack + p_rest + q_rest + slack), 1.0)

    with np.errstate(divide="ignore", invalid="ignore"):
        gain = np.where(p > 0, rollout - policy, 0.0)  # [N, M], +inf where the policy drops a token
        known = np.where(p > 0, p * gain, 0.0).sum(axis=1)
        moved = np.where(np.isfinite(gain), p_error * np.abs(gain), 0.0).sum(axis=1)
        moved += ((p + p_error) * (rounding * (_size(rollout, p) + _size(policy, q)) + 2 * NORMALIZER_ERROR)).sum(
            axis=1
        )
        q_most = np.minimum(q_rest + q_slack, 1.0)
        mass = np.clip(q_most / np.e, np.maximum(p_rest - p_slack, 0), np.minimum(p_rest + p_slack, 1))  # least there
        rest = np.where(mass > 0, mass * np.log(mass / q_most), 0.0)
    kl_low = np.maximum(known - moved + rest, 0.0)
    nothing = is_contradictory
    return TokenInterval(
        kl_low=np.where(nothing, 0.0, kl_low),
        kl_high=np.full(len(p), np.inf),
        tv_low=np.where(nothing, 0.0, tv_low),
        tv_high=np.where(nothing, 1.0, tv_high),
        total_variation=np.where(nothing, 0.0, tv_bucket),
        is_contradictory=is_contradictory,
    )


def _size(logprobs: Float64, chance: Float64) -> Float64:
    return np.where(chance > 0, np.abs(np.where(chance > 0, logprobs, 0.0)), 0.0)


def _rounding(values: Array) -> float:
    """Return half a unit in the last place of a number format, relative; that of float32 for longer ones."""
    return 2.0**-11 if values.dtype == np.float16 else 2.0**-23


def _matched(ids: Array, policy_ids: Array | None, logprobs: Array) -> Float64:
    """Find the policy's log-prob of each of the rollout's K tokens: ``[N, K]``, NaN where its list has it not."""
    if policy_ids is None:  # at the rollout's ids
        return logprobs.astype(np.float64) if logprobs.shape == ids.shape else np.full(ids.shape, np.nan)
    theirs = policy_ids.reshape(len(ids), -1).astype(np.int64)
    found = np.full(ids.shape, np.nan)
    for index in range(theirs.shape[1]):
        found = np.where(ids == theirs[:, index, None], logprobs[:, index, None], found)
    return found


@dataclass
class TopK:
    """Sums of the intervals, and what they decide about the paper's gates.

    Attributes:
        arms: thresholds "max" and "avg" by arm.
    """

    arms: dict[str, dict[str, float]]

    def __post_init__(self) -> None:
        """Start with nothing."""
        self.num_tokens = self.num_contradictory = self.num_sequences = 0
        self.sums = dict.fromkeys(("kl_low", "kl_high", "tv_low", "tv_high"), 0.0)
        self.maxima = dict.fromkeys(self.sums, 0.0)
        self.decisions = {name: np.zeros(3, dtype=np.int64) for name in self.arms}

    def add(self, interval: TokenInterval, offsets: Array, sequences: Sequences) -> None:
        """Add a chunk."""
        self.num_tokens += len(interval.kl_low)
        self.num_contradictory += int(interval.is_contradictory.sum())
        self.num_sequences += len(sequences.length)
        for name in self.sums:
            values = getattr(interval, name)
            self.sums[name] += float(values.sum())
            self.maxima[name] = max(self.maxima[name], float(values.max(initial=0.0)))
        ends = [
            {"max": segment_max(values, offsets), "avg": segment_sum(values, offsets) / sequences.divisor}
            for values in (interval.kl_low, interval.kl_high)
        ]
        for name, limits in self.arms.items():
            low, high = (np.logical_and.reduce([end[kind] <= limit for kind, limit in limits.items()]) for end in ends)
            self.decisions[name] += np.array([high.sum(), (~low).sum(), (low & ~high).sum()])

    def summary(self) -> dict[str, Any] | None:
        """Say what is certified; None where no token had a top-K."""
        if not self.num_tokens:
            return None
        total = max(1, self.num_sequences)
        words = ("accepted", "rejected", "undecided")
        return {
            "num_tokens": self.num_tokens,
            "num_contradictory_tokens": self.num_contradictory,
            **{f"{name}_mean": _finite(value / self.num_tokens) for name, value in self.sums.items()},
            **{f"{name}_max": _finite(value) for name, value in self.maxima.items()},
            "arms": {
                name: dict(zip(words, (counts / total).tolist(), strict=True))
                for name, counts in self.decisions.items()
            },
        }


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
