"""Rows and files that cannot be used: named with file and row, or left out and counted."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipelines.cli import main
from tests.unit.audit_data import GENERIC, audited, sample, write_jsonl
from trm_repro.errors import InputError

ROWS = sample(20)


def broken(tmp_path, index, **changes):
    rows = [dict(row) for row in ROWS]
    rows[index] |= changes
    return write_jsonl(tmp_path / "rollouts.jsonl", rows)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"policy_logprobs": [-1.0]}, r"\d+ rollout_logprobs but 1 policy_logprobs"),
        ({"rollout_logprobs": [float("nan")], "policy_logprobs": [-1.0]}, "rollout_logprobs is NaN or null at token 0"),
        ({"rollout_logprobs": [-1.0, None], "policy_logprobs": [-1.0, -1.0]}, "NaN or null at token 1"),
        ({"rollout_logprobs": [-1.0, -1.0], "policy_logprobs": [-1.0, float("inf")]}, r"\+inf at token 1"),
        ({"rollout_logprobs": [0.5], "policy_logprobs": [-1.0]}, "rollout_logprobs is a positive log-prob at token 0"),
        ({"rollout_logprobs": None}, "no rollout_logprobs"),
        ({"policy_logprobs": [["a"]]}, "policy_logprobs: could not convert string"),
        ({"policy_logprobs": -1.0}, "policy_logprobs: one number where other rows have a list"),
    ],
)
def test_a_bad_row_is_named_and_can_be_left_out(tmp_path, changes, reason):
    path = broken(tmp_path, 11, **changes)
    with pytest.raises(InputError, match=rf"rollouts\.jsonl: line 12: .*{reason}.*--skip-bad"):
        audited(path)
    payload = audited(path, skip_bad=True)
    assert payload["num_sequences"] == 19
    assert payload["num_bad_rows"] == 1
    assert "line 12" in payload["bad_rows"][0]
    rest = [r for i, r in enumerate(ROWS) if i != 11]
    x = np.concatenate([r["policy_logprobs"].astype(float) - r["rollout_logprobs"] for r in rest])
    assert payload["k2_mean"] == pytest.approx((x**2 / 2).mean())


def test_a_line_that_is_no_json_is_named(tmp_path):
    path = write_jsonl(tmp_path / "rollouts.jsonl", ROWS)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], lines[4][:40], "[1]", *lines[5:]]))
    with pytest.raises(InputError, match="line 5: is no JSON"):
        audited(path)
    payload = audited(path, skip_bad=True)
    assert payload["num_bad_rows"] == 2
    assert payload["num_sequences"] == 19
    assert "line 6: is no object" in payload["bad_rows"][1]


def test_a_bad_row_of_a_table_is_found_among_many_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.audit.sources.CHUNK_TOKENS", 50)
    rows = [dict(row) for row in ROWS]
    rows[13]["policy_logprobs"] = np.append(rows[13]["policy_logprobs"], np.float32(-1))
    pq.write_table(pa.table({name: [row[name] for row in rows] for name in GENERIC}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet: row 13: "):
        audited(tmp_path / "a.parquet")
    assert audited(tmp_path / "a.parquet", skip_bad=True)["num_sequences"] == 19


def test_columns_of_negated_log_probs_are_recognised(tmp_path):
    rows = [row | {"policy_logprobs": -row["policy_logprobs"]} for row in ROWS]
    with pytest.raises(InputError, match="none is negative"):
        audited(write_jsonl(tmp_path / "a.jsonl", rows))


def test_minus_infinity_rejects_its_sequence_and_is_counted(tmp_path):
    path = broken(tmp_path, 3, rollout_logprobs=[-1.0, -1.0], policy_logprobs=[-1.0, float("-inf")])
    payload = audited(path)
    assert payload["num_nonfinite_sequences"] == 1
    assert payload["num_sequences"] == 20
    assert payload["acceptance"]["trm_max_0.1"] <= 19 / 20
    assert payload["gates"]["token_tis"]["sequence_fraction"] == pytest.approx(19 / 20)
    assert np.isfinite(payload["k1_mean"])


def test_empty_responses_are_kept_and_have_no_gap(tmp_path):
    path = broken(tmp_path, 3, rollout_logprobs=[], policy_logprobs=[], token_ids=[])
    payload = audited(path)
    assert payload["num_empty_sequences"] == 1
    x = [r["policy_logprobs"].astype(float) - r["rollout_logprobs"] for i, r in enumerate(ROWS) if i != 3]
    assert payload["ppl_gap"] == pytest.approx(sum(abs(v.mean()) for v in x) / 20)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "npz", "pt", "safetensors", "arrow"])
def test_empty_and_damaged_files_are_named(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    path.touch()
    with pytest.raises(InputError, match=r"is empty \(0 bytes\)"):
        audited(path)
    path.write_bytes(b"PAR1 no such thing" * 10)
    with pytest.raises(InputError, match=f"a.{suffix}: "):
        audited(path)


def test_a_truncated_parquet_file_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({name: [row[name] for row in ROWS] for name in GENERIC}), path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(InputError, match=r"a\.parquet: cannot be read as \.parquet .*cut short"):
        audited(path)


def test_an_arrow_file_whose_lists_reach_beyond_their_values_is_refused_and_does_not_end_the_process(tmp_path):
    lists = pa.array([[-1.0, -2.0], [-3.0]], pa.list_(pa.float32()))
    batch = pa.record_batch({"rollout_logprobs": lists, "policy_logprobs": lists})
    path = tmp_path / "rollouts.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    offsets, wrong = (np.array([0, 2, last], np.int32).tobytes() for last in (3, 2**30))
    assert path.read_bytes().count(offsets) == 2
    path.write_bytes(path.read_bytes().replace(offsets, wrong))
    with pytest.raises(InputError, match=r"rollouts\.arrow: cannot be read as \.arrow \(.*offset"):
        audited(path)


def test_pickled_objects_are_not_loaded(tmp_path):
    torch.save({"rollout_log_probs": np.zeros((2, 3))}, tmp_path / "a.pt")
    with pytest.raises(InputError, match="Python objects"):
        audited(tmp_path / "a.pt")
    np.savez(tmp_path / "a.npz", rollout_logprobs=np.array([[-1.0], None], dtype=object))
    with pytest.raises(InputError, match=r"a\.npz: "):
        audited(tmp_path / "a.npz")


def test_arrays_with_different_numbers_of_rows_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", rollout_logprobs=-np.ones((3, 2)), policy_logprobs=-np.ones((2, 2)))
    with pytest.raises(InputError, match="arrays differ in rows"):
        audited(tmp_path / "a.npz")


def test_a_number_where_a_list_is_expected_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"rollout_logprobs": -1.0, "policy_logprobs": -1.0}) + "\n")
    with pytest.raises(InputError, match="has one number a row; expected a list"):
        audited(tmp_path / "a.jsonl")


def test_lists_of_lists_of_several_lengths_are_named_in_words(tmp_path):
    row = {"rollout_logprobs": [-1.0, -1.0], "policy_logprobs": [-1.0, -1.0], "rollout_top_ids": [[1, 2], [1]]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row | {"rollout_top_logprobs": [[-1.0, -2.0]] * 2}) + "\n")
    with pytest.raises(InputError, match="line 1: rollout_top_ids: inner lists of several lengths, or numbers beside"):
        audited(tmp_path / "a.jsonl")


def test_only_bad_rows_leave_nothing_to_audit(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"rollout_logprobs": [-1.0, -1.0], "policy_logprobs": [-1.0]}) + "\n")
    with pytest.raises(InputError, match="no sequence could be used"):
        audited(path, skip_bad=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.jsonl"], "no such file or folder"),
        (["{path}", "--map", "rollout=x"], "expected ours=theirs"),
        (["{path}", "--arms", "trm_max_0"], "expected trm_max_D"),
        (["{path}", "--gates", "trm_maxx"], "did you mean 'trm_max'"),
        (["{path}", "--gates", "icepop:lo=1"], "has no threshold 'lo'"),
        (["{path}", "--thresholds", "icepop=1"], "expected trm_max="),
        (["{path}", "--length-limit", "5"], "below the longest response"),
        (["{path}", "--json", "/no/such/folder/out.json"], "no such folder"),
    ],
)
def test_bad_options_exit_with_2_and_one_line(tmp_path, capsys, arguments, message):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    assert main(["audit", *(argument.format(path=path) for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
