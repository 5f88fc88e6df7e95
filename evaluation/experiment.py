"""What was run, as the tracking server tells it, and what a reader has to be warned of. Pure: records in, texts out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

FREE_SETTINGS = ("name", "arm", "seed", "num_threads", "output.", "tracking.", "reproduce.", "claims.")
"""Settings that may differ between any two runs; those that end in a point are sections."""

FEWEST_STEPS = 20
"""An experiment of fewer shows that its parts run, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run, or the parent of an experiment's runs.

    Attributes:
        run_id: of MLflow.
        name: of the run.
        arm: its arm; empty for a parent.
        seed: its seed; -1 for a parent.
        status: FINISHED, FAILED, KILLED or RUNNING.
        num_steps: steps it has done.
        git_commit: of the code; ends in -dirty where files differed from it.
        config_hash: of its whole configuration.
        settings: every key of its configuration with its value, as text.
        environment: versions and machine.
    """

    run_id: str
    name: str
    arm: str = ""
    seed: int = -1
    status: str = "FINISHED"
    num_steps: int = 0
    git_commit: str = "unknown"
    config_hash: str = "unknown"
    settings: Mapping[str, str]
    environment: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class ExperimentRecord:
    """A parent with its runs.

    Attributes:
        parent: the run that holds the others.
        runs: its children.
        planned: (arm, seed) of the runs that were to be made, as far as it is known.
        arm_settings: keys in which arms may differ, since they are what an arm is.
        command: that makes these runs again.
        source: where all of this was read.
    """

    parent: RunRecord
    runs: Sequence[RunRecord]
    planned: Sequence[tuple[str, int]]
    arm_settings: frozenset[str]
    command: str
    source: str


def find_warnings(experiment: ExperimentRecord) -> list[str]:
    """Name what makes the runs of an experiment less than they were meant to be, or hard to compare.

    Args:
        experiment: with its runs.

    Returns:
        Sentences; none where there is nothing to say.
    """
    return [
        *_missing(experiment),
        *_unfinished(experiment.runs),
        *_doubled(experiment.runs),
        *_different_commits(experiment.runs),
        *_different_environments(experiment.runs),
        *_different_settings(experiment),
    ]


def trial_warning(experiment: ExperimentRecord) -> str | None:
    """Say that an experiment is too short to mean anything: conf/smoke.yaml, or fewer than `FEWEST_STEPS` steps."""
    steps = experiment.parent.settings.get("num_steps", "")
    num_steps = int(steps) if steps.isdigit() else max((run.num_steps for run in experiment.runs), default=0)
    if experiment.parent.name != "smoke" and num_steps >= FEWEST_STEPS:
        return None
    return (
        f"A trial of {num_steps} step{'' if num_steps == 1 else 's'}: its numbers mean nothing beyond that every part "
        "ran."
    )


def differing_settings(runs: Sequence[RunRecord]) -> dict[str, dict[str, set[str]]]:
    """Find the settings that differ between runs, but for those that may.

    Args:
        runs: to be compared.

    Returns:
        For each key its values, and for each value the arms that have it.
    """
    found: dict[str, dict[str, set[str]]] = {}
    for key in sorted({key for run in runs for key in run.settings}):
        if key.startswith(tuple(free for free in FREE_SETTINGS if free.endswith("."))) or key in FREE_SETTINGS:
            continue
        values: dict[str, set[str]] = {}
        for run in runs:
            values.setdefault(run.settings.get(key, "not recorded"), set()).add(run.arm)
        if len(values) > 1:
            found[key] = values
    return found


def _missing(experiment: ExperimentRecord) -> Iterator[str]:
    there = {(run.arm, run.seed) for run in experiment.runs}
    missing = [name_of(arm, seed) for arm, seed in experiment.planned if (arm, seed) not in there]
    if missing:
        yield f"{len(missing)} of {len(experiment.planned)} planned runs are missing: {listed(missing)}."


def _unfinished(runs: Sequence[RunRecord]) -> Iterator[str]:
    for status, meaning in (
        ("FAILED", "failed"),
        ("KILLED", "were killed"),
        ("RUNNING", "are still running, or died without a word"),
    ):
        names = [name_of(run.arm, run.seed) for run in runs if run.status == status]
        if names:
            yield f"{len(names)} of {len(runs)} runs {meaning}; what they logged is used: {listed(names)}."
    short = [
        f"{name_of(run.arm, run.seed)} ({run.num_steps} of {run.settings['num_steps']} steps)"
        for run in runs
        if run.settings.get("num_steps", "").isdigit() and run.num_steps < int(run.settings["num_steps"])
    ]
    if short:
        yield f"{len(short)} of {len(runs)} runs are cut short: {listed(short)}."
    lengths = sorted({run.num_steps for run in runs})
    if len(lengths) > 1:
        yield f"Runs have {lengths[0]} to {lengths[-1]} steps; claims that compare unequal ones are undecided."


def _doubled(runs: Sequence[RunRecord]) -> Iterator[str]:
    names = [(run.arm, run.seed) for run in runs]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        yield f"Several runs have the same arm and seed: {listed([name_of(arm, seed) for arm, seed in doubled])}."


def _different_commits(runs: Sequence[RunRecord]) -> Iterator[str]:
    commits = sorted({run.git_commit for run in runs})
    if len(commits) > 1:
        yield f"Runs come from {len(commits)} commits: {listed([short_commit(commit) for commit in commits])}."
    if any(commit.endswith("-dirty") for commit in commits):
        yield "Some runs come from files that differed from their commit (-dirty), which alone does not repeat them."
    if "unknown" in commits:
        yield "The commit of some runs is unknown."


def _different_environments(runs: Sequence[RunRecord]) -> Iterator[str]:
    keys = sorted({key for run in runs for key in run.environment} - {"git_commit"})
    different = [key for key in keys if len({run.environment.get(key) for run in runs}) > 1]
    if different:
        yield f"Runs were made in different environments; these differ: {listed(different)}."


def _different_settings(experiment: ExperimentRecord) -> Iterator[str]:
    for key, values in differing_settings(experiment.runs).items():
        within = sorted({arm for arms in values.values() for arm in arms if sum(arm in a for a in values.values()) > 1})
        shown = listed([value or "(empty)" for value in sorted(values)])
        if within:
            yield f"{key} differs between seeds of {listed(within)}: {shown}."
        elif key not in experiment.arm_settings:
            yield f"{key} differs between arms, though no arm is defined by it: {shown}."


def name_of(arm: str, seed: int) -> str:
    """Name a run by arm and seed."""
    return f"{arm}, seed {seed}"


def short_commit(commit: str) -> str:
    """Shorten a commit to 12 digits, keeping ``-dirty``."""
    digits, mark, rest = commit.partition("-")
    return digits[:12] + mark + rest


def listed(names: Sequence[str], *, most: int = 12) -> str:
    """Join names by commas, the first few where there are many."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
