"""The audit, on dumps of every kind."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import strategies as st
from safetensors.numpy import save as save_safetensors

from pipelines.audit.measure import Request, audit
from tests.fuzz.damage import changed_rows, damaged
from tests.fuzz.reading import Target, bytes_of, lines, refused, written

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
    return bytes_of(lambda path: np.savez(path, **arrays), ".npz")


def _torch(arrays: dict[str, Any]) -> bytes:
    return bytes_of(lambda path: torch.save({k: torch.tensor(v) for k, v in arrays.items()}, path), ".pt")


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


TARGETS = {
    "audit_jsonl": Target(_dumps(lines(ROWS), changed_rows(ROWS).map(lines)), _audit_of(".jsonl")),
    "audit_parquet": Target(_dumps(_parquet(ROWS), changed_rows(ROWS).map(_table_rows)), _audit_of(".parquet")),
    "audit_arrow": Target(_dumps(_arrow(ROWS), changed_rows(ROWS).map(_arrow_rows)), _audit_of(".arrow")),
    "audit_npz": Target(_dumps(_npz(ARRAYS), changed_arrays().map(_npz)), _audit_of(".npz")),
    "audit_safetensors": Target(
        _dumps(save_safetensors(ARRAYS), changed_arrays().map(save_safetensors)), _audit_of(".safetensors")
    ),
    "audit_torch": Target(_dumps(_torch(ARRAYS), changed_arrays().map(_torch)), _audit_of(".pt")),
}
