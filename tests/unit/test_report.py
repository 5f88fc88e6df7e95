from pathlib import Path

import pandas as pd
import pytest

from evaluation.claims import ClaimThresholds, claims_table, evaluate_claims
from evaluation.figures import FIGURES
from evaluation.outcomes import ACCEPTANCE, GAP, SCORE, RunOutcome
from evaluation.report import render_report, summary_table


def outcome(arm, *, seed=1, final=0.6, gap=0.012):
    return RunOutcome(
        arm=arm,
        seed=seed,
        run_id=f"{arm}-{seed}",
        num_steps=60,
        start_score=0.4,
        final_score=final,
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
        point("throughput/step_tokens_per_second", 100.0),
        point("throughput/step_tokens_per_second", 900.0, step=2),
        point("throughput/step_tokens_per_second", 200.0, step=3),
        point("mask/kept_long_fraction", 0.2, arm="trm_avg_0.001"),
        point("mask/kept_long_fraction", 0.6, arm="trm_avg_0.001", step=2),
    ]
)


NO_RUNS = pd.DataFrame(columns=["arm", "seed", "run_id", "metric", "step", "value"])
CLAIMS = evaluate_claims(NO_RUNS, ClaimThresholds(num_random_pairs=1))


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


def render(outcomes=(), *, points=POINTS, figures=(), claims=CLAIMS):
    return render_report(
        pd.concat([points, points_of(outcomes)]) if outcomes else points,
        claims,
        figures,
        name="miniature",
        settings={"update.learning_rate": 0.5},
        environment={"torch": "2.13.0"},
    )


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


def test_tables_have_as_many_cells_in_every_line():
    text = render([outcome("ppo_clip"), outcome("trm_avg_0.001")])
    table = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            table.append(line.count("|"))
        elif table:
            assert len(set(table)) == 1, table
            table = []


def test_the_report_has_the_claims_with_the_rule_that_decides_them():
    text = render()
    assert f"## Claims\n\n{claims_table(CLAIMS)}\n\nEffects are means" in text
    assert "always inconclusive below 5 seeds" in text


@pytest.mark.parametrize(("num_seeds", "is_few"), [(2, True), (4, True), (5, False)])
def test_fewer_than_five_seeds_are_called_an_indication(num_seeds, is_few):
    text = render([outcome("ppo_clip", seed=seed) for seed in range(num_seeds)])
    assert (f"(here {num_seeds}) are no more than an indication" in text) == is_few


def test_the_engines_gap_is_that_of_the_first_step_over_runs():
    text = render()
    assert line_with(text, "PPL gap in the first step").endswith(": 1.0e-03 to 2.0e-03 over 2 runs")
    assert line_with(text, "largest token KL").endswith(": 7.0e-02 to 7.0e-02 over 1 runs")


def test_stages_are_reported_in_seconds_and_as_shares_of_a_step():
    text = render()
    assert "| rollout | 1.500 | 50% |" in text
    assert "| update | 0.500 | 17% |" in text
    assert "| whole step | 3.000 | |" in text
    assert "trains on 200 tokens a second (median)" in text


def test_acceptance_by_length_and_correctness_is_a_mean_with_its_range():
    text = render([outcome("trm_avg_0.001")])
    assert "| trm_avg_0.001 |  |  |  | 0.40 (0.20 to 0.60) |" in text


def test_figures_are_shown_with_their_titles_and_relative_paths():
    folder = Path("/somewhere/report/figures")
    text = render(figures=[folder / f"figure_1.{suffix}" for suffix in ("png", "pdf", "csv")])
    assert f"![{FIGURES[0].title}](figures/figure_1.png)" in text
    assert text.count("figure_1") == 1
    assert "/somewhere" not in text


def test_settings_and_environment_are_listed():
    text = render()
    assert text.startswith("# miniature: ")
    assert "| update.learning_rate | 0.5 |" in text
    assert "| torch | 2.13.0 |" in text


def test_a_report_of_runs_without_times_says_no_number_that_was_not_measured():
    points = POINTS[~POINTS.metric.str.startswith(("time/", "throughput/"))]
    assert "nan" not in render(points=points)
