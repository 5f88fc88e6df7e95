"""Every trainer's field names and layout, made to its documented schema, give the numbers of the same rollouts."""

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import save_file

from pipelines.audit import FORMAT_NAMES
from pipelines.audit.adapters import FORMATS
from tests.unit.audit_data import audited, padded, response_mask, sample, write_jsonl
from trm_repro.errors import InputError

ROWS = sample(30, noise=0.3)
X = [(r["policy_logprobs"].astype(np.float64) - r["rollout_logprobs"]) for r in ROWS]
PPL_GAP = np.mean([abs(x.mean()) for x in X])
NUM_TOKENS = sum(map(len, X))
SCALARS = {name: np.array([row[name] for row in ROWS]) for name in ("step", "reward", "advantage")}


def check(payload, expected_format):
    assert payload["formats"] == {expected_format: 1}
    assert payload["num_tokens"] == NUM_TOKENS
    assert payload["ppl_gap"] == pytest.approx(PPL_GAP, rel=1e-6)


def write_pt(path, arrays):
    torch.save({name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}, path)
    return path


def rename(names):
    """Rows under other names, as lists."""
    return [{theirs: row[ours] for ours, theirs in names.items()} for row in ROWS]


def test_names_of_the_command_line_are_the_formats():
    assert tuple(FORMATS) == FORMAT_NAMES


def test_no_two_formats_share_both_log_probs():
    pairs = [
        (rollout, policy)
        for known in FORMATS.values()
        for rollout in known.names["rollout_logprobs"]
        for policy in known.names["policy_logprobs"]
    ]
    assert len(pairs) == len(set(pairs))


def test_verl_batch_is_padded_and_rewarded_at_the_last_token(tmp_path):
    scores = padded(ROWS, "rollout_logprobs") * 0
    for row, values in zip(ROWS, scores, strict=True):
        values[len(row["token_ids"]) - 1] = row["reward"]
    mask = response_mask(ROWS)
    arrays = {
        "rollout_log_probs": padded(ROWS, "rollout_logprobs"),
        "old_log_probs": padded(ROWS, "policy_logprobs", fill=-5.0),  # what stands on padding does not matter
        "response_mask": mask,
        "responses": padded(ROWS, "token_ids"),
        "token_level_scores": scores,
        "advantages": SCALARS["advantage"][:, None].astype(np.float32) * mask,
    }
    payload = audited(write_pt(tmp_path / "batch.pt", arrays))
    check(payload, "verl")
    correct = {row["bin"]: row["num_tokens"] for row in payload["where"]["correct"]}
    assert correct["reward > 0"] == sum(len(x) for x, r in zip(X, ROWS, strict=True) if r["reward"] > 0)
    assert sum(row["num_tokens"] for row in payload["where"]["token_id"]) == NUM_TOKENS
    assert "not_applied" not in payload["gates"]["opsm"]
    assert any(f["code"] == "padding_tokens" for f in payload["findings"])


def test_verl_jsonl_dump_with_log_probs_is_read(tmp_path):
    names = {"rollout_logprobs": "rollout_log_probs", "policy_logprobs": "old_log_probs", "reward": "score"}
    rows = [row | {"input": "1+1=", "output": "2"} for row in rename(names | {"step": "step"})]
    keys = ("input", "output", "score", "step", "rollout_log_probs", "old_log_probs")
    payload = audited(write_jsonl(tmp_path / "5.jsonl", rows, keys))
    check(payload, "verl")
    assert payload["steps"][0]["reward_mean"] == np.mean([r["reward"] for r in ROWS[:10]])


def test_dumps_of_texts_alone_say_what_to_save(tmp_path):
    (tmp_path / "5.jsonl").write_text('{"input": "1+1=", "output": "2", "gts": "2", "score": 1.0, "step": 5}\n')
    with pytest.raises(InputError, match=r"5\.jsonl: has no log-probs .*rollout_log_probs"):
        audited(tmp_path / "5.jsonl")


