"""The report as Markdown: what was run, what came out, which claims hold and which do not."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from evaluation.claims import ENOUGH_SEEDS, ClaimRow, claims_table
from evaluation.figures import FIGURES, arm_order
from evaluation.outcomes import RunOutcome, run_outcomes

SCORE_NAME = "held-out score (greedy pass rate)"
CLAIMS_NOTE = (
    "Effects are means over seeds with a bootstrap interval (percentile, whole seeds), or with the smallest and the "
    f"largest seed (range) where there are fewer than {ENOUGH_SEEDS} or one has no value. Percentile intervals of few "
    "seeds are too short, so that a part holds only where its whole interval is on the claimed side and the one-sided "
    "sign-flip test over seeds is significant. A claim is reproduced where all its parts hold, not reproduced where "
    f"one fails, and always inconclusive below {ENOUGH_SEEDS} seeds. p is the largest of its parts'; in brackets it is "
    "corrected for the number of claims tested (Holm): five seeds get no p below 1/32, so holding after the correction "
    "takes more. Reproduced means here, at these settings and this scale."
)
STAGES = ("sync", "rollout", "mask", "update", "evaluate", "record")


def summary_table(outcomes: Sequence[RunOutcome]) -> str:
    """Lay the runs out as a Markdown table, arm by arm, one line a run: no mean hides a seed.

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


def render_report(
    points: pd.DataFrame,
    claims: Sequence[ClaimRow],
    figures: Sequence[Path],
    *,
    name: str,
    settings: Mapping[str, object],
    environment: Mapping[str, str],
    length_bias: str = "",
) -> str:
    """Write the report.

    Args:
        points: frame of points.
        claims: from `evaluate_claims`.
        figures: files of the figures, in the report's folder or below it.
        name: of the experiment.
        settings: the settings that matter, by dotted key.
        environment: versions and machine.
        length_bias: the table of rejection against length with its figure, or nothing.

    Returns:
        Markdown.
    """
    outcomes = run_outcomes(points)
    num_seeds = len({outcome.seed for outcome in outcomes})
    parts = [
        f"# {name}: PPO clipping against Trust Region Masking",
        "Every number below is read from MLflow and comes from runs of this experiment, but for those marked exact, "
        "which are computed, and rejection against length, which is sampled by itself.",
        "## Claims",
        claims_table(claims),
        CLAIMS_NOTE,
        _caution(num_seeds),
        "## Runs",
        summary_table(outcomes),
        "The score is the share of held-out problems answered right, greedily. The PPL gap is "
        "mean over sequences of |mean_t log pi_theta - mean_t log pi_roll|, in nats per token, each sequence measured "
        "just before the update that uses it. A policy that has collapsed can have a small gap again: read it together "
        "with the score. Collapsed: final score below half of the start; improved or fell: by more than 0.05.",
        "## Figures",
        *_figure_lines(figures),
        "## Engine against trainer",
        _engine_lines(points),
        "## Who is kept",
        _acceptance_table(points),
        "## What the bounds say",
        _bounds_table(points),
        "## Sampled estimators against exact KL",
        _confusion_table(points),
        *(["## Rejection against length (Table 2)", length_bias] if length_bias else []),
        "## Why token-level methods fail",
        "By enumeration, not from these runs: clipping or masking single tokens leaves responses with a large KL in "
        "the gradient, and PPO's clip lets a large ratio with a negative advantage through.\n\n"
        "![Why token-level methods fail](figures/token_level.png)",
        "## Where the time goes",
        _time_table(points),
        "## Settings",
        _two_columns("setting", settings),
        "## Environment",
        _two_columns("", environment),
    ]
    return "\n\n".join(parts) + "\n"


def _caution(num_seeds: int) -> str:
    if num_seeds >= ENOUGH_SEEDS:
        return f"{num_seeds} seeds; each has its own starting policy, training prompts and held-out problems."
    return (
        f"Fewer than {ENOUGH_SEEDS} seeds (here {num_seeds}) are no more than an indication. Each seed has its own "
        "starting policy, training prompts and held-out problems. The learning rate, staleness and optimizer are those "
        "at which the arms separate in earlier trials on other seeds; at other settings they need not."
    )


def _figure_lines(figures: Sequence[Path]) -> list[str]:
    titles = {plan.name: plan.title for plan in FIGURES}
    lines = []
    for file in figures:
        if file.suffix == ".png":
            relative = f"{file.parent.name}/{file.name}"
            lines.append(f"**{titles[file.stem]}**\n\n![{titles[file.stem]}]({relative})")
    if lines:
        lines.append("The points of each figure, with the MLflow run of each, are in the CSV file beside it.")
    return lines


