"""Controls end to end but for training: their files, what they read of the arm they copy, and when they may start."""

from pathlib import Path

import pytest

from pipelines.report import _final_scores
from pipelines.reproduce import Schedule, plan_runs
from pipelines.run_directory import RunDirectory
from pipelines.spool import MetricsSpool, SpoolEntry
from pipelines.tracking import Tracker
from pipelines.tracking_reader import read_experiment
from pipelines.training import reference_updates
from trm_repro.config import RunConfig, arm_names, load_arm, load_config
from trm_repro.errors import InputError
from trm_repro.steps import ReferenceUpdate

MASKING = (
    "trm_max_0.05",
    "trm_max_0.1",
    "trm_avg_0.001",
    "trm_avg_0.002",
    "trm_max_0.1_avg_0.002",
    "ln_trm_0.05",
    "ser_0.05",
)


@pytest.mark.parametrize("arm", MASKING)
@pytest.mark.parametrize(("kind", "criterion"), [("random", "random"), ("length", "length_matched")])
def test_every_masking_arm_of_the_paper_has_its_two_controls(arm, kind, criterion):
    mask = load_arm(f"{kind}_as_{arm}").mask
    assert (mask.criterion, mask.reference_arm) == (criterion, arm)


@pytest.mark.parametrize("arm", ["trm_max_0.05", "trm_avg_0.001"])
def test_a_variant_differs_from_its_arm_in_one_key(arm):
    base = load_arm(arm)
    baseline, denominator = load_arm(f"{arm}_kept_baseline"), load_arm(f"{arm}_kept_denominator")
    assert base.mask == baseline.mask == denominator.mask
    assert (base.loss.baseline, base.loss.denominator) == ("all", "all")
    assert (baseline.loss.baseline, baseline.loss.denominator) == ("kept", "all")
    assert (denominator.loss.baseline, denominator.loss.denominator) == ("all", "kept")


def test_controls_copy_arms_that_can_be_run():
    references = {load_arm(arm).mask.reference_arm for arm in arm_names()} - {None}
    assert references <= set(arm_names())


def test_an_arm_cannot_copy_itself():
    with pytest.raises(InputError, match=r"mask\.reference_arm must be another arm than its own"):
        load_arm("random_as_trm_avg_0.001", overrides=["mask.reference_arm=random_as_trm_avg_0.001"])


ARMS = ["length_as_trm_avg_0.001", "trm_avg_0.001"]
KEYS = ["num_steps=1", "policy.path=somewhere", "evaluation.length_operands=[2]"]


def settings(folder: Path) -> list[str]:
    return [*KEYS, f"output.dir={folder}", f"reproduce.arms=[{', '.join(ARMS)}]", "reproduce.seeds=[1, 2]"]


def runs_of(folder: Path) -> list[RunDirectory]:
    directories = plan_runs(load_config(overrides=settings(folder)), [], settings(folder))
    for directory in directories:
        directory.prepare()
    return directories


def finish(directory: RunDirectory, rejected_lengths: list[list[int]] | None) -> None:
    entry = SpoolEntry(step=1, kind="train", time=0.0, metrics={}, num_kept=[2, 1], rejected_lengths=rejected_lengths)
    MetricsSpool(directory.spool_file).append(entry)
    directory.finish()


def test_a_control_waits_for_its_arm_and_gets_what_it_did(tmp_path: Path):
    directories = {directory.name: directory for directory in runs_of(tmp_path)}
    schedule = Schedule(list(directories.values()))
    first, second = schedule.next_job(), schedule.next_job()
    assert first is not None
    assert second is not None
    assert [first[1].name, second[1].name] == ["trm_avg_0.001/seed_1", "trm_avg_0.001/seed_2"]
    assert schedule.next_job() is None
    finish(directories["trm_avg_0.001/seed_2"], [[7], [9, 31]])
    schedule.finish(second[0], second[1])
    third = schedule.next_job()
    assert third is not None
    assert third[1].name == "length_as_trm_avg_0.001/seed_2"
    assert reference_updates(third[0].config) == {
        0: [
            ReferenceUpdate(num_kept=2, rejected_lengths=(7,)),
            ReferenceUpdate(num_kept=1, rejected_lengths=(9, 31)),
        ]
    }


def test_lengths_are_measured_for_every_seed_once(tmp_path: Path):
    directories = runs_of(tmp_path)
    for directory in directories:
        finish(directory, [[], []])
    done = tmp_path / "figures" / "lengths" / "seed_2"
    done.mkdir(parents=True)
    (done / "table_2.md").write_text("measured", encoding="utf-8")
    schedule = Schedule(directories)
    job = schedule.next_job()
    assert job is not None
    assert (job[0].kind, job[1].name) == ("lengths", "length_as_trm_avg_0.001/seed_1")
    assert schedule.next_job() is None


def test_a_reference_recorded_without_lengths_serves_the_random_control_only(tmp_path: Path):
    finish(runs_of(tmp_path)[1], None)
    keys = [*KEYS, f"output.dir={tmp_path}", "seed=1"]
    random = reference_updates(load_arm("random_as_trm_avg_0.001", overrides=keys))
    assert random == {0: [ReferenceUpdate(num_kept=2), ReferenceUpdate(num_kept=1)]}
    with pytest.raises(InputError, match=r"without the lengths of rejected sequences.*run trm_avg_0\.001 again"):
        reference_updates(load_arm("length_as_trm_avg_0.001", overrides=keys))


def test_a_control_says_which_arm_has_to_be_run_first(tmp_path: Path):
    config = load_arm("length_as_trm_avg_0.001", overrides=[*KEYS, f"output.dir={tmp_path}"])
    with pytest.raises(InputError, match=r"run it first: trm-repro train --arm trm_avg_0\.001 seed=101"):
        reference_updates(config)


def test_the_last_score_of_every_held_out_problem_comes_back_from_mlflow(tmp_path: Path):
    config: RunConfig = load_config(overrides=[f"output.dir={tmp_path}"])
    directory = RunDirectory(config)
    directory.prepare()
    spool = MetricsSpool(directory.spool_file)
    for step, scores in ((0, [0.0, 1.0]), (9, [1.0, 1.0]), (10, [1.0, 0.0])):
        metrics = {"score/greedy": sum(scores) / 2}
        entry = SpoolEntry(
            step=step, kind="evaluate", time=1.0, metrics=metrics, problem_scores={"greedy": scores, "avg_at_k": [0.5]}
        )
        spool.append(entry)
    tracker = Tracker(config)
    parent = tracker.open_parent(config)
    tracker.open_run(directory, parent)
    tracker.replay(directory)
    tracker.close_run(directory, "KILLED")
    experiment, _ = read_experiment(config, ["score/greedy"])
    assert _final_scores(config, experiment) == {(config.arm, config.seed): [1.0, 0.0]}
