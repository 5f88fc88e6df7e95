"""Dumps and options made to mislead: refused or named in one line, never taken for something else."""

import json
import pickle

import numpy as np
import pytest
import torch

from pipelines.cli import main
from tests.unit.audit_data import audited
from trm_repro.errors import InputError

GOOD = {"rollout_logprobs": [-1.0, -2.0], "policy_logprobs": [-1.5, -2.5]}


def lines(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_column_of_later_rows_counts_and_the_rest_have_none(tmp_path):
    rows = [GOOD, GOOD | {"reward": 1.0, "step": 3}]
    payload = audited(lines(tmp_path / "a.jsonl", *rows))
    assert payload["columns"]["reward"] == "reward"
    assert {row["step"]: row["reward_mean"] for row in payload["steps"]} == {-1: None, 3: 1.0}
    masked = lines(tmp_path / "b.jsonl", GOOD, GOOD | {"mask": [1, 0]})
    with pytest.raises(InputError, match=r"line 1: .*2 rollout_logprobs but 0 mask"):
        audited(masked)
    assert audited(masked, skip_bad=True)["num_tokens"] == 1


def test_a_column_that_first_appears_in_a_later_chunk_counts(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.audit.sources.CHUNK_BYTES", 32)
    payload = audited(lines(tmp_path / "a.jsonl", GOOD, GOOD | {"reward": 1.0}))
    assert payload["columns"]["reward"] == "reward"
    assert payload["formats"] == {"generic": 1}
    assert payload["num_sequences"] == 2
    for name, value in (("mask", [1, 0]), ("length", 1)):
        with pytest.raises(InputError, match=f"{name} is in later rows"):
            audited(lines(tmp_path / "a.jsonl", GOOD, GOOD | {name: value}))
    with pytest.raises(InputError, match="line 2: no mask"):
        audited(lines(tmp_path / "a.jsonl", GOOD | {"mask": [1, 0]}, GOOD))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"reward": "1.0"}, "reward is the text '1.0'"),
        ({"advantage": "x"}, "advantage is the text 'x'"),
        ({"step": "x"}, "step is the text 'x'"),
        ({"step": 1e30}, "step is 1e"),
        ({"reward": 10**400}, "reward: .*where other rows have a number"),
        ({"advantage": float("nan")}, "advantage is nan"),
        ({"policy_logprobs": ["-1.5", "-2.5"]}, "could not convert string '-1.5'"),
        ({"policy_logprobs": [[-1.5], [-2.5]]}, "nested otherwise"),
        ({"policy_logprobs": [-(10**400), -1]}, "policy_logprobs: "),
        ({"token_kl": [0.1, -0.5]}, "token_kl is a negative KL at token 1"),
        ({"mask": [1, float("nan")]}, "mask is neither 0 nor 1 at token 1"),
        ({"mask": [1, 2]}, "mask is neither 0 nor 1 at token 1"),
    ],
)
def test_a_value_that_a_field_cannot_hold_makes_its_row_bad(tmp_path, change, reason):
    good = GOOD | {"reward": 0.5, "step": 1, "advantage": 0.1, "mask": [1, 1], "token_kl": [0.1, 0.1]}
    path = lines(tmp_path / "a.jsonl", good, good | change, good)
    with pytest.raises(InputError, match=f"line 2: .*{reason}"):
        audited(path)
    assert audited(path, skip_bad=True)["num_sequences"] == 2


def test_an_advantage_list_is_as_long_as_its_row_and_finite(tmp_path):
    good = GOOD | {"advantage": [0.1, 0.1]}
    with pytest.raises(InputError, match="line 2: 2 rollout_logprobs but 1 advantage"):
        audited(lines(tmp_path / "a.jsonl", good, GOOD | {"advantage": [0.1]}))
    with pytest.raises(InputError, match="line 2: advantage is not finite at token 1"):
        audited(lines(tmp_path / "a.jsonl", good, GOOD | {"advantage": [0.1, None]}))


def test_identifiers_may_be_texts_and_numbers(tmp_path):
    path = lines(tmp_path / "a.jsonl", GOOD | {"prompt_id": 1}, GOOD | {"prompt_id": "x"})
    assert audited(path)["num_sequences"] == 2


def test_lists_of_lists_are_no_log_probs(tmp_path):
    nested = {name: [[-1.0, -2.0], [-1.0, -2.0]] for name in GOOD}
    with pytest.raises(InputError, match="holds lists of lists"):
        audited(lines(tmp_path / "a.jsonl", nested))
    np.savez(tmp_path / "a.npz", **{name: -np.ones((2, 3, 4)) for name in GOOD})
    with pytest.raises(InputError, match="holds lists of lists"):
        audited(tmp_path / "a.npz")
    flat = {name: -np.ones((2, 3)) for name in GOOD}
    np.savez(tmp_path / "a.npz", **flat, mask=np.ones((2, 3, 1)))
    with pytest.raises(InputError, match="mask holds lists of lists"):
        audited(tmp_path / "a.npz")


def test_what_most_rows_have_decides_and_not_the_first(tmp_path):
    path = lines(tmp_path / "a.jsonl", GOOD | {"policy_logprobs": "abc"}, GOOD, GOOD)
    assert audited(path, skip_bad=True)["num_sequences"] == 2


