import dataclasses
import re

import pandas as pd
import pytest

from evaluation.claim_rows import ClaimRow, Effect
from evaluation.claims import ClaimThresholds, evaluate_claims
from evaluation.document import Picture, table_markdown, to_markdown
from evaluation.experiment import ExperimentRecord, RunRecord
from evaluation.html import to_html
from evaluation.outcomes import ACCEPTANCE, GAP, SCORE, RunOutcome
from evaluation.report import ReportData, build_report, summary_table
from evaluation.report_tables import (
    claims_block,
    figure_claims,
    metrics_table,
    over_seeds,
    times_table,
    untested_claims,
)

SVG = b"<svg xmlns='http://www.w3.org/2000/svg' width='8' height='4'/>"
THRESHOLDS = ClaimThresholds(num_random_pairs=1, num_resamples=200)


def outcome(arm, *, seed=1, final=0.6, gap=0.012):
    return RunOutcome(
        arm=arm,
        seed=seed,
        run_id=f"{arm}-{seed}",
        num_steps=60,
        start_score=0.4,
        final_score=final,
        final_sampled_score=final,
        best_score=0.75,
        first_gap=gap,
        final_gap=gap,
        acceptance=0.42,
        refuted_fraction=0.0,
        score_area=0.4,
        has_collapsed=None,
        collapse_step=None,
    )


def point(metric, value, *, arm="ppo_clip", seed=1, step=1):
    return {"arm": arm, "seed": seed, "run_id": f"{arm}-{seed}", "metric": metric, "step": step, "value": value}


POINTS = pd.DataFrame(
    [
        point(GAP, 1e-3),
        point(GAP, 2e-3, seed=2),
        point(GAP, 0.5, step=2),  # not the first step
        point("divergence/kl_max", 0.07),
        point("router/agreement_fraction", 0.998),
        point(SCORE, 0.4, step=0),
        point(ACCEPTANCE, 1.0),
        point("time/rollout_seconds", 1.0),
        point("time/rollout_seconds", 2.0, step=2),
        point("time/update_seconds", 0.5),
        point("time/step_seconds", 3.0),
        point("time/step_seconds", 5.0, step=2),
        point("throughput/step_tokens_per_second", 100.0),
        point("throughput/step_tokens_per_second", 900.0, step=2),
        point("throughput/step_tokens_per_second", 200.0, step=3),
        point("mask/kept_long_fraction", 0.2, arm="trm_avg_0.001"),
        point("mask/kept_long_fraction", 0.6, arm="trm_avg_0.001", step=2),
        point("mask/kept_long_fraction", 0.6, arm="trm_avg_0.001", seed=2),
    ]
)
NO_RUNS = pd.DataFrame(columns=["arm", "seed", "run_id", "metric", "step", "value"])
CLAIMS = evaluate_claims(NO_RUNS, THRESHOLDS)


def points_of(outcomes):
    """The points that such runs leave: scores at the start and the end, the gap at the end."""
    rows = []
    for run in outcomes:
        identity = {"arm": run.arm, "seed": run.seed}
        rows += [
            point(SCORE, run.start_score, step=0, **identity),
            point(SCORE, run.final_score, step=run.num_steps, **identity),
            point(GAP, run.final_gap, step=run.num_steps, **identity),
        ]
    return pd.DataFrame(rows)


def record(arm="", seed=-1, **changes):
    settings = {"num_steps": "60", "update.learning_rate": "0.5"}
    values = {
        "run_id": f"id-{arm}-{seed}",
        "name": f"{arm}/seed_{seed}",
        "arm": arm,
        "seed": seed,
        "num_steps": 60,
        "git_commit": "a1b2c3d4e5f6a7b8",
        "config_hash": "0123456789ab",
        "settings": settings,
        "environment": {"torch": "2.13.0"},
    }
    return RunRecord(**values | changes)


def experiment(runs, **changes):
    values = {
        "parent": record(name="miniature"),
        "runs": runs,
        "planned": [(run.arm, run.seed) for run in runs],
        "arm_settings": frozenset(),
        "command": "trm-repro reproduce update.learning_rate=0.5",
        "source": "sqlite:///mlflow.db",
    }
    return ExperimentRecord(**values | changes)


def report_data(outcomes=(), *, points=POINTS, **changes):
    runs = [record(run.arm, run.seed) for run in outcomes] or [record("ppo_clip", 1)]
    values = {
        "experiment": experiment(runs),
        "points": pd.concat([points, points_of(outcomes)]) if outcomes else points,
        "claims": CLAIMS,
        "thresholds": THRESHOLDS,
    }
    return ReportData(**values | changes)


def render(outcomes=(), **changes):
    return to_markdown(build_report(report_data(outcomes, **changes)))


def line_with(text, words):
    (line,) = [line for line in text.splitlines() if words in line]
    return line


