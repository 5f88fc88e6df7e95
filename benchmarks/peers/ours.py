"""This project's step: `trm-repro train` as it is, with its logging, masks, checkpoints and MLflow.

Three things are put in place of others: the progress bar reports the steps, no token ends a response, and every
response has a reward of its own, so that no update is saved. What lies within a stage is timed by wrapping it.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.peers.work import STEPS_WITHOUT_END, Reporter, Work, enter, share_of_digits

if TYPE_CHECKING:
    from trm_repro.stage_clock import StageClock  # torch's threads are set before anything else is imported

KEEP_ALL = ("mask.criterion=trm_max_avg", "mask.max_threshold=1e6", "mask.avg_threshold=1e6")
"""Every gate is computed; none rejects."""
SAMPLED = ("rollout.distribution=sampled", "mask.max_estimator=k2", "mask.avg_estimator=k3")
ON_POLICY = ("rollout.staleness_steps=0", "update.learning_rate=1e-3")
NO_EVALUATION = (
    *("evaluation.num_problems=1", "evaluation.num_sampled_problems=1", "evaluation.num_samples=1"),
    "evaluation.num_final_problems=0",
    *("evaluation.max_response_tokens=1", f"evaluation.every_steps={STEPS_WITHOUT_END}"),
)
WITHIN = {
    "trm_repro.rollout.probe:Probe.fill_cache": "sync: probe",
    "trm_repro.rollout.probe:Probe.check": "sync: probe",
    "trm_repro.datamodule:write_rollouts": "rollout: shard",
    "trm_repro.module:TRMModule.measure": "mask: scoring",
    "pipelines.recorder:write_masks": "record: masks",
    "pipelines.recorder:StepRecorder.save_checkpoint": "record: checkpoint",
}
"""What is timed within a stage, by where it is."""


def arguments(work: Work) -> list[str]:
    """Write the command line of a worker."""
    return [
        "train",
        f"policy.path={work.model}",
        f"output.dir={work.folder}",
        f"num_steps={STEPS_WITHOUT_END}",
        f"num_threads={work.num_threads}",
        f"rollout.num_prompts={work.num_prompts}",
        f"rollout.group_size={work.group_size}",
        f"rollout.max_response_tokens={work.response_tokens}",
        f"update.num_updates_per_rollout={work.num_updates}",
        *KEEP_ALL,
        *ON_POLICY,
        *NO_EVALUATION,
        *work.overrides,
    ]


def run(connection: Connection, work: Work) -> None:
    """Be a worker."""
    enter(work)
    import lightning as L  # noqa: N812

    from pipelines.cli import main
    from pipelines.recorder import StepRecorder
    from trm_repro.stage_clock import StageClock
    from trm_repro.tasks import ChainArithmetic, Grade, Problem, Response

    reporter, clock = Reporter(connection), StageClock()

    class ReportingBar(L.Callback):
        """Stands where the progress bar does, after the recorder."""

        def __init__(self, *_: object) -> None:
            """Take what the bar takes."""

        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            """Wait for the other workers."""
            reporter.start()

        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            """Report the step and its stages."""
            recorder = next(found for found in trainer.callbacks if isinstance(found, StepRecorder))
            assert recorder.latest is not None
            metrics = recorder.latest.metrics
            assert metrics["rollout/num_tokens"] == work.num_tokens
            assert metrics["mask/kept_sequence_fraction"] == 1.0
            reporter.step(stage_seconds(metrics) | clock.take()[0])

    def grade(task: Any, problem: Problem, response: Response) -> Grade:  # noqa: ANN401
        return Grade(reward=share_of_digits(response.text), answer=None, reason="benchmark")

    with ExitStack() as changes:
        changes.enter_context(mock.patch.object(ChainArithmetic, "grade", grade))
        changes.enter_context(mock.patch("trm_repro.rollout.vllm.engine.stop_token_ids", return_value=()))
        changes.enter_context(mock.patch("pipelines.training.StepBar", ReportingBar))
        for place, name in WITHIN.items():
            changes.enter_context(timed(clock, place, name))
        sys.exit(main(arguments(work)))


def timed(clock: "StageClock", place: str, name: str) -> Any:  # noqa: ANN401
    """Make the patch that counts the time of one function, ``MODULE:NAME`` or ``MODULE:CLASS.NAME``."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, function_name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    original: Callable[..., Any] = getattr(owner, function_name)

    @functools.wraps(original)
    def measured(*args: Any, **options: Any) -> Any:  # noqa: ANN401
        with clock.measure(name):
            return original(*args, **options)

    return mock.patch.object(owner, function_name, measured)


def stage_seconds(metrics: dict[str, float]) -> dict[str, float]:
    """Take the stages' seconds out of a step's metrics."""
    return {
        name.removeprefix("time/").removesuffix("_seconds"): value
        for name, value in metrics.items()
        if name.startswith("time/")
    }
