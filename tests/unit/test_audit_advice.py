"""Thresholds are advised where the data can carry them, and one line says why where they cannot."""

import numpy as np
import pytest

from pipelines.audit.terminal import summary_text
from tests.unit.audit_data import audited, sample, write_jsonl

LOG_2 = np.float32(np.log(2))


def as_log2(row):
    return {"policy_logprobs": row["policy_logprobs"] / LOG_2}


def copied(row):
    return {"policy_logprobs": row["rollout_logprobs"]}


def shifted(row):
    return {"policy_logprobs": np.roll(row["policy_logprobs"], -1)}


def swapped(row):
    return {"policy_logprobs": row["rollout_logprobs"], "rollout_logprobs": row["policy_logprobs"]}


def thresholds_of(payload):
    """Give the lines under the head of the advice, without that on bounds."""
    lines = summary_text(payload).split("\nthresholds\n")[1].splitlines()
    return [line.strip() for line in lines if not line.startswith("  bounds")]


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize(
    ("rows", "change", "code"),
    [
        (sample(200), as_log2, "log_base"),
        (sample(100), copied, "identical"),
        (sample(100), shifted, "shifted"),
        (sample(400, noise=0.4), swapped, "swapped"),
        (sample(300, top_p=0.8, noise=0.02), dict, "top_p"),
        (sample(300, rollout_temperature=0.7, noise=0.05), dict, "temperature"),
    ],
)
def test_under_a_finding_that_explains_the_drift_nothing_is_advised(tmp_path, rows, change, code, is_quick):
    payload = audited(write_jsonl(tmp_path / "a.jsonl", [row | change(row) for row in rows]), is_quick=is_quick)
    assert code in [row["code"] for row in payload["findings"]]
    (line,) = thresholds_of(payload)
    assert line.startswith(f"no threshold is advised: with the finding {code} ")
    assert {payload["advice"][name]["advised"] for name in ("trm_max", "trm_avg", "trm_max_avg")} == {None}


def test_a_threshold_takes_30_sequences_with_tokens(tmp_path):
    rows = sample(30)
    assert thresholds_of(audited(write_jsonl(tmp_path / "a.jsonl", rows)))[0].startswith("trm_max 0.")
    (line,) = thresholds_of(audited(write_jsonl(tmp_path / "b.jsonl", rows[:29])))
    assert line == "no threshold is advised: 29 sequences with tokens, 30 are needed"
    empty = rows[0] | {"rollout_logprobs": np.zeros(0), "policy_logprobs": np.zeros(0), "token_ids": np.zeros(0)}
    (line,) = thresholds_of(audited(write_jsonl(tmp_path / "c.jsonl", [*rows[:1], *[empty] * 40])))
    assert line == "no threshold is advised: 1 sequence with tokens, 30 are needed"


def test_a_quick_audit_looks_for_signatures_in_the_first_tokens_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.audit.sources.CHUNK_BYTES", 4000)
    monkeypatch.setattr("pipelines.audit.measure.SHIFT_TOKENS", 500)
    rows = sample(200)
    path = write_jsonl(tmp_path / "a.jsonl", [row | copied(row) for row in rows])
    quick, full = audited(path, is_quick=True), audited(path)
    assert 0 < quick["num_signature_tokens"] <= 1500 < full["num_signature_tokens"] == full["num_tokens"]
    tested = f"; {quick['num_signature_tokens']:,} of {quick['num_tokens']:,} tokens tested for signatures\n"
    assert tested in summary_text(quick)
    assert "tested for signatures" not in summary_text(full)
