import json
import math
import os
import stat
import warnings
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipelines import mask as mask_command
from pipelines.checkpoints import Checkpoint, check_snapshots, load_into, read_checkpoint
from tests.unit.builders import EXPERTS_PER_TOKEN, NUM_EXPERTS, NUM_LAYERS, VOCAB_SIZE, make_rollout, tiny_policy
from trm_repro.errors import InputError
from trm_repro.parquet_files import check_folder
from trm_repro.rollout.synced_engine import policy_weights
from trm_repro.shard_checks import check_fits, check_versions
from trm_repro.shards import (
    MASK_SCHEMA,
    ROLLOUT_SCHEMA,
    MaskRow,
    read_masks,
    read_rollouts,
    write_masks,
    write_rollouts,
)

DENSE = tiny_policy("dense").model.config
MOE = tiny_policy("moe").model.config
SHAPES = {"log_distribution": [2], "hidden": [3], "top_ids": [2], "top_logprobs": [2], "experts": [1, 2]}
ROW = {
    "step": 4,
    "group": 0,
    "prompt_ids": [1],
    "response_ids": [2, 3],
    "rollout_logprobs": [-1.0, -1.0],
    "rollout_log_distribution": [-1.0] * 4,
    "rollout_hidden": b"\x00" * 12,
    "rollout_top_ids": [0, 1, 0, 1],
    "rollout_top_logprobs": [-1.0] * 4,
    "rollout_experts": [0, 1, 1, 0],
    "finished": True,
    "reward": 1.0,
    "advantage": 0.5,
    "weight_version": 0,
}


def write_rows(path, *changes, shapes=SHAPES, hidden_dtype="bfloat16"):
    about = {"kind": "rollouts", "shapes": shapes, "hidden_dtype": hidden_dtype}
    metadata = {"trm_repro": json.dumps(about)}
    rows = [ROW | change for change in changes]
    pq.write_table(pa.Table.from_pylist(rows, schema=ROLLOUT_SCHEMA.with_metadata(metadata)), path)


def refusal(call, *arguments):
    with pytest.raises(InputError) as raised:
        call(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_the_row_that_the_next_tests_damage_is_sound_by_itself(tmp_path):
    path = tmp_path / "step.parquet"
    write_rows(path, {}, {})
    rollouts, step = read_rollouts(path)
    assert (len(rollouts), step) == (2, 4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_ids": [None]}, "prompt_ids has an empty entry"),
        ({"response_ids": [2, None]}, "response_ids has an empty entry"),
        ({"rollout_logprobs": [-1.0, None]}, ""),
        ({"rollout_experts": [0, None, 1, 0]}, ""),
        ({"prompt_ids": [-1]}, "prompt_ids holds -1"),
        ({"response_ids": [2, -7]}, "response_ids holds -7"),
        ({"rollout_logprobs": [-1.0, 2e-3]}, "logprobs holds 0.002"),
        ({"rollout_logprobs": [math.inf, -1.0]}, "logprobs holds inf"),
        ({"rollout_log_distribution": [-1.0, math.nan, -1.0, -1.0]}, "log_distribution holds NaN"),
        ({"rollout_log_distribution": [-1.0, 0.5, -1.0, -1.0]}, "log_distribution holds 0.5"),
        ({"rollout_top_logprobs": [-1.0, math.nan, -1.0, -1.0]}, "top_logprobs holds NaN"),
        ({"rollout_top_ids": [0, -1, 0, 1]}, "top_ids holds -1"),
        ({"rollout_top_ids": [0, 1, 1, 1]}, "top_ids names a token twice"),
        ({"rollout_top_ids": None}, "top_ids and top_logprobs differ"),
        ({"rollout_log_distribution": None}, "log_distribution is present in some rows and missing in others"),
        ({"rollout_hidden": b"\x00" * 13}, ""),
        ({"rollout_hidden": b"\x00" * 10}, ""),
        ({"rollout_hidden": b""}, ""),
        ({"rollout_hidden": b"\x00" * 6}, "hidden has 1 rows, the response has 2 tokens"),
        ({"rollout_hidden": None}, "hidden is present in some rows and missing in others"),
        ({"reward": math.nan}, "reward is nan; expected 0 to 1"),
        ({"reward": 1.5}, "reward is 1.5; expected 0 to 1"),
        ({"reward": -0.5}, "reward is -0.5; expected 0 to 1"),
        ({"advantage": math.inf}, "advantage is inf; expected a finite number"),
        ({"advantage": math.nan}, "advantage is nan; expected a finite number"),
        ({"step": -1}, "step holds -1"),
        ({"step": 5}, "step is 5, that of the rows before is 4"),
        ({"group": -1}, "group holds -1"),
        ({"weight_version": -2}, "weight_version holds -2"),
    ],
    ids=str,
)
def test_what_no_sampling_gives_is_refused_by_file_row_and_reason(tmp_path, changes, reason):
    path = tmp_path / "step.parquet"
    write_rows(path, {}, changes)
    message = refusal(read_rollouts, path)
    assert message.startswith(f"{path}: row 1 is no rollout ({reason}")
    assert message.endswith("sample the shard again with trm-repro rollout")


