"""What a run holds beside its curves: configuration, environment, data sets, figures' numbers, and its final policy."""

import dataclasses
import hashlib
import json
import tempfile
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag
from mlflow.exceptions import MlflowException

from pipelines.credentials import public_config
from pipelines.environment import lock_file
from pipelines.run_directory import RunDirectory
from pipelines.spool import read_spool
from pipelines.tracking.state import flatten
from trm_repro.config import RunConfig, derive_seed, to_yaml
from trm_repro.randomness import seed_record

MAX_PARAMS = 100  # MLflow takes at most this many params in one request
MAX_COPIED_BYTES = 64 * 2**20
"""A final policy up to this size is copied into the artifact store; of a larger one its path and digests are."""


def log_setup(client: MlflowClient, run_id: str, config: RunConfig, environment: dict[str, str]) -> None:
    """Store configuration, seeds, environment and lock of a run; credentials are left out."""
    config = public_config(config)
    params = [Param(key, str(value)) for key, value in flatten(dataclasses.asdict(config))]
    for start in range(0, len(params), MAX_PARAMS):
        client.log_batch(run_id, params=params[start : start + MAX_PARAMS])
    client.log_batch(run_id, tags=[RunTag(f"environment.{key}", value) for key, value in environment.items()])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        (Path(folder) / "environment.json").write_text(json.dumps(environment, indent=2), encoding="utf-8")
        (Path(folder) / "seeds.json").write_text(json.dumps(seed_record(config), indent=2), encoding="utf-8")
        client.log_artifacts(run_id, folder, "setup")
    if lock_file().is_file():
        client.log_artifact(run_id, str(lock_file()), "setup")


def log_datasets(client: MlflowClient, run_id: str, config: RunConfig) -> None:
    """Store what the run trains and is evaluated on, as inputs of the run."""
    training, evaluation = config.task, config.evaluation
    client.log_inputs(
        run_id,
        [
            _dataset_input(training.name, training, "training", derive_seed(config.seed, "training problems")),
            _dataset_input(evaluation.task, evaluation, "evaluation", derive_seed(config.seed, "held-out problems")),
        ],
    )


def _dataset_input(name: str, section: object, context: str, seed: int) -> DatasetInput:
    """Describe one data set; its digest changes with the file, or with the settings and seed that generate it."""
    settings = {key: getattr(section, key, None) for key in ("dataset", "revision", "subset", "split", "file")}
    if name == "chain_arithmetic":
        settings |= {key: getattr(section, key, None) for key in ("min_operands", "max_operands", "num_problems")}
        settings["seed"] = seed
        source_type, source = "generated", {"generator": name, **settings}
    elif settings["file"] is not None:
        source_type, source = "local", {"uri": Path(str(settings["file"])).name}
        settings["sha256"] = file_digest(Path(str(settings["file"])))
    else:
        source_type, source = "hugging_face", {"path": settings["dataset"] or name, **settings}
    digest = hashlib.sha256(json.dumps([name, settings], sort_keys=True).encode()).hexdigest()[:12]
    dataset = Dataset(name=name, digest=digest, source_type=source_type, source=json.dumps(source))
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])


def log_profiles(client: MlflowClient, run_id: str, directory: RunDirectory) -> None:
    """Store expected divergence by position, step by step, as one artifact."""
    if not directory.spool_file.is_file():
        return
    profiles = {entry.step: entry.profiles for entry in read_spool(directory.spool_file) if entry.profiles}
    if profiles:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "divergence_by_position.json"
            file.write_text(json.dumps(profiles), encoding="utf-8")
            client.log_artifact(run_id, str(file), "profiles")


def log_problem_scores(client: MlflowClient, run_id: str, directory: RunDirectory) -> None:
    """Store the score of each held-out problem at each evaluation as one artifact, for comparisons by problem."""
    if not directory.spool_file.is_file():
        return
    scores = {entry.step: entry.problem_scores for entry in read_spool(directory.spool_file) if entry.problem_scores}
    if scores:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "held_out.json"
            file.write_text(json.dumps(scores), encoding="utf-8")
            client.log_artifact(run_id, str(file), "scores")


def register_policy(client: MlflowClient, run_id: str, directory: RunDirectory, tags: dict[str, str]) -> None:
    """Put the run's final policy into the model registry, once: one model an arm, one version a run.

    The version's source is the folder of safetensors among the run's artifacts, as `transformers` loads it.
    """
    files = sorted(path for path in directory.policy.glob("*") if path.is_file())
    if not files or client.search_model_versions(f"run_id = '{run_id}'"):
        return
    if sum(path.stat().st_size for path in files) <= MAX_COPIED_BYTES:
        client.log_artifacts(run_id, str(directory.policy), "policy")
    else:
        pointer = {"path": str(directory.policy.resolve()), "sha256": {path.name: file_digest(path) for path in files}}
        client.log_text(run_id, json.dumps(pointer, indent=2), "policy/pointer.json")
    name = f"{directory.config.name}.{directory.config.arm}"
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    source = f"{client.get_run(run_id).info.artifact_uri}/policy"
    client.create_model_version(name, source, run_id, tags=tags, await_creation_for=0)


def file_digest(path: Path) -> str:
    """Return a file's SHA-256; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
