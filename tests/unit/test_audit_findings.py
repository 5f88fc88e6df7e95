"""Data that are not what they seem are recognised, and sound data are left alone."""

import numpy as np
import pytest

from tests.unit.audit_data import audited, sample, write_jsonl

LOG_2, LOG_10 = np.float32(np.log(2)), np.float32(np.log(10))


def warnings(tmp_path, rows, **options):
    findings = audited(write_jsonl(tmp_path / "a.jsonl", rows), **options)["findings"]
    return {row["code"]: row["message"] for row in findings if row["level"] == "warning"}


def changed(rows, change):
    return [row | change(row) for row in rows]


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.7])
def test_sound_rollouts_raise_no_warning(tmp_path, noise):
    assert warnings(tmp_path, sample(400, noise=noise)) == {}


def test_log2_and_log10_are_told_with_their_side(tmp_path):
    rows = sample(200)
    found = warnings(tmp_path, changed(rows, lambda r: {"policy_logprobs": r["policy_logprobs"] / LOG_2}))
    assert list(found) == ["log_base"]
    assert "the policy log-probs look like log2" in found["log_base"]
    found = warnings(tmp_path, changed(rows, lambda r: {"rollout_logprobs": r["rollout_logprobs"] / LOG_10}))
    assert "the rollout log-probs look like log10" in found["log_base"]


@pytest.mark.parametrize("top_p", [0.8, 0.95])
def test_top_p_shows_as_a_kept_mass_below_1(tmp_path, top_p):
    path = write_jsonl(tmp_path / "a.jsonl", sample(300, top_p=top_p, noise=0.02))
    payload = audited(path)
    found = {row["code"]: row["message"] for row in payload["findings"] if row["level"] == "warning"}
    assert list(found) == ["top_p"]
    assert f"kept mass of about {payload['ratio_mean']:.3f}" in found["top_p"]
    assert top_p < payload["ratio_mean"] < 1


@pytest.mark.parametrize(("temperature", "side"), [(0.7, "rollout"), (1.3, "policy")])
def test_another_temperature_of_the_rollout_is_told(tmp_path, temperature, side):
    found = warnings(tmp_path, sample(300, rollout_temperature=temperature, noise=0.05))
    assert list(found) == ["temperature"]
    assert f"the {side} side being the sharper" in found["temperature"]


def test_swapped_columns_show_as_negative_k1(tmp_path):
    rows = sample(400, noise=0.4)
    swap = changed(rows, lambda r: {"policy_logprobs": r["rollout_logprobs"], "rollout_logprobs": r["policy_logprobs"]})
    assert list(warnings(tmp_path, swap)) == ["swapped"]


def test_copied_log_probs_are_told(tmp_path):
    rows = changed(sample(50), lambda r: {"policy_logprobs": r["rollout_logprobs"]})
    assert list(warnings(tmp_path, rows)) == ["identical"]


@pytest.mark.parametrize(("step", "where"), [(-1, "before"), (1, "after")])
def test_a_shift_by_one_position_is_told(tmp_path, step, where):
    rows = changed(sample(100), lambda r: {"policy_logprobs": np.roll(r["policy_logprobs"], step)})
    found = warnings(tmp_path, rows)
    assert list(found) == ["shifted"]
    assert f"one position {where} their token" in found["shifted"]


def test_training_on_the_same_tokens_since_is_noted(tmp_path):
    rows = changed(sample(200), lambda r: {"policy_logprobs": np.minimum(r["policy_logprobs"] + np.float32(0.1), 0)})
    payload = audited(write_jsonl(tmp_path / "a.jsonl", rows))
    assert [row["code"] for row in payload["findings"] if row["code"] == "ratio_mean"]


def test_columns_that_are_not_used_are_listed(tmp_path):
    rows = [row | {"nonsense": 1} for row in sample(5)]
    path = write_jsonl(tmp_path / "a.jsonl", rows, ("rollout_logprobs", "policy_logprobs", "nonsense"))
    payload = audited(path)
    assert any(row["code"] == "unused_columns" and "nonsense" in row["message"] for row in payload["findings"])
