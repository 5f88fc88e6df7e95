"""`trm-repro lengths`: the paper's Table 2, measured: rejection by each gate against the length of the response."""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.arguments import add_config_arguments, config_from
from pipelines.progress import progress_bar
from pipelines.run_directory import write_atomically

if TYPE_CHECKING:
    from evaluation.length_bias import LengthRow, LengthSample
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
    parser.add_argument("--out", type=Path, required=True, help="folder for table_2.md, .json, .png and .pdf")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from pipelines.session import set_threads
    from trm_repro.errors import InputError
    from trm_repro.parquet_files import check_folder

    arguments.settings = [*_own_configuration(arguments.checkpoint), *arguments.settings]
    config = config_from(arguments)
    check_folder(arguments.out)
    if not config.evaluation.length_operands:
        raise InputError("evaluation.length_operands is empty: name problem sizes, such as [8,14,20,28,38,50]")
    set_threads(config.num_threads)
    write_length_table(config, arguments.checkpoint, arguments.out)
    sys.stdout.write((arguments.out / "table_2.md").read_text(encoding="utf-8"))
    return 0


def _own_configuration(checkpoint: Path | None) -> list[str]:
    """Name the configuration beside a run's checkpoint: its seed, task and policy are those to measure."""
    file = None if checkpoint is None else checkpoint.parent / "config.yaml"
    return [str(file)] if file is not None and file.is_file() else []


def write_length_table(config: "RunConfig", checkpoint: Path | None, folder: Path) -> None:
    """Measure rejection at each problem size and write table_2.png, .pdf, .json and, last, .md.

    Args:
        config: the run.
        checkpoint: of a run, whose oldest weights sample and whose newest are the policy; None for the starting
            policy on both sides.
        folder: where to write.

    Raises:
        InputError: if the checkpoint is missing, damaged or of another architecture.
    """
    from evaluation.length_bias import length_rows

    samples, threshold = _sample(config, checkpoint)
    _write(length_rows(samples, threshold, seed=config.seed), folder)


def join_length_tables(figures: Path) -> None:
    """Write one table of the seeds that were measured into ``figures``; nothing where none was.

    Args:
        figures: holds the tables of single seeds below ``lengths``.
    """
    rows = [row for file in sorted(figures.glob("lengths/seed_*/table_2.json")) for row in read_length_rows(file)]
    if rows:
        _write(rows, figures)


def seed_folder(config: "RunConfig") -> Path:
    """Name the folder of one seed's table in the output folder of an experiment."""
    return Path(config.output.dir) / "figures" / "lengths" / f"seed_{config.seed}"


def read_length_rows(file: Path) -> "list[LengthRow]":
    """Read a table_2.json.

    Args:
        file: as written by `write_length_table`.

    Returns:
        Its rows.

    Raises:
        InputError: if it holds something else.
    """
    return parse_length_rows(file.read_bytes(), str(file))


def parse_length_rows(content: bytes, source: str) -> "list[LengthRow]":
    """Read the content of a table_2.json; see `read_length_rows`. ``source`` names it in errors."""
    from evaluation.length_bias import LengthRow
    from trm_repro.errors import InputError

    try:
        rows = [LengthRow(**row) for row in json.loads(content)]
    except (ValueError, TypeError, RecursionError):
        rows = []
    if not rows or not all(_is_sound(row, rows[0]) for row in rows):
        raise InputError(
            f"{source}: is no table of rejection against length with a seed and shares from 0 to 1 in each row; delete "
            "the table_2 files beside it, reproduce and lengths make them again"
        )
    return rows


def _is_sound(row: "LengthRow", first: "LengthRow") -> bool:
    """Whether the values of a row from a file are what a table is made of, for the gates of the first row."""
    counts = (row.seed, row.num_operands, row.num_sequences)
    return (
        all(type(count) is int and count >= 0 for count in counts)
        and _is_number(row.mean_length, math.inf)
        and isinstance(row.rejection, dict)
        and isinstance(first.rejection, dict)
        and row.rejection.keys() == first.rejection.keys()
        and all(
            _is_number(share, 1.0)
            for share in (row.token_violation_fraction, row.predicted_rejection, *row.rejection.values())
        )
    )


def _is_number(value: object, highest: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value <= highest


def _write(rows: "Sequence[LengthRow]", folder: Path) -> None:
    from evaluation.length_bias import draw_length_bias, length_table

    folder.mkdir(parents=True, exist_ok=True)
    figure = draw_length_bias(rows)
    for suffix in ("png", "pdf"):
        figure.savefig(folder / f"table_2.{suffix}", dpi=150)
    write_atomically(folder / "table_2.json", json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    write_atomically(folder / "table_2.md", length_table(rows) + "\n")


def _sample(config: "RunConfig", checkpoint_file: Path | None) -> "tuple[list[LengthSample], float]":
    """Sample and score responses of each size; returns them with TRM-Max's threshold."""
    from evaluation.length_bias import LengthSample
    from pipelines.checkpoints import load_into, read_checkpoint
    from pipelines.session import open_session
    from pipelines.training import build_module, starting_policy
    from trm_repro.batch import RolloutBatch
    from trm_repro.config import load_arm
    from trm_repro.rollout.sampler import RolloutSampler
    from trm_repro.steps import gate

    checkpoint = None if checkpoint_file is None else read_checkpoint(checkpoint_file)
    trained = None if checkpoint_file is None else checkpoint_file.parent / "policy"
    is_trained = trained is not None and (trained / "config.json").is_file()
    model_path = trained if trained is not None and is_trained else starting_policy(config, show_progress=True)
    module = build_module(config, model_path, None)
    module.configure_model()
    sizes = config.evaluation.length_operands
    rollout = dataclasses.replace(
        config.rollout,
        distribution="full",
        num_prompts=config.evaluation.num_length_prompts,
        max_prompt_tokens=2 * max(sizes) + 4,
        max_response_tokens=6 * max(sizes) + 9,
    )
    update = dataclasses.replace(config.update, num_updates_per_rollout=1)
    config = dataclasses.replace(config, rollout=rollout, update=update)
    session = open_session(config, model_path)
    if checkpoint is not None and checkpoint_file is not None:
        load_into(module.policy, checkpoint, checkpoint_file)
        version, weights = checkpoint.snapshots[0]
        session.engine.sync(weights, run=str(checkpoint_file), version=version)
    gates = {name: load_arm(name).mask for name in GATES}
    samples = []
    with progress_bar("lengths", len(sizes), "size") as bar:
        for size in sizes:
            # A response has the room that a solution of its size needs, and a little more.
            limited = dataclasses.replace(rollout, max_response_tokens=6 * size + 9)
            task = dataclasses.replace(config.task, min_operands=size, max_operands=size)
            evaluation = dataclasses.replace(
                config.evaluation, num_problems=1, num_sampled_problems=1, num_final_problems=0
            )
            sized = dataclasses.replace(config, task=task, rollout=limited, evaluation=evaluation)
            rollouts = RolloutSampler(sized, session.engine, session.tokenizer).sample_step(0, 0)
            batch = RolloutBatch.from_rollouts(rollouts)
            measurement = module.measure(batch)
            assert measurement.kl is not None
            masks = {name: gate(measurement, batch.response_mask, mask) for name, mask in gates.items()}
            samples.append(
                LengthSample(num_operands=size, kl=measurement.kl, response_mask=batch.response_mask, masks=masks)
            )
            bar.update(1)
    return samples, gates["trm_max_0.05"].max_threshold
