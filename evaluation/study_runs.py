"""The runs of a study, from its two CSV files alone: outcome, setting and what is derived from the curves. Pure.

``runs.csv`` has a row a run, ``points.csv`` a row a run and step with a column a metric, empty where not measured.
"""

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from evaluation.outcomes import (
    ACCEPTANCE,
    FINAL_SAMPLED_SCORE,
    FINAL_SCORE,
    GAP,
    NUM_REFUTING,
    SAMPLED_SCORE,
    SCORE,
    RunOutcome,
    run_outcomes,
)

CURVES = (
    SCORE,
    SAMPLED_SCORE,
    FINAL_SCORE,
    FINAL_SAMPLED_SCORE,
    GAP,
    "divergence/kl_mean",
    "divergence/kl_max",
    ACCEPTANCE,
    "rollout/reward_mean",
    "rollout/response_length_mean",
    "policy/entropy_mean",
    "router/agreement_fraction",
    "train/gradient_norm_mean",
    "train/learning_rate",
    "train/num_skipped_updates",
    "control/scale_mean",
    "control/num_undone_steps",
    "bounds/unified_sharp",
    "bounds/trivial",
    "bounds/surrogate",
    NUM_REFUTING,
)
"""The columns of points.csv after cell, arm, seed and step."""
RUN_COLUMNS = (
    "cell",
    "stage",
    "arm",
    "seed",
    "num_steps",
    "is_finished",
    "seconds",
    "optimizer",
    "learning_rate",
    "staleness_steps",
    "precision",
    "max_operands",
    "max_gradient_norm",
    "num_updates_per_rollout",
    "settings",
)
POINT_COLUMNS = ("cell", "arm", "seed", "step", *CURVES)
TOLD_KEYS = ("num_steps", "update.optimizer", "update.learning_rate", "rollout.staleness_steps", "rollout.precision")
TOLD_SECTIONS = ("evaluation", "task", "warm_start")
"""What a setting changes that other columns tell, or that changes no update."""
SMOOTHED_OVER = 3
"""Steps whose median gap is the gap at the last of them."""