@pytest.mark.parametrize("value", [math.nan, -math.inf, 9e-4, 0.0])
def test_a_sampled_log_prob_that_masks_reject_and_one_lifted_by_rounding_are_read(tmp_path, value):
    path = tmp_path / "step.parquet"
    write_rows(path, {"rollout_logprobs": [-1.0, value]})
    assert read_rollouts(path)[0][0].logprobs[1].item() == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize("shape", [None, "x", 3, [], [0], [-1], [2, 1], [2.0], [True]])
def test_token_tensors_of_an_unknown_shape_are_refused_and_not_dropped(tmp_path, shape):
    path = tmp_path / "step.parquet"
    write_rows(path, {}, shapes=SHAPES | {"log_distribution": shape})
    assert "for log_distribution; expected 1 sizes >= 1" in refusal(read_rollouts, path)


def test_hidden_states_of_an_unknown_dtype_are_refused(tmp_path):
    path = tmp_path / "step.parquet"
    write_rows(path, {}, hidden_dtype="float128")
    assert "the file says no dtype for hidden; expected one of bfloat16, float32" in refusal(read_rollouts, path)


def test_hidden_states_or_a_head_of_another_policy_do_not_fit(tmp_path):
    path, own = tmp_path / "step.parquet", torch.zeros(VOCAB_SIZE, DENSE.hidden_size)
    fitting = replace(make_rollout(2), hidden=torch.zeros(2, DENSE.hidden_size))
    check_fits(path, [fitting], DENSE, {0: own})
    message = refusal(check_fits, path, [replace(fitting, hidden=torch.zeros(2, 7))], DENSE, {0: own})
    assert message.startswith(
        f"{path}: row 0 does not fit the policy (hidden states are of 7 values, the policy's of 32)"
    )
    message = refusal(check_fits, path, [fitting], DENSE, {0: own[:-1]})
    assert f"the head of weight version 0 beside it is over {VOCAB_SIZE - 1} tokens" in message


def test_a_rollout_of_the_policys_own_shape_fits(tmp_path):
    path = tmp_path / "step.parquet"
    write_rollouts(path, [make_rollout(3, experts=True)], 0)
    check_fits(path, read_rollouts(path)[0], MOE)
    check_fits(path, [make_rollout(126, prompt_length=2)], DENSE)  # 128 tokens, the policy's limit
    check_fits(path, [replace(make_rollout(1), response_ids=(VOCAB_SIZE - 1,))], DENSE)


def experts(num_layers=NUM_LAYERS, top_k=EXPERTS_PER_TOKEN, largest=0):
    return torch.full((3, num_layers, top_k), largest, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "config", "reason"),
    [
        ({"prompt_ids": (0, VOCAB_SIZE)}, DENSE, f"prompt_ids holds token {VOCAB_SIZE}"),
        ({"response_ids": (0, 1, 999)}, DENSE, "response_ids holds token 999"),
        ({"prompt_ids": (1,) * 126}, DENSE, "prompt and response take 129 tokens, the policy's limit is 128"),
        ({"log_distribution": torch.zeros(3, 5)}, DENSE, "log_distribution is over 5 tokens"),
        ({"log_distribution": torch.zeros(3, VOCAB_SIZE + 1)}, DENSE, "log_distribution is over 19 tokens"),
        ({"top_ids": torch.full((3, 1), VOCAB_SIZE)}, DENSE, f"top_ids holds token {VOCAB_SIZE}"),
        ({"experts": experts()}, DENSE, "it has experts, the policy is dense"),
        (
            {"experts": experts(num_layers=3)},
            MOE,
            "each token has 3 layers of 2 experts, the policy routes in 2 layers",
        ),
        ({"experts": experts(top_k=1)}, MOE, "each token has 2 layers of 1 experts"),
        ({"experts": experts(largest=NUM_EXPERTS)}, MOE, f"experts holds expert {NUM_EXPERTS}"),
    ],
)
def test_rollouts_of_another_policy_are_refused_by_file_and_row(tmp_path, changes, config, reason):
    rollouts = [make_rollout(3), replace(make_rollout(3), **changes)]
    message = refusal(check_fits, tmp_path / "step.parquet", rollouts, config)
    assert message.startswith(f"{tmp_path / 'step.parquet'}: row 1 does not fit the policy ({reason}")


