"""`trm-repro plan`: what it prints, and the settings it refuses."""

import json
from pathlib import Path

import pytest

from pipelines.cli import main

QWEN3_8B = [
    "policy.architecture=dense",
    "policy.hidden_size=4096",
    "policy.num_layers=36",
    "policy.num_attention_heads=32",
    "policy.num_key_value_heads=8",
    "policy.head_dim=128",
    "policy.intermediate_size=12288",
    "policy.vocab_size=151936",
    "policy.tie_word_embeddings=false",
    "policy.max_position_embeddings=32768",
    "rollout.num_prompts=32",
    "rollout.group_size=16",
    "rollout.max_prompt_tokens=1024",
    "rollout.max_response_tokens=8192",
    "rollout.kv_cache_bytes=30000000000",
    "rollout.distribution=sampled",
    "mask.max_estimator=k2",
    "update.optimizer=adamw",
    "trainer.devices=8",
    "rollout.placement=colocated",
    "trainer.activation_checkpointing=true",
]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *QWEN3_8B, *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_plan_of_the_8b_policy_adds_up(capsys: pytest.CaptureFixture[str]):
    code, printed, _ = plan(capsys, "--json", "--gpu", "h100-80gb", "--gpus", "8", "--mean-response", "4096")
    found = json.loads(printed)
    memory = found["memory_bytes_per_gpu"]
    assert code == 0
    assert found["model"]["parameters"] == 8_190_735_360
    streamed = 6 * 151_936 * 4096  # the largest weight on its way to the engine, in float32 and bfloat16
    assert memory["sampling"] == 12 * 8_190_735_360 / 8 + 2 * 8_190_735_360 + 30e9 + streamed
    assert found["step_seconds"] == pytest.approx(sum(stage["seconds"] for stage in found["stages"]))
    assert found["rollout_bytes_per_step"] == 512 * 4096 * 8
    assert found["rollout_bytes_kept"] == 6 * 512 * 4096 * 8  # steps 0, 10, ..., 50 of 60


def test_without_settings_it_plans_the_papers_run(capsys: pytest.CaptureFixture[str]):
    code = main(["plan", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (found["gpu"]["count"], found["model"]["parameters"]) == (8, 8_190_735_360)


def test_offloading_moves_twelve_to_sixteen_bytes_a_parameter_to_the_host(capsys: pytest.CaptureFixture[str]):
    _, printed, _ = plan(capsys, "--json", "rollout.staleness_steps=0")
    _, offloaded, _ = plan(
        capsys, "--json", "rollout.staleness_steps=0", "trainer.accelerator=gpu", "trainer.cpu_offload=true"
    )
    before, after = json.loads(printed), json.loads(offloaded)
    assert after["memory_bytes_per_gpu"]["masters"] == 0
    assert after["host_bytes"]["total"] - before["host_bytes"]["total"] == 16 * 8_190_735_360


def test_text_names_every_category_stage_and_assumption(capsys: pytest.CaptureFixture[str]):
    code, printed, _ = plan(capsys)
    assert code == 0
    for word in (
        "key value cache",
        "optimizer",
        "first machine",
        "snapshots",
        "rollout",
        "mask",
        "update",
        "Assumed",
        "Not measured on a GPU",
    ):
        assert word in printed


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--gpus", "1"], "use more GPUs"),
        (["--gpu", "l40s"], "lower rollout.kv_cache_bytes"),
        (["rollout.kv_cache_bytes=70000000000"], "lower rollout.kv_cache_bytes"),
        (["rollout.kv_cache_bytes=1000000000"], "holds less than one sequence"),
        (["update.tokens_per_micro_batch=400000"], "lower update.tokens_per_micro_batch"),
        (  # one sequence of 32,024 tokens is the least that a micro-batch holds
            ["rollout.max_response_tokens=31000", "trainer.activation_checkpointing=false"],
            "or set trainer.activation_checkpointing=true",
        ),
        (["--host-memory", "200"], "snapshots takes 196.6 GB: lower rollout.staleness_steps"),
        (["--host-memory", "nan"], "--host-memory must be a number of GB > 0"),
        (["--gpus", "0"], "--gpus must be >= 1"),
        (["--mean-response", "9000"], "at most rollout.max_response_tokens = 8192"),
        (["--training-efficiency", "nan"], "--training-efficiency must be in (0, 1]"),
        (["policy.vocab_size=null"], "policy.vocab_size is not set"),
    ],
)
def test_settings_that_cannot_run_are_refused_with_the_one_to_change(
    capsys: pytest.CaptureFixture[str], arguments: list[str], wanted: str
):
    code, printed, error = plan(capsys, *arguments)
    assert (code, printed) == (2, "")
    assert wanted in error
    assert error.count("\n") == 1


def test_shape_is_read_from_the_models_own_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 100,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    code, printed, _ = plan(capsys, f"policy.path={tmp_path}", "--json")
    found = json.loads(printed)["model"]
    assert code == 0
    assert (found["head_dim"], found["num_key_value_heads"], found["vocab_size"]) == (16, 4, 100)
    (tmp_path / "config.json").write_text("{}")
    code, _, error = plan(capsys, f"policy.path={tmp_path}")
    assert code == 2
    assert "no configuration of a decoder model" in error


@pytest.mark.parametrize("value", [0, -1, 10**30, 10**400])
@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size", "head_dim"])
def test_a_size_that_no_model_has_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: int):
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    if name == "head_dim" and value == 0:
        value = -2  # 0 stands for none
    (tmp_path / "config.json").write_text(json.dumps(shape | {"vocab_size": 100, name: value}))
    code, printed, error = plan(capsys, f"policy.path={tmp_path}")
    assert (code, printed, error.count("\n")) == (2, "", 1)
    assert "must be >= 1 and at most 1e+13" in error


@pytest.mark.parametrize(
    ("argument", "wanted"),
    [
        ("--mean-response=0", "--mean-response must be > 0"),
        ("--mean-prompt=0", "--mean-prompt must be > 0"),
        ("num_steps=" + "9" * 400, "num_steps must be >= 1 and at most"),
    ],
)
def test_a_length_of_0_is_not_taken_for_none(capsys: pytest.CaptureFixture[str], argument: str, wanted: str):
    code, printed, error = plan(capsys, argument)
    assert (code, printed) == (2, "")
    assert wanted in error
