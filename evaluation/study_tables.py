"""Tables of a study, Markdown: arms, paired differences, stable rates, prediction, bound, length. Pure."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from evaluation.arm_summaries import compare_arms, pairs_of
from evaluation.figures import arm_order
from evaluation.gap_prediction import AlarmRow, PredictionRow, alarm, predict_collapse
from evaluation.outcomes import GAP
from evaluation.statistics import bootstrap_mean
from evaluation.study_runs import Setting, StudyRun, cells_of, confirming_cells, outcomes_of
from trm_repro.config_sections.claims import ENOUGH_SEEDS, ClaimThresholds
from trm_repro.config_sections.task import TaskConfig

REFERENCE_ARM = "ppo_clip"
"""Arms are compared with it seed by seed."""
NOTHING = "Nothing of this has been run."
USUAL_OPERANDS = TaskConfig.max_operands
"""Largest problem of conf/miniature.yaml; cells with others ask about the length of responses."""


def arms_table(runs: Sequence[StudyRun], thresholds: ClaimThresholds) -> str:
    """Lay out every cell and arm: a mean with its interval from five seeds, with its range below, one seed as it is."""
    heads = [
        *("cell", "arm", "seeds", "score before", "final score", "final, sampled", "score area"),
        *("PPL gap, last quarter", "kept", "update length", "collapsed", "at step (median)"),
    ]
    rows = []
    for cell, members in cells_of(runs).items():
        for arm in arm_order([run.arm for run in members]):
            of_arm = [run for run in members if run.arm == arm]
            outcomes = outcomes_of(of_arm)
            known = [outcome for outcome in outcomes if outcome.has_collapsed is not None]
            steps = [outcome.collapse_step for outcome in known if outcome.collapse_step is not None]
            rows.append(
                [
                    cell,
                    arm,
                    str(len(of_arm)),
                    spread([outcome.start_score for outcome in outcomes]),
                    mean_with_interval([outcome.final_score for outcome in outcomes], thresholds),
                    mean_with_interval([outcome.final_sampled_score for outcome in outcomes], thresholds),
                    mean_with_interval([outcome.score_area for outcome in outcomes], thresholds),
                    spread([outcome.final_gap for outcome in outcomes], "{:.1e}"),
                    mean_with_interval([outcome.acceptance for outcome in outcomes], thresholds),
                    spread([run.effective_step for run in of_arm], "{:.3f}"),
                    f"{len(steps)} of {len(known)}",
                    f"{statistics.median(steps):g}" if steps else "",
                ]
            )
    return markdown(heads, rows)


def differences_table(runs: Sequence[StudyRun], thresholds: ClaimThresholds) -> str:
    """Lay out the arms of the cells that confirm, two by two, seed by seed."""
    heads = ["cell", "quantity", "arm", "minus", "difference", "p (Holm)"]
    rows = []
    for cell, members in confirming_cells(runs).items():
        outcomes = outcomes_of(members)
        for row in compare_arms(
            outcomes, thresholds, pairs=pairs_of([run.arm for run in members], reference=REFERENCE_ARM)
        ):
            p_value = "" if row.p_value is None else f"{row.p_value:.3f} ({row.adjusted_p_value:.3f})"
            rows.append([cell, row.quantity, row.first, row.second, str(row), p_value])
    return markdown(heads, rows)


def rates_table(runs: Sequence[StudyRun]) -> str:
    """Lay out, for each arm and surroundings, up to which learning rate no seed collapsed."""
    heads = ["optimizer, staleness, engine", "arm", "rates tried", "stable up to", "first collapse at"]
    rows = []
    for surroundings, members in by_surroundings(runs).items():
        for arm in arm_order([run.arm for run in members]):
            known = [run for run in members if run.arm == arm and run.outcome.has_collapsed is not None]
            rates = sorted({run.setting.learning_rate for run in known})
            dead = sorted({run.setting.learning_rate for run in known if run.outcome.has_collapsed})
            stable = [rate for rate in rates if not dead or rate < dead[0]]
            rows.append(
                [
                    surroundings,
                    arm,
                    ", ".join(f"{rate:g}" for rate in rates),
                    f"{stable[-1]:g}" if stable else "none of them",
                    f"{dead[0]:g}" if dead else "none of them",
                ]
            )
    return markdown(heads, rows)


def by_surroundings(runs: Iterable[StudyRun]) -> dict[str, list[StudyRun]]:
    """Group runs of the usual problem size by all but the learning rate, leaving out what has one rate only."""
    chosen = [run for run in runs if run.setting.max_operands == USUAL_OPERANDS]
    order = sorted({run.setting for run in chosen}, key=_setting_order)
    groups: dict[str, list[StudyRun]] = {setting.surroundings: [] for setting in order}
    for run in chosen:
        groups[run.setting.surroundings].append(run)
    return {name: group for name, group in groups.items() if len({run.setting.learning_rate for run in group}) > 1}


def _setting_order(setting: Setting) -> tuple[object, ...]:
    return (setting.optimizer != "sgd", setting.precision, setting.staleness_steps, setting.learning_rate)


def prediction_table(runs: Sequence[StudyRun]) -> str:
    """Lay out whether the gap tells beforehand who collapses: over all runs, and in each cell that confirms."""
    groups = {"all runs": list(runs)} | confirming_cells(runs)
    heads = ["runs", "gap read at step", "will collapse", "will not", "AUC"]
    rows = [[name, *_prediction(row)] for name, group in groups.items() for row in predict_collapse(group)]
    alarms = [[name, *_alarm(found)] for name, group in groups.items() if (found := alarm(group)) is not None]
    alarm_heads = ["runs", "alarm above", "collapses warned of", "steps ahead (median)", "false alarms"]
    return markdown(heads, rows) + ("\n\n" + markdown(alarm_heads, alarms) if alarms else "")


def _prediction(row: PredictionRow) -> list[str]:
    ends = "" if math.isnan(row.low) else f" ({row.low:.2f} to {row.high:.2f})"
    auc = "cannot say" if math.isnan(row.auc) else f"{row.auc:.2f}{ends}"
    return [str(row.step), str(row.num_collapsing), str(row.num_lasting), auc]


def _alarm(row: AlarmRow) -> list[str]:
    return [
        f"{row.threshold:.1e}",
        f"{row.num_warned} of {row.num_collapsing}",
        "" if math.isnan(row.median_lead) else f"{row.median_lead:g}",
        f"{row.num_false_alarms} of {row.num_lasting}",
    ]


def bound_table(runs: Sequence[StudyRun]) -> str:
    """Lay out whether the sharp unified bound says anything: below the range of the reward, below the surrogate."""
    heads = ["cell", "arm", "runs", "bound (median)", "steps with bound below 1", "steps with surrogate above bound"]
    rows = []
    for cell, members in cells_of(runs).items():
        for arm in arm_order([run.arm for run in members]):
            of_arm = [run for run in members if run.arm == arm and not math.isnan(run.bound)]
            if of_arm:
                rows.append(
                    [
                        cell,
                        arm,
                        str(len(of_arm)),
                        f"{statistics.median(run.bound for run in of_arm):.3g}",
                        _mean_of(of_arm, lambda run: run.bound_below_one, "{:.3f}"),
                        _mean_of(of_arm, lambda run: run.guarantee_fraction, "{:.3f}"),
                    ]
                )
    return markdown(heads, rows)


def horizon_table(runs: Sequence[StudyRun]) -> str:
    """Lay out what moves with the length of responses: longer problems, and the usual ones at the same settings."""
    longer = [run for run in runs if run.setting.max_operands != USUAL_OPERANDS]
    beside = {(run.setting.surroundings, run.setting.learning_rate) for run in longer}
    arms = {run.arm for run in longer}
    chosen = [
        run
        for run in runs
        if run.arm in arms and (run.setting.surroundings, run.setting.learning_rate) in beside
    ]  # fmt: skip
    heads = [
        *("operands at most", "mean length", "arm", "seeds", "kept, steps 1 to 4", "kept", "gap, steps 1 to 4"),
        *("PPL gap, last quarter", "score before", "final score", "collapsed"),
    ]
    rows = []
    for size in sorted({run.setting.max_operands for run in chosen}) if longer else []:
        members = [run for run in chosen if run.setting.max_operands == size]
        for arm in arm_order([run.arm for run in members]):
            of_arm = [run for run in members if run.arm == arm]
            rows.append(
                [
                    str(size),
                    _mean_of(of_arm, lambda run: run.response_length, "{:.0f}"),
                    arm,
                    str(len(of_arm)),
                    _mean_of(of_arm, lambda run: early(run, "mask/kept_sequence_fraction"), "{:.2f}"),
                    _mean_of(of_arm, lambda run: run.outcome.acceptance, "{:.2f}"),
                    _mean_of(of_arm, lambda run: early(run, GAP), "{:.1e}"),
                    spread([run.outcome.final_gap for run in of_arm], "{:.1e}"),
                    _mean_of(of_arm, lambda run: run.outcome.start_score, "{:.2f}"),
                    spread([run.outcome.final_score for run in of_arm], "{:.2f}"),
                    f"{sum(bool(run.outcome.has_collapsed) for run in of_arm)} of {len(of_arm)}",
                ]
            )
    return markdown(heads, rows)


def early(run: StudyRun, metric: str, *, last: int = 4) -> float:
    """Average a metric over the first steps, whose rollout weights are all the starting policy's; NaN without any."""
    values = [value for step, value in run.curves[metric] if step <= last]
    return statistics.fmean(values) if values else math.nan


def mean_with_interval(values: Sequence[float], thresholds: ClaimThresholds, form: str = "{:.2f}") -> str:
    """Write a mean with its bootstrap interval from five values on, with its range below, one value as it is."""
    if len(values) < ENOUGH_SEEDS or not np.all(np.isfinite(values)):
        return spread(values, form)
    rng = np.random.default_rng(thresholds.seed)
    found = bootstrap_mean(values, rng, num_resamples=thresholds.num_resamples, confidence=thresholds.confidence)
    return f"{form.format(float(found.estimate))} ({form.format(float(found.low))} to {form.format(float(found.high))})"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a Markdown table; a sentence where it has no rows."""
    if not rows:
        return NOTHING
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _mean_of(runs: Sequence[StudyRun], measure: Callable[[StudyRun], float], form: str) -> str:
    values = [value for value in map(measure, runs) if not math.isnan(value)]
    return form.format(statistics.fmean(values)) if values else ""


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Write a mean with its smallest and largest; one value as it is, NaN left out."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return ""
    mean = form.format(statistics.fmean(known))
    return mean if len(known) == 1 else f"{mean} ({form.format(min(known))} to {form.format(max(known))})"
