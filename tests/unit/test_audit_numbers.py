"""Every number of an audit against a plain numpy recomputation on the same tokens."""

import json
import math
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.audit.acceptance import SWEEP, parse_arm
from pipelines.audit.columns import offsets_of
from pipelines.audit.page import page_html
from pipelines.audit.slices import _doubling_runs, _tenth_runs
from pipelines.audit.tails import QUANTILE_ERROR, Tail
from tests.unit.audit_data import GENERIC, audited, padded, response_mask, sample, write_jsonl
from trm_repro.errors import InputError

ROWS = sample(200, noise=0.3)
X = [(r["policy_logprobs"].astype(np.float64) - r["rollout_logprobs"]) for r in ROWS]
FLAT = np.concatenate(X)
K2, K3 = FLAT**2 / 2, np.exp(FLAT) - 1 - FLAT


@pytest.fixture(scope="module")
def payload(tmp_path_factory):
    return audited(write_jsonl(tmp_path_factory.mktemp("audit") / "rollouts.jsonl", ROWS))


def test_counts_are_those_of_the_file(payload):
    assert payload["num_sequences"] == 200
    assert payload["num_tokens"] == len(FLAT)
    assert payload["longest"] == max(map(len, X))
    assert payload["estimator"] == "sampled"
    assert payload["formats"] == {"generic": 1}


def test_perplexity_gap_is_the_mean_over_sequences_of_the_absolute_mean(payload):
    assert payload["ppl_gap"] == pytest.approx(np.mean([abs(x.mean()) for x in X]), rel=1e-12)


def test_estimators_are_means_over_tokens(payload):
    assert payload["k1_mean"] == pytest.approx(-FLAT.mean(), rel=1e-10)
    assert payload["k2_mean"] == pytest.approx(K2.mean(), rel=1e-12)
    assert payload["k3_mean"] == pytest.approx(K3.mean(), rel=1e-9)
    assert payload["log_ratio_abs_mean"] == pytest.approx(np.abs(FLAT).mean(), rel=1e-12)
    assert payload["ratio_deviation_mean"] == pytest.approx(np.abs(np.exp(FLAT) - 1).mean(), rel=1e-9)


def test_largest_values_are_exact_and_quantiles_within_the_stated_error(payload):
    assert payload["k2_max"] == pytest.approx(K2.max(), rel=1e-12)
    assert payload["k3_max"] == pytest.approx(K3.max(), rel=1e-9)
    for name, level in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)):
        for quantity, values, error in (("log_ratio_abs", np.abs(FLAT), 1), ("k2", K2, 2.01), ("k3", K3, 1)):
            expected = np.quantile(values, level, method="inverted_cdf")
            assert payload[f"{quantity}_{name}"] == pytest.approx(expected, rel=error * QUANTILE_ERROR)


def test_chi_square_and_effective_sample_sizes(payload):
    ratio, sequence_ratio = np.exp(FLAT), np.exp([x.sum() for x in X])
    assert payload["chi_square"] == pytest.approx((ratio**2).mean() - 1, rel=1e-9)
    assert payload["chi_square_sequence"] == pytest.approx((sequence_ratio**2).mean() - 1, rel=1e-9)
    assert payload["ess_token_fraction"] == pytest.approx(ratio.mean() ** 2 / (ratio**2).mean(), rel=1e-12)
    expected = sequence_ratio.sum() ** 2 / (sequence_ratio**2).sum() / len(X)
    assert payload["ess_sequence_fraction"] == pytest.approx(expected, rel=1e-9)


