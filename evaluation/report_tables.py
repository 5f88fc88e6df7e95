"""The report's tables: a frame of points or a list of outcomes in, a table out. No mean stands without its interval.

A step is not a unit of its own: what is averaged over seeds is each seed's mean over its steps.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from evaluation.arm_summaries import QUANTITIES, ProblemScores, compare_arms, pairs_of, summarise_arms
from evaluation.claim_rows import ClaimRow, ClaimThresholds, Effect
from evaluation.document import Cell, Table, Tone
from evaluation.figures import arm_order
from evaluation.outcomes import RunOutcome
from evaluation.statistics import bootstrap_mean

if TYPE_CHECKING:
    from evaluation.length_bias import LengthRow  # brings torch

STAGES = ("sync", "rollout", "mask", "update", "evaluate", "record")
OVER_SEEDS = (
    "Mean over seeds; in brackets its bootstrap interval over seeds or, where seeds are too few for one, the smallest "
    "and the largest seed (range). A number without brackets is that of one seed, or of seeds that all agree."
)
CLAIMS_CAPTION = (
    "What was measured has its interval or range in brackets; a number without them is that of one seed, or of seeds "
    "that all agree. Parts of a test and what was measured for them have the same number."
)
ARMS_CAPTION = (
    f"{OVER_SEEDS} The area is under the score curve, over its steps: a mean score. Lasting collapse: the share of "
    "runs whose score was below half of its start at 4 evaluations running; a run with fewer cannot say."
)
PAIRS_CAPTION = (
    "Pairs of the same seed, so of the same starting policy, prompts and held-out problems: mean difference with its "
    "bootstrap interval over seeds. Fewer than five seeds have an interval of the final score over their held-out "
    "problems, seeds drawn whole, which says little about other seeds, or a range; a number without brackets is that "
    "of one seed. p: two-sided sign-flip test over seeds, which gets no smaller than 1/16 with five; in brackets "
    "corrected for the pairs of that quantity (Holm)."
)
VERDICT_TONES: dict[str, Tone] = {
    "reproduced": "good",
    "not reproduced": "bad",
    "inconclusive": "unsure",
    "not run": "muted",
}
OUTCOME_TONES: dict[str, Tone] = {"improved": "good", "level": "muted", "fell": "unsure", "collapsed": "bad"}
ENGINE = (
    ("divergence/ppl_gap", "PPL gap, nats per token", ".2g"),
    ("divergence/kl_mean", "mean token KL, nats", ".2g"),
    ("divergence/kl_max", "largest token KL, nats", ".2g"),
    ("router/agreement_fraction", "share of tokens routed alike in every layer", ".3g"),
)
"""Metric, what it is, and how its values are written."""


def over_seeds(values: Sequence[float], thresholds: ClaimThresholds) -> str:
    """Write a mean over seeds with its interval, or with its range where seeds are too few.

    Args:
        values: ``[S]``, one a seed; those that are not finite are counted and left out.
        thresholds: number of seeds from which on there is an interval, its confidence and resamples.

    Returns:
        Text; empty where nothing was measured.
    """
    array = np.asarray(values, dtype=np.float64)
    array = array[np.isfinite(array)]
    if not len(array):
        return ""
    lost = f"; {len(values) - len(array)} seeds without a value" if len(array) < len(values) else ""
    if len(array) < thresholds.min_seeds:
        effect = Effect(estimate=float(array.mean()), low=float(array.min()), high=float(array.max()), kind="range")
        return f"{effect}{lost}"
    interval = bootstrap_mean(
        array,
        np.random.default_rng(thresholds.seed),
        num_resamples=thresholds.num_resamples,
        confidence=thresholds.confidence,
    )
    estimate, low, high = (float(end) for end in interval)
    return f"{Effect(estimate=estimate, low=low, high=high, kind='interval')}{lost}"


def claims_block(claims: Sequence[ClaimRow]) -> Table:
    """Tabulate claims that were run: what was tested, and what was measured with its interval or range."""
    rows: list[list[str | Cell]] = []
    for row in claims:
        adjusted = "" if row.adjusted_p_value is None else f" ({row.adjusted_p_value:.3f})"
        rows.append(
            [
                row.source,
                row.text,
                Cell(text=row.verdict, tone=VERDICT_TONES[row.verdict]),
                "none needed" if row.num_seeds is None else str(row.num_seeds),
                _test(row),
                _measured(row),
                "" if row.p_value is None else f"{row.p_value:.3f}{adjusted}",
                _data_and_note(row),
            ]
        )
    columns = ["source", "claim", "verdict", "seeds", "test", "measured", "p (Holm)", "data, note"]
    return Table(columns=columns, rows=rows, is_stacked=True, caption=CLAIMS_CAPTION)


def untested_claims(claims: Sequence[ClaimRow]) -> Table:
    """Tabulate claims that were not run: what would be tested, and on what."""
    rows = [[row.source, row.text, _test(row), _data_and_note(row)] for row in claims]
    return Table(columns=["source", "claim", "test", "data, note"], rows=rows, is_stacked=True)


def figure_claims(claims: Sequence[ClaimRow], source: str) -> Table:
    """Put what a figure of the paper claims beside what came out here; claims that were not run are left out."""
    rows: list[list[str | Cell]] = [
        [row.text, Cell(text=row.verdict, tone=VERDICT_TONES[row.verdict]), _test(row), _measured(row)]
        for row in claims
        if row.source == source and row.verdict != "not run"
    ]
    return Table(columns=["claim", "here", "test", "measured"], rows=rows, is_stacked=True)


def runs_table(outcomes: Sequence[RunOutcome]) -> Table:
    """Tabulate the runs, arm by arm, one line a run: no mean hides a seed."""
    rows: list[list[str | Cell]] = [
        [
            run.arm,
            str(run.seed),
            str(run.num_steps),
            f"{run.start_score:.2f}",
            f"{run.final_score:.2f}",
            f"{run.best_score:.2f}",
            f"{run.final_gap:.1e}",
            f"{run.acceptance:.2f}",
            Cell(text=run.verdict, tone=OUTCOME_TONES[run.verdict]),
            Cell(text=run.run_id, is_code=True),
        ]
        for run in _in_order(outcomes)
    ]
    columns = ["arm", "seed", "steps", "start", "final", "best", "PPL gap", "kept", "outcome", "MLflow run"]
    return Table(
        columns=columns,
        rows=rows,
        caption="Start, final and best are greedy scores, final that of the evaluation after the last step, which may "
        "answer more problems; the PPL gap is the median over the last quarter of the steps.",
    )


def arms_table(outcomes: Sequence[RunOutcome], thresholds: ClaimThresholds) -> Table:
    """Summarise each arm over its seeds."""
    cells: dict[str, list[str | Cell]] = {}
    for row in summarise_arms(outcomes, thresholds):
        cells.setdefault(row.arm, [row.arm]).append(str(row))
    return Table(columns=["arm", *QUANTITIES], rows=list(cells.values()), caption=ARMS_CAPTION)


def pairs_table(
    outcomes: Sequence[RunOutcome],
    reference: str,
    thresholds: ClaimThresholds,
    final_scores: ProblemScores | None = None,
) -> Table | None:
    """Compare every arm with one, and with its controls and variants, on the seeds both have; None without a pair.

    Args:
        outcomes: of all runs.
        reference: the one arm.
        thresholds: of the intervals.
        final_scores: by (arm, seed): the last score of each held-out problem, for pairs of few seeds.
    """
    pairs = pairs_of([run.arm for run in outcomes], reference)
    found = [
        row
        for row in compare_arms(outcomes, thresholds, pairs=pairs, final_scores=final_scores)
        if row.num_seeds or row.num_missing
    ]
    if not found:
        return None
    rows: list[list[str | Cell]] = [
        [
            row.quantity,
            row.first,
            row.second,
            str(row),
            f"{row.num_seeds} ({row.num_missing} without)" if row.num_missing else str(row.num_seeds),
            "" if row.p_value is None else f"{row.p_value:.3f} ({row.adjusted_p_value:.3f})",
        ]
        for row in found
    ]
    columns = ["quantity", "first", "second", "first minus second", "seeds", "p (Holm)"]
    return Table(columns=columns, rows=rows, caption=PAIRS_CAPTION)


def metrics_table(points: pd.DataFrame, metrics: dict[str, str], thresholds: ClaimThresholds, caption: str) -> Table:
    """Summarise metrics by arm: each seed's mean over its steps, then over seeds."""
    rows = []
    for arm in arm_order(list(points[points.metric.isin(list(metrics))].arm)):
        cells = [over_seeds(seed_means(points, metric, arm=arm), thresholds) for metric in metrics]
        rows.append([arm, *cells])
    return Table(columns=["arm", *metrics.values()], rows=rows, caption=f"{caption} {OVER_SEEDS}")


