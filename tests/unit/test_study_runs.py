"""The runs of a study from its CSV files, and what is derived from their curves."""

import dataclasses
import math

import pandas as pd
import pytest

from evaluation.outcomes import ACCEPTANCE, GAP, SCORE
from evaluation.study_runs import (
    POINT_COLUMNS,
    RUN_COLUMNS,
    Setting,
    StudyRun,
    cells_of,
    effective_step,
    other_settings,
    study_runs,
)
from tests.unit.test_outcomes import outcome

SETTING = Setting(optimizer="sgd", learning_rate=0.5, staleness_steps=4, precision="bfloat16", max_operands=14)


def study_run(
    *, arm="a", seed=1, cell="c", stage="screen", gaps=(0.01,), collapse_step=None, can_say=True, final=0.4, rate=0.5
):
    return StudyRun(
        cell=cell,
        stage=stage,
        setting=dataclasses.replace(SETTING, learning_rate=rate),
        outcome=outcome(
            arm,
            seed=seed,
            final=final,
            has_collapsed=collapse_step is not None if can_say else None,
            collapse_step=collapse_step,
        ),
        curves={
            GAP: list(enumerate(gaps, start=1)),
            SCORE: [(0, 0.4), (len(gaps), final)],
            ACCEPTANCE: [(step, 1.0) for step in range(1, len(gaps) + 1)],
            "rollout/response_length_mean": [(1, 60.0)],
        },
        effective_step=0.1,
        response_length=60.0,
        bound=2.0,
        bound_below_one=0.0,
        guarantee_fraction=0.0,
    )


def frames(**changes):
    row = dict.fromkeys(RUN_COLUMNS, 1) | {
        "cell": "c",
        "stage": "screen",
        "arm": "a",
        "seed": 3,
        "optimizer": "sgd",
        "learning_rate": 0.5,
        "precision": "bfloat16",
        "max_gradient_norm": 1.0,
        "num_updates_per_rollout": 4,
        "settings": "",
    }
    points = [dict.fromkeys(POINT_COLUMNS) | {"cell": "c", "arm": "a", "seed": 3, "step": step} for step in (0, 1, 2)]
    points[0] |= {SCORE: 0.8}
    points[1] |= {GAP: 0.1, "train/learning_rate": 0.5, "train/gradient_norm_mean": 2.0, "bounds/unified_sharp": 0.5}
    points[2] |= {
        SCORE: 0.6,
        GAP: 0.2,
        "train/learning_rate": 0.5,
        "train/gradient_norm_mean": 0.4,
        "train/num_skipped_updates": 2.0,
        "bounds/unified_sharp": 3.0,
        "bounds/surrogate": 4.0,
    }
    table = pd.DataFrame(points, columns=list(POINT_COLUMNS))
    values = [name for name in POINT_COLUMNS if name not in ("cell", "arm", "seed", "step")]
    return pd.DataFrame([row | changes]), table.astype(dict.fromkeys(values, float))


def test_a_run_is_read_from_both_files():
    (run,) = study_runs(*frames())
    assert (run.outcome.start_score, run.outcome.final_score, run.outcome.num_steps) == (0.8, 0.6, 2)
    assert run.setting.surroundings == "sgd, weights 1 steps old, bfloat16"
    assert run.curves[GAP] == [(1, 0.1), (2, 0.2)]
    assert run.bound == 1.75
    assert run.bound_below_one == 0.5
    assert run.guarantee_fraction == 1.0  # of the one step that has both
    # Step 1: 0.5 x 1 (clipped). Step 2: two of four updates, of norm 0.4 x 4 / 2, move 0.5 x 0.8.
    assert run.effective_step == pytest.approx((0.5 + 0.5 * 0.8 * 0.5) / 2)


def test_adamw_has_no_step_length_here():
    (run,) = study_runs(*frames(optimizer="adamw"))
    assert math.isnan(run.effective_step)


def test_unfinished_runs_are_left_out():
    assert study_runs(*frames(is_finished=0)) == []


def test_a_step_that_control_undid_or_that_was_skipped_has_no_length():
    curves = {
        "train/learning_rate": [(1, 0.5), (2, 0.5)],
        "train/gradient_norm_mean": [(1, 0.5), (2, 0.0)],
        "control/scale_mean": [(1, 0.25)],
        "train/num_skipped_updates": [(1, 0.0), (2, 4.0)],
    }
    assert effective_step(curves, limit=1.0, num_updates=4) == pytest.approx(0.5 * 0.5 * 0.25 / 2)


def test_the_gap_at_a_step_is_the_median_of_three():
    run = study_run(gaps=[0.1, 0.001, 0.01, 0.01])
    assert run.gap_at(3) == pytest.approx(-2)
    assert run.gap_at(1) == pytest.approx(-1)
    assert math.isnan(run.gap_at(99))


def test_cells_keep_their_order():
    runs = [study_run(cell="z"), study_run(cell="a"), study_run(cell="z", seed=2)]
    assert {name: len(group) for name, group in cells_of(runs).items()} == {"z": 2, "a": 1}
    assert list(cells_of(runs)) == ["z", "a"]


def test_settings_that_no_column_tells_keep_cells_apart():
    settings = (
        "evaluation.length_operands=[8, 14] update.learning_rate=0.5 task.max_operands=30 rollout.max_prompt_tokens=9"
    )
    assert other_settings(settings) == ""
    assert other_settings(f"{settings} policy.architecture=dense update.skip_empty=false") == (
        "policy.architecture=dense update.skip_empty=false"
    )
    dense = dataclasses.replace(SETTING, others="policy.architecture=dense")
    assert dense.surroundings == "sgd, weights 4 steps old, bfloat16, policy.architecture=dense" != SETTING.surroundings
