"""Reads an experiment back from MLflow: its runs, their settings and every point. Nothing there is changed."""

import ast
import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run

from evaluation.experiment import ExperimentRecord, RunRecord
from pipelines.credentials import without_credentials
from pipelines.tracking import (
    EXPERIMENT_TAG,
    STORE_ERRORS,
    TrackingUnreachable,
    check_store,
    flatten,
    read_state,
    tracking_uri,
)
from pipelines.tracking.store import connect, reason
from trm_repro.config import CONF_DIR, RunConfig, arm_names
from trm_repro.errors import InputError

STEP_METRIC = "divergence/ppl_gap"  # one point a step in every run


def read_experiment(config: RunConfig, metric_names: list[str]) -> tuple[ExperimentRecord, list[dict[str, Any]]]:
    """Read the runs of an experiment from MLflow alone.

    The parent run is the one noted in the output folder; without a note, the newest of the same name.

    Args:
        config: gives tracking URI, experiment, name and output folder.
        metric_names: metrics to read.

    Returns:
        The experiment, and one dictionary a point: arm, seed, run_id, metric, step, value; by step within a metric.

    Raises:
        InputError: if MLflow cannot be reached, or has no runs of this experiment.
    """
    uri, public = tracking_uri(config), without_credentials(tracking_uri(config))
    check_store(uri)
    try:
        return _read(config, connect(uri), public, metric_names)
    except (*STORE_ERRORS, TrackingUnreachable) as error:
        raise InputError(f"tracking.uri={public}: MLflow cannot be read ({reason(error, uri)})") from None


def read_artifact(config: RunConfig, run_id: str, path: str) -> bytes | None:
    """Read a file that a run holds in MLflow.

    Args:
        config: gives the tracking URI.
        run_id: the run.
        path: of the artifact.

    Returns:
        Its bytes; None where there is none, or where the store that holds it is out of reach.
    """
    try:
        client = connect(tracking_uri(config))
        folder = path.rpartition("/")[0]
        if path not in {file.path for file in client.list_artifacts(run_id, folder)}:
            return None
        return Path(client.download_artifacts(run_id, path)).read_bytes()
    except (*STORE_ERRORS, TrackingUnreachable):
        return None


def _read(
    config: RunConfig, client: MlflowClient, uri: str, metric_names: list[str]
) -> tuple[ExperimentRecord, list[dict[str, Any]]]:
    experiment = client.get_experiment_by_name(config.tracking.experiment)
    if experiment is None:
        raise InputError(f"MLflow at {uri} has no experiment {config.tracking.experiment!r}; see tracking.experiment")
    parent = _find_parent(config, client, experiment.experiment_id, uri)
    runs: list[Run] = []
    for tag in (EXPERIMENT_TAG, "`mlflow.parentRunId`"):  # without the first, runs hang below their parent directly
        condition = f"tags.{tag} = '{parent.info.run_id}' AND tags.kind = 'run'"
        runs = runs or list(client.search_runs([experiment.experiment_id], condition, max_results=10_000))
    runs = [run for run in runs if "arm" in run.data.tags and run.data.tags.get("seed", "").isdigit()]
    if not runs:
        raise InputError(f"MLflow at {uri} has no runs under parent run {parent.info.run_id}")
    points, records = [], []
    for run in sorted(runs, key=lambda run: run.info.start_time):
        names = [name for name in {*metric_names, STEP_METRIC} if name in run.data.metrics]
        histories = {name: client.get_metric_history(run.info.run_id, name) for name in names}
        num_steps = max((point.step for point in histories.get(STEP_METRIC, [])), default=0)
        record = _record(run, num_steps)
        records.append(record)
        identity = {"arm": record.arm, "seed": record.seed, "run_id": record.run_id}
        points += [
            identity | {"metric": name, "step": point.step, "value": point.value}
            for name in metric_names
            for point in sorted(histories.get(name, []), key=lambda point: point.step)
        ]
    record = _record(parent, 0)
    keys = {key for name in arm_names() for key in _keys_of(name)}
    return (
        ExperimentRecord(
            parent=record,
            runs=records,
            planned=_planned(record.settings),
            arm_settings=frozenset(keys),
            command=rerun_command(record.settings),
            source=without_credentials(uri),
        ),
        points,
    )


def _find_parent(config: RunConfig, client: MlflowClient, experiment_id: str, uri: str) -> Run:
    state = read_state(Path(config.output.dir) / "mlflow.json")
    if state is not None:
        known = client.search_runs([experiment_id], f"attributes.run_id = '{_plain(state.run_id)}'")
        if known:
            return known[0]
    named = client.search_runs(
        [experiment_id],
        f"tags.kind = 'experiment' AND attributes.run_name = '{_plain(config.name)}'",
        order_by=["attributes.start_time DESC"],
        max_results=1,
    )
    if not named:
        raise InputError(f"MLflow at {uri} has no experiment named {config.name!r}; run trm-repro reproduce first")
    return named[0]


def _record(run: Run, num_steps: int) -> RunRecord:
    tags: Mapping[str, str] = run.data.tags
    environment = {
        key.removeprefix("environment."): value for key, value in tags.items() if key.startswith("environment.")
    }
    return RunRecord(
        run_id=run.info.run_id,
        name=run.info.run_name,
        arm=tags.get("arm", ""),
        seed=int(tags.get("seed", "-1")),
        status=run.info.status,
        num_steps=num_steps,
        git_commit=tags.get("git_commit", "unknown"),
        config_hash=tags.get("config_hash", "unknown"),
        settings=dict(run.data.params),
        environment=environment,
    )


def rerun_command(settings: Mapping[str, str]) -> str:
    """Write the command that makes an experiment again: every key whose value is not the default.

    Args:
        settings: of the parent run, as text by key.

    Returns:
        A line for a POSIX shell; keys that this version does not know are left out.
    """
    words = ["trm-repro", "reproduce"]
    for key, default in flatten(dataclasses.asdict(RunConfig())):
        value = settings.get(key, str(default))
        if value != str(default) and key not in ("arm", "seed"):
            words.append(shlex.quote(f"{key}={_as_typed(value)}"))
    return " ".join(words)


def _as_typed(value: str) -> str:
    """Turn a value as Python writes it into one as the command line takes it."""
    if value.startswith("("):
        return "[" + ",".join(str(item) for item in ast.literal_eval(value)) + "]"
    return {"None": "null", "True": "true", "False": "false"}.get(value, value)


def _planned(settings: Mapping[str, str]) -> list[tuple[str, int]]:
    """Which runs were to be made; none where the parent's settings do not say."""
    try:
        arms, seeds = (ast.literal_eval(settings[f"reproduce.{name}"]) for name in ("arms", "seeds"))
        return [(str(arm), int(seed)) for seed in seeds for arm in arms]
    except (KeyError, ValueError, SyntaxError, TypeError):
        return []


def _keys_of(arm: str) -> list[str]:
    from omegaconf import OmegaConf

    from trm_repro.config import flat_items

    return [key for key, _ in flat_items(OmegaConf.load(CONF_DIR / "arms" / f"{arm}.yaml"))]


def _plain(text: str) -> str:
    """Keep a value that stands in a search from ending its quotes."""
    if "'" in text:
        raise InputError(f"{text!r} must not hold a quote")
    return text
