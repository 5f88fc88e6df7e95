"""`trm-repro update`: train one step on a shard, as training would, and write masks, metrics and the new policy."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.arguments import add_arm_argument, add_config_arguments, config_from

if TYPE_CHECKING:
    from trm_repro.datamodule import RolloutDataModule
    from trm_repro.module import TRMModule

HELP = "train one step on a shard, from the starting policy or a checkpoint"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config_arguments(parser)
    add_arm_argument(parser)
    parser.add_argument("--in", dest="shard", type=Path, required=True, help="rollout shard, step_NNNNN.parquet")
    parser.add_argument("--checkpoint", type=Path, help="checkpoint.ckpt of the run before this step")
    parser.add_argument("--out", type=Path, required=True, help="folder for masks, metrics and policy")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from pipelines.checkpoints import load_into, read_checkpoint
    from pipelines.mask import check_shard
    from pipelines.recorder import mask_rows
    from pipelines.run_directory import write_atomically
    from pipelines.session import set_threads
    from pipelines.training import build_module, reference_updates, starting_policy
    from trm_repro.datamodule import RolloutDataModule, shard_name
    from trm_repro.errors import InputError
    from trm_repro.heads import read_heads
    from trm_repro.parquet_files import check_folder
    from trm_repro.policy import load_tokenizer, save_policy
    from trm_repro.shard_checks import check_versions
    from trm_repro.shards import read_rollouts, write_masks
    from trm_repro.step_metrics import step_metrics

    config = config_from(arguments)
    check_folder(arguments.out)
    set_threads(config.num_threads)
    rollouts, step = read_rollouts(arguments.shard)
    checkpoint = None if arguments.checkpoint is None else read_checkpoint(arguments.checkpoint)
    num_done = 0 if checkpoint is None else checkpoint.num_steps
    if num_done != step:
        raise InputError(
            f"{arguments.shard} holds step {step}, but {arguments.checkpoint or 'the starting policy'} has done "
            f"{num_done} steps; give --checkpoint of the run after {step} steps"
        )
    check_versions(arguments.shard, rollouts, step, config.rollout.staleness_steps)
    if len(rollouts) % config.update.num_updates_per_rollout:
        raise InputError(
            f"{arguments.shard} has {len(rollouts)} sequences, which update.num_updates_per_rollout="
            f"{config.update.num_updates_per_rollout} does not divide"
        )
    model_path = starting_policy(config, show_progress=True)
    module = build_module(config, model_path, reference_updates(config), fault_dir=arguments.out / "faults")
    module.configure_model()
    if checkpoint is not None:
        load_into(module.policy, checkpoint, arguments.checkpoint)
    heads = read_heads(arguments.shard.parent, rollouts)
    check_shard(arguments.shard, rollouts, module, heads)
    data = RolloutDataModule(config, None, run_name="update", stored=rollouts, heads=heads)
    _train_step(module, data, step, arguments.checkpoint)
    metrics = step_metrics(module.records, config.loss)
    write_masks(arguments.out / f"masks_{shard_name(step)}", mask_rows(module.records), step)
    write_atomically(arguments.out / "metrics.json", json.dumps(metrics, indent=2) + "\n")
    save_policy(module.policy, load_tokenizer(model_path), arguments.out / "policy")
    sys.stdout.write(
        f"{arguments.out}: step {step}, {len(module.records)} updates, "
        f"{metrics['mask/kept_sequence_fraction']:.0%} of sequences kept, "
        f"{metrics['train/num_skipped_updates']:.0f} updates skipped\n"
    )
    return 0


def _train_step(module: "TRMModule", data: "RolloutDataModule", step: int, checkpoint: Path | None) -> None:
    from pipelines.training import StartNote, build_trainer
    from trm_repro.errors import InputError

    started = StartNote()
    try:
        build_trainer(step + 1, [started]).fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    except (KeyError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        if checkpoint is None or started.is_training:
            raise
        raise InputError(
            f"{checkpoint}: training cannot go on from it ({' '.join(str(error).split())[:200]}); expected the "
            "checkpoint.ckpt of a run with this configuration"
        ) from error
