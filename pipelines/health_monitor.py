"""The callback that stops a run whose numbers no longer make sense."""

from collections import deque
from collections.abc import Mapping

import lightning as L  # noqa: N812

from pipelines.recorder import StepRecorder
from pipelines.run_directory import RunDirectory
from pipelines.spool import read_spool
from trm_repro import ranks
from trm_repro.config import RunConfig
from trm_repro.errors import FaultError
from trm_repro.health import health_problem


class HealthMonitor(L.Callback):
    """Looks at the last steps after each, in the first process, and stops all of them."""

    def __init__(self, config: RunConfig, directory: RunDirectory, recorder: StepRecorder) -> None:
        """Set up; goes behind the recorder, whose metrics it reads."""
        self.config = config
        self.directory = directory
        self.recorder = recorder
        longest = max(config.health.patience, config.health.max_nonfinite_steps)
        self.recent: deque[Mapping[str, float]] = deque(maxlen=longest)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remember the last steps of a run that goes on; one that had to stop stops again."""
        if ranks.is_first() and self.directory.spool_file.is_file():
            entries = [entry for entry in read_spool(self.directory.spool_file) if entry.kind == "train"]
            self.recent.extend(entry.metrics for entry in entries if entry.step <= trainer.current_epoch)
        self.stop_if_sick()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look at the step that just ended."""
        if ranks.is_first() and self.recorder.latest is not None:
            self.recent.append(self.recorder.latest.metrics)
        self.stop_if_sick()

    def stop_if_sick(self) -> None:
        """Raise in every process what the first one found."""
        problem = None
        if ranks.is_first():
            problem = health_problem(self.recent, self.config.health, self.directory.faults)
        problem = ranks.broadcast(problem)
        if problem is not None:
            raise FaultError(f"{self.directory.name}: {problem}")
