"""Spool entries to MLflow metrics: in order, batched, none lost, none twice.

What is about to be sent is noted before, what was sent after. Where the two differ, an answer was lost: what is there
already is then read from MLflow and left out, so that a store which would keep a point twice does not get it twice.
"""

from collections.abc import Iterator, Sequence

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from pipelines.spool import SpoolEntry
from pipelines.tracking.store import TrackingUnreachable, is_rejection

MAX_BATCH = 1000  # MLflow takes at most this many metrics in one request

PointKey = tuple[str, int, int]  # metric, step, timestamp


def batches(entries: Sequence[SpoolEntry]) -> Iterator[tuple[int, list[Metric]]]:
    """Group whole entries into requests.

    Args:
        entries: in the order written.

    Yields:
        Number of entries done once this is sent, and its metrics: at most MAX_BATCH, but for an entry that has more.
    """
    waiting: list[Metric] = []
    for number, entry in enumerate(entries):
        metrics = to_metrics(entry)
        if waiting and len(waiting) + len(metrics) > MAX_BATCH:
            yield number, waiting
            waiting = []
        waiting = waiting + metrics
    if entries:
        yield len(entries), waiting


def to_metrics(entry: SpoolEntry) -> list[Metric]:
    """Turn an entry into metrics that keep the time at which they were measured."""
    return [Metric(name, value, round(entry.time * 1000), entry.step) for name, value in entry.metrics.items()]


def points_there(client: MlflowClient, run_id: str, names: set[str]) -> set[PointKey]:
    """Read which points of these metrics a run has."""
    return {
        (name, point.step, point.timestamp)
        for name in sorted(names)
        for point in client.get_metric_history(run_id, name)
    }


def without(metrics: list[Metric], there: set[PointKey]) -> list[Metric]:
    """Leave out what is there."""
    return [metric for metric in metrics if (metric.key, metric.step, metric.timestamp) not in there]


def send(client: MlflowClient, run_id: str, metrics: list[Metric]) -> list[str]:
    """Send metrics; those that MLflow refuses are left out, and the others are sent.

    Args:
        client: of the store.
        run_id: an open run.
        metrics: in order.

    Returns:
        Names of the metrics refused.

    Raises:
        TrackingUnreachable: if the run has been deleted.
    """
    rejected: list[str] = []
    for start in range(0, len(metrics), MAX_BATCH):
        rejected += _send_batch(client, run_id, metrics[start : start + MAX_BATCH])
    return rejected


def _send_batch(client: MlflowClient, run_id: str, metrics: list[Metric]) -> list[str]:
    try:
        client.log_batch(run_id, metrics=metrics)
    except MlflowException as error:
        if not is_rejection(error):
            raise
        if client.get_run(run_id).info.lifecycle_stage != "active":
            raise TrackingUnreachable(f"run {run_id} was deleted in MLflow") from None
        if len(metrics) == 1:
            return [metrics[0].key]
        half = len(metrics) // 2
        return _send_batch(client, run_id, metrics[:half]) + _send_batch(client, run_id, metrics[half:])
    return []
