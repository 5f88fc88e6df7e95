"""What runs of the shipped setting can be expected to do: how often each arm did what in the study. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from evaluation.document import Block, Heading, Paragraph, Table
from evaluation.figures import arm_order
from evaluation.outcomes import IMPROVED_BY, RunOutcome

VERDICTS = ("improved", "level", "fell", "collapsed")


@dataclass(frozen=True, kw_only=True)
class StudiedRun:
    """One run of the study at the shipped setting.

    Attributes:
        arm: its arm.
        seed: its seed.
        start_score: before the first step.
        final_score: after the last.
        verdict: improved, level, fell or collapsed.
    """

    arm: str
    seed: int
    start_score: float
    final_score: float
    verdict: str


def studied_runs(outcomes: Sequence[RunOutcome]) -> list[dict[str, object]]:
    """Keep of outcomes what the report of `reproduce` shows, ready for JSON."""
    return [
        asdict(
            StudiedRun(
                arm=run.arm,
                seed=run.seed,
                start_score=run.start_score,
                final_score=run.final_score,
                verdict=run.verdict,
            )
        )
        for run in outcomes
    ]


def expected_blocks(studied: Sequence[StudiedRun], outcomes: Sequence[RunOutcome]) -> list[Block]:
    """Set what the study saw beside what these runs did.

    Args:
        studied: runs of the study at the setting of these runs.
        outcomes: of these runs.

    Returns:
        Blocks of the report; none where no arm is in both.
    """
    arms = arm_order([run.arm for run in studied if run.arm in {outcome.arm for outcome in outcomes}])
    if not arms:
        return []
    seeds = sorted({run.seed for run in studied})
    return [
        Heading(text="What to expect"),
        Paragraph(
            text=f"The study (docs/miniature.md) ran this setting on seeds {', '.join(map(str, seeds))}. "
            f"Improved: ends more than {IMPROVED_BY:g} above its start; fell: as much below; collapsed: below half of "
            "it. Other seeds differ; a count is no promise."
        ),
        expected_table(studied, outcomes, arms),
    ]


def expected_table(studied: Sequence[StudiedRun], outcomes: Sequence[RunOutcome], arms: Sequence[str]) -> Table:
    """Lay out arm by arm how often the study saw each outcome, and which of them these runs had."""
    rows = []
    for arm in arms:
        there = [run for run in studied if run.arm == arm]
        counts = Counter(run.verdict for run in there)
        finals = [run.final_score for run in there]
        here = Counter(outcome.verdict for outcome in outcomes if outcome.arm == arm)
        rows.append(
            [
                arm,
                str(len(there)),
                *(str(counts[verdict]) for verdict in VERDICTS),
                f"{min(finals):.2f} to {max(finals):.2f}",
                ", ".join(f"{here[verdict]} {verdict}" for verdict in VERDICTS if here[verdict]),
            ]
        )
    return Table(columns=["arm", "seeds in the study", *VERDICTS, "final scores there", "here"], rows=rows)


def parse_studied_runs(content: Mapping[str, object]) -> list[StudiedRun]:
    """Read the runs of an expected.json; raises ValueError or TypeError where it is something else."""
    runs = content["runs"]
    if not isinstance(runs, list):
        raise TypeError("runs must be a list")
    return [StudiedRun(**run) for run in runs]
