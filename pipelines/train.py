"""`trm-repro train`: one arm with one seed, from warm start to final policy; goes on where it was."""

import argparse
import dataclasses
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import lightning as L  # noqa: N812
from tqdm import tqdm

from pipelines.arguments import add_arm_argument, add_config_arguments, config_from
from pipelines.checkpoints import read_checkpoint
from pipelines.recorder import StepRecorder
from pipelines.run_directory import RunDirectory
from pipelines.session import Session, open_session, set_threads
from pipelines.spool import read_spool
from trm_repro.config import RunConfig
from trm_repro.datamodule import RolloutDataModule
from trm_repro.errors import InputError
from trm_repro.module import TRMModule
from trm_repro.policy import load_tokenizer, save_policy
from trm_repro.rollout.sampler import RolloutSampler
from trm_repro.warm_start import REPORT as WARM_START_REPORT
from trm_repro.warm_start import ensure_warm_start, warm_start_path

HELP = "train one arm with one seed"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config_arguments(parser)
    add_arm_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from pipelines.tracking import Tracker

    config = config_from(arguments)
    set_threads(config.num_threads)
    num_kept = random_control(config)
    model_path = starting_policy(config, show_progress=True)
    directory = RunDirectory(config)
    directory.prepare()
    tracker = Tracker(config)
    tracker.open_run(directory)
    if not directory.is_finished:
        train_run(config, open_session(config, model_path), model_path, num_kept, show_progress=True)
    tracker.replay(directory)
    tracker.close_run(directory, status="FINISHED")
    last = [entry for entry in read_spool(directory.spool_file) if entry.kind == "evaluate"][-1]
    scores = ", ".join(f"{name} {value:.3f}" for name, value in last.metrics.items())
    sys.stdout.write(f"{directory.name}: {scores} after {last.step} steps; files in {directory.path}\n")
    return 0


def starting_policy(config: RunConfig, *, show_progress: bool = False) -> Path:
    """Return the directory of the policy training starts from: policy.path, or the cached warm start."""
    if config.policy.path is not None:
        return Path(config.policy.path)
    is_cached = (warm_start_path(config) / WARM_START_REPORT).is_file()
    with tqdm(desc=f"warm start, seed {config.seed}", unit=" steps", disable=is_cached or not show_progress) as bar:

        def progress(step: int, pass_rate: float) -> None:
            bar.update(step - bar.n)
            bar.set_postfix_str(f"pass rate {pass_rate:.2f}, goal {config.warm_start.target_pass_rate:g}")

        return ensure_warm_start(config, progress)


def build_module(config: RunConfig, model_path: Path, num_kept: Mapping[int, Sequence[int]] | None) -> TRMModule:
    """Make the module whose policy starts from a saved one."""
    policy = dataclasses.replace(config.policy, path=str(model_path))
    return TRMModule(dataclasses.replace(config, policy=policy), load_tokenizer(model_path), num_kept)


def build_trainer(num_steps: int, callbacks: list[L.Callback]) -> L.Trainer:
    """Make the trainer: an epoch is a step, and every step has rollouts of its own."""
    # Warm-up counts updates, also those whose optimizer step is skipped, so the schedule may move first.
    warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)` before")
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=num_steps,
        reload_dataloaders_every_n_epochs=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        log_every_n_steps=1,
    )


def train_run(
    config: RunConfig,
    session: Session,
    model_path: Path,
    num_kept: Mapping[int, Sequence[int]] | None = None,
    *,
    show_progress: bool = False,
) -> None:
    """Train one run to its end, from its checkpoint where there is one.

    Args:
        config: the run; its folder has been prepared.
        session: an engine for policies of this architecture.
        model_path: directory of the starting policy.
        num_kept: for the random criterion, kept sequences by step, update by update.
        show_progress: draw a progress bar.

    Raises:
        FaultError: if going on would give wrong results.
    """
    directory = RunDirectory(config)
    with directory.locked():
        module = build_module(config, model_path, num_kept)
        sampler = RolloutSampler(config, session.engine, session.tokenizer)
        data = RolloutDataModule(config, sampler, run_name=str(directory.path), shard_dir=directory.shards)
        callbacks: list[L.Callback] = [StepRecorder(config, directory, session)]
        if show_progress:
            callbacks.append(StepBar(directory.name, config.num_steps))
        trainer = build_trainer(config.num_steps, callbacks)
        checkpoint = directory.checkpoint if directory.checkpoint.is_file() else None
        if checkpoint is not None:
            read_checkpoint(checkpoint)  # a damaged one is named before anything else happens
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        save_policy(module.policy, session.tokenizer, directory.policy)
        directory.finish()


def random_control(config: RunConfig) -> dict[int, list[int]] | None:
    """Read how many sequences the reference arm of a random control kept, by step.

    Args:
        config: the run.

    Returns:
        Step (from 0) to kept sequences of each update; None unless mask.criterion is random.

    Raises:
        InputError: if the reference arm has not finished with this seed in this output.dir.
    """
    if config.mask.criterion != "random":
        return None
    assert config.mask.reference_arm is not None
    reference = RunDirectory(dataclasses.replace(config, arm=config.mask.reference_arm))
    if not reference.is_finished:
        raise InputError(
            f"arm {config.arm} copies the rate of {reference.name}, which has not finished in {config.output.dir}; "
            f"run it first: trm-repro train --arm {config.mask.reference_arm} seed={config.seed}"
        )
    entries = [entry for entry in read_spool(reference.spool_file) if entry.kind == "train"]
    if len(entries) < config.num_steps:
        raise InputError(f"{reference.name} has {len(entries)} steps, {config.arm} needs {config.num_steps}")
    return {entry.step - 1: entry.num_kept for entry in entries}


class StepBar(L.Callback):
    """A progress bar over steps."""

    def __init__(self, name: str, num_steps: int) -> None:
        """Name the bar."""
        self.name = name
        self.num_steps = num_steps

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the bar."""
        self.bar = tqdm(total=self.num_steps, initial=trainer.current_epoch, desc=self.name, unit="step")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count a step."""
        self.bar.update(1)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the bar."""
        self.bar.close()
