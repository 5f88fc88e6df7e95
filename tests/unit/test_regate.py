"""Re-gating: numbers by hand on one small step, and stored decisions met again on files of a real policy."""

import json
import math
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from evaluation.regating import StoredUpdate, draw_regating, gate_means, regate
from pipelines.cli import main
from pipelines.regate import arm_function, gate_function
from tests.unit.builders import make_batch, make_rollout, near_policy, tiny_policy
from trm_repro.config import load_arm
from trm_repro.masks import TokenStatistics
from trm_repro.measurement import measure
from trm_repro.shards import MaskRow, read_masks, write_masks, write_rollouts
from trm_repro.steps import gate


def update_of(log_ratio, advantages, rewards, kept, *, lengths=(2, 2), update=0, step=0, kl=None):
    values = torch.tensor(log_ratio)
    mask = torch.arange(values.shape[1]) < torch.tensor(lengths)[:, None]
    policy = torch.full_like(values, -1.0)
    statistics = TokenStatistics.from_logprobs(policy, policy - values, mask, advantages=torch.tensor(advantages))
    statistics = replace(statistics, reference_mask=torch.tensor(kept), kl=None if kl is None else torch.tensor(kl))
    groups = torch.zeros(len(rewards), dtype=torch.long)
    return StoredUpdate(step=step, update=update, statistics=statistics, rewards=torch.tensor(rewards), groups=groups)


LOG_2 = math.log(2.0)
# ratios 1 2 | 1 1, then 0.5 (one token) | 4 1
UPDATES = [
    update_of([[0.0, LOG_2], [0.0, 0.0]], [1.0, -1.0], [1.0, 0.0], [True, True]),
    update_of([[-LOG_2, math.nan], [2 * LOG_2, 0.0]], [0.5, -2.0], [1.0, 0.0], [False, True], lengths=(1, 2), update=1),
]


def test_acceptance_mass_and_biases_of_a_step_are_those_by_hand():
    (row,) = regate(UPDATES, {"icepop": gate_function("icepop,low=0.6,high=1.9")})  # rejects 2, 0.5 and 4
    assert (row.num_sequences, row.step) == (4, 0)
    assert row.kept_sequence_fraction == 3 / 4  # the response of one token is gone
    assert row.kept_token_fraction == 4 / 7
    mass, lost = (1 + 2) * 1 + 2 * 1 + 0.5 * 0.5 + 5 * 2, 2 * 1 + 0.5 * 0.5 + 4 * 2
    assert row.gradient_mass_fraction == pytest.approx(1 - lost / mass)
    assert row.objective_bias == pytest.approx(-(1 * 2 + 0.5 * 0.5 - 2 * 4) / 4)
    # reward minus its group's mean is 1/2 or -1/2; terms 1/2 (2 - 1), 1/2 (0.5 - 1), -1/2 (4 - 1)
    assert row.surrogate == pytest.approx((0.5 - 0.25 - 1.5) / 4)
    assert row.surrogate_bias == pytest.approx(-(0.5 - 0.25 - 1.5) / 4)


def test_weights_count_as_what_they_leave_of_a_token():
    (row,) = regate(UPDATES[:1], {"tis": gate_function("token_tis,cap=1.5")})  # 2 becomes 1.5
    assert row.kept_token_fraction == 1.0
    assert row.gradient_mass_fraction == pytest.approx(4.5 / 5)
    assert row.objective_bias == pytest.approx(-0.5 / 2)


def test_no_gate_keeps_all_and_has_no_bias_and_steps_come_in_order():
    later = replace(UPDATES[0], step=7)
    rows = regate([later, *UPDATES], {"none": gate_function("none"), "ser": gate_function("ser")})
    assert [(row.step, row.gate) for row in rows] == [(0, "none"), (0, "ser"), (7, "none"), (7, "ser")]
    for row in rows[::2]:
        assert (row.kept_token_fraction, row.gradient_mass_fraction) == (1.0, 1.0)
        assert (row.objective_bias, row.surrogate_bias) == (0.0, 0.0)
    means = gate_means(rows)
    assert means["ser"]["kept_sequence_fraction"] == pytest.approx((1 / 4 + 1 / 2) / 2)
    assert len(draw_regating(rows).axes) == 3


def test_without_advantages_there_is_no_gradient_mass_to_keep():
    flat = update_of([[0.0, 1.0], [0.0, 0.0]], [0.0, 0.0], [1.0, 1.0], [True, True])
    (row,) = regate([flat], {"none": gate_function("none")})
    assert row.gradient_mass_fraction is None
    assert gate_means([row])["none"]["gradient_mass_fraction"] is None


def test_a_sequence_without_finite_log_probs_is_in_no_sum():
    broken = update_of([[0.0, math.inf], [0.0, LOG_2]], [1.0, -1.0], [1.0, 0.0], [False, True])
    (row,) = regate([broken], {"none": gate_function("none")})
    assert row.kept_sequence_fraction == 0.5
    assert row.gradient_mass_fraction == 1.0
    assert row.surrogate == pytest.approx(-0.5 / 2)


