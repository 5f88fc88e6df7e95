"""`trm-repro report`: figures, summary, report.md and one self-contained report.html, from MLflow alone."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.arguments import add_config_arguments, config_from
from pipelines.run_directory import write_atomically
from trm_repro.config import RunConfig
from trm_repro.config_sections import ClaimThresholds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evaluation.document import Block
    from evaluation.experiment import ExperimentRecord
    from evaluation.length_bias import LengthRow

HELP = "draw the figures and write the report of an experiment, from MLflow"
REPORT_FILE = "report.html"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    config = config_from(arguments)
    files = write_report(config)
    sys.stdout.write("".join(f"{file}\n" for file in files))
    sys.stdout.write(f"report: {(Path(config.output.dir) / REPORT_FILE).resolve().as_uri()}\n")
    return 0


def write_report(config: RunConfig) -> list[Path]:
    """Write figures, summary.txt, report.md and report.html into the output folder.

    Args:
        config: names the output folder, the tracking server, and the experiment.

    Returns:
        The files written.

    Raises:
        InputError: if MLflow cannot be reached or has no runs of this experiment.
    """
    import pandas as pd

    from evaluation.claims import claims_summary, evaluate_claims
    from evaluation.document import to_markdown
    from evaluation.experiment import trial_warning
    from evaluation.figures import FIGURES, save_figures
    from evaluation.html import to_html
    from evaluation.length_bias import rows_by_seed
    from evaluation.outcomes import REPORTED_METRICS, run_outcomes
    from evaluation.recorded_thresholds import recorded_thresholds
    from evaluation.report import SCORE_NAME, ReportData, build_report, summary_table
    from evaluation.report_figures import (
        BOUNDS,
        KEPT,
        arm_pictures,
        file_picture,
        plan_pictures,
        survival_picture,
    )
    from evaluation.token_level import draw_token_level
    from pipelines.study_report import expected_of
    from pipelines.tracking_reader import read_experiment

    experiment, read = read_experiment(config, list(REPORTED_METRICS))
    points = pd.DataFrame(read, columns=["arm", "seed", "run_id", "metric", "step", "value"])
    folder = Path(config.output.dir)
    figures = folder / "figures"
    rows = _length_rows(config, experiment.parent.run_id)
    recorded = recorded_thresholds({run.name: run.settings for run in experiment.runs}, config.claims)
    claims = evaluate_claims(points, recorded.thresholds, None if rows is None else rows_by_seed(rows))
    written = save_figures(points, figures, score_name=SCORE_NAME)
    outcomes = run_outcomes(points)
    token_level = draw_token_level()
    for suffix in ("png", "pdf"):
        token_level.savefig(figures / f"token_level.{suffix}", dpi=150)
    report = build_report(
        ReportData(
            experiment=experiment,
            points=points,
            claims=claims,
            thresholds=recorded.thresholds,
            warnings=recorded.warnings,
            final_scores=_final_scores(config, experiment),
            figures={plan.name: plan_pictures(points, plan, figures, score_name=SCORE_NAME) for plan in FIGURES},
            kept=arm_pictures(points, KEPT, figures, name="kept", title="Share of sequences kept"),
            bounds=arm_pictures(points, BOUNDS, figures, name="bounds", title="Bounds and surrogate, in reward units"),
            survival=survival_picture(outcomes, figures, min_seeds=recorded.thresholds.min_seeds),
            token_level=file_picture(
                token_level,
                figures / "token_level.svg",
                alt="What is left after each method against pi_roll of a token that pi_theta gives 0.9: the largest KL "
                "among responses with gradient, and the largest ratio with a negative advantage.",
            ),
            lengths=[] if rows is None else _length_blocks(rows, recorded.thresholds, figures),
            expected=expected_of(experiment.parent.settings, outcomes),
        )
    )
    write_atomically(folder / "report.md", to_markdown(report))
    write_atomically(folder / REPORT_FILE, to_html(report))
    parts = [trial_warning(experiment), summary_table(outcomes), claims_summary(claims)]
    write_atomically(folder / "summary.txt", "\n\n".join(part for part in parts if part) + "\n")
    others = [file for pattern in ("*.svg", "table_2.*", "token_level.p*") for file in figures.glob(pattern)]
    texts = [folder / name for name in (REPORT_FILE, "report.md", "summary.txt")]
    return [*texts, *written, *sorted(set(others) - set(written))]


def _final_scores(config: RunConfig, experiment: "ExperimentRecord") -> "dict[tuple[str, int], Sequence[float]]":
    """Read each run's last score of every held-out problem; runs that hold none are left out."""
    from pipelines.tracking_reader import read_artifact

    found = {}
    for run in experiment.runs:
        content = read_artifact(config, run.run_id, "scores/held_out.json")
        if content is not None:
            by_step = json.loads(content)
            found[run.arm, run.seed] = by_step[max(by_step, key=int)]["greedy"]
    return found


def _length_rows(config: RunConfig, parent_run: str) -> "list[LengthRow] | None":
    """Read rejection against length: as just measured in the output folder, else as MLflow keeps it."""
    from pipelines.lengths import parse_length_rows
    from pipelines.tracking_reader import read_artifact

    file = Path(config.output.dir) / "figures" / "table_2.json"
    if file.is_file():
        return parse_length_rows(file.read_bytes(), str(file))
    content = read_artifact(config, parent_run, "report/table_2.json")
    return None if content is None else parse_length_rows(content, f"MLflow's run {parent_run}: report/table_2.json")


def _length_blocks(rows: "Sequence[LengthRow]", thresholds: ClaimThresholds, folder: Path) -> "list[Block]":
    from evaluation.length_bias import draw_length_bias
    from evaluation.report_figures import file_picture
    from evaluation.report_tables import lengths_table

    alt = f"Share rejected against mean response length by {', '.join(rows[0].rejection)}."
    return [lengths_table(rows, thresholds), file_picture(draw_length_bias(rows), folder / "table_2.svg", alt=alt)]
