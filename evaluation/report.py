"""The report: what was run, what came out, which claims hold and which do not. Pure: records, frame and rows in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from evaluation.arm_summaries import ProblemScores
from evaluation.claim_rows import ClaimRow, ClaimThresholds
from evaluation.document import (
    Block,
    Document,
    Fold,
    Heading,
    Note,
    Paragraph,
    Picture,
    Row,
)
from evaluation.experiment import (
    ExperimentRecord,
    find_warnings,
    listed,
    short_commit,
    trial_warning,
)
from evaluation.figures import FIGURES, arm_order
from evaluation.outcomes import RunOutcome, run_outcomes
from evaluation.report_settings import rerun_section, settings_section
from evaluation.report_tables import (
    arms_table,
    bounds_table,
    claims_block,
    engine_table,
    figure_claims,
    metrics_table,
    pairs_table,
    runs_table,
    times_table,
    untested_claims,
)

SCORE_NAME = "held-out score (greedy pass rate)"
REFERENCE_ARM = "ppo_clip"
KEPT_COLUMNS = {f"mask/kept_{name}_fraction": f"{name} kept" for name in ("correct", "wrong", "short", "long")}
CONFUSION_COLUMNS = {
    "confusion/max_wrongly_accepted_fraction": "k2 accepts, exact max rejects",
    "confusion/max_wrongly_rejected_fraction": "k2 rejects, exact accepts",
    "confusion/avg_wrongly_accepted_fraction": "k3 accepts, exact mean rejects",
    "confusion/avg_wrongly_rejected_fraction": "k3 rejects, exact accepts",
}
PAPER_SHOWS = {
    "figure_1": "In the paper, PPO clipping makes it worse than token-level importance sampling: a larger gap and a "
    "lower AIME25 score.",
    "figure_2": "In the paper, both TRM arms stay bounded and keep improving, and PPO clipping does not.",
    "figure_3": "In the paper, each loose criterion alone fails, and both together hold.",
    "control": "The paper has no such control: as many sequences are rejected as by the criterion, but at random.",
}
BANDS = "Lines are medians over seeds, bands reach from the smallest to the largest."
SOURCES = {"figure_1": "Figure 1", "figure_2": "Figure 2", "figure_3": "Figure 3", "control": "Control (ours)"}


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """All that a report is made of.

    Attributes:
        experiment: its runs, as they are recorded.
        points: frame of points (arm, seed, run_id, metric, step, value).
        claims: with their verdicts.
        thresholds: of the claims' tests.
        figures: the panels of each of `FIGURES` that has data, by its name.
        kept: who is kept, step by step.
        bounds: the bounds, step by step.
        survival: share of runs not yet collapsed, by arm; None where seeds are too few.
        token_level: why token-level methods fail.
        lengths: rejection against length, as blocks.
        final_scores: by (arm, seed), the last score of each held-out problem.
        warnings: beside those about the runs: what a reader of the claims has to know of their thresholds.
        expected: what the study saw at this setting, as blocks.
    """

    experiment: ExperimentRecord
    points: pd.DataFrame
    claims: Sequence[ClaimRow]
    thresholds: ClaimThresholds
    figures: Mapping[str, Sequence[Picture]] = field(default_factory=dict)
    kept: Sequence[Picture] = ()
    bounds: Sequence[Picture] = ()
    survival: Picture | None = None
    token_level: Picture | None = None
    lengths: Sequence[Block] = ()
    final_scores: ProblemScores = field(default_factory=dict)
    warnings: Sequence[str] = ()
    expected: Sequence[Block] = ()


def summary_table(outcomes: Sequence[RunOutcome]) -> str:
    """Lay the runs out as a Markdown table for a terminal, arm by arm, one line a run: no mean hides a seed.

    Args:
        outcomes: of all runs.

    Returns:
        The table.
    """
    lines = [
        "| arm | seed | steps | score: start | final | best | PPL gap, last quarter | kept | outcome |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in arm_order([outcome.arm for outcome in outcomes]):
        for run in sorted((o for o in outcomes if o.arm == arm), key=lambda o: o.seed):
            lines.append(
                f"| {run.arm} | {run.seed} | {run.num_steps} | {run.start_score:.2f} | {run.final_score:.2f} "
                f"| {run.best_score:.2f} | {run.final_gap:.1e} | {run.acceptance:.2f} | {run.verdict} |"
            )
    return "\n".join(lines)


def build_report(data: ReportData) -> Document:
    """Put the report together.

    Args:
        data: what it is made of.

    Returns:
        The document, for `to_markdown` and `to_html`.
    """
    runs = data.experiment.runs
    arms, seeds = arm_order([run.arm for run in runs]), sorted({run.seed for run in runs})
    parent = data.experiment.parent
    blocks = [
        *_warnings(data),
        *_claims(data, len(seeds)),
        *data.expected,
        *_figures(data),
        *_runs(data),
        *_acceptance(data),
        *_bounds(data),
        *_estimators(data),
        *_lengths(data),
        *_token_level(data),
        *_times(data),
        *settings_section(data.experiment),
        *rerun_section(data.experiment),
    ]
    return Document(
        title=f"{parent.name}: PPO clipping against Trust Region Masking",
        subtitle=f"{len(runs)} runs: {len(arms)} arms, seeds {listed([str(seed) for seed in seeds])}. Commit "
        f"{listed(sorted({short_commit(run.git_commit) for run in runs}))}, configuration {parent.config_hash}.",
        blocks=blocks,
    )


def _warnings(data: ReportData) -> list[Block]:
    trial = trial_warning(data.experiment)
    texts = [*([trial] if trial else []), *find_warnings(data.experiment), *data.warnings]
    return [Note(text=text, kind="warning") for text in texts]


def _claims(data: ReportData, num_seeds: int) -> list[Block]:
    enough = data.thresholds.min_seeds
    verdicts = [row.verdict for row in data.claims]
    tested = [row for row in data.claims if row.verdict != "not run"]
    untested = [row for row in data.claims if row.verdict == "not run"]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
    caution = (
        f"{num_seeds} seeds; each has its own starting policy, training prompts and held-out problems."
        if num_seeds >= enough
        else f"Fewer than {enough} seeds (here {num_seeds}) are no more than an indication."
    )
    return [
        Heading(text="Claims"),
        Paragraph(text=f"{len(verdicts)} claims: {counts}. {caution}"),
        *([claims_block(tested)] if tested else []),
        *(
            [Fold(title=f"{len(untested)} claims that were not run", blocks=[untested_claims(untested)])]
            if untested
            else []
        ),
        Fold(
            title="How a verdict is reached",
            blocks=[
                Paragraph(
                    text="Effects are means over seeds with a bootstrap interval (percentile, whole seeds), or with "
                    f"the smallest and the largest seed (range) where there are fewer than {enough} or one has no "
                    "value. Percentile intervals of few seeds are too short, so that a part holds only where its whole "
                    "interval is on the claimed side and the one-sided sign-flip test over seeds is significant."
                ),
                Paragraph(
                    text="A claim is reproduced where all its parts hold, not reproduced where one fails, and always "
                    f"inconclusive below {enough} seeds. p is the largest of its parts'; in brackets it is corrected "
                    "for the number of claims tested (Holm): five seeds get no p below 1/32, so holding after the "
                    "correction takes more. Reproduced means here, at these settings and this scale."
                ),
            ],
        ),
    ]


def _figures(data: ReportData) -> list[Block]:
    blocks: list[Block] = []
    left_out = []
    for plan in FIGURES:
        missing = listed(plan.missing_arms(data.points))
        if not plan.can_compare(data.points):
            left_out.append(f"{plan.title.partition(':')[0]} (without {missing})")
        pictures = data.figures.get(plan.name)
        if not pictures:
            continue
        lacks = f" Not run here: {missing}." if missing else ""
        blocks += [Heading(text=plan.title, level=3), Paragraph(text=PAPER_SHOWS.get(plan.name, "") + lacks)]
        claims = figure_claims(data.claims, SOURCES.get(plan.name, ""))
        blocks.append(claims if claims.rows else Paragraph(text="Its claims were not run here."))
        blocks.append(Row(pictures=pictures))
    absent = [Paragraph(text=f"Left out, as fewer than two of their arms have runs: {'; '.join(left_out)}.")]
    if not blocks:
        return [Heading(text="The paper's figures"), *absent] if left_out else []
    return [
        Heading(text="The paper's figures"),
        *blocks,
        *(absent if left_out else []),
        Paragraph(
            text="The PPL gap is the mean over sequences of |mean_t log pi_theta - mean_t log pi_roll|, in nats per "
            "token, each sequence measured just before the update that uses it. A policy that has collapsed can have a "
            "small gap again: read it together with the score, the share of held-out problems answered right. From "
            "five seeds on a line is their mean and its band a pointwise bootstrap interval. The points of each "
            "figure, with the MLflow run of each, are in figures/*.csv."
        ),
    ]


def _runs(data: ReportData) -> list[Block]:
    outcomes = run_outcomes(data.points)
    pairs = pairs_table(outcomes, REFERENCE_ARM, data.thresholds, data.final_scores)
    engine = engine_table(data.points)
    blocks: list[Block] = [
        Heading(text="Arms and runs"),
        arms_table(outcomes, data.thresholds),
        *([pairs] if pairs is not None else []),
        Fold(title=f"All {len(outcomes)} runs", blocks=[runs_table(outcomes)]),
        Paragraph(
            text="Collapsed: final score below half of the start; improved or fell: by more than "
            f"{data.thresholds.improvement:g}; else level."
        ),
    ]
    if data.survival is not None:
        blocks += [
            data.survival,
            Paragraph(
                text="Collapsed for good: below half of the start at 4 evaluations running, from the first of these "
                "on (Kaplan-Meier over seeds; runs that cannot say are left out)."
            ),
        ]
    if engine.rows:
        blocks += [
            Heading(text="Engine against trainer", level=3),
            engine,
            Paragraph(
                text="The first step's rollouts come from the starting weights, but its later updates are already "
                "off-policy."
            ),
        ]
    return blocks


def _acceptance(data: ReportData) -> list[Block]:
    table = metrics_table(data.points, KEPT_COLUMNS, data.thresholds, "Share kept, mean over steps.")
    if not table.rows:
        return []
    return [Heading(text="Who is kept, by length and correctness"), table, *_side_by_side(data.kept)]


def _bounds(data: ReportData) -> list[Block]:
    table = bounds_table(data.points)
    if not table.rows:
        return []
    return [
        Heading(text="What the bounds say, step by step"),
        table,
        *_side_by_side(data.bounds),
        Paragraph(
            text="Measured on samples, not certified. A bound above 1 says nothing about a reward in [0, 1], and "
            "improvement is guaranteed only where L' exceeds a bound. One sequence with a token whose exact KL is "
            "above the threshold refutes the guarantee's condition for its step; docs/theory.md says what a run "
            "without any may claim."
        ),
    ]


def _estimators(data: ReportData) -> list[Block]:
    table = metrics_table(data.points, CONFUSION_COLUMNS, data.thresholds, "Share of all sequences, mean over steps.")
    return [Heading(text="Sampled estimators against exact KL"), table] if table.rows else []


def _lengths(data: ReportData) -> list[Block]:
    return [Heading(text="Rejection against length (Table 2)"), *data.lengths] if data.lengths else []


def _token_level(data: ReportData) -> list[Block]:
    if data.token_level is None:
        return []
    return [
        Heading(text="Why token-level methods fail"),
        Paragraph(
            text="By enumeration, not from these runs: clipping or masking single tokens leaves responses with a large "
            "KL in the gradient, and PPO's clip lets a large ratio with a negative advantage through. A line stops "
            "where nothing is kept."
        ),
        data.token_level,
    ]


def _times(data: ReportData) -> list[Block]:
    table = times_table(data.points)
    if not table.rows:
        return []
    blocks: list[Block] = [Heading(text="Where the time goes"), table]
    speeds = data.points[data.points.metric == "throughput/step_tokens_per_second"].value.dropna()
    if not speeds.empty:
        low, high = speeds.quantile(0.1), speeds.quantile(0.9)
        blocks.append(
            Paragraph(
                text=f"One process trains on {speeds.median():.0f} tokens a second ({low:.0f} to {high:.0f}, median "
                "and percentiles as above), evaluation left out."
            )
        )
    return blocks


def _side_by_side(pictures: Sequence[Picture]) -> list[Block]:
    if not pictures:
        return []
    return [Row(pictures=pictures), Paragraph(text=BANDS)]
