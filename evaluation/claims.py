"""The paper's claims, and some of ours, each with its test, data and verdict. Pure: a frame of points in, rows out.

A claim about runs compares arms seed by seed; those that are computed are in evaluation/exact_claims.py. The score is
that of the runs at hand: on the miniature the held-out greedy pass rate, in the place of the paper's AIME25 score.
Source of every claim that names a figure or table: TRM (arXiv 2512.23075v3).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from evaluation.claim_rows import (
    ENOUGH_SEEDS,
    ClaimRow,
    ClaimThresholds,
    Effect,
    MeasuredPart,
    Relation,
    Verdict,
    adjust_for_number,
    claims_summary,
    claims_table,
    join_notes,
    judge_row,
)
from evaluation.exact_claims import exact_claims
from evaluation.outcomes import RunOutcome, run_outcomes

if TYPE_CHECKING:
    from evaluation.length_bias import LengthRow  # brings torch

__all__ = [
    "ENOUGH_SEEDS",
    "RUN_CLAIMS",
    "ClaimRow",
    "ClaimThresholds",
    "Effect",
    "Verdict",
    "claims_summary",
    "claims_table",
    "evaluate_claims",
]

Arms = Mapping[str, RunOutcome]

LABELS = {
    "trm_max_0.05": "TRM-Max 0.05",
    "trm_avg_0.001": "TRM-Avg 0.001",
    "trm_max_0.1": "TRM-Max 0.1",
    "trm_avg_0.002": "TRM-Avg 0.002",
    "trm_max_0.1_avg_0.002": "The combination of TRM-Max 0.1 and TRM-Avg 0.002",
}
"""The arms of the paper's figures that mask: each has its controls."""
MAX_GATE, FLAT_GATES = "trm_max_0.05", ("trm_avg_0.001", "ln_trm_0.05", "ser_0.05")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One thing that has to be so in a claim about runs.

    Attributes:
        name: what is measured in each seed.
        measure: it, from the runs of one seed.
        relation: the claimed side of the threshold.
        threshold: from the thresholds.
    """

    name: str
    measure: Callable[[Arms], float]
    relation: Relation
    threshold: Callable[[ClaimThresholds], float]


@dataclass(frozen=True, kw_only=True)
class RunClaim:
    """A claim about runs: all its parts have to hold, over the seeds that have all its arms.

    Attributes:
        source: where it is claimed.
        text: the claim.
        arms: it needs.
        parts: of its test.
        note: what a reader has to know beside it.
    """

    source: str
    text: str
    arms: tuple[str, ...]
    parts: tuple[Part, ...]
    note: str = ""


def _score_above(first: str, second: str) -> Part:
    return Part(
        name=f"final score, {first} minus {second}",
        measure=lambda arms: arms[first].final_score - arms[second].final_score,
        relation=">",
        threshold=lambda t: t.score_difference,
    )


def _gap_above(first: str, second: str) -> Part:
    return Part(
        name=f"log10 final PPL gap, {first} minus {second}",
        measure=lambda arms: arms[first].log_gap - arms[second].log_gap,
        relation=">",
        threshold=lambda t: math.log10(t.gap_factor),
    )


def _rises(arm: str, relation: Relation = ">") -> Part:
    return Part(
        name=f"score of {arm}, final minus start",
        measure=lambda arms: arms[arm].rise,
        relation=relation,
        threshold=lambda t: t.improvement,
    )


def _stays_bounded(arm: str) -> Part:
    return Part(
        name=f"log10 PPL gap of {arm}, last quarter minus first",
        measure=lambda arms: arms[arm].gap_growth,
        relation="<",
        threshold=lambda t: math.log10(t.bounded_gap_factor),
    )


def _figure_2(arm: str) -> RunClaim:
    return RunClaim(
        source="Figure 2",
        text=f"{LABELS[arm]} stays bounded, improves, and ends with a smaller gap and a higher score than PPO clipping",
        arms=("ppo_clip", arm),
        parts=(_stays_bounded(arm), _rises(arm), _gap_above("ppo_clip", arm), _score_above(arm, "ppo_clip")),
    )


def _loose(arm: str) -> RunClaim:
    text = f"{LABELS[arm]} alone fails: it does not improve"
    return RunClaim(source="Figure 3", text=text, arms=(arm,), parts=(_rises(arm, "<"),))


def _beats_control(arm: str, control: str, what: str) -> RunClaim:
    return RunClaim(
        source="Control (ours)",
        text=f"{LABELS[arm]} ends above {what}",
        arms=(arm, control),
        parts=(_score_above(arm, control),),
    )


def _acceptance(arm: str) -> RunClaim:
    part = Part(
        name=f"mean kept fraction of {arm}",
        measure=lambda arms: arms[arm].acceptance,
        relation=">",
        threshold=lambda t: t.acceptance,
    )
    note = "a high rate is no evidence for the guarantee's condition where an exact KL refutes it"
    return RunClaim(source="Acceptance", text=f"{LABELS[arm]} keeps over 70%", arms=(arm,), parts=(part,), note=note)


RUN_CLAIMS = (
    RunClaim(
        source="Figure 1",
        text="PPO clipping ends with a larger gap and a lower score than token-level importance sampling",
        arms=("token_is", "ppo_clip"),
        parts=(_gap_above("ppo_clip", "token_is"), _score_above("token_is", "ppo_clip")),
    ),
    _figure_2("trm_max_0.05"),
    _figure_2("trm_avg_0.001"),
    _loose("trm_max_0.1"),
    _loose("trm_avg_0.002"),
    RunClaim(
        source="Figure 3",
        text="TRM-Max 0.1 and TRM-Avg 0.002 together hold: they stay bounded and improve",
        arms=("trm_max_0.1_avg_0.002",),
        parts=(_stays_bounded("trm_max_0.1_avg_0.002"), _rises("trm_max_0.1_avg_0.002")),
    ),
    _acceptance("trm_max_0.05"),
    _acceptance("trm_avg_0.001"),
    *(_beats_control(arm, f"random_as_{arm}", "random rejection of as many sequences") for arm in LABELS),
    *(_beats_control(arm, f"length_as_{arm}", "random rejection matched in number and length") for arm in LABELS),
)
"""Those that compare a mean over seeds with a threshold; `evaluate_claims` adds the others."""


def evaluate_claims(
    points: pd.DataFrame,
    thresholds: ClaimThresholds,
    length_rows: "Mapping[int, Sequence[LengthRow]] | None" = None,
) -> list[ClaimRow]:
    """Test every claim.

    Args:
        points: frame of points (arm, seed, run_id, metric, step, value).
        thresholds: of the tests, set before the runs.
        length_rows: for each seed its rows of rejection against length; None where it was not measured.

    Returns:
        A row for each claim: first those about runs, then those that were computed or enumerated. Holm's correction
        runs over all that have a p-value.
    """
    by_seed: dict[int, dict[str, RunOutcome]] = {}
    for outcome in run_outcomes(points):
        by_seed.setdefault(outcome.seed, {})[outcome.arm] = outcome
    rows = [
        *(_run_row(claim, by_seed, thresholds) for claim in RUN_CLAIMS),
        _guarantee_row(by_seed, thresholds),
        _full_scale_row(),
        *_length_claims(length_rows or {}, thresholds),
        *exact_claims(thresholds),
    ]
    return adjust_for_number(rows, thresholds)


def _run_row(claim: RunClaim, by_seed: Mapping[int, Arms], thresholds: ClaimThresholds) -> ClaimRow:
    seeds = [arms for arms in by_seed.values() if all(arm in arms for arm in claim.arms)]
    num_lacking = sum(any(arm in arms for arm in claim.arms) for arms in by_seed.values()) - len(seeds)
    num_steps = sorted({arms[arm].num_steps for arms in seeds for arm in claim.arms})
    is_uneven = len(num_steps) > 1
    row = ClaimRow(
        source=claim.source,
        text=claim.text,
        data=f"runs of {', '.join(claim.arms)}",
        num_seeds=len(seeds),
        note=join_notes(
            claim.note,
            f"seeds that lack an arm: {num_lacking}" if num_lacking else "",
            f"undecided: runs have {num_steps[0]} to {num_steps[-1]} steps" if is_uneven else "",
        ),
    )
    parts = [
        MeasuredPart(
            name=part.name,
            values=tuple(part.measure(arms) for arms in seeds),
            relation=part.relation,
            threshold=part.threshold(thresholds),
        )
        for part in claim.parts
    ]
    return judge_row(row, parts, thresholds, is_comparable=not is_uneven)


def _guarantee_row(by_seed: Mapping[int, Arms], thresholds: ClaimThresholds) -> ClaimRow:
    """A statement about every context: a counterexample refutes it, and nothing sampled confirms it."""
    runs = [arms[MAX_GATE] for arms in by_seed.values() if MAX_GATE in arms]
    shares = tuple(run.refuted_fraction for run in runs)
    row = ClaimRow(
        source="Guarantee",
        text="Under TRM-Max 0.05 the condition holds: exact KL is at most delta in every reachable context",
        data=f"exact KL in runs of {MAX_GATE}",
        num_seeds=len(runs),
        note="one rejection by exact KL refutes the condition for its step, whatever the number of seeds; none in N "
        "sequences only bounds the violating probability (3/N at 95%), so this is never called reproduced",
    )
    part = MeasuredPart(name="share of steps with an exact-KL rejection", values=shares, relation="<", threshold=0.0)
    judged = judge_row(row, [part], thresholds)  # for its effect: the verdict is not about a mean
    is_refuted = len(runs) >= thresholds.min_seeds and any(share > 0 for share in shares)
    verdict: Verdict = "not reproduced" if is_refuted else "inconclusive"
    return dataclasses.replace(
        judged, test=f"{part.name}: 0 in every seed", p_value=None, verdict=verdict if runs else "not run"
    )


def _full_scale_row() -> ClaimRow:
    return ClaimRow(
        source="Figures 1 to 3",
        text="The same at the paper's scale: Qwen3-8B-Base on DAPO-Math-17k, scored by avg@32 on AIME25",
        test="the tests of Figures 1 to 3, with AIME25 as the score",
        data="runs at that scale on GPUs",
        num_seeds=0,
        note="cannot be tested on the miniature",
    )


def _length_claims(rows_by_seed: "Mapping[int, Sequence[LengthRow]]", thresholds: ClaimThresholds) -> list[ClaimRow]:
    gates = {MAX_GATE, *FLAT_GATES}
    seeds = [
        sorted(rows, key=lambda row: row.mean_length)
        for rows in rows_by_seed.values()
        if len(rows) > 1 and all(gates <= set(row.rejection) for row in rows)
    ]
    data = "rejection by problem size (trm-repro lengths), a policy pair a seed"
    ends = [(rows[0].rejection, rows[-1].rejection) for rows in seeds]
    # Where nearly everything is rejected at any length, rejection has no room to grow.
    ceiling = 1.0 - thresholds.length_growth
    growth = MeasuredPart(
        name=f"rejection by {MAX_GATE}, longest minus shortest problems",
        values=tuple(
            math.nan if short[MAX_GATE] > ceiling else long[MAX_GATE] - short[MAX_GATE] for short, long in ends
        ),
        relation=">",
        threshold=thresholds.length_growth,
    )
    flat = [
        MeasuredPart(
            name=f"absolute change of rejection by {gate}, longest minus shortest",
            values=tuple(abs(long[gate] - short[gate]) for short, long in ends),
            relation="<",
            threshold=thresholds.flat_within,
        )
        for gate in FLAT_GATES
    ]
    grows = ClaimRow(
        source="Table 2",
        text="TRM-Max rejects more, the longer the response",
        data=data,
        num_seeds=len(seeds),
        note="a seed whose shortest problems are nearly all rejected has no value",
    )
    is_flat = ClaimRow(
        source="Table 2",
        text="TRM-Avg, LN-TRM and SER reject about as much at any length",
        data=data,
        num_seeds=len(seeds),
    )
    return [judge_row(grows, [growth], thresholds), judge_row(is_flat, flat, thresholds)]
