"""MLflow. This package fills it from the runs' spools, so that it can fail without harm.

`tracker` writes one experiment, `background` does so beside training, `reading` reads runs back. docs/tracking.md has
the names and tags.
"""

from pipelines.tracking.background import EXPERIMENT_FILE, BackgroundTracker, ExperimentReplay
from pipelines.tracking.reading import TrackedRun, read_histories, select_runs
from pipelines.tracking.state import RunState, flatten, read_state
from pipelines.tracking.store import STORE_ERRORS, TrackingUnreachable, check_store, how_to_browse, tracking_uri
from pipelines.tracking.tracker import EXPERIMENT_TAG, Tracker

__all__ = [
    "EXPERIMENT_FILE",
    "EXPERIMENT_TAG",
    "STORE_ERRORS",
    "BackgroundTracker",
    "ExperimentReplay",
    "RunState",
    "TrackedRun",
    "Tracker",
    "TrackingUnreachable",
    "check_store",
    "flatten",
    "how_to_browse",
    "read_histories",
    "read_state",
    "select_runs",
    "tracking_uri",
]