def test_hill_index_is_that_of_the_largest_values(payload):
    top = np.sort(np.abs(FLAT))[::-1]
    k = max(10, len(FLAT) // 100)
    assert payload["hill_index"] == pytest.approx(1 / np.mean(np.log(top[:k] / top[k])), rel=1e-12)


def test_hill_index_recovers_the_exponent_of_a_pareto_tail():
    tail = Tail()
    for seed in range(4):
        tail.add(np.random.default_rng(seed).pareto(1.5, 50_000) + 1)
    assert tail.hill_index() == pytest.approx(1.5, rel=0.1)


def test_quantiles_of_many_chunks_are_those_of_all_values():
    values = np.random.default_rng(0).lognormal(0, 3, 100_000)
    whole, halves = Tail(), (Tail(), Tail())
    whole.add(values)
    for half, part in zip(halves, np.split(values, 2), strict=True):
        half.add(part)
    halves[0].merge(halves[1])
    for level in (0.01, 0.5, 0.999):
        assert halves[0].quantile(level) == whole.quantile(level)
        assert whole.quantile(level) == pytest.approx(np.quantile(values, level), rel=2 * QUANTILE_ERROR)
    assert halves[0].maximum == values.max()


def test_acceptance_of_each_arm_is_a_count_of_sequences(payload):
    k2_max, k3_mean = [(x**2 / 2).max() for x in X], [(np.exp(x) - 1 - x).mean() for x in X]
    ser = [np.abs(np.exp(x) - 1).mean() for x in X]
    expected = {
        "trm_max_0.05": np.mean(np.array(k2_max) <= 0.05),
        "trm_avg_0.002": np.mean(np.array(k3_mean) <= 0.002),
        "trm_max_0.1_avg_0.002": np.mean((np.array(k2_max) <= 0.1) & (np.array(k3_mean) <= 0.002)),
        "ser_0.05": np.mean(np.array(ser) <= 0.05),
    }
    for name, value in expected.items():
        assert payload["acceptance"][name] == pytest.approx(value, abs=1e-12), name
    assert 0 < payload["acceptance"]["trm_max_0.05"] < 1


def test_swept_acceptance_is_a_count_at_every_threshold(payload):
    k2_max = np.array([(x**2 / 2).max() for x in X])
    assert len(payload["sweep"]["trm_max"]) > 20
    for threshold, fraction in payload["sweep"]["trm_max"]:
        assert fraction == pytest.approx((k2_max <= threshold).mean(), abs=1e-12)
        assert threshold in SWEEP


def test_rejection_by_length_counts_the_sequences_of_each_bin(payload):
    rejected = np.array([(x**2 / 2).max() > 0.05 for x in X])
    lengths = np.array(list(map(len, X)))
    for row in payload["rejected_by_length"]:
        low, _, high = row["length"].partition(" to ")
        here = (lengths >= int(low)) & (lengths <= int(high or low))
        assert row["num_sequences"] == here.sum()
        assert row["rejected"]["trm_max_0.05"] == pytest.approx(rejected[here].mean())


def test_each_step_says_what_every_gate_keeps_of_its_sequences(payload):
    for step in (0, 3, 19):
        own, row = X[10 * step : 10 * step + 10], payload["steps"][step]
        assert row["acceptance"]["trm_max_0.1"] == np.mean([(x**2 / 2).max() <= 0.1 for x in own])
        assert row["acceptance"]["trm_avg_0.002"] == np.mean([(np.exp(x) - 1 - x).mean() <= 0.002 for x in own])
        assert row["gates"]["sequence_mis:low=0,high=3"] == np.mean([np.exp(x.sum()) <= 3 for x in own])
        inside = [((np.exp(x) >= 0.5) & (np.exp(x) <= 5)).any() for x in own]
        assert row["gates"]["icepop"] == np.mean(inside)
    for gate in ("sequence_mis", "geometric", "opsm"):
        assert np.mean([row["gates"][gate] for row in payload["steps"]]) == pytest.approx(
            payload["gates"][gate]["sequence_fraction"]
        )


def test_a_sequence_that_is_not_finite_counts_as_rejected_in_its_step(tmp_path):
    rows = [dict(row) for row in ROWS[:20]]
    rows[12]["policy_logprobs"] = np.append(rows[12]["policy_logprobs"][:-1], -np.inf)
    text = (tmp_path / "a.jsonl", [{k: np.asarray(v).tolist() for k, v in row.items() if k in GENERIC} for row in rows])
    text[0].write_text("".join(json.dumps(row) + "\n" for row in text[1]))
    acceptance = audited(text[0], arms=[parse_arm("trm_max_100")])["steps"][1]["acceptance"]
    assert acceptance["trm_max_100"] == 0.9


def test_a_step_whose_sequences_all_hold_an_infinity_has_a_row_without_numbers(tmp_path):
    rows = [{"step": step, "rollout_logprobs": [-1.0, -1.0], "policy_logprobs": [-1.5, -1.0]} for step in (0, 1, 1, 2)]
    for row in rows[1:3]:
        row["policy_logprobs"][0] = -math.inf
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    payload = audited(tmp_path / "a.jsonl", arms=[parse_arm("trm_max_100")])
    before, lost, after = payload["steps"]
    assert (before["k2_mean"], before["acceptance"]["trm_max_100"]) == (0.0625, 1.0)  # (0.5^2 / 2 + 0) / 2
    assert [lost[name] for name in ("step", "num_sequences", "num_tokens", "num_nonfinite_sequences")] == [1, 2, 4, 2]
    assert [lost[name] for name in ("ppl_gap", "k1_mean", "k2_max")] == [None, None, None]
    assert lost["acceptance"]["trm_max_100"] == 0.0
    assert after["step"] == 2
    assert "Sequences kept at each step" in page_html(payload)


def test_every_gate_and_every_length_counts_an_infinite_sequence_as_rejected(tmp_path):
    lines = [
        {"step": 0, "advantage": 1, "rollout_logprobs": [-1.0] * n, "policy_logprobs": [-1.0] * n} for n in (1, 2, 2, 5)
    ]
    for line in lines[2:]:
        line["policy_logprobs"][-1] = -math.inf
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    payload = audited(tmp_path / "a.jsonl")
    for name, gate in payload["gates"].items():
        if "not_applied" not in gate and name not in ("random", "length_matched"):
            assert gate["sequence_fraction"] in (0.0, 0.5), name  # of two finite sequences and two others
    assert payload["gates"]["m2po"]["sequence_fraction"] == 0.5
    assert payload["gates"]["m2po"]["token_fraction"] == pytest.approx(3 / 10)
    assert payload["steps"][0]["gates"]["m2po"] == 0.5
    assert payload["steps"][0]["gates"]["geometric"] == 0.5
    assert [
        (row["length"], row["num_sequences"], row["rejected"]["trm_max_0.05"]) for row in payload["rejected_by_length"]
    ] == [
        ("1", 1, 0.0),
        ("2 to 3", 2, 0.5),
        ("4 to 7", 1, 1.0),
    ]


def test_a_dump_of_infinities_alone_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"rollout_logprobs": [-1.0], "policy_logprobs": [-Infinity]}\n')
    with pytest.raises(InputError, match="all of 1 sequence hold a log-prob of -inf"):
        audited(tmp_path / "a.jsonl")


