"""`trm-repro regate`: replay a stored run under any gate, without a model."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.run_directory import write_atomically
from trm_repro.errors import InputError
from trm_repro.gate_specs import GATE_SPECS, fill_thresholds, find_spec

if TYPE_CHECKING:
    from torch import Tensor

    from evaluation.regating import GateFunction, StoredUpdate
    from trm_repro.shards import MaskRow

MISSING = {
    "total_variation": "mask files hold the policy's log-probs of the sampled tokens alone, so what a shard stores of "
    "the rollout's other tokens (all or the K largest) has nothing to be compared with; dppo_binary_tv needs no more",
    "kl": "mask files hold exact KL where rollout.distribution is full or hidden; sampled and top_k have none",
}
"""Why a statistic that a gate needs may not be there."""

HELP = "replay a stored run under any gate: what it would keep, and the bias that makes; no model, no GPU"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "path",
        type=Path,
        help="folder of a run (shards/ and masks/), folder of shards, or one shard, step_NNNNN.parquet",
    )
    parser.add_argument(
        "--gate",
        action="append",
        default=[],
        metavar="NAME[,THRESHOLD=X...][,sampled]",
        help="a gate of docs/masks.md, such as icepop,low=0.5,high=5; sampled leaves stored exact KL aside; may be "
        "repeated; default: every gate that the data allow, with its own thresholds",
    )
    parser.add_argument(
        "--arm", action="append", default=[], help="a gate as an arm of conf/arms sets it; may be repeated"
    )
    parser.add_argument("--masks", type=Path, help="folder or file of masks; default: masks/ beside the shards")
    parser.add_argument("--out", type=Path, help="folder to write; default: regate/ in PATH, or beside the shard")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from evaluation.regating import draw_regating, regate, regating_document, regating_table
    from trm_repro.parquet_files import check_folder

    out = arguments.out or (arguments.path if arguments.path.is_dir() else arguments.path.parent) / "regate"
    check_folder(out)
    gates = _gates(arguments.gate, arguments.arm)
    updates = [update for shard, masks in find_files(arguments.path, arguments.masks) for update in read(shard, masks)]
    available = frozenset.intersection(*(update.statistics.available for update in updates))
    left_out: dict[str, str] = {}
    if not gates:
        left_out = {name: why for name, spec in GATE_SPECS.items() if (why := _lacks(spec.needs - available))}
        gates = {name: gate_function(name) for name in GATE_SPECS if name not in left_out}
    for text in arguments.gate:
        if why := _lacks(GATE_SPECS[text.split(",")[0]].needs - available):
            raise InputError(f"{arguments.path}: gate {text} cannot be replayed: {why}")
    try:
        rows = regate(updates, {"stored": _stored, **gates})
    except ValueError as error:
        raise InputError(f"{arguments.path}: {error}") from None
    notes = "".join(f"{name} left out: {why}\n" for name, why in left_out.items())
    num_missing = sum({update.step: update.num_missing for update in updates}.values())
    if num_missing:
        notes += f"{num_missing:,} sequences of the shards have no row in the mask files and are in no number here\n"
    out.mkdir(parents=True, exist_ok=True)
    document = regating_document(rows) | {"left_out": left_out, "num_missing_sequences": num_missing}
    write_atomically(out / "regate.json", json.dumps(document, indent=2) + "\n")
    write_atomically(out / "regate.md", f"{regating_table(rows)}\n{notes and chr(10) + notes}")
    draw_regating(rows).savefig(out / "regate.partial.png", dpi=150)
    (out / "regate.partial.png").replace(out / "regate.png")
    sys.stderr.write("".join(f"regate: {note}\n" for note in notes.splitlines()))
    num_steps = len({row.step for row in rows})
    scope = f"means over the {num_steps} steps whose shards were kept, {len(updates)} updates"
    sys.stdout.write(f"{regating_table(rows)}\n\n{scope}; files: {out}\n")
    return 0


def _lacks(missing: frozenset[str]) -> str:
    """Say why statistics are not there; empty where none is missing."""
    return "; ".join(f"needs {name}: {MISSING.get(name, 'the run did not store it')}" for name in sorted(missing))


def find_files(path: Path, masks: Path | None = None) -> list[tuple[Path, Path]]:
    """Find shards and the masks that belong to them.

    Args:
        path: folder of a run, folder of shards, or a shard.
        masks: folder or file of masks; None looks in masks/ and for SHARD.masks.parquet beside the shard.

    Returns:
        Pairs of files, by step; a shard without masks is left out.

    Raises:
        InputError: if there is no pair.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; expected a run, a folder of shards, or a shard")
    folder = path / "shards" if (path / "shards").is_dir() else path
    shards = [path] if path.is_file() else sorted(p for p in folder.glob("*.parquet") if ".masks." not in p.name)
    if not shards:
        raise InputError(f"{folder}: has no shards, step_NNNNN.parquet; expected the folder of a run")
    pairs = []
    for shard in shards:
        places = [shard.parent.parent / "masks" / shard.name, shard.with_name(f"{shard.stem}.masks.parquet")]
        if masks is not None:
            places = [masks] if masks.is_file() else [masks / shard.name, masks / f"masks_{shard.name}"]
        pairs += [(shard, place) for place in places if place.is_file()][:1]
    if not pairs:
        looked = masks or shards[0].parent.parent / "masks"
        raise InputError(
            f"{path}: no shard has masks ({looked} has no {shards[0].name}); expected a run's folder, or write them "
            "with trm-repro mask"
        )
    return pairs