def test_trl_batch(tmp_path):
    arrays = {
        "sampling_per_token_logps": padded(ROWS, "rollout_logprobs"),
        "old_per_token_logps": padded(ROWS, "policy_logprobs"),
        "completion_mask": response_mask(ROWS),
        "completion_ids": padded(ROWS, "token_ids"),
        "advantages": SCALARS["advantage"].astype(np.float32),
    }
    check(audited(write_pt(tmp_path / "batch.pt", arrays)), "trl")


def test_prime_rl_rows_hold_the_whole_sequence(tmp_path):
    rows = [
        {
            "input_ids": [7] * 3 + row["token_ids"].tolist(),
            "loss_mask": [False] * 3 + [True] * len(row["token_ids"]),
            "inference_logprobs": [0.0] * 3 + row["rollout_logprobs"].tolist(),
            "trainer_logprobs": [-1.0] * 3 + row["policy_logprobs"].tolist(),
            "advantages": [row["advantage"]] * (3 + len(row["token_ids"])),
        }
        for row in ROWS
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rank_0.parquet")
    payload = audited(tmp_path / "rank_0.parquet")
    check(payload, "prime-rl")
    ids = np.concatenate([row["token_ids"] for row in ROWS])
    found = {row["bin"]: row["num_tokens"] for row in payload["where"]["token_id"]}
    assert found == {str(i): n for i, n in enumerate(np.bincount(ids))}


def test_slime_lists_of_tensors_with_prompt_tokens(tmp_path):
    data = {
        "rollout_log_probs": [torch.from_numpy(row["rollout_logprobs"]) for row in ROWS],
        "log_probs": [torch.from_numpy(row["policy_logprobs"]) for row in ROWS],
        "loss_masks": [torch.ones(len(row["token_ids"]), dtype=torch.int) for row in ROWS],
        "tokens": [torch.tensor([5, 5, *row["token_ids"]]) for row in ROWS],
        "response_lengths": [len(row["token_ids"]) for row in ROWS],
        "rewards": SCALARS["reward"].tolist(),
    }
    torch.save(data, tmp_path / "0.pt")
    payload = audited(tmp_path / "0.pt")
    check(payload, "slime")
    ids = np.concatenate([row["token_ids"] for row in ROWS])  # those of the prompt, 5 and 5, do not count
    found = {row["bin"]: row["num_tokens"] for row in payload["where"]["token_id"]}
    assert found == {str(i): n for i, n in enumerate(np.bincount(ids))}


def test_skyrl_nemo_rl_and_openrlhf_names(tmp_path):
    left = 4
    whole = {name: padded(ROWS, name, left=left) for name in ("rollout_logprobs", "policy_logprobs", "token_ids")}
    mask = response_mask(ROWS, left=left)
    cases = {
        "skyrl": ("rollout_logprobs", "action_log_probs", "loss_mask", "response_ids"),
        "nemo-rl": ("generation_logprobs", "prev_logprobs", "token_mask", "input_ids"),
        "openrlhf": ("rollout_log_probs", "action_log_probs", "action_mask", "sequences"),
    }
    for name, (rollout, policy, kept, ids) in cases.items():
        arrays = {rollout: whole["rollout_logprobs"], policy: whole["policy_logprobs"], kept: mask}
        save_file(arrays | {ids: whole["token_ids"]}, tmp_path / f"{name}.safetensors")
        check(audited(tmp_path / f"{name}.safetensors"), name)


@pytest.mark.parametrize("is_shifted", [True, False])
def test_areal_policy_log_probs_one_position_early_are_moved_on(tmp_path, is_shifted):
    left = 2
    policy = padded(ROWS, "policy_logprobs", left=left)
    arrays = {
        "logprobs": padded(ROWS, "rollout_logprobs", left=left),
        "prox_logp": np.roll(policy, -1, axis=1) if is_shifted else policy,
        "loss_mask": response_mask(ROWS, left=left),
        "input_ids": padded(ROWS, "token_ids", left=left),
    }
    payload = audited(write_pt(tmp_path / "step.pt", arrays))
    check(payload, "areal")
    note = next(f["message"] for f in payload["findings"] if f["code"] == "policy_shift")
    assert ("moved on" in note) is is_shifted


def test_arrow_files_and_streams(tmp_path):
    table = pa.table({name: [row[name] for row in ROWS] for name in ("rollout_logprobs", "policy_logprobs")})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    for name in ("a.arrow", "b.arrow"):
        check(audited(tmp_path / name), "generic")


def test_named_columns_and_half_precision(tmp_path):
    arrays = {
        "q": padded(ROWS, "rollout_logprobs").astype(np.float64),
        "p": padded(ROWS, "policy_logprobs").astype(np.float16),
        "m": response_mask(ROWS),
    }
    np.savez(tmp_path / "a.npz", **arrays)
    mapped = {"rollout_logprobs": "q", "policy_logprobs": "p", "mask": "m"}
    payload = audited(tmp_path / "a.npz", mapped=mapped)
    half = [(r["policy_logprobs"].astype(np.float16).astype(float) - r["rollout_logprobs"]) for r in ROWS]
    assert payload["ppl_gap"] == pytest.approx(np.mean([abs(x.mean()) for x in half]))
    assert any(f["code"] == "mixed_dtypes" for f in payload["findings"])


def test_bfloat16_tensors_are_read(tmp_path):
    tensors = {
        "rollout_logprobs": torch.from_numpy(padded(ROWS, "rollout_logprobs")).bfloat16(),
        "policy_logprobs": torch.from_numpy(padded(ROWS, "policy_logprobs")).bfloat16(),
        "response_mask": torch.from_numpy(response_mask(ROWS)),
    }
    torch.save(tensors, tmp_path / "a.pt")
    payload = audited(tmp_path / "a.pt")
    assert payload["num_tokens"] == NUM_TOKENS
    assert any(f["code"] == "bfloat16" for f in payload["findings"])


def test_padding_without_a_mask_is_found_and_said(tmp_path):
    np.savez(tmp_path / "a.npz", **{n: padded(ROWS, n) for n in ("rollout_logprobs", "policy_logprobs")})
    payload = audited(tmp_path / "a.npz")
    check(payload, "generic")
    assert any(f["code"] == "padding_guessed" for f in payload["findings"])


def test_lengths_cut_padding_off(tmp_path):
    arrays = {n: padded(ROWS, n, fill=-9.0) for n in ("rollout_logprobs", "policy_logprobs")}
    np.savez(tmp_path / "a.npz", **arrays, length=np.array([len(x) for x in X]))
    check(audited(tmp_path / "a.npz"), "generic")


def test_a_mask_with_holes_leaves_tool_tokens_out(tmp_path):
    row = {"rollout_logprobs": [-1.0, -9.0, -2.0], "policy_logprobs": [-1.1, -1.0, -2.3], "response_mask": [1, 0, 1]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    payload = audited(tmp_path / "a.jsonl")
    assert payload["num_tokens"] == 2
    assert payload["k1_mean"] == pytest.approx((0.1 + 0.3) / 2)
    assert payload["ppl_gap"] == pytest.approx(0.2)


def test_a_format_that_is_named_must_fit(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(InputError, match="is not a dump of verl: expected columns rollout_log_probs and old_log_probs"):
        audited(path, chosen_format="verl")


def test_unknown_columns_are_listed(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"foo": [-1.0], "bar": [-1.0]}\n')
    with pytest.raises(InputError, match=r"a\.jsonl: no known pair .*bar, foo.*--map"):
        audited(tmp_path / "a.jsonl")
    with pytest.raises(InputError, match="--map policy_logprobs=baz: no such column"):
        audited(tmp_path / "a.jsonl", mapped={"policy_logprobs": "baz", "rollout_logprobs": "foo"})
    payload = audited(tmp_path / "a.jsonl", mapped={"policy_logprobs": "bar", "rollout_logprobs": "foo"})
    assert payload["k2_max"] == 0.0
    assert math.isclose(payload["ratio_mean"], 1.0)
