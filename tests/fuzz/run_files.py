"""Readers of what a run left: shards, masks, checkpoints, spools, tables."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import strategies as st

from pipelines.checkpoints import read_checkpoint
from pipelines.evaluation_folder import EvaluationFolder
from pipelines.lengths import parse_length_rows
from pipelines.spool import MetricsSpool, SpoolEntry, read_spool
from pipelines.tracking.state import read_state
from tests.fuzz.damage import changed_rows, damaged, json_values
from tests.fuzz.reading import FOLDER, Target, bytes_of, first, json_files, lines, refused, written
from tests.unit.builders import make_rollout
from trm_repro.batch import RolloutBatch
from trm_repro.shards import MaskRow, read_masks, read_rollouts, write_masks, write_rollouts


def _shard() -> bytes:
    rollouts = [make_rollout(length, seed=length, group=length % 2, experts=True) for length in (3, 1, 4)]
    return bytes_of(lambda path: write_rollouts(path, rollouts, 2), ".parquet")


def _mask_file() -> bytes:
    rows = [
        MaskRow(update=0, sequence_id=i, kept=i > 0, policy_logprobs=-torch.rand(3), token_kl=torch.rand(3))
        for i in range(3)
    ]
    return bytes_of(lambda path: write_masks(path, rows, 2), ".parquet")


def _table_of(content: bytes) -> pa.Table:
    return pq.read_table(pa.BufferReader(content))


@st.composite
def changed_tables(draw: st.DrawFn, content: bytes) -> bytes:
    """Change values that the schema allows, the schema, or what the file says about itself."""
    table = _table_of(content)
    about = dict(table.schema.metadata)
    rows = table.to_pylist()
    for _ in range(draw(st.integers(0, 3))):
        row, field = draw(st.sampled_from(rows)), draw(st.sampled_from(list(table.schema)))
        number = st.integers(-(2**31), 2**31 - 1) if not pa.types.is_floating(_value_type(field.type)) else st.floats()
        if pa.types.is_uint8(_value_type(field.type)):
            number = st.integers(0, 255)
        if pa.types.is_list(field.type):
            row[field.name] = draw(st.none() | st.lists(st.none() | number, max_size=40))
        elif pa.types.is_large_binary(field.type):
            row[field.name] = draw(st.none() | st.binary(max_size=40))
        elif pa.types.is_boolean(field.type):
            row[field.name] = draw(st.none() | st.booleans())
        else:
            row[field.name] = draw(st.none() | number)
    if draw(st.booleans()):
        said = json.loads(about[b"trm_repro"])
        said |= draw(st.dictionaries(st.sampled_from(["kind", "shapes", "hidden_dtype"]), json_values, max_size=2))
        if isinstance(said.get("shapes"), dict) and draw(st.booleans()):
            names = st.sampled_from(["log_distribution", "experts", "hidden", "top_ids", "top_logprobs"])
            said["shapes"] |= draw(st.dictionaries(names, json_values, max_size=2))
        about[b"trm_repro"] = json.dumps(said).encode()
    changed = pa.Table.from_pylist(rows, schema=table.schema.with_metadata(about))
    sink = pa.BufferOutputStream()
    pq.write_table(changed, sink)
    return bytes(sink.getvalue())


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_list(kind) else kind


def check_shard(content: bytes) -> None:
    read = refused(lambda: read_rollouts(written("step_00002.parquet", content)))
    if read is not None:
        rollouts, step = read
        assert step >= 0
        bare = [rollout for rollout in rollouts if rollout.hidden is None]
        if len(bare) == len(rollouts):
            assert RolloutBatch.from_rollouts(rollouts).num_sequences == len(rollouts)
        write_rollouts(FOLDER / "again.parquet", rollouts, step)
        assert len(read_rollouts(FOLDER / "again.parquet")[0]) == len(rollouts)


def check_masks(content: bytes) -> None:
    rows = refused(lambda: read_masks(written("masks.parquet", content)))
    assert rows is None or all(isinstance(row.kept, bool) and row.update >= 0 for row in rows)


def _checkpoint() -> bytes:
    weights = {"policy.model.weight": torch.ones(2, 2)}
    snapshots = [(0, {"weight": torch.ones(2, 2)}), (1, {"weight": torch.zeros(2, 2)})]
    stored = {"epoch": 0, "state_dict": weights, "RolloutDataModule": {"snapshots": snapshots}}
    return bytes_of(lambda path: torch.save(stored, path), ".ckpt")


def check_checkpoint(content: bytes) -> None:
    checkpoint = refused(lambda: read_checkpoint(written("checkpoint.ckpt", content)))
    assert checkpoint is None or checkpoint.num_steps >= 1


ENTRIES = [
    {
        "step": step,
        "kind": kind,
        "time": 1.5,
        "metrics": {"a/b": 0.5, "c": 1},
        "num_kept": [1, 2],
        "rejected_lengths": [[3], []],
        "problem_scores": {"greedy": [1.0]},
        "spans": [["mask", 1.0, 2.0]],
        "profiles": {"mean_tv": [0.1]},
    }
    for step, kind in ((0, "evaluate"), (1, "train"), (2, "train"))
]


def check_spool(content: bytes) -> None:
    path = written("metrics.jsonl", content)
    entries = refused(lambda: list(read_spool(path)))
    if entries is not None:
        MetricsSpool(path).append(SpoolEntry(step=10**6, kind="train", time=0.0, metrics={"x": 1.0}))
        again = list(read_spool(path))
        assert [(e.step, e.kind) for e in again[: len(entries)]] == [(e.step, e.kind) for e in entries]
        assert again[-1].step == 10**6


STATE = {"uri": "sqlite:///x", "key": "k", "run_id": "r", "replayed": 1, "sending": 2, "rejected": [], "seeds": [1]}


def check_state(content: bytes) -> None:
    state = read_state(written("mlflow.json", content))
    assert state is None or (isinstance(state.uri, str) and isinstance(state.replayed, int))


LENGTHS = [
    {
        "seed": 1,
        "num_operands": n,
        "num_sequences": 4,
        "mean_length": 9.5,
        "token_violation_fraction": 0.1,
        "predicted_rejection": 0.5,
        "rejection": {"trm_max_0.05": 0.25},
    }
    for n in (2, 4)
]


def check_lengths(content: bytes) -> None:
    rows = refused(lambda: parse_length_rows(content, "table_2.json"))
    assert rows is None or all(row.num_sequences >= 0 for row in rows)


def check_evaluation(content: bytes) -> None:
    written("settings.json", content)
    settings = refused(EvaluationFolder(FOLDER).read_settings)
    assert settings is None or isinstance(settings, dict)


TARGETS = {
    "shard": Target(damaged(_shard()) | changed_tables(_shard()), check_shard),
    "masks": Target(damaged(_mask_file()) | changed_tables(_mask_file()), check_masks),
    "checkpoint": Target(damaged(_checkpoint()), check_checkpoint),
    "spool": Target(damaged(lines(ENTRIES)) | changed_rows(ENTRIES).map(lines), check_spool),
    "state": Target(
        damaged(json.dumps(STATE).encode())
        | changed_rows([STATE]).map(lambda r: json.dumps(r[0]).encode())
        | json_values.map(lambda v: json.dumps(v).encode()),
        check_state,
    ),
    "lengths": Target(json_files(LENGTHS), check_lengths),
    "evaluation": Target(json_files([STATE]).map(first), check_evaluation),
}
