"""What is remembered on disk about a folder's MLflow run: which run it is, and how far its spool has been sent."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipelines.run_directory import write_atomically

STATE_FILE = "mlflow.json"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The content of an ``mlflow.json``.

    Attributes:
        uri: of the store, without credentials.
        key: random; tags the MLflow run, so that a run whose making was not answered is found and not made twice.
        run_id: the run; empty until MLflow has said it.
        replayed: spool entries that are known to be there.
        sending: spool entries that may be there: beyond `replayed`, a request was made whose answer is not known.
        rejected: metrics that MLflow refused by name or value.
        seeds: of an arm: the seeds whose mean it is.
    """

    uri: str
    key: str
    run_id: str = ""
    replayed: int = 0
    sending: int = 0
    rejected: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Replace the file whole or not at all."""
        write_atomically(path, json.dumps(asdict(self)))


def read_state(path: Path) -> RunState | None:
    """Read which MLflow run a folder belongs to; a damaged file counts as none.

    Args:
        path: an ``mlflow.json``.

    Returns:
        The state, or None.
    """
    try:
        values = json.loads(path.read_bytes())
        state = RunState(**({"key": ""} | values))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    texts = (state.uri, state.key, state.run_id)
    counts = (state.replayed, state.sending)
    is_whole = all(isinstance(text, str) for text in texts) and all(isinstance(count, int) for count in counts)
    return state if is_whole and isinstance(state.rejected, list) and isinstance(state.seeds, list) else None


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values under dotted keys."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, prefix=f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
