"""`trm-repro lengths`: the paper's Table 2, measured: rejection by each gate against the length of the response."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.arguments import add_config_arguments, config_from

if TYPE_CHECKING:
    from evaluation.length_bias import LengthSample
    from trm_repro.config import RunConfig

HELP = "measure how each gate's rejection grows with response length (the paper's Table 2)"
GATES = ("trm_max_0.05", "trm_avg_0.001", "ln_trm_0.05", "ser_0.05")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config_arguments(parser)
    parser.add_argument(
        "--in",
        dest="checkpoint",
        type=Path,
        help="checkpoint.ckpt of a run: its oldest weights sample, its newest are the policy; default: engine gap only",
    )
    parser.add_argument("--operands", type=int, nargs="+", default=[8, 14, 20, 28, 38, 50], help="problem sizes")
    parser.add_argument("--num-prompts", type=int, default=32, help="prompts of each size")
    parser.add_argument("--out", type=Path, required=True, help="folder for table_2.md, .json, .png and .pdf")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from evaluation.length_bias import draw_length_bias, length_rows, length_table
    from pipelines.run_directory import write_atomically
    from pipelines.session import set_threads
    from trm_repro.errors import InputError

    for name, values in (("--operands", arguments.operands), ("--num-prompts", [arguments.num_prompts])):
        if not all(2 <= value <= 100 for value in values):
            raise InputError(f"{name} must be between 2 and 100, got {values}")
    config = config_from(arguments)
    set_threads(config.num_threads)
    samples, threshold = _sample(arguments, config)
    rows = length_rows(samples, threshold)
    table = length_table(rows)
    write_atomically(arguments.out / "table_2.md", table + "\n")
    write_atomically(arguments.out / "table_2.json", json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    figure = draw_length_bias(rows)
    for suffix in ("png", "pdf"):
        figure.savefig(arguments.out / f"table_2.{suffix}", dpi=150)
    sys.stdout.write(table + "\n")
    return 0


def _sample(arguments: argparse.Namespace, config: "RunConfig") -> "tuple[list[LengthSample], float]":
    """Sample and score responses of each size; returns them with TRM-Max's threshold."""
    from tqdm import tqdm

    from evaluation.length_bias import LengthSample
    from pipelines.checkpoints import load_into, read_checkpoint
    from pipelines.session import open_session
    from pipelines.train import build_module, starting_policy
    from trm_repro.batch import RolloutBatch
    from trm_repro.config import load_arm
    from trm_repro.rollout.sampler import RolloutSampler
    from trm_repro.steps import gate

    checkpoint = None if arguments.checkpoint is None else read_checkpoint(arguments.checkpoint)
    model_path = starting_policy(config, show_progress=True)
    module = build_module(config, model_path, None)
    module.configure_model()
    longest = max(arguments.operands)
    rollout = dataclasses.replace(
        config.rollout,
        num_prompts=arguments.num_prompts,
        max_prompt_tokens=2 * longest + 4,
        max_response_tokens=6 * longest + 12,
    )
    session = open_session(dataclasses.replace(config, rollout=rollout), model_path)
    if checkpoint is not None:
        load_into(module.policy, checkpoint, arguments.checkpoint)
        version, weights = checkpoint.snapshots[0]
        session.engine.sync(weights, run=str(arguments.checkpoint), version=version)
    gates = {name: load_arm(name).mask for name in GATES}
    samples = []
    for size in tqdm(arguments.operands, desc="lengths", unit="size"):
        task = dataclasses.replace(config.task, min_operands=size, max_operands=size)
        # A response is given the room that a solution of its size needs, and a little more.
        limited = dataclasses.replace(rollout, max_response_tokens=6 * size + 9)
        sampler = RolloutSampler(
            dataclasses.replace(config, task=task, rollout=limited), session.engine, session.tokenizer
        )
        batch = RolloutBatch.from_rollouts(sampler.sample_step(0, 0))
        measurement = module.measure(batch)
        assert measurement.kl is not None
        masks = {name: gate(measurement, batch.response_mask, mask) for name, mask in gates.items()}
        samples.append(
            LengthSample(num_operands=size, kl=measurement.kl, response_mask=batch.response_mask, masks=masks)
        )
    return samples, gates["trm_max_0.05"].max_threshold
