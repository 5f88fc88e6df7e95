"""Keys of trainer and placement: what goes together, what changes a run, and which checkpoint a run goes on from."""

from pathlib import Path

import pytest

from pipelines.launch import check_launch
from pipelines.run_directory import RunDirectory
from trm_repro.config import CONF_DIR, load_config
from trm_repro.errors import InputError


@pytest.mark.parametrize(
    ("overrides", "is_sharded"),
    [
        ([], False),
        (["trainer.strategy=fsdp2"], True),
        (["trainer.compute_dtype=bfloat16"], True),
        (["trainer.devices=2", "rollout.engine=transformers"], True),
        (["trainer.num_nodes=2", "rollout.placement=colocated"], True),
    ],
)
def test_the_policy_is_sharded_where_one_plain_process_cannot_hold_it(overrides, is_sharded):
    assert load_config([], overrides).trainer.is_sharded == is_sharded


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.devices=2"], "rollout.placement must be colocated or server"),
        (["trainer.devices=3", "rollout.engine=transformers"], "a divisor of the 32 sequences of an update, got 3"),
        (["trainer.attention=flash_attention_2"], "trainer.attention must be sdpa or eager unless"),
        (["trainer.cpu_offload=true"], "trainer.cpu_offload must be false unless trainer.accelerator=gpu"),
        (["rollout.overlap=true"], "rollout.overlap must be false unless rollout.placement=server"),
        (
            ["rollout.overlap=true", "rollout.placement=server", "rollout.staleness_steps=0"],
            "rollout.overlap must be false unless",
        ),
        (["rollout.placement=server", "rollout.engine=transformers"], "rollout.placement must be in_process"),
        (["rollout.placement=server", "rollout.distribution=hidden"], "carries no hidden states"),
        (["rollout.server_urls=[localhost]"], "rollout.server_urls must be http:// or https:// URLs"),
        (["rollout.server_urls=[http://user:hunter2@host]"], "must be URLs without user, password and query$"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(overrides, message):
    with pytest.raises(InputError, match=message):
        load_config([], overrides)


def test_the_papers_configuration_has_the_papers_values():
    config = load_config([CONF_DIR / "paper.yaml"])
    assert config.policy.path == "Qwen/Qwen3-8B-Base"
    assert (config.rollout.num_prompts, config.rollout.group_size) == (32, 16)
    assert config.update.learning_rate == 1e-6
    evaluation = config.evaluation
    assert (evaluation.num_samples, evaluation.temperature, evaluation.top_p) == (32, 1.0, 0.95)
    assert config.loss.length_normalizer == 1
    assert config.trainer.is_sharded


def test_a_run_goes_on_with_another_number_of_processes_but_not_with_another_arithmetic(tmp_path: Path):
    common = [f"output.dir={tmp_path}", "trainer.strategy=fsdp2"]
    RunDirectory(load_config([], common)).prepare()
    two = ["trainer.devices=2", "rollout.placement=colocated", "trainer.activation_checkpointing=true"]
    RunDirectory(load_config([], [*common, *two])).prepare()
    with pytest.raises(InputError, match=r"trainer.packing is False there and True here"):
        RunDirectory(load_config([], [*common, "trainer.packing=true"])).prepare()


def test_a_launcher_that_started_another_number_of_processes_is_told(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    config = load_config([], ["trainer.devices=2", "rollout.placement=colocated"])
    with pytest.raises(InputError, match=r"4 processes were started, but trainer\.num_nodes \* trainer\.devices = 2"):
        check_launch(config)