def bounds_table(points: pd.DataFrame) -> Table:
    """Tabulate the bounds of the steps by arm, with the steps that refute the guarantee's condition."""
    rows = []
    for arm in arm_order(list(points[points.metric.str.startswith("bounds/")].arm)):
        cells = [arm]
        for metric in ("surrogate", "unified_paper", "unified_sharp", "trivial"):
            values = points[(points.arm == arm) & (points.metric == f"bounds/{metric}")].value.dropna()
            cells.append("" if values.empty else f"{values.median():.2g} ({values.min():.2g} to {values.max():.2g})")
        refuting = points[(points.arm == arm) & (points.metric == "bounds/num_refuting_sequences")].value
        cells.append("" if refuting.empty else f"{(refuting > 0).sum()} of {len(refuting)}")
        rows.append(cells)
    return Table(
        columns=["arm", "surrogate L'", "unified, paper", "unified, sharp", "trivial", "steps that refute"],
        rows=rows,
        caption="Median over steps and seeds, smallest and largest in brackets, in reward units.",
    )


def times_table(points: pd.DataFrame) -> Table:
    """Tabulate where a step's time goes; no rows where it was not recorded."""
    steps = points[points.metric == "time/step_seconds"].value
    rows = []
    for stage in (*STAGES, "step"):
        values = points[points.metric == f"time/{stage}_seconds"].value.dropna()
        if values.empty or steps.empty:
            continue
        low, high = values.quantile(0.1), values.quantile(0.9)
        share = "" if stage == "step" else f"{values.sum() / steps.sum():.0%}"
        name = "whole step" if stage == "step" else stage
        rows.append([name, f"{values.median():.3f} ({low:.3f} to {high:.3f})", share])
    return Table(
        columns=["stage", "seconds", "share of all steps"],
        rows=rows,
        caption="Median over steps of all runs, with their 10th and 90th percentile in brackets.",
    )


