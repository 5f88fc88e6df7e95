"""Configuration: defaults, merging, ranges, and errors that say how to mend them."""

import math
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml

from pipelines.config import config_text
from trm_repro.config import CONF_DIR, RunConfig, arm_names, derive_seed, load_arm, load_config, to_yaml
from trm_repro.config_sections import LossName
from trm_repro.errors import InputError
from trm_repro.gate_specs import GATE_SPECS
from trm_repro.losses import OBJECTIVES
from trm_repro.steps import CRITERIA

ALL_FILES = sorted(path for path in CONF_DIR.rglob("*.yaml") if path.name != "study.yaml")
PAPER_ARMS = {
    "token_is",
    "ppo_clip",
    "trm_max_0.05",
    "trm_avg_0.001",
    "trm_max_0.1",
    "trm_avg_0.002",
    "trm_max_0.1_avg_0.002",
    "random_as_trm_avg_0.001",
}


def all_leaf_keys(values: dict, prefix: str = "") -> set[str]:
    keys = set()
    for key, value in values.items():
        keys |= all_leaf_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}"}
    return keys


def test_miniature_file_is_what_the_config_command_prints():
    written = (CONF_DIR / "miniature.yaml").read_text()
    assert written == config_text(RunConfig()), "run: trm-repro config > conf/miniature.yaml"
    assert load_config([CONF_DIR / "miniature.yaml"]) == RunConfig()
    assert all_leaf_keys(yaml.safe_load(written)) == all_leaf_keys(yaml.safe_load(to_yaml(RunConfig())))


def test_config_command_writes_names_that_yaml_would_read_as_something_else(tmp_path: Path):
    config = load_config([], ["tracking.experiment='1e3: # yes'", "evaluation.length_operands=[]", "arm=off"])
    (tmp_path / "written.yaml").write_text(config_text(config))
    assert load_config([tmp_path / "written.yaml"]) == config


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda path: str(path.relative_to(CONF_DIR)))
def test_every_file_in_conf_loads(path: Path):
    assert isinstance(load_config([path]), RunConfig)


@pytest.mark.parametrize("name", sorted(PAPER_ARMS))
def test_arm_file_names_its_own_arm_and_holds_only_what_differs(name: str):
    written = yaml.safe_load((CONF_DIR / "arms" / f"{name}.yaml").read_text())
    assert written.pop("arm") == name
    assert set(written) <= {"mask", "loss"}


def test_every_arm_of_the_paper_and_its_control_is_there():
    assert set(arm_names()) >= PAPER_ARMS


def test_arm_thresholds_are_the_papers():
    assert load_arm("trm_max_0.05").mask.max_threshold == 0.05
    assert load_arm("trm_max_0.1_avg_0.002").mask.max_threshold == 0.1
    assert load_arm("trm_max_0.1_avg_0.002").mask.avg_threshold == 0.002
    assert load_arm("trm_avg_0.002").mask.avg_threshold == 0.002


