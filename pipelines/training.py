"""Training one arm with one seed, from warm start to final policy; what `train`, `reproduce` and the stages share."""

import dataclasses
import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import lightning as L  # noqa: N812
from lightning.pytorch.strategies import ModelParallelStrategy

from pipelines.checkpoint_files import find_checkpoint
from pipelines.checkpoints import SNAPSHOTS
from pipelines.environment import attention_problem
from pipelines.health_monitor import HealthMonitor
from pipelines.progress import progress_bar
from pipelines.recorder import StepRecorder
from pipelines.run_directory import RunDirectory, write_atomically
from pipelines.session import Session
from pipelines.spool import SpoolEntry, read_spool
from trm_repro import ranks
from trm_repro.config import RunConfig
from trm_repro.config_sections import MaskConfig, TrainerConfig
from trm_repro.datamodule import RolloutDataModule
from trm_repro.errors import InputError
from trm_repro.model_files import check_model_files
from trm_repro.module import TRMModule
from trm_repro.policy import load_tokenizer, save_policy
from trm_repro.rollout.sampler import RolloutSampler
from trm_repro.sharding import whole_weights
from trm_repro.steps import ReferenceUpdate
from trm_repro.warm_start import REPORT as WARM_START_REPORT
from trm_repro.warm_start import ensure_warm_start, warm_start_path


def starting_policy(config: RunConfig, *, show_progress: bool = False) -> Path:
    """Return the directory of the policy training starts from: policy.path, or the cached warm start.

    Raises:
        InputError: if there is no model at policy.path, or what trainer.attention needs is not installed.
    """
    if problem := attention_problem(config.trainer.attention):
        raise InputError(f"trainer.attention={config.trainer.attention}: {problem}")
    if config.policy.path is not None:
        check_model_files(config.policy.path)
        return Path(config.policy.path)
    is_cached = (warm_start_path(config) / WARM_START_REPORT).is_file()
    with progress_bar(
        f"warm start, seed {config.seed}", None, " steps", is_hidden=is_cached or not show_progress
    ) as bar:

        def progress(step: int, pass_rate: float) -> None:
            goal = config.warm_start.target_pass_rate
            bar.set_postfix_str(f"pass rate {pass_rate:.2f}, goal {goal:g}", refresh=False)
            bar.update(step - bar.n)

        return ensure_warm_start(config, progress)


def build_module(
    config: RunConfig,
    model_path: Path,
    reference: Mapping[int, Sequence[ReferenceUpdate]] | None,
    *,
    fault_dir: Path | None = None,
) -> TRMModule:
    """Make the module whose policy starts from a saved one; batches that are not finite go to ``fault_dir``."""
    policy = dataclasses.replace(config.policy, path=str(model_path))
    config = dataclasses.replace(config, policy=policy)
    return TRMModule(config, load_tokenizer(model_path), reference, fault_dir=fault_dir)


