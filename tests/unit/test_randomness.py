"""The record of a run's seeds: complete, and by its own rule."""

import ast
import hashlib
from pathlib import Path

from trm_repro.config import RunConfig
from trm_repro.randomness import SOURCES, seed_record

ROOT = Path(__file__).resolve().parents[2]


def labels_in_use() -> set[str]:
    """First labels of every call of `derive_seed` in the project."""
    found = set()
    for folder in ("trm_repro", "evaluation", "pipelines"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                is_call = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "derive_seed"
                if is_call and isinstance(node.args[1], ast.Constant):
                    found.add(node.args[1].value)
    return found


def test_every_source_of_randomness_is_on_record():
    assert labels_in_use() == {source.label for source in SOURCES}


def test_generators_are_seeded_by_derived_seeds_or_numbers_from_the_configuration():
    """A generator without a seed would be a source that nobody recorded."""
    unseeded = []
    for folder in ("trm_repro", "evaluation", "pipelines"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                if is_method and not isinstance(node.func.value, ast.Call):
                    makes = node.func.attr in ("Random", "default_rng", "RandomState") and not node.args
                    draws = ast.unparse(node.func).startswith(("random.", "np.random.")) and node.func.attr in (
                        *("random", "randint", "choice", "shuffle", "sample", "uniform", "normal", "seed"),
                    )
                    if makes or draws:
                        unseeded.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert unseeded == []


def test_seeds_follow_from_the_rule_that_is_written_beside_them():
    record = seed_record(RunConfig(seed=7, num_steps=3))
    assert record["seed"] == 7
    sources = record["sources"]

    def by_the_rule(text: str) -> int:
        return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) // 2

    assert sources["initial weights"]["seed"] == by_the_rule("7/initial weights")
    assert sources["rollout"]["seeds"] == [by_the_rule(f"7/rollout/{step}/0/0") for step in range(3)]
    assert sources["minibatches"]["seeds"] == [by_the_rule(f"7/minibatches/{step}/0") for step in range(3)]
    assert sources["evaluation"]["seeds"] == [by_the_rule(f"7/evaluation/{step}") for step in range(4)]
    assert sources["probe"]["seed"] == by_the_rule("0/probe")  # the same in every run
    assert "seed" not in sources["score"]


def test_runs_with_different_seeds_share_no_seed_but_the_probes():
    first, second = (seed_record(RunConfig(seed=seed, num_steps=5))["sources"] for seed in (1, 2))
    for label, source in first.items():
        if "seed" in source:
            assert (source["seed"] == second[label]["seed"]) == label.startswith("probe")
        for seed, other in zip(source.get("seeds", []), second[label].get("seeds", []), strict=True):
            assert seed != other