def test_tenths_and_doublings_are_those_of_the_position_token_by_token():
    lengths = np.array([0, 1, 2, 9, 10, 15, 31, 32, 1000])
    offsets = offsets_of(lengths)
    position = np.concatenate([np.arange(length) for length in lengths])
    length = np.repeat(lengths, lengths)
    for runs, expected in (
        (_tenth_runs, (2 * position + 1) * 10 // (2 * length)),
        (_doubling_runs, np.floor(np.log2(position + 1)).astype(int)),
    ):
        bins, boundaries = runs(lengths, offsets)
        assert np.repeat(bins, np.diff(boundaries)).tolist() == expected.tolist()


def test_steps_add_up_their_own_sequences(payload):
    assert [row["step"] for row in payload["steps"]] == list(range(20))
    row, own = payload["steps"][3], X[30:40]
    assert row["num_sequences"] == 10
    assert row["ppl_gap"] == pytest.approx(np.mean([abs(x.mean()) for x in own]))
    assert row["k1_mean"] == pytest.approx(-np.concatenate(own).mean())
    assert row["k2_max"] == pytest.approx((np.concatenate(own) ** 2 / 2).max())
    assert row["reward_mean"] == pytest.approx(np.mean([r["reward"] for r in ROWS[30:40]]))


def check_slice(rows, labels, bins):
    """Compare a slice with numpy: ``labels`` in order of bin, ``bins`` of every token."""
    found = {row["bin"]: row for row in rows}
    assert sum(row["num_tokens"] for row in rows) == len(FLAT)
    for index, label in enumerate(labels):
        here = bins == index
        if here.any():
            row = found[label]
            assert row["num_tokens"] == here.sum(), label
            assert row["k1_mean"] == pytest.approx(-FLAT[here].mean(), abs=1e-12)
            assert row["k2_mean"] == pytest.approx(K2[here].mean())
            assert row["k3_mean"] == pytest.approx(K3[here].mean())
            assert row["k2_max"] == pytest.approx(K2[here].max())


def test_slices_by_position_probability_length_reward_and_advantage(payload):
    where = payload["where"]
    position = np.concatenate([np.arange(len(x)) for x in X])
    lengths = np.concatenate([np.full(len(x), len(x)) for x in X])
    doublings = ["1", "2 to 3", "4 to 7", "8 to 15", "16 to 31", "32 to 63"]
    check_slice(where["position"], doublings, np.floor(np.log2(position + 1)).astype(int))
    check_slice(where["length"], doublings, np.floor(np.log2(lengths)).astype(int))
    tenths = [f"{i / 10:g} to {(i + 1) / 10:g}" for i in range(10)]
    check_slice(where["position_fraction"], tenths, ((position + 0.5) * 10 / lengths).astype(int))
    probability = np.exp(np.concatenate([r["rollout_logprobs"] for r in ROWS]))
    edges = ["0", "0.01", "0.1", "0.5", "0.9", "0.99", "1"]
    labels = [f"{a} to {b}" for a, b in pairwise(edges)]
    check_slice(where["probability"], labels, np.digitize(probability, [0.01, 0.1, 0.5, 0.9, 0.99]))
    reward = np.concatenate([np.full(len(x), r["reward"]) for x, r in zip(X, ROWS, strict=True)])
    check_slice(where["correct"], ["reward <= 0", "reward > 0"], (reward > 0).astype(int))
    sign = np.concatenate([np.full(len(x), np.sign(r["advantage"])) for x, r in zip(X, ROWS, strict=True)])
    check_slice(where["advantage"], ["negative", "zero", "positive"], sign.astype(int) + 1)


def test_token_ids_are_listed_by_their_share_of_k3(payload):
    ids = np.concatenate([r["token_ids"] for r in ROWS])
    check_slice(payload["where"]["token_id"], [str(i) for i in range(12)], ids)
    sums = np.bincount(ids, weights=K3)
    assert payload["where"]["token_id"][0]["bin"] == str(sums.argmax())
    assert payload["where"]["token_id"][0]["share_of_k3"] == pytest.approx(sums.max() / sums.sum())


def test_exact_divergences_come_from_whole_distributions(tmp_path):
    path = tmp_path / "full.npz"
    wide = {n: padded(ROWS, n) for n in ("rollout_logprobs", "policy_logprobs")}
    for name in ("rollout_log_distribution", "policy_log_distribution"):
        wide[name] = np.zeros((len(ROWS), wide["rollout_logprobs"].shape[1], 12))
        for values, row in zip(wide[name], ROWS, strict=True):
            values[: len(row[name])] = row[name]
    np.savez(path, **wide, response_mask=response_mask(ROWS))
    payload = audited(path)
    kl = [
        (np.exp(r["rollout_log_distribution"]) * (r["rollout_log_distribution"] - r["policy_log_distribution"])).sum(-1)
        for r in ROWS
    ]
    assert payload["estimator"] == "exact"
    assert payload["kl_mean"] == pytest.approx(np.concatenate(kl).mean())
    assert payload["kl_max"] == pytest.approx(np.concatenate(kl).max())
    assert payload["acceptance"]["trm_max_0.1"] == pytest.approx(np.mean([k.max() <= 0.1 for k in kl]))
    assert payload["bounds"]["available"]
    assert payload["bounds"]["inputs"]["kl_seq"] == pytest.approx(np.concatenate(kl).sum() / len(kl))
    assert payload["ppl_gap"] == pytest.approx(np.mean([abs(x.mean()) for x in X]))


def test_chunks_do_not_change_any_number(tmp_path, monkeypatch, payload):
    monkeypatch.setattr("pipelines.audit.sources.CHUNK_BYTES", 512)
    again = audited(write_jsonl(tmp_path / "rollouts.jsonl", ROWS))
    assert again["acceptance"] == payload["acceptance"]
    assert again["rejected_by_length"] == payload["rejected_by_length"]
    kept = [
        {name: row["token_fraction"] for name, row in p["gates"].items() if "token_fraction" in row and name != "m2po"}
        for p in (again, payload)
    ]  # M2PO takes a chunk for the batch
    assert kept[0] == pytest.approx(kept[1])
    for name, value in payload.items():
        if isinstance(value, float):
            assert again[name] == pytest.approx(value, rel=1e-9), name


def test_parquet_and_jsonl_give_the_same_numbers(tmp_path, payload):
    table = pa.table({name: [row[name] for row in ROWS] for name in GENERIC})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=30)
    again = audited(tmp_path / "a.parquet")
    for name in ("ppl_gap", "k3_mean", "k2_max", "chi_square", "num_tokens"):
        assert again[name] == pytest.approx(payload[name], rel=1e-12)
    assert again["acceptance"] == payload["acceptance"]
