"""Sections of the report on settings: choices the paper leaves open, differences between arms, how to run it again."""

from collections.abc import Mapping

from evaluation.choices import as_yaml, choices_table
from evaluation.document import Block, Bullets, Cell, Code, Fold, Heading, Paragraph, Table
from evaluation.experiment import ExperimentRecord, differing_settings, listed
from evaluation.figures import arm_order


def settings_section(experiment: ExperimentRecord) -> list[Block]:
    """Write what this experiment chose where the paper says nothing, in what its arms differ, and every setting."""
    settings = experiment.parent.settings
    return [
        Heading(text="Choices the paper leaves open"),
        Paragraph(
            text="What the paper states is used as stated. What it does not state is a choice of this project; these "
            "are the values of this experiment."
        ),
        choices_table(settings),
        *_arm_settings(experiment),
        Fold(
            title="Every setting",
            blocks=[_two_columns("setting", {key: as_yaml(value) for key, value in settings.items()})],
        ),
    ]


def _arm_settings(experiment: ExperimentRecord) -> list[Block]:
    """Say by which settings the arms differ."""
    rows: list[list[str | Cell]] = [
        [
            Cell(text=key, is_code=True),
            "; ".join(f"{as_yaml(value)}: {listed(arm_order(list(arms)))}" for value, arms in items),
        ]
        for key, values in differing_settings(experiment.runs).items()
        for items in [sorted(values.items())]
    ]
    if not rows:
        return []
    table = Table(columns=["setting", "value: arms"], rows=rows, is_stacked=True)
    return [Fold(title="Settings by which runs differ", blocks=[table])]


def rerun_section(experiment: ExperimentRecord) -> list[Block]:
    """Write the command that makes these numbers again, and where they were made."""
    parent = experiment.parent
    return [
        Heading(text="Run it again"),
        Bullets(
            items=[
                f"Commit: {listed(sorted({run.git_commit for run in experiment.runs}))}",
                f"Configuration hash: {parent.config_hash}",
                f"Read from: MLflow at {experiment.source}, parent run {parent.run_id}",
            ]
        ),
        Code(text=experiment.command),
        Paragraph(
            text="Every number above is read from MLflow and comes from runs of this experiment, but for those marked "
            "exact, which are computed, and rejection against length, which is sampled by itself."
        ),
        Fold(title="Environment", blocks=[_two_columns("what", parent.environment)]),
    ]


def _two_columns(head: str, values: Mapping[str, str]) -> Table:
    rows: list[list[str | Cell]] = [[Cell(text=key, is_code=True), value] for key, value in values.items()]
    return Table(columns=[head, "value"], rows=rows)