def read(shard: Path, masks: Path) -> "list[StoredUpdate]":
    """Read the updates of one step.

    Raises:
        InputError: if a file is damaged, or the masks are of other rollouts.
    """
    import torch

    from evaluation.regating import StoredUpdate
    from trm_repro.batch import TOKEN_TENSORS, RolloutBatch
    from trm_repro.masks import TokenStatistics
    from trm_repro.shards import read_masks, read_rollouts

    rollouts, step = read_rollouts(shard)
    unused: dict[str, Any] = dict.fromkeys(TOKEN_TENSORS)
    rollouts = [dataclasses.replace(rollout, **unused) for rollout in rollouts]
    rows: dict[int, list[MaskRow]] = {}
    seen: set[tuple[int, int]] = set()
    for row in read_masks(masks, of_step=step):
        lengths = len(rollouts[row.sequence_id].response_ids) if row.sequence_id < len(rollouts) else None
        if lengths != len(row.policy_logprobs):
            raise InputError(
                f"{masks}: sequence {row.sequence_id} has {len(row.policy_logprobs)} tokens, in {shard} "
                f"{'it is missing' if lengths is None else lengths}; give the masks of the same step"
            )
        if (row.update, row.sequence_id) in seen:
            raise InputError(
                f"{masks}: update {row.update} has sequence {row.sequence_id} twice; write the masks again"
            )
        seen.add((row.update, row.sequence_id))
        rows.setdefault(row.update, []).append(row)
    num_missing = len(rollouts) - len({row.sequence_id for own in rows.values() for row in own})
    updates = []
    for update, own in sorted(rows.items()):
        batch = RolloutBatch.from_rollouts([rollouts[row.sequence_id] for row in own])
        kl = [row.token_kl for row in own if row.token_kl is not None]
        statistics = TokenStatistics.from_logprobs(
            batch.dense(torch.cat([row.policy_logprobs for row in own])),
            batch.rollout_logprobs,
            batch.response_mask,
            advantages=batch.advantages,
            kl=batch.dense(torch.cat(kl)) if len(kl) == len(own) else None,
        )
        kept = torch.tensor([row.kept for row in own])
        statistics = dataclasses.replace(statistics, reference_mask=kept)
        updates.append(
            StoredUpdate(
                step=step,
                update=update,
                statistics=statistics,
                rewards=batch.rewards,
                groups=batch.groups,
                num_missing=num_missing,
            )
        )
    if not updates:
        raise InputError(f"{masks}: has no masks")
    return updates


def gate_function(text: str) -> "GateFunction":
    """Make a gate from NAME[,THRESHOLD=X...][,sampled].

    Raises:
        InputError: if there is no such gate or threshold, or a value is no number.
    """
    from trm_repro.masks import gate_mask, token_weights

    name, *words = text.split(",")
    is_sampled = "sampled" in words
    thresholds = {}
    for word in words:
        key, separator, value = word.partition("=")
        if word == "sampled":
            continue
        if key in thresholds:
            raise InputError(f"--gate {text}: gives {key} twice; give it once")
        try:
            thresholds[key] = float(value)
        except ValueError:
            wanted = "a number" if separator else "THRESHOLD=X or sampled"
            raise InputError(f"--gate {text}: {word!r} is not {wanted}") from None
    try:
        filled = fill_thresholds(find_spec(name), thresholds)
    except ValueError as error:
        raise InputError(f"--gate {text}: {error}") from None

    def function(update: "StoredUpdate") -> "Tensor":
        statistics = dataclasses.replace(update.statistics, kl=None) if is_sampled else update.statistics
        return token_weights(gate_mask(name, statistics, **filled), statistics.response_mask)

    return function


def arm_function(arm: str) -> "GateFunction":
    """Make the gate of an arm, with its estimators and thresholds; a control copies the stored decisions.

    Raises:
        InputError: if there is no such arm.
    """
    from trm_repro.config import load_arm
    from trm_repro.masks import gate_mask, token_weights

    config = load_arm(arm).mask

    def function(update: "StoredUpdate") -> "Tensor":
        statistics = update.statistics
        masks = []
        for name, estimator in (("trm_max", config.max_estimator), ("trm_avg", config.avg_estimator)):
            if config.criterion not in (name, "trm_max_avg"):
                continue
            if estimator == "exact" and statistics.kl is None:
                raise ValueError(f"arm {arm} needs exact KL, which the masks do not have")
            thresholds = {key: config.gate_thresholds[key] for key in GATE_SPECS[name].thresholds}
            given = statistics if estimator == "exact" else dataclasses.replace(statistics, kl=None)
            masks.append(gate_mask(name, given, **thresholds))
        if not masks:
            masks.append(gate_mask(config.criterion, statistics, **config.gate_thresholds))
        mask = masks[0] if len(masks) == 1 else masks[0] & masks[1]
        return token_weights(mask, statistics.response_mask)

    return function


def _gates(texts: Sequence[str], arms: Sequence[str]) -> "dict[str, GateFunction]":
    gates = {text: gate_function(text) for text in texts}
    return gates | {f"arm {arm}": arm_function(arm) for arm in arms}


def _stored(update: "StoredUpdate") -> "Tensor":
    from trm_repro.masks import token_weights

    assert update.statistics.reference_mask is not None
    return token_weights(update.statistics.reference_mask, update.statistics.response_mask)
