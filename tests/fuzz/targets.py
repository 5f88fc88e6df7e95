"""The readers under test: for each, inputs near to what it expects, and what must hold of whatever comes out."""

import json
import shutil
import string
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from hypothesis import strategies as st
from safetensors.numpy import save as save_safetensors

from pipelines.audit.measure import Request, audit
from pipelines.checkpoints import read_checkpoint
from pipelines.credentials import without_credentials
from pipelines.grade import _grade_line
from pipelines.spool import MetricsSpool, SpoolEntry, read_spool
from pipelines.study_plan import read_study
from pipelines.tracking.state import read_state
from tests.fuzz.damage import changed_rows, damaged, json_values
from tests.unit.builders import make_rollout
from trm_repro.batch import RolloutBatch
from trm_repro.config import CONF_DIR, RunConfig, load_config, to_yaml
from trm_repro.errors import InputError
from trm_repro.shards import MaskRow, read_masks, read_rollouts, write_masks, write_rollouts
from trm_repro.tasks.dataset import _to_problem
from trm_repro.tasks.grading import grade_integer, normalize_integer
from trm_repro.tasks.verl_grading import grade_by_verl

LONGEST_MESSAGE = 1500
LONGEST_GRADING = 2.0  # seconds, of a response of 2,000 characters
FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-"))
"""Where inputs are written."""


@dataclass(frozen=True)
class Target:
    """One reader.

    Attributes:
        inputs: what it is given.
        check: raises anything where it does not do as it should.
        cost: how many times less often the unit tests try it than others.
    """

    inputs: st.SearchStrategy[Any]
    check: Callable[[Any], None]
    cost: int = 1


