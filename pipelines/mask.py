"""`trm-repro mask`: score a shard with a policy and say which sequences it would keep."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.arguments import add_arm_argument, add_config_arguments, config_from

if TYPE_CHECKING:
    from torch import Tensor

    from trm_repro.batch import Rollout
    from trm_repro.module import TRMModule

HELP = "score a shard with the starting policy or a checkpoint, and write which sequences the mask keeps"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config_arguments(parser)
    add_arm_argument(parser)
    parser.add_argument("--in", dest="shard", type=Path, required=True, help="rollout shard, step_NNNNN.parquet")
    parser.add_argument("--checkpoint", type=Path, help="checkpoint.ckpt of a run; default: the starting policy")
    parser.add_argument("--out", type=Path, help="file to write; default: SHARD.masks.parquet beside the shard")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from pipelines.checkpoints import load_into, read_checkpoint
    from pipelines.recorder import mask_rows
    from pipelines.session import set_threads
    from pipelines.training import build_module, reference_updates, starting_policy
    from trm_repro.batch import RolloutBatch
    from trm_repro.errors import InputError
    from trm_repro.heads import read_heads
    from trm_repro.parquet_files import check_folder, check_target
    from trm_repro.shards import read_rollouts, write_masks
    from trm_repro.step_metrics import UpdateRecord

    config = config_from(arguments)
    path = arguments.out or arguments.shard.with_name(f"{arguments.shard.stem}.masks.parquet")
    check_target(path)
    check_folder(path.parent)
    if path.resolve() == arguments.shard.resolve():
        raise InputError(f"{path}: is the shard itself; give --out another file")
    set_threads(config.num_threads)
    rollouts, step = read_rollouts(arguments.shard)
    module = build_module(config, starting_policy(config, show_progress=True), reference_updates(config))
    module.configure_model()
    if arguments.checkpoint is not None:
        load_into(module.policy, read_checkpoint(arguments.checkpoint), arguments.checkpoint)
    heads = read_heads(arguments.shard.parent, rollouts)
    check_shard(arguments.shard, rollouts, module, heads)
    batch = RolloutBatch.from_rollouts(rollouts, heads)
    measurement = module.measure(batch)
    sequence_mask = module.mask(measurement, batch, update=0)
    record = UpdateRecord(
        batch=batch,
        measurement=measurement,
        sequence_mask=sequence_mask,
        loss=0.0,
        gradient_norm=0.0,
        is_skipped=True,
        learning_rate=0.0,
    )
    write_masks(path, mask_rows([record]), step)
    kept = int(sequence_mask.sum())
    sys.stdout.write(f"{path}: {config.mask.criterion} keeps {kept} of {len(rollouts)} sequences of step {step}\n")
    return 0


def check_shard(
    path: Path, rollouts: "Sequence[Rollout]", module: "TRMModule", heads: "Mapping[int, Tensor] | None" = None
) -> None:
    """Check that a module's policy can score a shard and its mask judge it.

    Args:
        path: the shard.
        rollouts: as read from it.
        module: with its policy built.
        heads: for hidden states, the output head of each weight version.

    Raises:
        InputError: if the policy has another shape, or the criterion needs distributions the shard lacks.
    """
    from trm_repro.errors import InputError
    from trm_repro.shard_checks import check_fits

    check_fits(path, rollouts, module.policy.model.config, heads)
    mask = module.config.mask
    is_sampled_only = all(getattr(rollouts[0], name) is None for name in ("log_distribution", "hidden", "top_ids"))
    if is_sampled_only and (mask.has_exact_max or mask.has_exact_avg):
        raise InputError(
            f"{path}: holds log-probs of the sampled tokens alone, but mask.criterion={mask.criterion} is exact and "
            "needs rollouts sampled with rollout.distribution=full, hidden or top_k; or set mask.max_estimator=k2 and "
            "mask.avg_estimator=k3"
        )
