"""One MLflow trace per RL step, its stages as spans with the times at which they ran.

Ids follow from the run and the step, so that a trace sent twice is the same trace.
"""

import hashlib
import json
from collections.abc import Sequence

from mlflow.entities import Span, TraceInfo, TraceLocation, TraceState
from mlflow.tracing.client import TracingClient

from pipelines.spool import SpoolEntry

NANOSECONDS = 1_000_000_000


def send_traces(
    client: TracingClient, entries: Sequence[SpoolEntry], *, experiment_id: str, run_id: str, tags: dict[str, str]
) -> int:
    """Send the traces of training steps: one request a step, and one for all their spans.

    Args:
        client: of the store.
        entries: of a spool; those without spans have no trace.
        experiment_id: where the traces go.
        run_id: the run they belong to.
        tags: of every trace.

    Returns:
        Number of traces sent.
    """
    spans: list[Span] = []
    traced = [entry for entry in entries if entry.kind == "train" and entry.spans]
    for entry in traced:
        client.start_trace(_trace_info(entry, experiment_id, run_id, tags))
        spans += _spans(entry, run_id)
    if spans:
        client.log_spans(experiment_id, spans)
    return len(traced)


def _trace_info(entry: SpoolEntry, experiment_id: str, run_id: str, tags: dict[str, str]) -> TraceInfo:
    begin, end = _bounds(entry)
    shown = {
        name: entry.metrics[name]
        for name in ("rollout/reward_mean", "mask/kept_sequence_fraction")
        if name in entry.metrics
    }
    return TraceInfo(
        trace_id=_trace_id(entry, run_id),
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=begin // 1_000_000,
        execution_duration=(end - begin) // 1_000_000,
        state=TraceState.OK,
        request_preview=f"{tags.get('arm', '')} seed {tags.get('seed', '')}, step {entry.step}",
        response_preview=json.dumps(shown),
        trace_metadata={"mlflow.sourceRun": run_id, "mlflow.trace_schema.version": "3"},
        tags=tags
        | {"mlflow.traceName": f"step {entry.step}", "step": str(entry.step)}
        | {"mlflow.trace.spansLocation": "TRACKING_STORE"},
    )


def _spans(entry: SpoolEntry, run_id: str) -> list[Span]:
    begin, end = _bounds(entry)
    stages = [(stage, round(start * NANOSECONDS), round(stop * NANOSECONDS)) for stage, start, stop in entry.spans]
    return [
        _span(entry, run_id, number, name, (start, stop))
        for number, (name, start, stop) in enumerate([(f"step {entry.step}", begin, end), *sorted(stages, key=_start)])
    ]


def _span(entry: SpoolEntry, run_id: str, number: int, name: str, times: tuple[int, int]) -> Span:
    trace_id = _trace_id(entry, run_id)
    context = {"trace_id": f"0x{trace_id.removeprefix('tr-')}", "span_id": _span_id(trace_id, number)}
    return Span.from_dict(
        {
            "name": name,
            "context": context,
            "parent_id": None if number == 0 else _span_id(trace_id, 0),
            "start_time": times[0],
            "end_time": times[1],
            "status_code": "OK",
            "status_message": "",
            "attributes": {
                "mlflow.traceRequestId": json.dumps(trace_id),
                "mlflow.spanType": json.dumps("CHAIN" if number == 0 else "TASK"),
                "step": json.dumps(entry.step),
            },
            "events": [],
        }
    )


def _bounds(entry: SpoolEntry) -> tuple[int, int]:
    begin, end = min(span[1] for span in entry.spans), max(span[2] for span in entry.spans)
    return round(begin * NANOSECONDS), round(end * NANOSECONDS)


def _start(stage: tuple[str, int, int]) -> int:
    return stage[1]


def _trace_id(entry: SpoolEntry, run_id: str) -> str:
    return f"tr-{hashlib.sha256(f'{run_id} {entry.step}'.encode()).hexdigest()[:32]}"


def _span_id(trace_id: str, number: int) -> str:
    return f"0x{hashlib.sha256(f'{trace_id} {number}'.encode()).hexdigest()[:16]}"
