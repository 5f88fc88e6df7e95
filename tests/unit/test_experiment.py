import dataclasses

import pytest

from evaluation.experiment import ExperimentRecord, RunRecord, differing_settings, find_warnings

ARM_SETTINGS = frozenset({"mask.criterion"})


def run(arm="a", seed=1, **changes):
    settings = {"num_steps": "4", "seed": str(seed), "mask.criterion": arm, "update.learning_rate": "0.5"}
    values = {
        "run_id": f"{arm}-{seed}",
        "name": f"{arm}/seed_{seed}",
        "arm": arm,
        "seed": seed,
        "num_steps": 4,
        "git_commit": "c" * 40,
        "settings": settings | changes.pop("settings", {}),
        "environment": {"torch": "2"},
    }
    return RunRecord(**values | changes)


GOOD = (run("a", 1), run("a", 2), run("b", 1), run("b", 2))


def warnings_of(runs, **changes):
    record = ExperimentRecord(
        parent=run("", -1),
        runs=runs,
        planned=[(arm, seed) for arm in ("a", "b") for seed in (1, 2)],
        arm_settings=ARM_SETTINGS,
        command="",
        source="",
    )
    return find_warnings(dataclasses.replace(record, **changes))


def test_runs_as_they_were_meant_to_be_make_no_warning():
    assert warnings_of(GOOD) == []


def with_last(**changes):
    return (*GOOD[:3], run("b", 2, **changes))


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        (GOOD[:3], ["1 of 4 planned runs are missing: b, seed 2."]),
        (with_last(status="FAILED"), ["1 of 4 runs failed; what they logged is used: b, seed 2."]),
        (with_last(status="KILLED"), ["1 of 4 runs were killed; what they logged is used: b, seed 2."]),
        (
            with_last(status="RUNNING"),
            ["1 of 4 runs are still running, or died without a word; what they logged is used: b, seed 2."],
        ),
        (
            with_last(num_steps=3),
            [
                "1 of 4 runs are cut short: b, seed 2 (3 of 4 steps).",
                "Runs have 3 to 4 steps; claims that compare unequal ones are undecided.",
            ],
        ),
        ((*GOOD, run("b", 2)), ["Several runs have the same arm and seed: b, seed 2."]),
        (with_last(git_commit="d" * 40), [f"Runs come from 2 commits: {'c' * 12}, {'d' * 12}."]),
        (with_last(environment={"torch": "3"}), ["Runs were made in different environments; these differ: torch."]),
        (
            with_last(settings={"update.learning_rate": "0.1"}),
            ["update.learning_rate differs between seeds of b: 0.1, 0.5."],
        ),
        (
            (*GOOD[:2], *(run("b", seed, settings={"update.learning_rate": "0.1"}) for seed in (1, 2))),
            ["update.learning_rate differs between arms, though no arm is defined by it: 0.1, 0.5."],
        ),
        (with_last(settings={"mask.criterion": "a"}), ["mask.criterion differs between seeds of b: a, b."]),
    ],
)
def test_what_is_wrong_with_the_runs_is_said(runs, expected):
    assert warnings_of(runs) == expected


def test_a_commit_that_does_not_say_what_was_run_is_named():
    dirty = [dataclasses.replace(r, git_commit="c" * 40 + "-dirty") for r in GOOD]
    assert warnings_of(dirty) == [
        "Some runs come from files that differed from their commit (-dirty), which alone does not repeat them."
    ]
    unknown = [dataclasses.replace(r, git_commit="unknown") for r in GOOD]
    assert warnings_of(unknown) == ["The commit of some runs is unknown."]


def test_settings_that_may_differ_are_not_compared():
    runs = [run("a", seed, settings={"output.dir": f"d{seed}", "name": f"n{seed}"}) for seed in (1, 2)]
    assert differing_settings(runs) == {}


def test_settings_that_differ_are_listed_with_the_arms_that_have_them():
    assert differing_settings(GOOD) == {"mask.criterion": {"a": {"a"}, "b": {"b"}}}


def test_many_names_are_cut():
    planned = [("a", seed) for seed in range(1, 30)]
    (warning,) = warnings_of(GOOD[:2], planned=planned)
    assert warning.startswith("27 of 29 planned runs are missing: a, seed 3, ")
    assert warning.endswith("and 15 more.")
