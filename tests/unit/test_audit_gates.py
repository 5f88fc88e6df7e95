"""Acceptance in an audit is that of the library's own gates on the same tokens, and advice follows from it."""

import numpy as np
import pytest
import torch

from pipelines.audit.acceptance import Counts, parse_arm, parse_gate
from pipelines.audit.advice import advise, bound_at
from pipelines.audit.gate_counts import default_gates
from pipelines.audit.statistics import Sequences
from tests.unit.audit_data import audited, padded, response_mask, sample, write_jsonl
from trm_repro.bounds import Divergences, unified_bound
from trm_repro.errors import InputError
from trm_repro.gate_specs import GATE_SPECS
from trm_repro.masks.gates import TokenStatistics, gate_mask

ROWS = sample(150, noise=0.4)
STATISTICS = TokenStatistics.from_logprobs(
    torch.from_numpy(padded(ROWS, "policy_logprobs")),
    torch.from_numpy(padded(ROWS, "rollout_logprobs")),
    torch.from_numpy(response_mask(ROWS).astype(bool)),
    advantages=torch.tensor([row["advantage"] for row in ROWS], dtype=torch.float32),
)
NUM_TOKENS = int(STATISTICS.response_mask.sum())


@pytest.fixture(scope="module")
def payload(tmp_path_factory):
    path = write_jsonl(tmp_path_factory.mktemp("audit") / "rollouts.jsonl", ROWS)
    return audited(
        path, gates=[parse_gate("icepop:high=1.2")], arms=[parse_arm("trm_max_0.3"), parse_arm("trm_max_0.5_avg_0.05")]
    )


def test_arms_of_the_paper_agree_with_the_registry(payload):
    cases = {
        "trm_max_0.05": ("trm_max", {"max_threshold": 0.05}),
        "trm_max_0.3": ("trm_max", {"max_threshold": 0.3}),
        "trm_avg_0.002": ("trm_avg", {"avg_threshold": 0.002}),
        "trm_max_0.5_avg_0.05": ("trm_max_avg", {"max_threshold": 0.5, "avg_threshold": 0.05}),
        "ln_trm_0.05": ("ln_trm", {"ln_trm_threshold": 0.05}),
        "ser_0.05": ("ser", {"ser_threshold": 0.05}),
    }
    for name, (gate, thresholds) in cases.items():
        expected = float(gate_mask(gate, STATISTICS, **thresholds).double().mean())
        assert payload["acceptance"][name] == pytest.approx(expected, abs=1e-12), name


def test_every_gate_of_the_registry_is_applied_as_it_is(payload):
    assert {name for _, name, _ in default_gates()} | {
        "none", "trm_max", "trm_avg", "trm_max_avg", "ln_trm", "ser", "random", "length_matched",
    } == set(GATE_SPECS)  # fmt: skip
    for name, row in payload["gates"].items():
        _, gate, thresholds = parse_gate(name)
        spec = GATE_SPECS[gate]
        if "not_applied" in row:
            assert not spec.needs <= STATISTICS.available
            continue
        mask = gate_mask(gate, STATISTICS, **thresholds)
        if spec.level == "sequence":
            assert row["sequence_fraction"] == pytest.approx(float(mask.double().mean())), name
            continue
        kept = mask >= 1 if spec.is_weight else mask
        assert row["token_fraction"] == pytest.approx(float(kept.sum()) / NUM_TOKENS), name
        expected = float((mask != 0).any(dim=-1).double().mean())
        assert row["sequence_fraction"] == pytest.approx(expected), name
        if spec.is_weight:
            assert row["weight_mean"] == pytest.approx(float(mask.double().sum()) / NUM_TOKENS), name


def test_a_gate_named_twice_is_counted_once(payload, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    for is_quick in (False, True):
        found = audited(path, gates=[parse_gate("icepop"), parse_gate("icepop")], is_quick=is_quick)["gates"]
        assert found["icepop"] == payload["gates"]["icepop"]


def test_gates_without_what_they_need_say_so(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS[:5], ("rollout_logprobs", "policy_logprobs"))
    assert audited(path)["gates"]["opsm"]["not_applied"] == "needs advantages"


def test_beyond_the_first_tokens_gates_see_a_share_of_the_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.audit.sources.CHUNK_BYTES", 2048)
    monkeypatch.setattr("pipelines.audit.gate_counts.FULL_TOKENS", 1)
    monkeypatch.setattr("pipelines.audit.gate_counts.SHARE", 4)
    payload = audited(write_jsonl(tmp_path / "a.jsonl", ROWS))
    assert 0.1 < payload["gates_share_of_sequences"] < 0.5
    assert payload["gates"]["token_tis"]["sequence_fraction"] == pytest.approx(1.0)
    assert payload["num_sequences"] == len(ROWS)


def test_advised_threshold_is_the_smallest_swept_one_above_70_percent(payload):
    advice = payload["advice"]["trm_max"]
    k2_max = [((r["policy_logprobs"].astype(float) - r["rollout_logprobs"]) ** 2 / 2).max() for r in ROWS]
    assert (np.array(k2_max) <= advice["floor"]).mean() > 0.7
    below = [threshold for threshold, _ in payload["sweep"]["trm_max"] if threshold < advice["floor"]][-1]
    assert (np.array(k2_max) <= below).mean() <= 0.7
    assert advice["floor"] > advice["ceiling"]
    assert advice["advised"] == advice["floor"]
    assert advice["reason"].startswith("no threshold keeps 70% and bounds the error below 1: ")


def test_where_a_bound_below_1_leaves_room_the_largest_such_threshold_is_advised(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", sample(50, noise=1e-3))
    advice = audited(path)["advice"]["trm_max"]
    assert advice["floor"] < advice["ceiling"] == advice["advised"]
    assert advice["bound"] == pytest.approx(1.0, abs=1e-6)


def test_a_value_at_a_threshold_is_kept_and_70_percent_is_not_above_70_percent():
    ones = np.ones(10)
    sequences = Sequences(np.ones(10, dtype=np.int64), *([ones] * 6))
    counts = Counts([parse_arm("trm_max_1")])
    counts.add(sequences)
    assert counts.acceptance(0) == {"trm_max_1": 1.0}
    assert dict(counts.sweep("max", 0))[1.0] == 1.0
    assert advise(counts, 4, 10)["trm_max"]["floor"] == 1.0  # 10 of 14
    assert advise(counts, 5, 10)["trm_max"]["advised"] is None  # 10 of 15


def test_both_advised_thresholds_together_keep_70_percent(payload):
    advice = payload["advice"]["trm_max_avg"]
    kept = gate_mask("trm_max_avg", STATISTICS, max_threshold=advice["max"], avg_threshold=advice["avg"])
    assert float(kept.double().mean()) > 0.7


def test_bound_at_a_threshold_is_the_unified_bound():
    assert bound_at(0.01, 100) == pytest.approx(float(unified_bound(Divergences.at_most(100, 0.01), constants="sharp")))
    assert bound_at(0.01, 100, 1e-4) < bound_at(0.01, 100)
    assert bound_at(0.01, 100, 1.0) == pytest.approx(bound_at(0.01, 100))


def test_sampled_log_probs_give_no_bound(payload):
    assert payload["bounds"]["available"] is False
    assert "sampled tokens allow no bound" in payload["bounds"]["reason"]


@pytest.mark.parametrize("name", ["trm_max", "trm_max_x", "trm_max_-1", "trm_max_nan", "ppo_clip", "trm_avg_0.1_max_1"])
def test_names_that_are_no_arm_are_refused(name):
    with pytest.raises(InputError, match="expected trm_max_D"):
        parse_arm(name)
