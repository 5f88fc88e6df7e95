"""An audit as one MLflow run: its numbers as metrics, its per-step rows as histories, its files as artifacts."""

import json
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param

from pipelines.credentials import without_credentials
from pipelines.tracking.store import STORE_ERRORS, TrackingUnreachable, connect, reason
from trm_repro.errors import InputError

MAX_BATCH = 1000  # MLflow takes at most this many metrics in one request
MAX_PARAM_LENGTH = 500


def log_audit(payload: dict[str, Any], *, uri: str, experiment: str, files: list[Path | None]) -> str:
    """Record an audit.

    Args:
        payload: what --json writes.
        uri: of the tracking store.
        experiment: made where it is not there.
        files: to keep as artifacts; None is left out, and without JSON among them the payload is added.

    Returns:
        The run's id.

    Raises:
        InputError: if MLflow cannot be used.
    """
    now = round(time.time() * 1000)
    metrics = [Metric(name, value, now, step) for name, value, step in _metrics(payload)]
    params = {"files": ", ".join(payload["files"]), "formats": ", ".join(payload["formats"])}
    try:
        client = connect(uri)
        found = client.get_experiment_by_name(experiment)
        experiment_id = (
            found.experiment_id if found is not None else client.create_experiment(experiment, _artifacts(uri))
        )
        run_id = str(client.create_run(experiment_id, run_name="audit", tags={"kind": "audit"}).info.run_id)
        client.log_batch(run_id, params=[Param(key, value[:MAX_PARAM_LENGTH]) for key, value in params.items()])
        for start in range(0, len(metrics), MAX_BATCH):
            client.log_batch(run_id, metrics=metrics[start : start + MAX_BATCH])
        for file in files:
            if file is not None:
                client.log_artifact(run_id, str(file))
        if not any(file is not None and file.suffix == ".json" for file in files):
            with tempfile.TemporaryDirectory() as folder:
                text = json.dumps(payload, default=str)
                (Path(folder) / "audit.json").write_text(text, encoding="utf-8")
                client.log_artifact(run_id, str(Path(folder) / "audit.json"))
        client.set_terminated(run_id, "FINISHED")
    except (*STORE_ERRORS, TrackingUnreachable) as error:
        raise InputError(f"--mlflow {without_credentials(uri)}: cannot be used ({reason(error, uri)})") from None
    return run_id


def _artifacts(uri: str) -> str | None:
    """Keep artifacts beside a SQLite file; MLflow would put them into the folder it is started in."""
    path = uri.removeprefix("sqlite:///")
    return None if path == uri else (Path(path).resolve().parent / "mlartifacts").as_uri()


def _metrics(payload: dict[str, Any]) -> Iterator[tuple[str, float, int]]:
    for name, value in payload.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield f"audit/{name}", float(value), 0
    for name, value in payload["acceptance"].items():
        yield f"acceptance/{name}", float(value), 0
    for name, row in payload.get("gates", {}).items():
        for key in ("sequence_fraction", "token_fraction"):
            if key in row:
                yield f"gate/{_gate_key(name)}/{key}", float(row[key]), 0
    for row in payload["steps"]:
        yield from _step_metrics(row, int(row["step"]))


def _step_metrics(row: dict[str, Any], step: int) -> Iterator[tuple[str, float, int]]:
    for name, value in row.items():
        if isinstance(value, dict):  # acceptance and gates: by gate
            yield from ((f"{name}_by_step/{_gate_key(gate)}", float(share), step) for gate, share in value.items())
        elif name != "step" and value is not None and math.isfinite(value):
            yield f"divergence/{name}", float(value), step


def _gate_key(name: str) -> str:
    """Write a gate with its thresholds as MLflow allows a metric's name to be."""
    return name.replace(":", "/").replace("=", "_").replace(",", "/")