def test_sampled_leaves_stored_kl_aside():
    stored = update_of([[0.0, 0.4], [0.0, 0.0]], [1.0, 1.0], [1.0, 0.0], [True, True], kl=[[0.0, 0.0], [0.0, 0.2]])
    exact, sampled = (gate_function(f"trm_max,max_threshold=0.07{end}")(stored) for end in ("", ",sampled"))
    assert exact.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert sampled.tolist() == [[0.0, 0.0], [1.0, 1.0]]


ARMS = ["trm_max_0.05", "trm_avg_0.001", "trm_max_0.1_avg_0.002", "ln_trm_0.05", "ser_0.05", "opsm_0.5", "icepop"]


@pytest.fixture(scope="module")
def measured():
    """A policy's measurement of twelve sequences, some far from it."""
    policy, batch = tiny_policy(), make_batch([(2, 3), (3, 6), (1, 2)] * 4, seed=3)
    batch = near_policy(batch, policy, torch.tensor([0.02, 0.1, 0.2, 0.3, 0.5, 1.0] * 2))
    return batch, measure(policy, batch, temperature=1.0, tokens_per_micro_batch=1000)


@pytest.fixture
def run_folder(tmp_path, measured):
    """A run's folder: shards and masks of two steps, one update each, under trm_avg_0.001."""
    batch, measurement = measured
    kept = gate(measurement, batch.response_mask, load_arm("trm_avg_0.001").mask, batch=batch)
    rollouts, rows = [], []
    for index, length in enumerate(batch.response_lengths.tolist()):
        plain = make_rollout(
            length, group=index // 2, reward=float(index % 2), advantage=float(batch.advantages[index])
        )
        rollouts.append(replace(plain, logprobs=batch.rollout_logprobs[index, :length], log_distribution=None))
        rows.append(
            MaskRow(
                update=0,
                sequence_id=index,
                kept=bool(kept[index]),
                policy_logprobs=measurement.policy_logprobs[index, :length],
                token_kl=measurement.kl[index, :length],
            )
        )
    for step in (0, 10):
        write_rollouts(tmp_path / "shards" / f"step_{step:05d}.parquet", rollouts, step)
        write_masks(tmp_path / "masks" / f"step_{step:05d}.parquet", rows, step)
    return tmp_path


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_replayed_keeps_what_training_under_it_would_have(measured, run_folder, arm):
    from pipelines.regate import find_files, read

    batch, measurement = measured
    (shard, masks), _ = find_files(run_folder)
    (stored,) = read(shard, masks)
    online = gate(measurement, batch.response_mask, load_arm(arm).mask, batch=batch)
    replayed = (arm_function(arm)(stored) > 0).any(dim=-1)
    assert replayed.tolist() == online.tolist()
    if arm not in ("icepop", "opsm_0.5"):
        assert 0 < int(online.sum()) < 12


def test_the_command_writes_table_figure_and_json_and_meets_the_stored_decisions_again(run_folder, capsys):
    code = main(["regate", str(run_folder), "--gate", "trm_avg,sampled", "--gate", "random", "--arm", "trm_avg_0.001"])
    assert code == 0
    files = {path.name for path in (run_folder / "regate").iterdir()}
    assert files == {"regate.json", "regate.md", "regate.png"}
    document = json.loads((run_folder / "regate" / "regate.json").read_text())
    assert list(document["gates"]) == ["stored", "trm_avg,sampled", "random", "arm trm_avg_0.001"]
    assert document["gates"]["stored"] == document["gates"]["arm trm_avg_0.001"] == document["gates"]["trm_avg,sampled"]
    share = "kept_sequence_fraction"
    assert document["gates"]["random"][share] == document["gates"]["stored"][share]
    assert {row["step"] for row in document["steps"]} == {0, 10}
    assert (run_folder / "regate" / "regate.md").read_text().strip() in capsys.readouterr().out