def test_the_summary_has_one_line_a_run_in_the_order_of_the_figures():
    runs = [outcome("trm_avg_0.001", seed=2), outcome("ppo_clip", final=0.1), outcome("trm_avg_0.001", seed=1)]
    lines = summary_table(runs).splitlines()[2:]
    assert lines == [
        "| ppo_clip | 1 | 60 | 0.40 | 0.10 | 0.75 | 1.2e-02 | 0.42 | collapsed |",
        "| trm_avg_0.001 | 1 | 60 | 0.40 | 0.60 | 0.75 | 1.2e-02 | 0.42 | improved |",
        "| trm_avg_0.001 | 2 | 60 | 0.40 | 0.60 | 0.75 | 1.2e-02 | 0.42 | improved |",
    ]


def test_every_run_has_a_line_that_names_its_mlflow_run():
    text = render([outcome("ppo_clip", final=0.1), outcome("trm_avg_0.001", seed=2)])
    assert line_with(text, "`trm_avg_0.001-2`").startswith("| trm_avg_0.001 | 2 | 60 | 0.40 | 0.60 |")
    assert line_with(text, "`ppo_clip-1`").startswith("| ppo_clip | 1 | 60 | 0.40 | 0.10 |")


def test_few_seeds_stand_with_their_range_and_one_alone():
    assert over_seeds([0.2, 0.6], THRESHOLDS) == "0.4 (range 0.2 to 0.6)"
    assert over_seeds([0.5], THRESHOLDS) == "0.5"
    assert over_seeds([], THRESHOLDS) == ""


def test_five_seeds_have_a_bootstrap_interval():
    # One seed of five has 1: a resample's mean is Binomial(5, 0.2) / 5, whose 2.5% and 97.5% points are 0 and 3/5.
    assert over_seeds([0.0, 0.0, 1.0, 0.0, 0.0], ClaimThresholds(num_resamples=5000)) == "0.2 (0 to 0.6)"


def test_a_seed_without_a_value_is_counted_and_not_averaged():
    assert over_seeds([0.2, float("nan"), 0.6], THRESHOLDS) == "0.4 (range 0.2 to 0.6); 1 seeds without a value"


def test_a_claim_of_one_part_needs_no_numbers():
    effect = Effect(estimate=0.5, low=0.5, high=0.5, kind="range")
    row = ClaimRow(source="a", text="b", test="x > 0", data="c", num_seeds=1, effects=(effect,), verdict="inconclusive")
    table = claims_block([row])
    assert table.rows[0][4:] == ["x > 0", "0.5", "", "c"]
    assert "number without them is that of one seed" in " ".join(table.caption.split())


def test_data_and_note_stay_apart_in_markdown():
    row = ClaimRow(source="a", text="b", test="x > 0", data="runs of c", num_seeds=0, note="mind")
    assert "| x \\> 0 | runs of c. Note: mind |" in table_markdown(untested_claims([row]))


def test_each_part_of_a_claims_test_has_the_number_of_what_was_measured_for_it():
    row = ClaimRow(
        source="Figure 2",
        text="it rises",
        test="score > 0.05; gap < 1",
        data="runs of a",
        num_seeds=5,
        effects=(
            Effect(estimate=0.2, low=0.1, high=0.3, kind="interval"),
            Effect(estimate=0.5, low=0.4, high=0.6, kind="range"),
        ),
        p_value=0.03125,
        adjusted_p_value=0.25,
        verdict="reproduced",
        note="mind",
    )
    cells = claims_block([row]).rows[0]
    assert cells[2].tone == "good"
    assert cells[4] == "(1) score > 0.05;\n(2) gap < 1"
    assert cells[5] == "(1) 0.2 (0.1 to 0.3);\n(2) 0.5 (range 0.4 to 0.6)"
    assert cells[6:] == ["0.031 (0.250)", "runs of a.\nNote: mind"]
    beside_figure = figure_claims([row], "Figure 2")
    assert beside_figure.columns == ["claim", "here", "test", "measured"]
    assert [[cells[0], *cells[2:]] for cells in beside_figure.rows] == [["it rises", *cells[4:6]]]
    assert not figure_claims([row], "Figure 1").rows
    assert not figure_claims([dataclasses.replace(row, verdict="not run")], "Figure 2").rows


def test_claims_that_were_not_run_are_listed_apart_and_every_claim_is_listed():
    text = render()
    before, after = text.split("claims that were not run**")
    for row in CLAIMS:
        assert (row.text[:30] in after) == (row.verdict == "not run"), row.text
    assert "always inconclusive below 5 seeds" in text
    assert f"{len(CLAIMS)} claims: " in before


@pytest.mark.parametrize(("num_seeds", "is_few"), [(2, True), (4, True), (5, False)])
def test_fewer_than_five_seeds_are_called_an_indication(num_seeds, is_few):
    text = render([outcome("ppo_clip", seed=seed) for seed in range(num_seeds)])
    assert (f"(here {num_seeds}) are no more than an indication" in text) == is_few


def test_the_engines_gap_is_that_of_the_first_step_over_runs():
    text = render()
    assert line_with(text, "PPL gap, nats per token").endswith("| 0.001 to 0.002 | 2 |")
    assert line_with(text, "largest token KL").endswith("| 0.07 | 1 |")
    assert line_with(text, "routed alike").endswith("| 0.998 | 1 |")


