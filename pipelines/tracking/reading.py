"""Runs read back from any tracking store, by run id or by name."""

from collections.abc import Sequence
from dataclasses import dataclass

from mlflow import MlflowClient
from mlflow.entities import Run

from pipelines.credentials import without_credentials
from pipelines.tracking.store import STORE_ERRORS, TrackingUnreachable, connect, reason
from trm_repro.errors import InputError

MIN_PREFIX = 6


@dataclass(frozen=True)
class TrackedRun:
    """A run in MLflow: its id, its name (arm/seed_N, or an arm's for the mean over its seeds), status and metrics."""

    run_id: str
    name: str
    status: str
    metrics: tuple[str, ...]


def select_runs(uri: str, experiment: str, wanted: Sequence[str]) -> list[TrackedRun]:
    """Find runs by id, by the first characters of an id, or by name; of runs with one name, the newest.

    Args:
        uri: of the store.
        experiment: name of the MLflow experiment.
        wanted: run ids or names.

    Returns:
        The runs, in the order wanted.

    Raises:
        InputError: if one is not there, or the store cannot be read.
    """
    public = without_credentials(uri)
    try:
        client = connect(uri)
        found = client.get_experiment_by_name(experiment)
        if found is None:
            raise InputError(f"MLflow at {public} has no experiment {experiment!r}; name one by --experiment")
        runs: list[Run] = []
        token: str | None = ""
        while token is not None:
            page = client.search_runs(
                [found.experiment_id],
                order_by=["attributes.start_time DESC"],
                max_results=1000,
                page_token=token or None,
            )
            runs += page
            token = page.token or None
    except (*STORE_ERRORS, TrackingUnreachable) as error:
        raise InputError(f"MLflow at {public} cannot be read ({reason(error, uri)})") from None
    return [_select(runs, name, public) for name in wanted]


def read_histories(uri: str, run: TrackedRun, metrics: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    """Read curves.

    Args:
        uri: of the store.
        run: whose.
        metrics: by name; those that the run does not have are left out.

    Returns:
        (step, value) by step, by metric.

    Raises:
        InputError: if the store cannot be read.
    """
    try:
        client: MlflowClient = connect(uri)
        return {
            name: sorted((point.step, point.value) for point in client.get_metric_history(run.run_id, name))
            for name in metrics
            if name in run.metrics
        }
    except (*STORE_ERRORS, TrackingUnreachable) as error:
        raise InputError(f"MLflow at {without_credentials(uri)} cannot be read ({reason(error, uri)})") from None


def _select(runs: Sequence[Run], wanted: str, public_uri: str) -> TrackedRun:
    by_id = [run for run in runs if len(wanted) >= MIN_PREFIX and run.info.run_id.startswith(wanted)]
    if len(by_id) > 1:
        raise InputError(f"{wanted!r} begins {len(by_id)} run ids; give more of it")
    by_name = [run for run in runs if run.info.run_name == wanted and "superseded_by" not in run.data.tags]
    if not by_id and not by_name:
        names = sorted({str(run.info.run_name) for run in runs if run.data.tags.get("kind") in ("arm", "run")})
        there = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise InputError(f"no run {wanted!r} in MLflow at {public_uri}; expected a run id or one of {there or 'none'}")
    run = (by_id or by_name)[0]
    return TrackedRun(
        run_id=str(run.info.run_id),
        name=str(run.info.run_name),
        status=str(run.info.status),
        metrics=tuple(sorted(run.data.metrics)),
    )