def test_without_gates_every_one_that_the_data_allow_is_replayed(run_folder, capsys, tmp_path):
    assert main(["regate", str(run_folder / "shards"), "--out", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert "| dppo_top_k_kl |" in out
    assert "regate: dppo_top_k_tv left out: needs total_variation: mask files hold the policy's log-probs of" in err


def test_sequences_without_a_mask_row_are_counted_and_said(run_folder, capsys):
    file = run_folder / "masks" / "step_00010.parquet"
    write_masks(file, read_masks(file)[3:], 10)
    assert main(["regate", str(run_folder), "--gate", "ser"]) == 0
    said = "3 sequences of the shards have no row in the mask files"
    assert said in capsys.readouterr().err
    assert said in (run_folder / "regate" / "regate.md").read_text()
    assert json.loads((run_folder / "regate" / "regate.json").read_text())["num_missing_sequences"] == 3


def test_a_sequence_twice_in_an_update_is_refused(run_folder, capsys):
    file = run_folder / "masks" / "step_00010.parquet"
    rows = read_masks(file)
    write_masks(file, [*rows, rows[0]], 10)
    assert main(["regate", str(run_folder), "--gate", "ser"]) == 2
    assert "update 0 has sequence 0 twice" in capsys.readouterr().err


def test_one_shard_with_the_masks_that_the_mask_command_writes_beside_it(run_folder, tmp_path):
    shard = tmp_path / "alone" / "step_00000.parquet"
    shard.parent.mkdir()
    shard.write_bytes((run_folder / "shards" / shard.name).read_bytes())
    shard.with_name("step_00000.masks.parquet").write_bytes((run_folder / "masks" / shard.name).read_bytes())
    assert main(["regate", str(shard), "--gate", "ser"]) == 0
    assert (shard.parent / "regate" / "regate.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gate", "trm_mx"], "no gate 'trm_mx'; did you mean 'trm_max'"),
        (["--gate", "ser,threshold=1"], "no threshold 'threshold'; did you mean 'ser_threshold'"),
        (["--gate", "ser,ser_threshold=wide"], "'ser_threshold=wide' is not a number"),
        (["--gate", "ser,exact"], "'exact' is not THRESHOLD=X or sampled"),
        (["--gate", "dppo_top_k_tv"], "cannot be replayed: needs total_variation: mask files hold the policy's"),
        (["--arm", "trm_av_0.001"], "did you mean 'trm_avg_0.001'"),
        (["--masks", "/"], "no shard has masks"),
        (["--gate", "icepop,low=0.1,low=0.5"], "gives low twice"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line_and_writes_nothing(run_folder, capsys, arguments, said):
    assert main(["regate", str(run_folder), *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not (run_folder / "regate").exists()


def test_masks_of_other_rollouts_are_refused(run_folder, capsys):
    short = MaskRow(update=0, sequence_id=0, kept=True, policy_logprobs=torch.zeros(1), token_kl=None)
    write_masks(run_folder / "masks" / "step_00000.parquet", [short], 0)
    assert main(["regate", str(run_folder), "--gate", "ser"]) == 2
    assert "sequence 0 has 1 tokens, in" in capsys.readouterr().err
    write_masks(run_folder / "masks" / "step_00000.parquet", [replace(short, sequence_id=99)], 0)
    assert main(["regate", str(run_folder), "--gate", "ser"]) == 2
    assert "it is missing" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["regate"], ["audit", "--masks"]])
def test_masks_of_another_step_are_refused_even_where_every_length_fits(run_folder, capsys, command):
    masks = run_folder / "masks"
    words = [str(run_folder)] if command[0] == "regate" else [str(masks), str(run_folder)]
    (masks / "step_00000.parquet").write_bytes((masks / "step_00010.parquet").read_bytes())
    assert main([*command, *words]) == 2
    assert "step_00000.parquet: holds masks of step 10; give those of" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["step", "update", "sequence_id", "policy_logprobs", "token_kl"])
def test_masks_without_a_column_or_with_other_values_are_one_line_of_the_audit(run_folder, capsys, name):
    file = run_folder / "masks" / "step_00000.parquet"
    table = pq.read_table(file)
    changed = [table.drop_columns([name])]
    if table.schema.field(name).type == pa.int32():
        index = table.column_names.index(name)
        others = (pa.nulls(table.num_rows, pa.int32()), ["x"] * table.num_rows, [1.5] * table.num_rows)
        changed += [table.set_column(index, name, pa.array(values)) for values in others]
    for wrong in changed:
        pq.write_table(wrong, file)
        assert main(["audit", str(run_folder)]) == 2
        err = capsys.readouterr().err
        assert (f"{file}: " in err, name in err, err.count("\n")) == (True, True, 1)


def test_damaged_masks_are_one_line_of_the_audit(run_folder, capsys):
    file = run_folder / "masks" / "step_00000.parquet"
    data = bytearray(file.read_bytes())
    data[4:200] = b"\xff" * 196  # the pages of the first columns; the footer is whole
    file.write_bytes(data)
    assert main(["audit", str(run_folder)]) == 2
    err = capsys.readouterr().err
    assert f"{file}: cannot be read for step, update" in err
    assert err.count("\n") == 1
    (run_folder / "text").write_text("x")
    assert main(["audit", str(run_folder / "shards" / file.name), "--masks", str(run_folder / "text")]) == 2
    assert "text: cannot be read for step, update" in capsys.readouterr().err


def test_a_path_that_is_no_run_is_named(tmp_path, capsys):
    assert main(["regate", str(tmp_path / "gone")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    assert main(["regate", str(tmp_path)]) == 2
    assert "has no shards" in capsys.readouterr().err
