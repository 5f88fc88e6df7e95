"""Top-K log-probs in an audit: intervals hold the truth, and what they decide is what exact KL decides."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipelines.audit.measure import Request, audit
from pipelines.audit.top_k import bucket_interval
from trm_repro.errors import InputError

B, T, V, K = 8, 6, 12, 4


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def policies(seed=0, noise=0.3, scale=1.5):
    """Both whole distributions, ``[B, T, V]``, and a sampled token of each position, ``[B, T]``."""
    rng = np.random.default_rng(seed)
    logits = scale * rng.standard_normal((B, T, V))
    rollout, policy = log_softmax(logits), log_softmax(logits + noise * rng.standard_normal((B, T, V)))
    sampled = np.array([rng.choice(V, p=np.exp(row)) for row in rollout.reshape(-1, V)]).reshape(B, T)
    return rollout, policy, sampled


def dump(rollout, policy, sampled, *, whole_policy=False, own_list=False):
    ids = np.argsort(-rollout, axis=-1)[..., :K]
    columns = {
        "rollout_logprobs": np.take_along_axis(rollout, sampled[..., None], -1)[..., 0],
        "policy_logprobs": np.take_along_axis(policy, sampled[..., None], -1)[..., 0],
        "token_ids": sampled,
        "mask": np.ones((B, T), dtype=np.int64),
        "rollout_top_ids": ids,
        "rollout_top_logprobs": np.take_along_axis(rollout, ids, -1),
    }
    if whole_policy:
        columns["policy_log_distribution"] = policy
    elif own_list:
        columns["policy_top_ids"] = np.argsort(-policy, axis=-1)[..., :K]
        columns["policy_top_logprobs"] = np.take_along_axis(policy, columns["policy_top_ids"], -1)
    else:
        columns["policy_top_logprobs"] = np.take_along_axis(policy, ids, -1)
    return columns


def audited(tmp_path, columns, name="dump.safetensors", **options):
    path = tmp_path / name
    save_file({key: np.ascontiguousarray(value) for key, value in columns.items()}, path)
    return audit(Request(files=[path], **options))


def truth(rollout, policy):
    p, q = np.exp(rollout), np.exp(policy)
    return (p * (rollout - policy)).sum(-1), 0.5 * np.abs(p - q).sum(-1)


@pytest.mark.parametrize("kind", ["same ids", "own list", "whole policy"])
def test_the_interval_holds_kl_and_tv_whatever_the_policy_side_is(tmp_path, kind):
    rollout, policy, sampled = policies()
    kl, tv = truth(rollout, policy)
    columns = dump(rollout, policy, sampled, whole_policy=kind == "whole policy", own_list=kind == "own list")
    found = audited(tmp_path, columns)["top_k"]
    assert found["num_tokens"] == B * T
    assert found["num_contradictory_tokens"] == 0
    assert 0.2 * kl.mean() < found["kl_low_mean"] <= kl.mean()
    assert found["kl_low_max"] <= kl.max()
    assert found["tv_low_mean"] <= tv.mean() <= found["tv_high_mean"]
    assert found["tv_low_max"] <= tv.max() <= found["tv_high_max"]
    if kind == "whole policy":
        assert found["kl_high_mean"] >= kl.mean()
        assert found["kl_high_max"] >= kl.max()
    else:
        assert found["kl_high_max"] is None


def test_decisions_are_those_of_exact_kl_where_there_is_one(tmp_path):
    rollout, policy, sampled = policies(noise=np.geomspace(0.01, 2, B)[:, None, None], scale=8.0)
    kl, _ = truth(rollout, policy)
    keeps = float((kl.max(axis=1) <= 0.05).mean())
    row = audited(tmp_path, dump(rollout, policy, sampled, whole_policy=True))["top_k"]["arms"]["trm_max_0.05"]
    assert sum(row.values()) == pytest.approx(1)
    assert row["accepted"] <= keeps <= 1 - row["rejected"]
    assert row["accepted"] > 0
    assert row["rejected"] > 0


def test_a_bucket_is_the_hand_case():
    p, q = np.array([[0.5, 0.2]]), np.array([[0.4, 0.4]])
    found = bucket_interval(np.log(p), np.log(q), 2.0**-23, np.zeros(1, dtype=bool))
    assert found.total_variation[0] == pytest.approx(0.5 * (0.1 + 0.2 + 0.1))
    exact = 0.5 * np.log(0.5 / 0.4) + 0.2 * np.log(0.2 / 0.4) + 0.3 * np.log(0.3 / 0.2)
    assert exact - 1e-4 < found.kl_low[0] <= exact
    assert found.tv_high[0] == pytest.approx(0.5 * (0.1 + 0.2 + 0.3 + 0.2), abs=1e-4)  # tails that share no token


def test_random_pairs_are_never_outside_also_where_rows_are_off_by_the_margin():
    rng = np.random.default_rng(1)
    logits = 2 * rng.standard_normal((2000, V))
    rollout, policy = (
        log_softmax(logits),
        log_softmax(logits + rng.standard_normal((2000, 1)) * rng.standard_normal((2000, V))),
    )
    kl, tv = truth(rollout, policy)
    top = np.argsort(-rollout, axis=1)[:, :K]
    stored = [np.take_along_axis(side, top, 1) + rng.choice([-1e-5, 1e-5], (2000, 1)) for side in (rollout, policy)]
    found = bucket_interval(*stored, 2.0**-23, np.zeros(2000, dtype=bool))
    assert (found.kl_low <= kl).all()
    assert (found.tv_low <= tv).all()
    assert (tv <= found.tv_high).all()
    assert not found.is_contradictory.any()


def test_dppo_top_k_tv_is_applied_to_the_bucket_tv(tmp_path):
    rollout, policy, sampled = policies(noise=2.0)
    columns = dump(rollout, policy, sampled) | {"advantage": np.ones(B)}
    gate = audited(tmp_path, columns)["gates"]["dppo_top_k_tv"]
    ids = columns["rollout_top_ids"]
    p, q = (np.exp(np.take_along_axis(side, ids, -1)) for side in (rollout, policy))
    own = [np.exp(columns[f"{side}_logprobs"]) for side in ("rollout", "policy")]
    is_beside = ~(ids == sampled[..., None]).any(-1)
    rests = [1 - side.sum(-1) - np.where(is_beside, chance, 0) for side, chance in zip((p, q), own, strict=True)]
    tv = 0.5 * (np.abs(p - q).sum(-1) + np.where(is_beside, np.abs(own[0] - own[1]), 0) + np.abs(rests[0] - rests[1]))
    keep = ~((tv > gate["thresholds"]["threshold"]) & (columns["policy_logprobs"] > columns["rollout_logprobs"]))
    assert 0 < keep.mean() < 1
    assert gate["token_fraction"] == pytest.approx(keep.mean())


def test_an_id_twice_or_mass_above_one_certifies_nothing(tmp_path):
    columns = dump(*policies())
    columns["rollout_top_ids"][0, 0, 1] = columns["rollout_top_ids"][0, 0, 0]
    columns["rollout_top_logprobs"][1, 1] = -0.1
    assert audited(tmp_path, columns)["top_k"]["num_contradictory_tokens"] == 2


def test_half_floats_have_a_wider_margin_and_still_hold_the_truth(tmp_path):
    rollout, policy, sampled = policies()
    columns = dump(rollout, policy, sampled)
    halves = {k: v.astype(np.float16) if v.dtype.kind == "f" else v for k, v in columns.items()}
    exact, rounded = (audited(tmp_path, c)["top_k"] for c in (columns, halves))
    assert rounded["num_contradictory_tokens"] == 0
    assert rounded["kl_low_mean"] < exact["kl_low_mean"]
    assert rounded["tv_high_mean"] > exact["tv_high_mean"]


def test_half_floats_widen_both_ends_where_the_policy_is_whole(tmp_path):
    rollout, policy, sampled = policies()
    kl, _ = truth(rollout, policy)
    columns = dump(rollout, policy, sampled, whole_policy=True)
    columns["rollout_top_ids"] = np.argsort(-rollout, axis=-1)  # K = V: the ends are apart by the rounding alone
    columns["rollout_top_logprobs"] = -np.sort(-rollout, axis=-1)
    halves = {k: v.astype(np.float16) if v.dtype.kind == "f" else v for k, v in columns.items()}
    found = audited(tmp_path, halves)["top_k"]
    assert found["num_contradictory_tokens"] == 0
    assert found["kl_low_max"] <= kl.max() <= found["kl_high_max"]
    assert found["kl_low_mean"] <= kl.mean() <= found["kl_high_mean"]


def test_where_the_upper_end_finds_a_contradiction_the_lower_ones_are_taken_back(tmp_path):
    rollout, policy, sampled = policies()
    columns = dump(rollout, policy, sampled, whole_policy=True)
    columns["rollout_top_logprobs"] = columns["rollout_top_logprobs"] - 3.0  # leaves more than the tail can hold
    columns["policy_log_distribution"] = np.roll(policy, 1, axis=-1)
    found = audited(tmp_path, columns)["top_k"]
    assert found["num_contradictory_tokens"] == B * T
    assert (found["kl_low_max"], found["tv_low_max"], found["tv_high_mean"]) == (0.0, 0.0, 1.0)


def test_lists_of_lists_in_jsonl_are_read_and_a_row_with_another_k_is_named(tmp_path):
    columns = dump(*policies())
    rows = [{name: values[i].tolist() for name, values in columns.items()} for i in range(B)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = audit(Request(files=[path]))["top_k"]
    assert whole["kl_low_mean"] == pytest.approx(audited(tmp_path, columns)["top_k"]["kl_low_mean"])
    rows[5]["rollout_top_ids"] = [entry[:2] for entry in rows[5]["rollout_top_ids"]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match="line 6: "):
        audit(Request(files=[path]))
    assert audit(Request(files=[path], skip_bad=True))["top_k"]["num_tokens"] == (B - 1) * T


def test_padding_is_cut_from_top_k_too_and_quick_leaves_it_unread(tmp_path):
    columns = dump(*policies())
    columns["mask"][:, 4:] = 0
    columns["rollout_top_logprobs"][:, 4:] = np.nan
    found = audited(tmp_path, columns)["top_k"]
    assert found["num_tokens"] == B * 4
    assert found["num_contradictory_tokens"] == 0
    assert "top_k" not in audited(tmp_path, columns, is_quick=True)