class Module:
    """What `check_shard` reads of a TRMModule."""

    def __init__(self, mask):
        from trm_repro.config import RunConfig

        self.policy = tiny_policy()
        self.config = RunConfig(mask=mask)


def test_an_exact_criterion_on_a_shard_of_sampled_log_probs_is_refused_and_an_estimated_one_is_not(tmp_path):
    from trm_repro.config_sections import MaskConfig

    rollouts = [replace(make_rollout(3), log_distribution=None)]
    exact = Module(MaskConfig(criterion="trm_max", max_estimator="exact"))
    message = refusal(mask_command.check_shard, tmp_path, rollouts, exact)
    assert (
        "mask.criterion=trm_max is exact and needs rollouts sampled with rollout.distribution=full, hidden or top_k"
        in message
    )
    mask_command.check_shard(tmp_path, rollouts, Module(MaskConfig(criterion="trm_max", max_estimator="k2")))
    mask_command.check_shard(tmp_path, [make_rollout(3)], exact)


@pytest.mark.parametrize(
    "changes",
    [{"policy_logprobs": [None]}, {"token_kl": [0.1, 0.2]}, {"update": -1}, {"token_kl": [None]}],
    ids=str,
)
def test_a_row_that_is_no_mask_is_named(tmp_path, changes):
    path = tmp_path / "masks.parquet"
    row = {"step": 0, "update": 0, "sequence_id": 0, "kept": True, "policy_logprobs": [-1.0], "token_kl": None}
    schema = MASK_SCHEMA.with_metadata({"trm_repro": '{"kind": "masks"}'})
    pq.write_table(pa.Table.from_pylist([row | changes], schema=schema), path)
    assert refusal(read_masks, path).startswith(f"{path}: row 0 is no mask (")


def write(path):
    write_masks(path, [MaskRow(update=0, sequence_id=0, kept=True, policy_logprobs=-torch.ones(1), token_kl=None)], 0)


def test_a_device_is_refused_and_stays_a_device(tmp_path):
    from pathlib import Path

    message = refusal(write, Path("/dev/full"))
    assert message == "/dev/full: is a device or pipe; expected the name of a file to write"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refusal(write, pipe)
    link = tmp_path / "link.parquet"
    link.symlink_to("/dev/null")
    refusal(write, link)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    assert link.is_symlink()


@pytest.mark.parametrize("name", ["", "."])
def test_a_folder_and_an_empty_path_are_refused(tmp_path, name):
    from pathlib import Path

    assert "is a folder; expected the name of a file" in refusal(write, tmp_path / name)
    assert refusal(write, Path(name)).startswith("'.' is a folder")


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "cannot be written (" in refusal(write, tmp_path / "file" / "masks.parquet")
    assert "is a file; expected a folder" in refusal(check_folder, tmp_path / "file" / "deeper")
    check_folder(tmp_path / "new" / "deeper")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


def test_files_that_differ_in_their_ending_share_no_partial_file(tmp_path, monkeypatch):
    written = []
    real = pq.ParquetWriter
    monkeypatch.setattr(pq, "ParquetWriter", lambda path, *args, **kw: written.append(path) or real(path, *args, **kw))
    write(tmp_path / "x.parquet")
    write(tmp_path / "x.json")
    assert len(set(written)) == 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.json", "x.parquet"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_half_written(tmp_path, monkeypatch, error):
    path = tmp_path / "masks.parquet"
    path.write_text("old")

    def fail(partial, schema, **kwargs):
        partial.write_text("half")
        raise error

    monkeypatch.setattr(pq, "ParquetWriter", fail)
    with pytest.raises(InputError if isinstance(error, OSError) else type(error)) as raised:
        write(path)
    if isinstance(error, OSError):
        expected = f"{path}: cannot be written (No space left on device); free the place or choose another"
        assert str(raised.value) == expected
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def checkpoint_of(policy):
    return {
        "epoch": 2,
        "state_dict": {f"policy.{name}": weight for name, weight in policy.state_dict().items()},
        "RolloutDataModule": {"snapshots": [(2, policy_weights(policy)), (3, policy_weights(policy))]},
    }