Curve = Sequence[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the cells of a study differ in.

    Attributes:
        optimizer: sgd or adamw.
        learning_rate: after warm-up.
        staleness_steps: age of the rollout weights.
        precision: of the engine.
        max_operands: largest problem.
        others: further settings, ``key=value`` with spaces between.
    """

    optimizer: str
    learning_rate: float
    staleness_steps: int
    precision: str
    max_operands: int
    others: str = ""

    @property
    def surroundings(self) -> str:
        """Write out everything but the learning rate."""
        known = f"{self.optimizer}, weights {self.staleness_steps} steps old, {self.precision}"
        return f"{known}, {self.others}" if self.others else known


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One finished run.

    Attributes:
        cell: it belongs to.
        stage: screen or confirm.
        setting: of the cell.
        outcome: what it did.
        curves: metric to (step, value), by step.
        effective_step: mean over steps of learning rate x min(gradient norm, its limit) x share of the step that step
            control left x share of updates not skipped: length of an update in weight space; NaN for AdamW, whose
            updates have another length.
        response_length: mean, tokens.
        bound: median over steps of the sharp unified bound on |J difference - L'|, in units of reward.
        bound_below_one: share of steps in which it is below 1, the range of the reward.
        guarantee_fraction: share of steps in which the surrogate exceeds the bound: improvement would be guaranteed.
    """

    cell: str
    stage: str
    setting: Setting
    outcome: RunOutcome
    curves: Mapping[str, Curve]
    effective_step: float
    response_length: float
    bound: float
    bound_below_one: float
    guarantee_fraction: float

    @property
    def arm(self) -> str:
        """Its arm."""
        return self.outcome.arm

    @property
    def seed(self) -> int:
        """Its seed."""
        return self.outcome.seed

    def gap_at(self, step: int) -> float:
        """Return log10 of the median gap of the `SMOOTHED_OVER` steps that end at a step; NaN where there is none."""
        recent = [gap for at, gap in self.curves[GAP] if step - SMOOTHED_OVER < at <= step]
        middle = statistics.median(recent) if recent else 0.0
        return math.log10(middle) if middle > 0 else math.nan


def study_runs(runs: pd.DataFrame, points: pd.DataFrame) -> list[StudyRun]:
    """Join the two files.

    Args:
        runs: frame with `RUN_COLUMNS`.
        points: frame with `POINT_COLUMNS`.

    Returns:
        The finished runs that have scores, in the order of ``runs``.
    """
    grouped = {key: group for key, group in points.groupby(["cell", "arm", "seed"], sort=False)}
    found = []
    for row in runs.to_dict("records"):
        key = (row["cell"], row["arm"], row["seed"])
        if not row["is_finished"] or key not in grouped:
            continue
        curves = _curves(grouped[key])
        outcomes = run_outcomes(_long(row["arm"], int(row["seed"]), "/".join(map(str, key)), curves))
        if outcomes:
            found.append(_study_run(row, outcomes[0], curves))
    return found


def other_settings(settings: str) -> str:
    """Take those of a cell's settings, with spaces between, that no other column tells and that change its updates."""
    others = []
    for setting in settings.split():
        key, is_set, _ = setting.partition("=")
        is_told = key in TOLD_KEYS or key.split(".")[0] in TOLD_SECTIONS or key.startswith("rollout.max_")
        if is_set and not is_told:
            others.append(setting)
    return " ".join(others)


def outcomes_of(runs: Iterable[StudyRun]) -> list[RunOutcome]:
    """Take the outcomes."""
    return [run.outcome for run in runs]


def cells_of(runs: Sequence[StudyRun]) -> dict[str, list[StudyRun]]:
    """Group runs by cell, in the order in which cells first appear."""
    cells: dict[str, list[StudyRun]] = {}
    for run in runs:
        cells.setdefault(run.cell, []).append(run)
    return cells


def confirming_cells(runs: Sequence[StudyRun]) -> dict[str, list[StudyRun]]:
    """Group the runs of the cells that confirm, as `cells_of` does."""
    return cells_of([run for run in runs if run.stage == "confirm"])


def _curves(group: pd.DataFrame) -> dict[str, list[tuple[int, float]]]:
    rows = group.sort_values("step")
    steps = rows.step.tolist()
    return {
        metric: [
            (int(step), float(value))
            for step, value in zip(steps, rows[metric].tolist(), strict=True)
            if not math.isnan(value)
        ]
        for metric in CURVES
    }


def _long(arm: str, seed: int, run_id: str, curves: Mapping[str, Curve]) -> pd.DataFrame:
    rows = [(arm, seed, run_id, metric, step, value) for metric, curve in curves.items() for step, value in curve]
    return pd.DataFrame(rows, columns=["arm", "seed", "run_id", "metric", "step", "value"])


def _study_run(row: Mapping[Hashable, Any], outcome: RunOutcome, curves: Mapping[str, Curve]) -> StudyRun:
    setting = Setting(
        optimizer=row["optimizer"],
        learning_rate=float(row["learning_rate"]),
        staleness_steps=int(row["staleness_steps"]),
        precision=row["precision"],
        max_operands=int(row["max_operands"]),
        others=other_settings(str(row["settings"])),
    )
    bounds, surrogates = dict(curves["bounds/unified_sharp"]), dict(curves["bounds/surrogate"])
    return StudyRun(
        cell=row["cell"],
        stage=row["stage"],
        setting=setting,
        outcome=outcome,
        curves=curves,
        effective_step=math.nan
        if setting.optimizer != "sgd"
        else effective_step(
            curves, limit=float(row["max_gradient_norm"]), num_updates=int(row["num_updates_per_rollout"])
        ),
        response_length=_mean([value for _, value in curves["rollout/response_length_mean"]]),
        bound=statistics.median(bounds.values()) if bounds else math.nan,
        bound_below_one=_mean([float(value < 1) for value in bounds.values()]),
        guarantee_fraction=_mean([float(surrogates[step] > bounds[step]) for step in bounds if step in surrogates]),
    )


def effective_step(curves: Mapping[str, Curve], *, limit: float, num_updates: int) -> float:
    """Estimate how far an update moves the weights, averaged over steps.

    A step logs the mean over its updates of each factor, so this is a product of means.

    Args:
        curves: of a run with SGD.
        limit: largest gradient norm.
        num_updates: updates of a step.

    Returns:
        Length in weight space; NaN where no rate was logged.
    """
    norms, scales, skipped = (
        dict(curves[metric])
        for metric in ("train/gradient_norm_mean", "control/scale_mean", "train/num_skipped_updates")
    )
    lengths = []
    for step, rate in curves["train/learning_rate"]:
        share_taken = 1 - skipped.get(step, 0.0) / num_updates
        # The logged norm is a mean over all updates, a skipped one counted as 0.
        norm = norms.get(step, 0.0) / share_taken if share_taken > 0 else 0.0
        lengths.append(rate * min(norm, limit) * scales.get(step, 1.0) * share_taken)
    return _mean(lengths)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan
