"""`trm-repro train`: one arm with one seed, from warm start to final policy; goes on where it was."""

import argparse
import sys
from pathlib import Path

from pipelines.arguments import add_arm_argument, add_config_arguments, config_from

HELP = "train one arm with one seed"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config_arguments(parser)
    add_arm_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from tqdm import tqdm

    from pipelines.launch import launched_rank, train_ranks
    from pipelines.run_directory import RunDirectory
    from pipelines.session import open_session, set_threads
    from pipelines.spool import read_spool
    from pipelines.tracking import BackgroundTracker, ExperimentReplay
    from pipelines.training import reference_updates, starting_policy, train_run
    from trm_repro.parquet_files import check_folder

    config = config_from(arguments)
    check_folder(Path(config.output.dir))  # before the warm start, which takes minutes
    set_threads(config.num_threads)
    reference = reference_updates(config)
    model_path = starting_policy(config, show_progress=True)
    directory = RunDirectory(config)
    if launched_rank():  # another than the first
        train_ranks(config, model_path, reference)
        return 0
    directory.prepare()
    if not directory.is_finished:
        with directory.locked():  # a run that another process trains is told before an engine starts
            pass
    replay = ExperimentReplay(config, is_experiment=False)
    with BackgroundTracker(replay, say=lambda line: tqdm.write(line, file=sys.stderr)) as tracking:
        tracking.track(directory)
        if not directory.is_finished:
            if config.trainer.is_sharded:
                train_ranks(config, model_path, reference, show_progress=True)
            else:
                train_run(config, open_session(config, model_path), model_path, reference, show_progress=True)
        tracking.track(directory, "FINISHED")
    if tracking.failure is not None:
        sys.stderr.write(
            f"trm-repro: MLflow cannot be reached ({tracking.failure}); every point is in {directory.spool_file}. "
            f"When it is back: trm-repro sync {config.output.dir}\n"
        )
    last = [entry for entry in read_spool(directory.spool_file) if entry.kind == "evaluate"][-1]
    scores = ", ".join(f"{name} {value:.3f}" for name, value in last.metrics.items())
    sys.stdout.write(f"{directory.name}: {scores} after {last.step} steps; files in {directory.path}\n")
    return 0