def build_trainer(num_steps: int, callbacks: list[L.Callback], config: TrainerConfig | None = None) -> L.Trainer:
    """Make the trainer: an epoch is a step, and every step has rollouts of its own.

    Args:
        num_steps: steps.
        callbacks: of the run.
        config: for a sharded policy, whose process group has been made; None trains in this process alone, on a CPU.
    """
    # Warm-up counts updates, also those whose optimizer step is skipped, so the schedule may move first.
    warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)` before")
    is_sharded = config is not None and config.is_sharded
    return L.Trainer(
        accelerator=config.accelerator if config is not None else "cpu",
        devices=config.devices if config is not None else 1,
        num_nodes=config.num_nodes if config is not None else 1,
        strategy=_sharded_strategy(config) if config is not None and is_sharded else "auto",
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


def _sharded_strategy(config: TrainerConfig) -> ModelParallelStrategy:
    strategy = OffloadingStrategy if config.cpu_offload else ModelParallelStrategy
    return strategy(data_parallel_size=config.num_ranks, tensor_parallel_size=1)


class OffloadingStrategy(ModelParallelStrategy):
    """FSDP2 whose shards stay in host memory."""

    def model_to_device(self) -> None:
        """Leave the shards where they are; FSDP moves what it gathers."""


def train_run(
    config: RunConfig,
    session: Session,
    model_path: Path,
    reference: Mapping[int, Sequence[ReferenceUpdate]] | None = None,
    *,
    show_progress: bool = False,
) -> None:
    """Train one run to its end, from its checkpoint where there is one.

    Args:
        config: the run; its folder has been prepared.
        session: an engine for policies of this architecture.
        model_path: directory of the starting policy.
        reference: for a control: what the arm that it copies did, by step, update by update.
        show_progress: draw a progress bar.

    Raises:
        FaultError: if going on would give wrong results.
    """
    directory = RunDirectory(config)
    with directory.locked() if ranks.is_first() else nullcontext():
        module = build_module(config, model_path, reference, fault_dir=directory.faults)
        sampler = RolloutSampler(config, session.engine, session.tokenizer)
        if sampler.math is not None and ranks.is_first():
            record = json.dumps(sampler.math.as_record(), indent=2, ensure_ascii=False)
            write_atomically(directory.path / "data.json", f"{record}\n")
        data = RolloutDataModule(
            config,
            sampler,
            run_name=str(directory.path),
            shard_dir=directory.shards,
        )
        recorder = StepRecorder(config, directory, session)
        callbacks: list[L.Callback] = [recorder, HealthMonitor(config, directory, recorder)]
        if show_progress:
            callbacks.append(StepBar(directory.name, config.num_steps))
        trainer = build_trainer(config.num_steps, callbacks, config.trainer)
        checkpoint = None
        if ranks.is_first():
            checkpoint = find_checkpoint(directory.checkpoint, is_sharded=config.trainer.is_sharded)
        checkpoint = ranks.broadcast(checkpoint)
        data.snapshot_dir = None if checkpoint is None else checkpoint / SNAPSHOTS
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        weights = whole_weights(module.policy)
        if ranks.is_first():
            save_policy(module.policy, session.tokenizer, directory.policy, weights)
            directory.finish()


def reference_updates(config: RunConfig) -> dict[int, list[ReferenceUpdate]] | None:
    """Read what the arm that a control copies did, by step.

    Args:
        config: the run.

    Returns:
        Step (from 0) to what the reference arm did at each update; None unless mask.reference_arm is set.

    Raises:
        InputError: if the reference arm has not finished with this seed in this output.dir, or was recorded without
            what this control needs.
    """
    arm = config.mask.reference_arm
    if arm is None:
        return None
    reference = RunDirectory(dataclasses.replace(config, arm=arm, mask=MaskConfig()))
    if not reference.is_finished:
        raise InputError(
            f"arm {config.arm} copies the rate of {reference.name}, which has not finished in {config.output.dir}; "
            f"run it first: trm-repro train --arm {arm} seed={config.seed}"
        )
    entries = [entry for entry in read_spool(reference.spool_file) if entry.kind == "train"]
    if len(entries) < config.num_steps:
        raise InputError(f"{reference.name} has {len(entries)} steps, {config.arm} needs {config.num_steps}")
    if config.mask.criterion == "length_matched" and any(entry.rejected_lengths is None for entry in entries):
        raise InputError(
            f"{reference.spool_file}: was recorded without the lengths of rejected sequences, which {config.arm} "
            f"matches; delete {reference.path} and run {arm} again"
        )
    return {entry.step - 1: _updates(entry) for entry in entries}


def _updates(entry: SpoolEntry) -> list[ReferenceUpdate]:
    if entry.rejected_lengths is None:
        return [ReferenceUpdate(num_kept=num_kept) for num_kept in entry.num_kept]
    return [
        ReferenceUpdate(num_kept=num_kept, rejected_lengths=tuple(lengths))
        for num_kept, lengths in zip(entry.num_kept, entry.rejected_lengths, strict=True)
    ]


class StartNote(L.Callback):
    """Notes that a checkpoint, where there is one, has been restored and training begins."""

    is_training = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note it."""
        self.is_training = True


class StepBar(L.Callback):
    """A progress bar over steps."""

    def __init__(self, name: str, num_steps: int) -> None:
        """Name the bar."""
        self.name = name
        self.num_steps = num_steps

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the bar."""
        self.bar = progress_bar(self.name, self.num_steps, "step", initial=trainer.current_epoch)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count a step."""
        self.bar.update(1)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the bar."""
        self.bar.close()