def refused(read: Callable[[], Any]) -> Any:
    """Return what a reader gives, or None where it refuses in one line."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return read()
    except InputError as error:
        message = str(error)
        assert message, "a message without words"
        assert "\n" not in message, message
        assert len(message) <= LONGEST_MESSAGE, message
        return None


def written(name: str, content: bytes) -> Path:
    """Write an input to a file."""
    path = FOLDER / name
    path.write_bytes(content)
    return path


def _bytes_of(write: Callable[[Path], Any], suffix: str) -> bytes:
    path = FOLDER / f"whole{suffix}"
    write(path)
    return path.read_bytes()


# --- configuration and studies


@cache
def _config_keys() -> list[str]:
    plain = yaml.safe_load(to_yaml(RunConfig()))
    return [*plain, *(f"{section}.{key}" for section, keys in plain.items() if isinstance(keys, dict) for key in keys)]


def check_config_file(content: bytes) -> None:
    config = refused(lambda: load_config([written("config.yaml", content)]))
    if config is not None:
        assert load_config([written("again.yaml", to_yaml(config).encode())]) == config


def check_settings(settings: list[str]) -> None:
    config = refused(lambda: load_config((), settings))
    if config is not None:
        assert load_config([written("again.yaml", to_yaml(config).encode())]) == config


def check_study(content: bytes) -> None:
    refused(lambda: read_study(written("study.yaml", content)))


def _yaml(value: Any) -> bytes:
    return yaml.safe_dump(value, allow_unicode=True).encode(errors="replace")


SMOKE = (CONF_DIR / "smoke.yaml").read_bytes()
STUDY = {
    "settings": ["num_steps=2"],
    "cells": [
        {
            "name": "one",
            "stage": "confirm",
            "arms": ["ppo_clip", "trm_avg_0.001"],
            "seeds": [1, 2],
            "settings": ["seed=3"],
            "hypotheses": [{"text": "a", "parts": [{"quantity": "final_score", "arm": "ppo_clip", "threshold": 0.1}]}],
        }
    ],
}
config_files = st.one_of(
    damaged(SMOKE),
    st.dictionaries(st.sampled_from(_config_keys()), json_values, max_size=4).map(_yaml),
    st.dictionaries(
        st.sampled_from(["rollout", "mask", "task", "update"]),
        st.dictionaries(st.sampled_from([key.rpartition(".")[2] for key in _config_keys()]), json_values, max_size=3),
        max_size=3,
    ).map(_yaml),
    st.text(string.printable, max_size=200).map(str.encode),
)
settings = st.lists(
    st.one_of(
        st.builds("{}={}".format, st.sampled_from(_config_keys()), json_values.map(json.dumps)),
        st.builds("{}={}".format, st.sampled_from(_config_keys()), st.text(max_size=20)),
        st.text(max_size=30),
    ),
    min_size=1,
    max_size=3,
)
studies = st.one_of(
    damaged(_yaml(STUDY)),
    st.builds(lambda cells: _yaml(STUDY | {"cells": cells}), changed_rows(STUDY["cells"])),
    json_values.map(_yaml),
)

# --- shards, masks, checkpoints


def _shard() -> bytes:
    rollouts = [make_rollout(length, seed=length, group=length % 2, experts=True) for length in (3, 1, 4)]
    return _bytes_of(lambda path: write_rollouts(path, rollouts, 2), ".parquet")


def _mask_file() -> bytes:
    rows = [
        MaskRow(update=0, sequence_id=i, kept=i > 0, policy_logprobs=-torch.rand(3), token_kl=torch.rand(3))
        for i in range(3)
    ]
    return _bytes_of(lambda path: write_masks(path, rows, 2), ".parquet")


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
    return _bytes_of(lambda path: torch.save(stored, path), ".ckpt")


def check_checkpoint(content: bytes) -> None:
    checkpoint = refused(lambda: read_checkpoint(written("checkpoint.ckpt", content)))
    assert checkpoint is None or checkpoint.num_steps >= 1


# --- spools and state

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


def _lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


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


# --- audit

ROWS = [
    {
        "rollout_logprobs": [-0.5, -1.5, -0.25],
        "policy_logprobs": [-0.5, -1.25, -0.5],
        "mask": [1, 1, 0],
        "reward": 1.0,
        "advantage": 0.5,
        "step": 1,
        "prompt_id": "a",
        "token_ids": [1, 2, 3],
    },
    {
        "rollout_logprobs": [-0.5, -1.5, -0.75],
        "policy_logprobs": [-0.5, -2.25, -0.5],
        "mask": [1, 1, 1],
        "reward": 0.0,
        "advantage": -0.5,
        "step": 2,
        "prompt_id": "b",
        "token_ids": [1, 3, 3],
    },
]
ARRAYS = {name: np.array([row[name] for row in ROWS]) for name in ROWS[0] if name != "prompt_id"}


def _audit_of(suffix: str) -> Callable[[tuple[bytes, bool]], None]:
    def check(drawn: tuple[bytes, bool]) -> None:
        content, skip_bad = drawn
        path = written(f"dump{suffix}", content)
        payload = refused(lambda: audit(Request(files=[path], skip_bad=skip_bad, is_quick=True)))
        assert payload is None or payload["num_sequences"] >= 0

    return check


def _npz(arrays: dict[str, Any]) -> bytes:
    return _bytes_of(lambda path: np.savez(path, **arrays), ".npz")


def _torch(arrays: dict[str, Any]) -> bytes:
    return _bytes_of(lambda path: torch.save({k: torch.tensor(v) for k, v in arrays.items()}, path), ".pt")


def _parquet(rows: list[Any]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue())


def _arrow(rows: list[Any]) -> bytes:
    sink, table = pa.BufferOutputStream(), pa.Table.from_pylist(rows)
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


@st.composite
def changed_arrays(draw: st.DrawFn) -> dict[str, Any]:
    """Change shapes, types and values of some arrays."""
    arrays = dict(ARRAYS)
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from([*arrays, "more"]))
        shape = draw(st.lists(st.integers(0, 3), max_size=4))
        kind = draw(st.sampled_from(["<f4", "<f8", "<f2", "<i8", "<u1", "?"]))
        fill = draw(st.sampled_from([0, -1, 1, np.nan, np.inf, -np.inf, 1e30]))
        with np.errstate(all="ignore"):
            arrays[name] = np.full(shape, fill).astype(kind)
    return arrays


def _table_rows(rows: list[dict[str, Any]]) -> bytes:
    try:
        return _parquet(rows)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return _parquet(ROWS)


def _arrow_rows(rows: list[dict[str, Any]]) -> bytes:
    try:
        return _arrow(rows)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return _arrow(ROWS)


def _dumps(whole: bytes, changed: st.SearchStrategy[bytes]) -> st.SearchStrategy[tuple[bytes, bool]]:
    return st.tuples(damaged(whole) | changed, st.booleans())


# --- grading and data

PIECES = (
    "\\boxed{", "\\boxed {", "{", "}", "\\{", "\\}", "Answer:", "answer :", "\n", "$", "$$", "\\text{", "\\frac", "\\(",
    "\\)", "\\,", "\\!", "{,}", ",", ".", "=", "<", "42", "-", "007", "1,024", "\uff11", "\u00b2", "\u2212", "%",
    "^\\circ", "\\textcolor{red}{", "\\displaystyle", "\\", " ", "**", "~", "or", "square", "x",
)  # fmt: skip
responses = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=60).map("".join) | st.builds(
    lambda piece, n: piece * n, st.sampled_from(PIECES), st.integers(1, 400)
)
golds = st.sampled_from(["42", "-7", "1024", "$336^\\circ$", "x", ""]) | st.text(max_size=10)


def check_grading(drawn: tuple[str, str, bool]) -> None:
    gold, response, finished = drawn
    began = time.process_time()
    for grade in (
        lambda: grade_integer(gold, response, finished=finished),
        lambda: grade_by_verl(gold, response),
    ):
        try:
            found = grade()
        except ValueError as error:
            if "the right answer must" not in str(error):
                raise
            continue
        assert found.reward in (0.0, 1.0)
        assert (found.reward == 1.0) == (found.reason == "correct")
    read = normalize_integer(response)
    assert read is None or normalize_integer(read) == read
    assert time.process_time() - began < LONGEST_GRADING


def check_grade_line(drawn: tuple[bytes, str]) -> None:
    line, mode = drawn
    graded = refused(lambda: _grade_line(line, "line 1", mode, None))
    assert graded is None or set(graded) == {"correct", "answer", "reason"}


def check_problem(row: object) -> None:
    problem = refused(lambda: _to_problem(row, "row 1"))
    assert problem is None or (problem.prompt and normalize_integer(problem.answer) == problem.answer)


def check_credentials(drawn: tuple[str, str, str]) -> None:
    user, password, rest = drawn
    for uri in (f"https://{user}:{password}@host/{rest}", f"https://host/{rest}?token={password}"):
        assert "s3cret" not in without_credentials(uri), uri


PROBLEM = {
    "id": "1",
    "problem": "1 + 1?",
    "answer": 2,
    "extra_info": {"index": 3},
    "reward_model": {"ground_truth": "2"},
}
words = st.text(string.ascii_letters + string.digits + "/@:?#&%=", max_size=12)

TARGETS = {
    "config_file": Target(config_files, check_config_file, cost=4),
    "settings": Target(settings, check_settings),
    "study": Target(studies, check_study),
    "shard": Target(damaged(_shard()) | changed_tables(_shard()), check_shard),
    "masks": Target(damaged(_mask_file()) | changed_tables(_mask_file()), check_masks),
    "checkpoint": Target(damaged(_checkpoint()), check_checkpoint),
    "spool": Target(damaged(_lines(ENTRIES)) | changed_rows(ENTRIES).map(_lines), check_spool),
    "state": Target(damaged(json.dumps(STATE).encode()) | changed_rows([STATE]).map(lambda r: json.dumps(r[0]).encode())
                    | json_values.map(lambda v: json.dumps(v).encode()), check_state),
    "audit_jsonl": Target(_dumps(_lines(ROWS), changed_rows(ROWS).map(_lines)), _audit_of(".jsonl")),
    "audit_parquet": Target(_dumps(_parquet(ROWS), changed_rows(ROWS).map(_table_rows)), _audit_of(".parquet")),
    "audit_arrow": Target(_dumps(_arrow(ROWS), changed_rows(ROWS).map(_arrow_rows)), _audit_of(".arrow")),
    "audit_npz": Target(_dumps(_npz(ARRAYS), changed_arrays().map(_npz)), _audit_of(".npz")),
    "audit_safetensors": Target(
        _dumps(save_safetensors(ARRAYS), changed_arrays().map(save_safetensors)), _audit_of(".safetensors")
    ),
    "audit_torch": Target(_dumps(_torch(ARRAYS), changed_arrays().map(_torch)), _audit_of(".pt")),
    "grading": Target(st.tuples(golds, responses, st.booleans()), check_grading),
    "grade_line": Target(
        st.tuples(
            damaged(b'{"gold": 42, "response": "so \\\\boxed{42}"}')
            | changed_rows([{"gold": 42, "response": "x"}]).map(lambda rows: json.dumps(rows[0]).encode())
            | json_values.map(lambda value: json.dumps(value).encode()),
            st.sampled_from(["strict", "verl"]),
        ),
        check_grade_line,
    ),
    "problem": Target(changed_rows([PROBLEM]).map(lambda rows: rows[0]) | json_values, check_problem),
    "credentials": Target(st.tuples(words, words.map("s3cret".__add__), words), check_credentials),
}  # fmt: skip


def clean_up() -> None:
    """Delete what was written."""
    shutil.rmtree(FOLDER, ignore_errors=True)