def test_a_sound_checkpoint_is_read_and_fits_its_policy(tmp_path):
    policy, path = tiny_policy(), tmp_path / "checkpoint.ckpt"
    torch.save(checkpoint_of(policy), path)
    checkpoint = read_checkpoint(path)
    assert checkpoint.num_steps == 3
    assert [version for version, _ in checkpoint.snapshots] == [2, 3]
    load_into(policy, checkpoint, path)


def damaged(name):
    good = checkpoint_of(tiny_policy())
    return {
        "bare tensor": torch.zeros(3),
        "number": 3,
        "list": [1, 2],
        "empty": {},
        "no snapshots": good | {"RolloutDataModule": {"snapshots": []}},
        "snapshots of numbers": good | {"RolloutDataModule": {"snapshots": [(1, {"a": 2})]}},
        "a snapshot without version": good | {"RolloutDataModule": {"snapshots": [{}]}},
        "weights of numbers": good | {"state_dict": {"policy.a": 1}},
        "epoch of text": good | {"epoch": "x"},
        "epoch before the first": good | {"epoch": -5},
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        "bare tensor",
        "number",
        "list",
        "empty",
        "no snapshots",
        "snapshots of numbers",
        "a snapshot without version",
        "weights of numbers",
        "epoch of text",
        "epoch before the first",
    ],
)
def test_a_file_that_is_no_checkpoint_is_named_with_what_to_do(tmp_path, name):
    path = tmp_path / "checkpoint.ckpt"
    torch.save(damaged(name), path)
    message = refusal(read_checkpoint, path)
    assert message.startswith(f"{path}: is damaged or no checkpoint of a run")
    assert "give another, or delete this file" in message


@pytest.mark.parametrize("kept", [0, 1, 2, 100, 0.3, 0.9, 0.999])
def test_a_checkpoint_cut_short_is_named_without_a_warning(tmp_path, kept):
    path = tmp_path / "checkpoint.ckpt"
    torch.save(checkpoint_of(tiny_policy()), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refusal(read_checkpoint, path)


@pytest.mark.parametrize(
    "content", [b"hello\n", b"\x80\x02K\x01.", b"\x80", b"cos\nsystem\n(S'true'\ntR.", b"PK\x03\x04"]
)
def test_a_pickle_and_other_bytes_are_refused_without_a_warning_or_their_execution(tmp_path, content):
    path = tmp_path / "checkpoint.ckpt"
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refusal(read_checkpoint, path)


def test_weights_of_another_architecture_are_refused_in_the_policy_and_in_the_snapshots(tmp_path):
    path, dense, moe = tmp_path / "checkpoint.ckpt", tiny_policy(), tiny_policy("moe")
    own, other = policy_weights(dense), policy_weights(moe)
    foreign = Checkpoint(num_steps=1, policy=moe.state_dict(), snapshots=[(0, other)])
    assert "does not fit the configured policy" in refusal(load_into, dense, foreign, path)
    mixed = Checkpoint(num_steps=1, policy=dense.state_dict(), snapshots=[(0, own), (1, other)])
    assert "weights of version 1 do not fit the configured policy (" in refusal(load_into, dense, mixed, path)
    narrow = own | {"model.norm.weight": torch.ones(5)}
    message = refusal(check_snapshots, dense.model, replace(mixed, snapshots=[(0, narrow)]), path)
    assert "(model.norm.weight is (5,) there and (32,) here)" in message


def test_a_wrong_weight_version_is_named_by_its_row(tmp_path):
    path = tmp_path / "step_00005.parquet"
    rollouts = [replace(make_rollout(3), weight_version=3), replace(make_rollout(3), weight_version=3)]
    check_versions(path, rollouts, 5, 2)
    check_versions(path, [replace(rollouts[0], weight_version=0)], 1, 4)  # the first steps use the oldest there are
    rollouts[1] = replace(rollouts[1], weight_version=4)
    message = refusal(check_versions, path, rollouts, 5, 2)
    assert message.startswith(f"{path}: row 1 was sampled from weight version 4, but step 5 with")
    assert "rollout.staleness_steps=2 samples from version 3" in message
