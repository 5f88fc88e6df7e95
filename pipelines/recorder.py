"""The callback that ends each step: snapshot, evaluation, metrics, masks, checkpoint."""

import time
from dataclasses import replace
from typing import Any

import lightning as L  # noqa: N812
import torch

from evaluation.outcomes import FINAL_SAMPLED_SCORE, FINAL_SCORE, SAMPLED_SCORE, SCORE
from evaluation.scores import ScoredResponse, average_at_k, problem_scores, score_problems
from pipelines.checkpoint_files import replace_checkpoint
from pipelines.checkpoints import SNAPSHOTS
from pipelines.run_directory import RunDirectory
from pipelines.session import Session
from pipelines.spool import MetricsSpool, SpoolEntry
from trm_repro import ranks
from trm_repro.config import RunConfig, derive_seed
from trm_repro.datamodule import RolloutDataModule, shard_name
from trm_repro.heads import remove_unused_heads
from trm_repro.module import TRMModule
from trm_repro.rollout import SamplingSettings
from trm_repro.rollout.leading import lead
from trm_repro.rollout.sampler import RolloutSampler, encode_prompt
from trm_repro.sharding import save_snapshots
from trm_repro.shards import MaskRow, write_masks
from trm_repro.stage_clock import StageClock
from trm_repro.step_bounds import step_bounds
from trm_repro.step_metrics import UpdateRecord, mask_confusions, step_metrics

SAVE_STAGES = ("sync", "rollout", "mask", "update", "control", "evaluate", "record")


