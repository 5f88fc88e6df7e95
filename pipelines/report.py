"""`trm-repro report`: figures, summary and report.md from MLflow alone."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.arguments import add_config_arguments, config_from
from pipelines.environment import describe_environment
from pipelines.run_directory import write_atomically
from trm_repro.config import RunConfig

if TYPE_CHECKING:
    from evaluation.length_bias import LengthRow

HELP = "draw the figures and write the report of an experiment, from MLflow"
SHOWN_SECTIONS = ("task", "policy", "rollout", "loss", "update", "evaluation")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    config = config_from(arguments)
    for file in write_report(config):
        sys.stdout.write(f"{file}\n")
    return 0


def _length_bias(folder: Path) -> str:
    table = folder / "figures" / "table_2.md"
    if not table.is_file():
        return ""
    return f"{table.read_text(encoding='utf-8')}\n![Rejection against length](figures/table_2.png)"


def _length_rows(folder: Path, seed: int) -> "dict[int, list[LengthRow]] | None":
    from evaluation.length_bias import LengthRow

    file = folder / "figures" / "table_2.json"
    if not file.is_file():
        return None
    return {seed: [LengthRow(**row) for row in json.loads(file.read_text(encoding="utf-8"))]}


def write_report(config: RunConfig) -> list[Path]:
    """Write figures, summary.txt and report.md into the output folder.

    Args:
        config: names the output folder and the tracking server.

    Returns:
        The files written.

    Raises:
        InputError: if MLflow has no runs of this experiment.
    """
    import pandas as pd

    from evaluation.claims import ClaimThresholds, claims_summary, evaluate_claims
    from evaluation.figures import save_figures
    from evaluation.outcomes import REPORTED_METRICS, run_outcomes
    from evaluation.report import SCORE_NAME, render_report, summary_table
    from evaluation.token_level import draw_token_level
    from pipelines.tracking import flatten, read_points

    folder = Path(config.output.dir)
    columns = ["arm", "seed", "run_id", "metric", "step", "value"]
    points = pd.DataFrame(read_points(config, list(REPORTED_METRICS)), columns=columns)
    claims = evaluate_claims(points, ClaimThresholds(), _length_rows(folder, config.seed))
    figures = save_figures(points, folder / "figures", score_name=SCORE_NAME)
    sections = {name: dataclasses.asdict(getattr(config, name)) for name in SHOWN_SECTIONS}
    settings = {"num_steps": config.num_steps, **dict(flatten(sections))}
    report = render_report(
        points,
        claims,
        figures,
        name=config.name,
        settings=settings,
        environment=describe_environment(),
        length_bias=_length_bias(folder),
    )
    write_atomically(folder / "report.md", report)
    summary = f"{summary_table(run_outcomes(points))}\n\n{claims_summary(claims)}\n"
    write_atomically(folder / "summary.txt", summary)
    token_level = draw_token_level()
    for suffix in ("png", "pdf"):
        token_level.savefig(folder / "figures" / f"token_level.{suffix}", dpi=150)
    figures += sorted([*(folder / "figures").glob("table_2.*"), *(folder / "figures").glob("token_level.*")])
    return [folder / "report.md", folder / "summary.txt", *figures]