def test_stages_are_reported_in_seconds_and_as_shares_of_all_steps():
    # rollout 1 and 2 s, update 0.5 s, of steps of 3 and 5 s; percentiles 10 and 90 of two values lie a tenth inside.
    assert times_table(POINTS).rows == [
        ["rollout", "1.500 (1.100 to 1.900)", "38%"],
        ["update", "0.500 (0.500 to 0.500)", "6%"],
        ["whole step", "4.000 (3.200 to 4.800)", ""],
    ]
    assert "trains on 200 tokens a second (120 to 760," in render()


def test_acceptance_by_length_and_correctness_is_each_seeds_mean_over_its_steps_and_then_over_seeds():
    # seed 1: (0.2 + 0.6) / 2 = 0.4; seed 2: 0.6
    table = metrics_table(POINTS, {"mask/kept_long_fraction": "long kept"}, THRESHOLDS, "")
    assert table.rows == [["trm_avg_0.001", "0.5 (range 0.4 to 0.6)"]]
    assert "| trm_avg_0.001 |  |  |  | 0.5 (range 0.4 to 0.6) |" in render([outcome("trm_avg_0.001")])


def test_figures_stand_beside_what_the_paper_shows():
    picture = Picture(image=SVG, alt="curves", path="figures/figure_2_gap.svg")
    text = render(figures={"figure_2": [picture]})
    assert text.index("both TRM arms stay bounded and keep improving") < text.index(
        "![curves](figures/figure_2_gap.svg)"
    )
    assert "each loose criterion alone fails" not in text


def test_figures_that_have_one_arm_or_none_are_named_with_the_arms_they_lack():
    line = line_with(render(), "Left out")  # there are points of ppo_clip and trm_avg_0.001
    assert "Figure 1 (without token_is); Figure 3 (without trm_max_0.1, trm_avg_0.002, trm_max_0.1" in line
    assert "Figure 2" not in line
    assert "Control" not in line


def test_a_figure_says_which_of_its_arms_were_not_run():
    picture = Picture(image=SVG, alt="curves", path="figures/figure_2_gap.svg")
    assert line_with(render(figures={"figure_2": [picture]}), "PPO clipping does not.").endswith(
        "Not run here: trm_max_0.05."
    )


@pytest.mark.parametrize(
    ("name", "num_steps", "is_trial"),
    [("smoke", "60", True), ("mine", "19", True), ("mine", "20", False), ("smoke_like", "60", False)],
)
def test_a_trial_is_said_to_mean_nothing_before_everything_else(name, num_steps, is_trial):
    parent = record(name=name, settings={"num_steps": num_steps})
    text = render(experiment=experiment([record("ppo_clip", 1)], parent=parent))
    banner = f"> **Warning.** A trial of {num_steps} steps: its numbers mean nothing beyond that every part ran."
    assert (banner in text) == is_trial
    assert not is_trial or text.index(banner) < text.index("## Claims")


def test_settings_are_written_as_in_a_configuration_file():
    settings = {"num_steps": "60", "policy.path": "None", "reproduce.seeds": "(1,)", "trainer.fast": "True"}
    text = render(experiment=experiment([record("ppo_clip", 1)], parent=record(name="m", settings=settings)))
    for line in ("| `policy.path` | null |", "| `reproduce.seeds` | \\[1\\] |", "| `trainer.fast` | true |"):
        assert line in text


def test_commit_command_configuration_and_environment_are_there():
    text = render()
    assert text.startswith("# miniature: ")
    assert "Commit a1b2c3d4e5f6, configuration 0123456789ab." in text
    assert "```\ntrm-repro reproduce update.learning_rate=0.5\n```" in text
    assert "| `update.learning_rate` | 0.5 |" in text
    assert "| `torch` | 2.13.0 |" in text


def test_warnings_stand_before_everything_else():
    runs = [record("ppo_clip", 1, status="FAILED", num_steps=7)]
    text = render(experiment=experiment(runs), warnings=["thresholds differ"])
    assert text.index("**Warning.** 1 of 1 runs failed") < text.index("## Claims")
    assert text.index("**Warning.** thresholds differ") < text.index("## Claims")


def test_a_report_of_runs_without_times_says_no_number_that_was_not_measured():
    points = POINTS[~POINTS.metric.str.startswith(("time/", "throughput/"))]
    text = render(points=points)
    assert "nan" not in text
    assert "Where the time goes" not in text


def test_hostile_names_do_not_become_markup():
    hostile = "<img src=x onerror=alert(1)>"
    data = report_data(
        [outcome(hostile)],
        points=pd.DataFrame([point("mask/kept_long_fraction", 0.5, arm=hostile), point(GAP, 0.1, arm=hostile)]),
    )
    assert hostile not in to_html(build_report(data))
    assert hostile not in re.sub("`[^`]*`", "", to_markdown(build_report(data)))
