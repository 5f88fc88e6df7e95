"""`benchmarks.training_step`: that all systems are given the same work, and how goals follow from rows."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from benchmarks import training_step
from benchmarks.peers import ours
from benchmarks.peers.work import share_of_digits
from benchmarks.training_step import SYSTEMS, Case, cases, hear, share_goals, summarise, trl_goals
from trm_repro.config import load_config
from trm_repro.stage_clock import StageClock


def row(system: str, workers: int, tokens: int, *, distribution: str = "sampled", **stages: float) -> dict[str, Any]:
    return {
        "model": "miniature",
        "system": system,
        "rollout log-probs": distribution,
        "workers": workers,
        "tokens/s": tokens,
        "seconds a step": 2.0,
        "stages": stages,
    }


@pytest.fixture(autouse=True)
def _has_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_step, "has_trl", lambda: True)


def listed(**options: bool) -> list[Case]:
    return list(cases(Path("small"), Path("large"), **{"quick": False, **options}))


def test_every_system_is_given_the_same_model_responses_updates_and_threads():
    for name, num_tokens in {"miniature": 128 * 63, "model": 64 * 256}.items():
        mine = [case for case in listed() if case.name == name]
        assert {case.system for case in mine} == set(SYSTEMS)
        assert {(case.work.model, case.work.num_tokens, case.work.num_updates) for case in mine} == {
            (Path("small" if name == "miniature" else "large"), num_tokens, 4)
        }
        assert {case.num_workers * case.work.num_threads for case in mine} == {2}
        for system in SYSTEMS:
            numbers = {case.num_workers for case in mine if case.system == system}
            assert numbers == ({1, 2} if name == "miniature" else {1})


def test_without_trl_ours_is_still_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training_step, "has_trl", lambda: False)
    assert {case.system for case in listed()} == {"ours"}


def test_rows_have_labels_of_their_own():
    labels = [case.label for case in listed()]
    assert len(set(labels)) == len(labels)


def test_every_command_line_of_ours_is_a_configuration_that_keeps_all_and_samples_on_policy():
    for case in listed():
        if case.system == "ours":
            config = load_config([], ours.arguments(case.work)[1:])
            assert config.mask.criterion == "trm_max_avg"
            assert config.mask.max_threshold == config.mask.avg_threshold == 1e6
            assert config.rollout.staleness_steps == 0
            assert config.rollout.num_prompts * config.rollout.group_size == case.work.num_sequences
            assert config.rollout.distribution == case.distribution
            assert config.mask.max_estimator == ("k2" if case.distribution == "sampled" else "exact")


def test_a_system_is_judged_by_the_number_of_workers_that_suits_it_best():
    rows = [
        row("ours", 1, 900),
        row("ours", 2, 3000),
        row("ours", 2, 9999, distribution="full"),  # TRL keeps no distributions
        row("TRL, vLLM", 1, 1500),
        row("TRL, vLLM", 2, 1000),
    ]
    assert [(found["goal"], found["value"], found["met"]) for found in trl_goals(rows)] == [
        ("miniature: tokens/s over TRL, vLLM", 2.0, True)
    ]


def test_shares_are_of_the_whole_step_and_state_the_scoring_pass_probe_and_checkpoint_apart():
    stages = {"sync": 0.3, "sync: probe": 0.2, "record": 0.06, "record: checkpoint": 0.02}
    rows = [
        row("ours", 2, 1, mask=0.21, **{"mask: scoring": 0.2}, **stages),
        row("ours", 2, 1, distribution="full", mask=0.26, **{"mask: scoring": 0.25}, **stages),
        row("ours", 1, 1, mask=9.0, **{"mask: scoring": 9.0}, **stages),
        row("TRL, vLLM", 2, 1),
    ]
    goals = {str(found["goal"]): (found["value"], found["limit"]) for found in share_goals(rows)}
    expected = {
        "miniature, sampled: share of mask": (0.105, 0.01),
        "miniature, sampled: share of mask beyond scoring": (0.005, 0.01),
        "miniature, sampled: share of sync, probe apart": (0.05, 0.05),
        "miniature, sampled: share of record, checkpoint apart": (0.02, 0.01),
        "miniature, full: share of mask": (0.13, 0.05),
        "miniature, full: share of mask beyond scoring": (0.03, 0.05),
        "miniature, full: share of sync, probe apart": (0.05, 0.05),
        "miniature, full: share of record, checkpoint apart": (0.02, 0.01),
    }
    assert goals.keys() == expected.keys()
    for name, values in expected.items():
        assert goals[name] == pytest.approx(values)


def test_tokens_per_second_are_those_of_all_workers_at_the_median_step():
    case = next(case for case in listed() if case.system == "ours" and case.num_workers == 2)
    steps = [{"wall": wall, "processor": 1.0, "stages": {"mask": wall}} for wall in (2.0, 4.0, 100.0)]
    steps[2]["stages"] = {"mask": 1.0, "control": 1.0}
    found = summarise(case, steps)
    assert found["seconds a step"] == 4.0
    assert found["tokens/s"] == 2 * 128 * 63 / 4
    assert found["stages"] == {"mask": 2.0, "control": 0.0}


def test_a_worker_that_ends_is_named_with_the_end_of_its_log(tmp_path: Path):
    case = listed()[0]
    (tmp_path / f"{case.label}_0").mkdir()
    (tmp_path / f"{case.label}_0" / "log").write_text("what went wrong\n")
    ours_end, theirs = multiprocessing.Pipe()
    theirs.close()
    with pytest.raises(SystemExit, match=r"miniature_ours_sampled_1: a worker ended\nwhat went wrong"):
        hear(ours_end, case, tmp_path)


def test_what_is_timed_within_a_stage_is_there_and_is_put_back():
    clock = StageClock()
    import trm_repro.datamodule

    before = trm_repro.datamodule.write_rollouts
    for place, name in ours.WITHIN.items():
        with ours.timed(clock, place, name):
            pass
    with ours.timed(clock, "trm_repro.datamodule:write_rollouts", "shard"), pytest.raises(TypeError):
        trm_repro.datamodule.write_rollouts()
    assert list(clock.take()[0]) == ["shard"]
    assert trm_repro.datamodule.write_rollouts is before


def test_the_reward_is_the_share_of_digits():
    assert share_of_digits("4+8=2;") == 0.5
    assert share_of_digits("") == 0.0