class StepRecorder(L.Callback):
    """Writes a run's files, so that the run can go on from its last finished step."""

    def __init__(self, config: RunConfig, directory: RunDirectory, session: Session) -> None:
        """Open the run's spool."""
        self.config = config
        self.directory = directory
        self.session = session
        self.spool = MetricsSpool(directory.spool_file) if ranks.is_first() else None
        self.latest: SpoolEntry | None = None  # of the step that ended last
        self.clock = StageClock()
        self.step_began = time.perf_counter()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the starting policy."""
        if trainer.current_epoch == 0:
            self.evaluate(trainer, version=0)
            self.clock.take()  # the first step's times do not include it
        self.step_began = time.perf_counter()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the probe of this step's rollouts; an evaluation will sync other weights."""
        self.probe_reading = trainer.datamodule.readings.pop(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Finish a step; the checkpoint comes last, so that what it says is on disk."""
        assert isinstance(pl_module, TRMModule)
        data: RolloutDataModule = trainer.datamodule
        step, records = trainer.current_epoch, pl_module.records
        data.take_snapshot(step + 1)
        entry = self.describe(step, records) if ranks.is_first() else None
        is_last = step + 1 == self.config.num_steps
        if (step + 1) % self.config.evaluation.every_steps == 0 or is_last:
            pl_module.free_device()  # callbacks come before the module's own end of the step
            self.evaluate(trainer, version=step + 1, is_last=is_last)
        if entry is not None and self.spool is not None:
            timings, spans = self.timings(entry.metrics["rollout/num_tokens"], data, pl_module)
            self.latest = replace(entry, metrics=entry.metrics | timings, spans=spans, time=time.time())
            self.spool.append(self.latest)
        if ranks.is_first():
            self.remove_old_shards(step)
        if (step + 1) % self.config.output.checkpoint_every_steps == 0 or is_last:
            self.save_checkpoint(trainer)

    def describe(self, step: int, records: list[UpdateRecord]) -> SpoolEntry:
        """Write a step's masks, and collect its metrics but for the times."""
        with self.clock.measure("record"):
            write_masks(self.directory.masks / shard_name(step), mask_rows(records), step)
            metrics = step_metrics(records, self.config.loss) | mask_confusions(records, self.config.mask)
            bounds, profiles = step_bounds(
                records,
                length_limit=self.config.rollout.max_response_tokens,
                divergence_threshold=self.config.mask.max_threshold,
            )
        metrics |= {"probe/gap": self.probe_reading.gap, "probe/threshold": self.probe_reading.threshold}
        metrics["rollout/lag_steps"] = step - metrics["rollout/weight_version"]
        return SpoolEntry(
            step=step + 1,
            kind="train",
            time=time.time(),
            metrics=metrics | bounds,
            num_kept=[int(record.sequence_mask.sum()) for record in records],
            rejected_lengths=[rejected_lengths(record) for record in records],
            profiles=profiles,
        )

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Count the step as done: it is, and a resumed run must begin the next one, not end this one again."""
        loop = checkpoint["loops"]["fit_loop"]
        for progress in loop["epoch_progress"].values():
            progress["completed"] = progress["processed"]
        batches = loop["epoch_loop.batch_progress"]
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False

    def evaluate(self, trainer: L.Trainer, version: int, *, is_last: bool = False) -> None:
        """Score the newest policy on held-out problems, greedily and by sampling; on more of them after the last step.

        Scores along the run are all of the same problems, the last among them; those of all problems have other names.
        """
        data: RolloutDataModule = trainer.datamodule
        assert data.sampler is not None
        snapshot_version, weights = data.snapshots[-1]
        assert snapshot_version == version
        with self.clock.measure("evaluate"):
            if data.ahead is not None:
                data.ahead.wait()
            self.session.engine.sync(weights, run=data.run_name, version=version)
            sampler = data.sampler
            scored = lead(self.session.engine.engine, lambda: self.score(sampler, version, is_last=is_last))
        if scored is None or self.spool is None:
            return
        greedy, sampled = scored
        settings = self.config.evaluation
        metrics = {
            SCORE: average_at_k(greedy[: settings.num_problems]),
            SAMPLED_SCORE: average_at_k(sampled[: settings.num_sampled_problems * settings.num_samples]),
        }
        if is_last:
            metrics |= {FINAL_SCORE: average_at_k(greedy), FINAL_SAMPLED_SCORE: average_at_k(sampled)}
        self.spool.append(
            SpoolEntry(
                step=version,
                kind="evaluate",
                time=time.time(),
                metrics=metrics,
                problem_scores={"greedy": problem_scores(greedy), "avg_at_k": problem_scores(sampled)},
            )
        )

    def score(
        self, sampler: RolloutSampler, version: int, *, is_last: bool
    ) -> tuple[list[ScoredResponse], list[ScoredResponse]]:
        """Answer the held-out problems with the engine's weights: greedily, and by sampling."""
        settings = self.config.evaluation
        at_least = settings.num_final_problems if is_last else 0
        limit = self.config.rollout.max_prompt_tokens
        questions = [
            (problem, encode_prompt(problem.prompt, self.session.tokenizer, limit)) for problem in sampler.held_out
        ]
        greedy = score_problems(
            self.session.engine,
            self.session.tokenizer,
            sampler.held_out_task,
            questions[: max(settings.num_problems, at_least)],
            num_samples=1,
            settings=SamplingSettings(max_tokens=settings.max_response_tokens, temperature=0.0),
        )
        sampled = score_problems(
            self.session.engine,
            self.session.tokenizer,
            sampler.held_out_task,
            questions[: max(settings.num_sampled_problems, at_least)],
            num_samples=settings.num_samples,
            settings=SamplingSettings(
                max_tokens=settings.max_response_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
            ),
            seed=derive_seed(self.config.seed, "evaluation", version),
        )
        return greedy, sampled

    def timings(
        self, num_tokens: float, data: RolloutDataModule, module: TRMModule
    ) -> tuple[dict[str, float], list[tuple[str, float, float]]]:
        """Collect the step's stage times."""
        seconds: dict[str, float] = {}
        spans: list[tuple[str, float, float]] = []
        for clock in (data.clock, module.clock, self.clock):
            stage_seconds, stage_spans = clock.take()
            seconds |= stage_seconds
            spans += stage_spans
        now = time.perf_counter()
        step_seconds, self.step_began = now - self.step_began, now
        metrics = {f"time/{stage}_seconds": seconds.get(stage, 0.0) for stage in SAVE_STAGES}
        metrics["time/step_seconds"] = step_seconds
        if data.ahead is not None:
            lag = data.ahead.lag
            metrics |= {"overlap/sampling_seconds": lag.sampling, "overlap/waiting_seconds": lag.waiting}
        metrics["throughput/rollout_tokens_per_second"] = num_tokens / max(seconds.get("rollout", 0.0), 1e-9)
        training_seconds = max(step_seconds - seconds.get("evaluate", 0.0), 1e-9)
        metrics["throughput/step_tokens_per_second"] = num_tokens / training_seconds
        return metrics, spans

    def save_checkpoint(self, trainer: L.Trainer) -> None:
        """Replace the checkpoint whole or not at all."""
        with self.clock.measure("record"):
            partial = self.directory.checkpoint.with_suffix(".partial")
            trainer.save_checkpoint(partial)
            if snapshots := trainer.datamodule.sharded_snapshots:
                save_snapshots(partial / SNAPSHOTS, snapshots)
            if ranks.is_first():
                replace_checkpoint(partial, self.directory.checkpoint, keep=self.config.output.keep_checkpoints)
            ranks.broadcast(None)

    def remove_old_shards(self, step: int) -> None:
        """Delete the previous step's files unless they are among those to keep."""
        previous = step - 1
        if previous >= 0 and previous % self.config.output.keep_shards_every != 0:
            (self.directory.shards / shard_name(previous)).unlink(missing_ok=True)
            remove_unused_heads(self.directory.shards)
            (self.directory.masks / shard_name(previous)).unlink(missing_ok=True)


def rejected_lengths(record: UpdateRecord) -> list[int]:
    """List the response lengths of the sequences that an update rejected, tokens."""
    return [int(length) for length in record.batch.response_lengths[~record.sequence_mask]]


def mask_rows(records: list[UpdateRecord]) -> list[MaskRow]:
    """Take the decisions of a step's updates apart, sequence by sequence, without padding."""
    rows = []
    for update, record in enumerate(records):
        batch, measurement = record.batch, record.measurement
        for index in range(batch.num_sequences):
            is_token: torch.Tensor = batch.response_mask[index]
            rows.append(
                MaskRow(
                    update=update,
                    sequence_id=int(batch.sequence_ids[index]),
                    kept=bool(record.sequence_mask[index]),
                    policy_logprobs=measurement.policy_logprobs[index][is_token].cpu(),
                    token_kl=None if measurement.kl is None else measurement.kl[index][is_token].cpu(),
                )
            )
    return rows
