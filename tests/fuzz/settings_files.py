"""Readers of what a user writes: configurations, studies, and the configuration of a model."""

import json
import string
from functools import cache
from typing import Any

import yaml
from hypothesis import strategies as st

from pipelines.plan import _shape_of_file
from pipelines.study_plan import read_study
from tests.fuzz.damage import changed_rows, damaged, json_values
from tests.fuzz.reading import Target, first, json_files, refused, written
from trm_repro.config import CONF_DIR, RunConfig, load_config, to_yaml


@cache
def _config_keys() -> list[str]:
    plain = yaml.safe_load(to_yaml(RunConfig()))
    return [*plain, *(f"{section}.{key}" for section, keys in plain.items() if isinstance(keys, dict) for key in keys)]


def check_config_file(content: bytes) -> None:
    config = refused(lambda: load_config([written("config.yaml", content)]))
    if config is not None:
        assert load_config([written("again.yaml", to_yaml(config).encode())]) == config


def check_settings(settings: list[str]) -> None:
    config = refused(lambda: load_config((), settings))
    if config is not None:
        assert load_config([written("again.yaml", to_yaml(config).encode())]) == config


def check_study(content: bytes) -> None:
    refused(lambda: read_study(written("study.yaml", content)))


def _yaml(value: Any) -> bytes:
    return yaml.safe_dump(value, allow_unicode=True).encode(errors="replace")


SMOKE = (CONF_DIR / "smoke.yaml").read_bytes()
STUDY = {
    "settings": ["num_steps=2"],
    "cells": [
        {
            "name": "one",
            "stage": "confirm",
            "arms": ["ppo_clip", "trm_avg_0.001"],
            "seeds": [1, 2],
            "settings": ["seed=3"],
            "hypotheses": [{"text": "a", "parts": [{"quantity": "final_score", "arm": "ppo_clip", "threshold": 0.1}]}],
        }
    ],
}
config_files = st.one_of(
    damaged(SMOKE),
    st.dictionaries(st.sampled_from(_config_keys()), json_values, max_size=4).map(_yaml),
    st.dictionaries(
        st.sampled_from(["rollout", "mask", "task", "update"]),
        st.dictionaries(st.sampled_from([key.rpartition(".")[2] for key in _config_keys()]), json_values, max_size=3),
        max_size=3,
    ).map(_yaml),
    st.text(string.printable, max_size=200).map(str.encode),
)
settings = st.lists(
    st.one_of(
        st.builds("{}={}".format, st.sampled_from(_config_keys()), json_values.map(json.dumps)),
        st.builds("{}={}".format, st.sampled_from(_config_keys()), st.text(max_size=20)),
        st.text(max_size=30),
    ),
    min_size=1,
    max_size=3,
)
studies = st.one_of(
    damaged(_yaml(STUDY)),
    st.builds(lambda cells: _yaml(STUDY | {"cells": cells}), changed_rows(STUDY["cells"])),
    json_values.map(_yaml),
)


MODEL = {
    "model_type": "qwen3",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 19,
    "num_experts": 4,
    "moe_intermediate_size": 4,
}


def check_model(content: bytes) -> None:
    shape = refused(lambda: _shape_of_file(written("config.json", content)))
    assert shape is None or shape.num_experts >= 1


TARGETS = {
    "config_file": Target(config_files, check_config_file, cost=4),
    "settings": Target(settings, check_settings),
    "study": Target(studies, check_study),
    "model": Target(json_files([MODEL]).map(first), check_model),
}