def _engine_lines(points: pd.DataFrame) -> str:
    first = points[(points.step == 1)]
    lines = []
    for metric, meaning in (
        ("divergence/ppl_gap", "PPL gap in the first step"),
        ("divergence/kl_mean", "mean token KL in the first step"),
        ("divergence/kl_max", "largest token KL in the first step"),
        ("router/agreement_fraction", "share of tokens routed alike in every layer, first step"),
    ):
        values = first[first.metric == metric].value
        if not values.empty:
            lines.append(f"- {meaning}: {values.min():.1e} to {values.max():.1e} over {len(values)} runs")
    note = "The first step's rollouts come from the starting weights, but its later updates are already off-policy."
    return "\n".join([*lines, "", note])


def _acceptance_table(points: pd.DataFrame) -> str:
    names = ("correct", "wrong", "short", "long")
    lines = ["| arm | " + " | ".join(f"{name} kept" for name in names) + " |", "|---|" + "---|" * len(names)]
    for arm in arm_order(list(points.arm.unique())):
        cells = []
        for name in names:
            values = points[(points.arm == arm) & (points.metric == f"mask/kept_{name}_fraction")].value
            cells.append("" if values.empty else f"{values.mean():.2f} ({values.min():.2f} to {values.max():.2f})")
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "Mean over steps and seeds, with the smallest and largest step in brackets."])


def _bounds_table(points: pd.DataFrame) -> str:
    lines = [
        "| arm | surrogate L' | unified bound, paper | sharp | trivial bound | steps in which exact KL refutes |",
        "|---|---|---|---|---|---|",
    ]
    for arm in arm_order(list(points.arm.unique())):
        cells = [arm]
        for metric in ("surrogate", "unified_paper", "unified_sharp", "trivial"):
            values = points[(points.arm == arm) & (points.metric == f"bounds/{metric}")].value
            cells.append("" if values.empty else f"{values.median():.2g} ({values.min():.2g} to {values.max():.2g})")
        refuting = points[(points.arm == arm) & (points.metric == "bounds/num_refuting_sequences")].value
        cells.append("" if refuting.empty else f"{(refuting > 0).sum()} of {len(refuting)}")
        lines.append("| " + " | ".join(cells) + " |")
    lines.append(
        "\nMedian over steps and seeds, smallest and largest in brackets, in reward units: measured on samples, not "
        "certified. A bound above 1 says nothing about a reward in [0, 1], and improvement is guaranteed only where L' "
        "exceeds a bound. One sequence with a token whose exact KL is above the threshold refutes the guarantee's "
        "condition for its step; docs/theory.md says what a run without any may claim."
    )
    return "\n".join(lines)


def _confusion_table(points: pd.DataFrame) -> str:
    lines = [
        "| arm | k2 accepts, exact max rejects | k2 rejects, exact accepts | k3 accepts, exact mean rejects "
        "| k3 rejects, exact accepts |",
        "|---|---|---|---|---|",
    ]
    for arm in arm_order(list(points.arm.unique())):
        cells = [arm]
        for metric in (
            "max_wrongly_accepted",
            "max_wrongly_rejected",
            "avg_wrongly_accepted",
            "avg_wrongly_rejected",
        ):
            values = points[(points.arm == arm) & (points.metric == f"confusion/{metric}_fraction")].value
            cells.append("" if values.empty else f"{values.mean():.3f} (to {values.max():.3f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "Share of all sequences, mean over steps and seeds, largest step in brackets."])


def _time_table(points: pd.DataFrame) -> str:
    lines = ["| stage | mean seconds per step | share of the step |", "|---|---|---|"]
    means = {
        stage: float(points[points.metric == f"time/{stage}_seconds"].value.mean())
        for stage in STAGES
        if not points[points.metric == f"time/{stage}_seconds"].empty
    }
    steps = points[points.metric == "time/step_seconds"].value
    if steps.empty:
        return "Not recorded."
    total = float(steps.mean())
    for stage, seconds in means.items():
        lines.append(f"| {stage} | {seconds:.3f} | {seconds / total:.0%} |")
    lines.append(f"| whole step | {total:.3f} | |")
    throughput = points[points.metric == "throughput/step_tokens_per_second"].value
    if not throughput.empty:
        lines.append(
            f"\nOne process trains on {throughput.median():.0f} tokens a second (median), evaluation left out."
        )
    return "\n".join(lines)


def _two_columns(head: str, values: Mapping[str, object]) -> str:
    return "\n".join([f"| {head} | |", "|---|---|", *(f"| {key} | {value} |" for key, value in values.items())])
