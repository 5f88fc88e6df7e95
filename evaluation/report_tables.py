"""The report's tables: a frame of points or a list of outcomes in, a table out. No mean stands without its interval.

A step is not a unit of its own: what is averaged over seeds is each seed's mean over its steps.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from evaluation.claim_rows import ClaimRow, ClaimThresholds, Effect
from evaluation.document import Cell, Table, Tone
from evaluation.figures import arm_order
from evaluation.outcomes import RunOutcome
from evaluation.statistics import bootstrap_mean, compare_paired, holm

if TYPE_CHECKING:
    from evaluation.length_bias import LengthRow  # brings torch

STAGES = ("sync", "rollout", "mask", "update", "evaluate", "record")
OVER_SEEDS = (
    "Mean over seeds; in brackets its bootstrap interval over seeds or, where seeds are too few for one, the smallest "
    "and the largest seed (range)."
)
VERDICT_TONES: dict[str, Tone] = {
    "reproduced": "good",
    "not reproduced": "bad",
    "inconclusive": "unsure",
    "not run": "muted",
}
OUTCOME_TONES: dict[str, Tone] = {"improved": "good", "level": "muted", "fell": "unsure", "collapsed": "bad"}
ENGINE = (
    ("divergence/ppl_gap", "PPL gap, nats per token"),
    ("divergence/kl_mean", "mean token KL, nats"),
    ("divergence/kl_max", "largest token KL, nats"),
    ("router/agreement_fraction", "share of tokens routed alike in every layer"),
)


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
    """Tabulate the claims: every effect has its interval or range beside it."""
    rows: list[list[str | Cell]] = []
    for row in claims:
        adjusted = "" if row.adjusted_p_value is None else f" ({row.adjusted_p_value:.3f})"
        rows.append(
            [
                row.source,
                row.text,
                Cell(text=row.verdict, tone=VERDICT_TONES[row.verdict]),
                "none needed" if row.num_seeds is None else str(row.num_seeds),
                row.test,
                "; ".join(str(effect) for effect in row.effects),
                "" if row.p_value is None else f"{row.p_value:.3f}{adjusted}",
                row.data,
                row.note,
            ]
        )
    columns = ["source", "claim", "verdict", "seeds", "test", "effect, test by test", "p (Holm)", "data", "note"]
    return Table(columns=columns, rows=rows, is_stacked=True)


def figure_claims(claims: Sequence[ClaimRow], source: str) -> Table:
    """Put what a figure of the paper claims beside what came out here."""
    rows: list[list[str | Cell]] = [
        [row.text, Cell(text=row.verdict, tone=VERDICT_TONES[row.verdict]), "; ".join(str(e) for e in row.effects)]
        for row in claims
        if row.source == source
    ]
    return Table(columns=["the paper's claim", "here", "effect, test by test"], rows=rows, is_stacked=True)


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
        caption="Start, final and best are scores; the PPL gap is the median over the last quarter of the steps.",
    )


def arms_table(outcomes: Sequence[RunOutcome], thresholds: ClaimThresholds) -> Table:
    """Summarise each arm over its seeds."""
    measures: dict[str, Callable[[RunOutcome], float]] = {
        "start score": lambda run: run.start_score,
        "final score": lambda run: run.final_score,
        "rise": lambda run: run.rise,
        "log10 PPL gap, last quarter": lambda run: run.log_gap,
        "kept fraction": lambda run: run.acceptance,
    }
    rows: list[list[str | Cell]] = []
    for arm in arm_order([run.arm for run in outcomes]):
        runs = [run for run in outcomes if run.arm == arm]
        cells = [over_seeds([measure(run) for run in runs], thresholds) for measure in measures.values()]
        num_collapsed = sum(run.verdict == "collapsed" for run in runs)
        rows.append([arm, str(len(runs)), *cells, f"{num_collapsed} of {len(runs)}"])
    return Table(columns=["arm", "seeds", *measures, "collapsed"], rows=rows, caption=OVER_SEEDS)


def pairs_table(outcomes: Sequence[RunOutcome], reference: str, thresholds: ClaimThresholds) -> Table | None:
    """Compare every arm's final score with one arm's, seed by seed; None where no arm shares enough seeds with it."""
    scores = {(run.arm, run.seed): run.final_score for run in outcomes}
    rng = np.random.default_rng(thresholds.seed)
    found = {}
    for arm in arm_order([run.arm for run in outcomes]):
        seeds = sorted(seed for name, seed in scores if name == arm and (reference, seed) in scores)
        if arm == reference or len(seeds) < thresholds.min_seeds:
            continue
        found[arm] = compare_paired(
            [scores[arm, seed] for seed in seeds],
            [scores[reference, seed] for seed in seeds],
            rng,
            num_resamples=thresholds.num_resamples,
            confidence=thresholds.confidence,
        )
    if not found:
        return None
    adjusted = holm([pair.p_value for pair in found.values()])
    rows = [
        [
            arm,
            str(pair.num_pairs),
            f"{pair.mean_difference:+.3f} ({pair.low:+.3f} to {pair.high:+.3f})",
            f"{pair.p_value:.3f}",
            f"{holm_p:.3f}",
        ]
        for (arm, pair), holm_p in zip(found.items(), adjusted, strict=True)
    ]
    return Table(
        columns=["arm", "seeds", f"final score minus {reference}", "p", "p (Holm)"],
        rows=rows,
        caption="Pairs of the same seed: mean difference with its bootstrap interval, two-sided sign-flip test, and "
        f"the same corrected for the {len(rows)} arms of this table. Five seeds get no two-sided p below 1/16.",
    )


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
    for metric, meaning in ENGINE:
        values = first[first.metric == metric].value.dropna()
        if not values.empty:
            rows.append([meaning, f"{values.min():.1e} to {values.max():.1e}", str(len(values))])
    return Table(columns=["in the first step", "smallest to largest run", "runs"], rows=rows)


def lengths_table(rows: "Sequence[LengthRow]") -> Table:
    """Tabulate rejection against length, gate by gate."""
    gates = list(rows[0].rejection)
    cells = [
        [
            str(row.num_operands),
            str(row.num_sequences),
            f"{row.mean_length:.0f}",
            f"{row.token_violation_fraction:.4f}",
            f"{row.predicted_rejection:.2f}",
            *(wilson(row.rejection[gate], row.num_sequences) for gate in gates),
        ]
        for row in rows
    ]
    return Table(
        columns=["operands", "responses", "mean length", "tokens above", "1 - (1 - p)^T", *gates],
        rows=cells,
        caption="Share rejected with its 95% Wilson interval, as if responses were independent: those to one prompt "
        "are not, so that it is too short. p is the share of tokens whose exact KL is above TRM-Max's threshold.",
    )


def wilson(share: float, num_samples: int, *, z: float = 1.959964) -> str:
    """Write a share with its score interval.

    Source: Wilson, "Probable Inference, the Law of Succession, and Statistical Inference" (JASA 1927).

    Args:
        share: of successes, in [0, 1].
        num_samples: N >= 1.
        z: normal quantile; the default is that of 95%.

    Returns:
        The share, its interval in brackets.
    """
    weight = z * z / num_samples
    centre = (share + weight / 2) / (1 + weight)
    half_width = math.sqrt(share * (1 - share) * weight + weight * weight / 4) / (1 + weight)
    return f"{share:.2f} ({centre - half_width:.2f} to {centre + half_width:.2f})"


def seed_means(points: pd.DataFrame, metric: str, *, arm: str) -> list[float]:
    """Average a metric over the steps of each seed of an arm."""
    values = points[(points.arm == arm) & (points.metric == metric)]
    return [float(mean) for mean in values.groupby("seed").value.mean() if not math.isnan(mean)]


def _in_order(outcomes: Sequence[RunOutcome]) -> list[RunOutcome]:
    return [
        run
        for arm in arm_order([outcome.arm for outcome in outcomes])
        for run in sorted((o for o in outcomes if o.arm == arm), key=lambda o: o.seed)
    ]
