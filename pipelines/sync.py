"""`trm-repro sync [DIR]`: send to MLflow what is in the spools below a folder and not there yet.

Safe at any time, also while a run is going on, and any number of times: what is there is not sent again.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from pipelines.run_directory import RunDirectory
from trm_repro.config import RunConfig, load_config
from trm_repro.errors import FaultError, InputError

HELP = "send to MLflow the points that wait in a folder's spools"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", nargs="?", metavar="DIR", help="output folder (default: that of the miniature)")
    parser.add_argument("--uri", help="tracking URI (default: the one the runs were started with)")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from pipelines.tracking import EXPERIMENT_FILE, ExperimentReplay, TrackingUnreachable, how_to_browse, tracking_uri

    folder = Path(arguments.folder or RunConfig().output.dir)
    directories = find_runs(folder, arguments.uri)
    experiment_file = folder / EXPERIMENT_FILE
    experiment = _place(load_config([experiment_file]), folder, arguments.uri) if experiment_file.is_file() else None
    replays = []
    if experiment is not None:
        replays.append(ExperimentReplay(experiment, is_experiment=True, seeds=experiment.reproduce.seeds))
    for directory in directories:
        if experiment is not None and is_planned(directory, experiment):
            replay = replays[0]
        else:
            replays.append(replay := ExperimentReplay(directory.config, is_experiment=False))
        replay.expect(directory, "FINISHED" if directory.is_finished else None)
    for replay in replays:
        try:
            replay.work()
        except TrackingUnreachable as error:
            raise FaultError(f"MLflow cannot be reached ({error}); nothing is lost, run it again") from None
        for name, number in replay.sent.items():
            sys.stdout.write(f"{name}: {number} entries sent\n" if number else f"{name}: up to date\n")
        for name, why in replay.damaged.items():
            sys.stdout.write(f"{name}: not sent: {why}\n")
    if experiment is not None and replays[0].is_complete and not replays[0].is_closed:
        from pipelines.reproduce import conclude

        conclude(replays[0], "FINISHED", missing=None, has_report=True)
    else:
        sys.stdout.write(f"MLflow: {how_to_browse(tracking_uri(directories[0].config))}\n")
    return 1 if any(replay.damaged for replay in replays) else 0


def find_runs(folder: Path, uri: str | None = None) -> list[RunDirectory]:
    """Find the runs below an output folder, wherever it stands now.

    Args:
        folder: holds ``ARM/seed_N/config.yaml``.
        uri: tracking URI in the place of the runs' own.

    Returns:
        Their folders, by arm and seed.

    Raises:
        InputError: if there is none.
    """
    files = sorted(folder.glob("*/seed_*/config.yaml"))
    if not files:
        raise InputError(f"{folder}: holds no runs; expected an output folder, with ARM/seed_N/config.yaml below")
    return [RunDirectory(_place(load_config([file]), folder, uri)) for file in files]


def is_planned(directory: RunDirectory, experiment: RunConfig) -> bool:
    """Whether a run is one of those that an experiment makes."""
    plan = experiment.reproduce
    return directory.config.arm in plan.arms and directory.config.seed in plan.seeds


def _place(config: RunConfig, folder: Path, uri: str | None) -> RunConfig:
    tracking = config.tracking if uri is None else dataclasses.replace(config.tracking, uri=uri)
    return dataclasses.replace(config, output=dataclasses.replace(config.output, dir=str(folder)), tracking=tracking)