def test_command_line_wins_over_arm_and_arm_over_files(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text("mask: {criterion: trm_max, max_threshold: 0.7}\nnum_steps: 7\n")
    config = load_arm("trm_avg_0.002", [file], ["mask.avg_threshold=0.5"])
    assert (config.mask.criterion, config.mask.avg_threshold, config.mask.max_threshold) == ("trm_avg", 0.5, 0.7)
    assert config.num_steps == 7


def test_written_configuration_reads_back_equal(tmp_path: Path):
    config = load_arm("random_as_trm_avg_0.001", overrides=["update.learning_rate=1e-6", "reproduce.seeds=[3,4]"])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert load_config([file]) == config


def test_scientific_notation_is_a_number():
    assert load_config(overrides=["update.learning_rate=1e-6"]).update.learning_rate == 1e-6


def test_choices_are_those_of_the_dispatch_tables():
    assert set(GATE_SPECS) == set(CRITERIA)
    assert set(get_args(LossName)) == set(OBJECTIVES)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("update.learning_rat=1", "did you mean 'update.learning_rate'"),
        ("learning_rate=1", "did you mean 'update.learning_rate'"),
        ("update.learning_rate=-1", "update.learning_rate must be >= 0"),
        ("update.learning_rate=nan", "update.learning_rate must be >= 0"),
        ("update.learning_rate=fast", "update.learning_rate"),
        ("update.max_gradient_norm=0", "must be > 0"),
        ("update.num_updates_per_rollout=3", "divisor of the 128 sequences"),
        ("rollout.engine=sglang", "expected one of ['vllm', 'transformers']"),
        ("rollout.top_p=0.9", "rollout.top_p must be 1 in training"),
        ("rollout.staleness_steps=-1", "rollout.staleness_steps must be >= 0"),
        ("rollout.group_size=1", "rollout.group_size must be >= 2"),
        ("rollout.probe_factor=10", "rollout.probe_factor must be in (1, 10)"),
        ("mask.criterion=random", "mask.reference_arm must be an arm's name"),
        ("mask.max_threshold=0", "mask.max_threshold must be > 0"),
        ("mask.avg_threshold=nan", "mask.avg_threshold must be > 0"),
        ("task.min_operands=1", "task.min_operands must be >= 2"),
        ("task.max_operands=7", "task.max_operands must be between task.min_operands = 8"),
        ("policy.num_experts_per_token=9", "between 1 and policy.num_experts = 8"),
        ("policy.num_key_value_heads=3", "a multiple of policy.num_key_value_heads = 3"),
        ("warm_start.target_pass_rate=1.5", "in (0, 1]"),
        ("evaluation.top_p=0", "in (0, 1]"),
        ("reproduce.seeds=[1,1]", "without repeats"),
        ("reproduce.arms=[]", "at least one arm"),
        ("arm=../x", "arm must be letters"),
        ("num_steps=0", "num_steps must be >= 1"),
        ("num_steps=1.5", "num_steps"),
        ("seed=" + "9" * 400, "seed must be >= 0 and at most"),
        ("rollout.stop_tokens=['']", "rollout.stop_tokens must be a list of texts that are not empty"),
        ("rollout.stop_tokens=[[1]]", "rollout.stop_tokens must be a list of texts"),
        ("reproduce.hypotheses=[[1]]", "reproduce.hypotheses must be a list of texts"),
        ("seed=-1", "seed must be >= 0"),
        ("output.dir=", "output.dir"),
        ("tracking.uri=${oc.env:HOME}", "not supported"),
        ("num_steps", "expected key=value"),
        ("=3", "expected key=value"),
        ("rollout=3", "rollout"),
        ("num_steps=[", "not valid YAML"),
        ("reproduce.arms={}", "reproduce.arms"),
        ("reproduce.seeds[0]=5", "reproduce.seeds"),
        ("reproduce.seeds=[1.5]", "reproduce.seeds"),
        ("mask.reference_arm=x/../y", "mask.reference_arm must be letters"),
        ("rollout.staleness_steps=99999999999999999999", "rollout.staleness_steps"),
        ("num_threads=99999999999999999999", "num_threads must be between 1 and 1024"),
        ("policy.hidden_size=10000000000", "policy.hidden_size must be at most"),
        ("policy.head_dim=3", "policy.head_dim must be even"),
        ("policy.max_position_embeddings=10", "policy.max_position_embeddings must be >= 122"),
        ("update.learning_rate=1e30", "update.learning_rate must be >= 0 and at most"),
        ("loss.length_normalizer=1e-300", "loss.length_normalizer must be > 0"),
        ("seed=???", "seed=??? is no value"),
        ("rollout.overlap=1", "rollout.overlap: expected true or false, got 1"),
        ("rollout.overlap=0", "rollout.overlap: expected true or false, got 0"),
        ("trainer.packing='true'", "trainer.packing: expected true or false, got 'true'"),
        ("num_steps=true", "num_steps"),
        ("name=" + "x" * 400, "name must be letters"),
        ('output.dir="a\\0b"', "output.dir must be a path of printable text"),
    ],
)
def test_wrong_override_is_refused_in_one_line_that_names_it(override: str, said: str):
    with pytest.raises(InputError) as raised:
        load_config(overrides=[override])
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_exact_mask_needs_full_distributions():
    with pytest.raises(InputError, match=r"rollout\.distribution must be full"):
        load_arm("trm_max_0.05", overrides=["rollout.distribution=sampled"])
    assert load_arm("trm_max_0.05", overrides=["rollout.distribution=sampled", "mask.max_estimator=k2"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"- 1\n- 2\n", "expected a mapping"),
        (b"a: [", "not valid YAML"),
        (b"\xff\xfe\x00", "cannot be read as UTF-8"),
        (b"num_step: 3\n", "did you mean 'num_steps'"),
        (b"update: 3\n", "update"),
        (b"5\n", "expected a mapping"),
        (b"num_steps: 3\nnum_steps: 4\n", "line 2"),
        (b"a:\tb\n\tc", "line"),
        (b"policy: {tie_word_embeddings: 1}\n", "policy.tie_word_embeddings: expected true or false, got 1"),
    ],
)
def test_wrong_file_is_refused_with_its_name(tmp_path: Path, content: bytes, said: str):
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    with pytest.raises(InputError) as raised:
        load_config([file])
    assert said in str(raised.value)
    assert str(file) in str(raised.value)


def test_missing_file_and_unknown_arm_are_refused():
    with pytest.raises(InputError, match=r"nowhere\.yaml: no such configuration file"):
        load_config(["nowhere.yaml"])
    with pytest.raises(InputError, match=r"did you mean 'trm_avg_0\.001'"):
        load_arm("trm_avg_0.01")


def test_derived_seeds_differ_by_use_and_repeat():
    seeds = [derive_seed(seed, "rollout", step) for seed in range(20) for step in range(200)]
    assert len(set(seeds)) == len(seeds)
    assert derive_seed(7, "rollout", 3) == derive_seed(7, "rollout", 3)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert not math.isclose(derive_seed(7, "a"), derive_seed(7, "b"))


def test_configuration_loads_without_torch():
    code = "import sys, trm_repro.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