def engine_table(points: pd.DataFrame) -> Table:
    """Tabulate what engine and trainer differ by in the first step."""
    first = points[points.step == 1]
    rows = []
    for metric, meaning, form in ENGINE:
        values = first[first.metric == metric].value.dropna()
        if not values.empty:
            low, high = format(values.min(), form), format(values.max(), form)
            rows.append([meaning, low if low == high else f"{low} to {high}", str(len(values))])
    return Table(columns=["in the first step", "smallest to largest run", "runs"], rows=rows)


def lengths_table(rows: "Sequence[LengthRow]", thresholds: ClaimThresholds) -> Table:
    """Tabulate rejection against length: a line for each problem size, each number over seeds."""
    gates = list(rows[0].rejection)
    cells = []
    for size in sorted({row.num_operands for row in rows}):
        sized = [row for row in rows if row.num_operands == size]
        measures = [
            [row.mean_length for row in sized],
            [row.token_violation_fraction for row in sized],
            [row.predicted_rejection for row in sized],
            *([row.rejection[gate] for row in sized] for gate in gates),
        ]
        num_sequences = sum(row.num_sequences for row in sized)
        cells.append([str(size), str(len(sized)), str(num_sequences), *(over_seeds(m, thresholds) for m in measures)])
    return Table(
        columns=["operands", "seeds", "responses", "mean length", "tokens above", "1 - (1 - p)^T", *gates],
        rows=cells,
        caption="Share of responses rejected by each gate. p is the share of tokens whose exact KL is above TRM-Max's "
        f"threshold; 1 - (1 - p)^T is what independent tokens would give. {OVER_SEEDS}",
    )


def seed_means(points: pd.DataFrame, metric: str, *, arm: str) -> list[float]:
    """Average a metric over the steps of each seed of an arm."""
    values = points[(points.arm == arm) & (points.metric == metric)]
    return [float(mean) for mean in values.groupby("seed").value.mean() if not math.isnan(mean)]


def _test(row: ClaimRow) -> str:
    return _numbered(row.test.split("; "))


def _measured(row: ClaimRow) -> str:
    return _numbered([str(effect) for effect in row.effects])


def _numbered(parts: Sequence[str]) -> str:
    """Put each part on a line of its own, with its number where there are several."""
    if len(parts) < 2:
        return "".join(parts)
    return ";\n".join(f"({number}) {part}" for number, part in enumerate(parts, start=1))


def _data_and_note(row: ClaimRow) -> str:
    """Two sentences, so that they stay apart where a line break does not show."""
    return f"{row.data}.\nNote: {row.note}" if row.note else row.data


def _in_order(outcomes: Sequence[RunOutcome]) -> list[RunOutcome]:
    return [
        run
        for arm in arm_order([outcome.arm for outcome in outcomes])
        for run in sorted((o for o in outcomes if o.arm == arm), key=lambda o: o.seed)
    ]