@pytest.mark.parametrize("skip", [False, True])
def test_a_file_without_a_readable_row_is_refused(tmp_path, skip):
    with pytest.raises(InputError, match="no row could be read" if skip else "line 1: is no JSON"):
        audited(lines(tmp_path / "a.jsonl", "{", "["), skip_bad=skip)


def test_a_line_nested_too_deep_is_a_bad_row(tmp_path):
    path = lines(tmp_path / "a.jsonl", GOOD, "[" * 200_000)
    assert audited(path, skip_bad=True)["num_bad_rows"] == 1


def test_tensors_of_any_type_are_read_or_refused(tmp_path):
    path = tmp_path / "a.pt"
    values = -torch.tensor([[1.0, 2.0], [4.0, 2.0]])
    for tensor in (values.to(torch.float8_e4m3fn), values.clone().requires_grad_(), values.long()):
        torch.save({"rollout_logprobs": tensor, "policy_logprobs": values}, path)
        assert audited(path)["k2_mean"] == 0
        torch.save([{"rollout_logprobs": t, "policy_logprobs": v} for t, v in zip(tensor, values, strict=True)], path)
        assert audited(path)["k2_mean"] == 0
    torch.save({"rollout_logprobs": values.to("meta"), "policy_logprobs": values}, path)
    with pytest.raises(InputError, match="meta"):
        audited(path)


def test_a_pickle_is_said_to_hold_python_objects(tmp_path):
    path = tmp_path / "a.pt"
    torch.save(GOOD, path, _use_new_zipfile_serialization=False)
    with pytest.raises(InputError, match="holds Python objects"):
        audited(path)
    path.write_bytes(pickle.dumps(GOOD))
    with pytest.raises(InputError, match="holds Python objects"):
        audited(path)


def test_names_that_no_encoding_can_write_are_escaped(tmp_path):
    path = lines(tmp_path / "a.jsonl", GOOD | {"\ud800": 1})
    out, page = tmp_path / "o.json", tmp_path / "o.html"
    assert main(["audit", str(path), "--json", str(out), "--html", str(page)]) == 0
    assert "\\ud800" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{path}", "--json", "{path}"], "is a file to read or another output"),
        (["{path}", "--html", "{path}"], "is a file to read or another output"),
        (["{path}", "--json", "{path}.o", "--html", "{path}.o"], "is a file to read or another output"),
        (["{path}", "--json", ""], "is a folder"),
        (["{path}", "--masks", "{path}"], "does not apply"),
        (["{path}", "--length-limit", "9" * 400], "must be 1 to"),
        (["{path}", "--gates", "icepop:low=5,high=1"], "low 5 is above high 1"),
        (["{path}", "--gates", "icepop:high=inf"], "must be finite"),
        (["{path}", "--arms", "trm_max_1e999"], "finite thresholds > 0"),
        ([""], "is no path"),
    ],
)
def test_bad_options_leave_the_dump_alone_and_exit_with_2(tmp_path, capsys, arguments, message):
    path = lines(tmp_path / "a.jsonl", GOOD)
    before = path.read_bytes()
    assert main(["audit", *(argument.format(path=path) for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]


def test_one_number_a_row_is_no_mask(tmp_path):
    with pytest.raises(InputError, match="mask has one number a row; expected a list of 0 and 1"):
        audited(lines(tmp_path / "a.jsonl", GOOD | {"mask": 1}))


@pytest.mark.parametrize("name", ["step", "length"])
def test_a_list_of_one_value_is_that_value_and_of_several_a_bad_row(tmp_path, name):
    rows = [GOOD | {name: [2]}, GOOD | {name: [2, 2]}]
    payload = audited(lines(tmp_path / "a.jsonl", *rows))
    assert payload["num_sequences"] == 2
    assert name == "length" or [row["step"] for row in payload["steps"]] == [2]
    with pytest.raises(InputError, match=f"line 3: {name} holds a list of several values"):
        audited(lines(tmp_path / "a.jsonl", *rows, GOOD | {name: [1, 2]}))


def test_a_list_of_one_nan_is_no_step(tmp_path):
    payload = audited(lines(tmp_path / "a.jsonl", GOOD | {"step": [float("nan")]}, GOOD | {"step": [2.0]}))
    assert [row["step"] for row in payload["steps"]] == [-1, 2]


def test_a_mask_that_leaves_nothing_is_a_warning(tmp_path):
    findings = audited(lines(tmp_path / "a.jsonl", GOOD | {"mask": [0, 0]}))["findings"]
    assert [row["code"] for row in findings if row["level"] == "warning"] == ["no_tokens"]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"rollout_top_logprobs": [[-1.0]] * 2}, "are both needed"),
        ({"rollout_top_ids": [[1]] * 2, "rollout_top_logprobs": [[-1.0]] * 2}, "nothing is known of the policy"),
    ],
)
def test_top_k_that_cannot_be_used_is_said(tmp_path, columns, said):
    findings = audited(lines(tmp_path / "a.jsonl", GOOD | columns))["findings"]
    assert said in next(row["message"] for row in findings if row["code"] == "top_k_unused")


def test_lines_that_are_json_to_the_standard_library_alone_are_read(tmp_path):
    row = json.dumps(GOOD)[:-1] + ', "reward": Infinity, "note": "\\ud800"}'
    assert audited(lines(tmp_path / "a.jsonl", row))["num_tokens"] == 2
