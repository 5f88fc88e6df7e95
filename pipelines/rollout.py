"""`trm-repro rollout`: sample one step's rollouts and write them as a shard."""

import argparse
import sys
from pathlib import Path

from pipelines.arguments import add_arm_argument, add_config_arguments, config_from

HELP = "sample one step's rollouts from the starting policy or a checkpoint, and write a shard"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config_arguments(parser)
    add_arm_argument(parser)
    parser.add_argument("--in", dest="checkpoint", type=Path, help="checkpoint.ckpt of a run; samples its next step")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder to write step_NNNNN.parquet to")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from pipelines.checkpoints import check_snapshots, read_checkpoint
    from pipelines.session import open_session, set_threads
    from pipelines.training import starting_policy
    from trm_repro.datamodule import shard_name
    from trm_repro.heads import write_head
    from trm_repro.parquet_files import check_folder
    from trm_repro.rollout.precision import engine_head
    from trm_repro.rollout.sampler import RolloutSampler
    from trm_repro.sharding import policy_weights
    from trm_repro.shards import write_rollouts

    config = config_from(arguments)
    check_folder(arguments.out)
    set_threads(config.num_threads)
    checkpoint = None if arguments.checkpoint is None else read_checkpoint(arguments.checkpoint)
    session = open_session(config, starting_policy(config, show_progress=True))
    assert session.engine.probe.policy is not None
    step, version, weights = 0, 0, policy_weights(session.engine.probe.policy)
    if checkpoint is not None:
        step, (version, weights) = checkpoint.num_steps, checkpoint.snapshots[0]
        check_snapshots(session.engine.probe.model, checkpoint, arguments.checkpoint)
        session.engine.sync(weights, run=str(arguments.checkpoint), version=version)
    sampler = RolloutSampler(config, session.engine, session.tokenizer)
    rollouts = sampler.sample_step(step, version)
    path = arguments.out / shard_name(step)
    if config.rollout.distribution == "hidden":
        write_head(arguments.out, version, engine_head(weights, config.rollout.precision))
    write_rollouts(path, rollouts, step)
    num_tokens = sum(len(rollout.response_ids) for rollout in rollouts)
    reward = sum(rollout.reward for rollout in rollouts) / len(rollouts)
    sys.stdout.write(
        f"{path}: step {step}, {len(rollouts)} responses of {num_tokens} tokens, mean reward {reward:.3f}, "
        f"weight version {version}\n"
    )
    return 0
