"""An engine that always says which weights it holds, and is probed after every change of them."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from trm_repro import ranks
from trm_repro.config import RunConfig
from trm_repro.memory_limits import ROLLOUT_KEYS, memory_limited
from trm_repro.policy import Policy
from trm_repro.rollout.engine import Completion, RolloutEngine, SamplingRequest, SamplingSettings, start_engine
from trm_repro.rollout.leading import AbsentEngine, DividedEngine
from trm_repro.rollout.probe import Probe, ProbeReading, long_probe_contexts
from trm_repro.sharding import policy_weights


class SyncedEngine:
    """An engine with its probe; one per process, reused for every run of the same architecture."""

    def __init__(self, engine: RolloutEngine, probe: Probe, reading: ProbeReading | None = None) -> None:
        """Take an engine that has been started; see `open_engine`. Without a reading, the first sync makes one."""
        self.engine = engine
        self.probe = probe
        self.reading = reading or ProbeReading(gap=math.nan, threshold=math.nan)
        self.is_started = reading is not None
        self.holds: tuple[str, int] | None = None

    @property
    def vocab_size(self) -> int:
        """V of the engine's model."""
        return self.engine.vocab_size

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        return self.engine.stop_ids

    def sync(self, weights: Mapping[str, Tensor], *, run: str, version: int) -> None:
        """Load weights unless the engine holds them already, then probe it.

        Args:
            weights: the policy's weights, float32.
            run: names the run, because versions count within one.
            version: number of training steps behind the weights.

        Raises:
            FaultError: if engine and policy then differ by more than the engine's noise.
        """
        if self.holds == (run, version):
            return
        self.holds = None
        if self.is_started:
            self.probe.fill_cache(self.engine)
        self.engine.load_weights(weights)
        if self.is_started:
            self.reading = self.probe.check(self.engine, weights, version=version)
        else:
            self.reading = self.probe.start(self.engine, weights)
            self.is_started = True
        self.holds = (run, version)

    def sample(self, requests: Sequence[SamplingRequest], settings: SamplingSettings) -> list[Completion]:
        """Sample one response per request, in order.

        Raises:
            FaultError: if memory runs out.
        """
        with memory_limited("rollout", ROLLOUT_KEYS):
            return self.engine.sample(requests, settings)


def open_engine(
    config: RunConfig, model_path: Path, policy: Policy, contexts: Sequence[tuple[int, ...]], max_length: int
) -> SyncedEngine:
    """Start an engine on a saved model and measure its noise.

    Args:
        config: the run.
        model_path: directory with weights, configuration and tokenizer.
        policy: the same model as loaded for training.
        contexts: the probe's token sequences.
        max_length: longest prompt and response together, tokens.

    Returns:
        The engine.

    Raises:
        InputError: if the engine is not installed.
        FaultError: if engine and policy disagree on the saved model.
    """
    longest = max([max_length, *(len(context) + 1 for context in contexts)])
    engine = start_engine(config.rollout, model_path, longest)
    probe = _probe(config, policy, contexts, max_length)
    return SyncedEngine(engine, probe, probe.start(engine, policy_weights(policy)))


def _probe(config: RunConfig, policy: Policy | None, contexts: Sequence[tuple[int, ...]], max_length: int) -> Probe:
    settings = config.rollout
    long_contexts = long_probe_contexts(contexts, max_length) if settings.prefix_caching else []
    return Probe(policy, contexts, settings.precision, settings.probe_factor, long_contexts=long_contexts)


def open_shared_engine(
    config: RunConfig, model_path: Path, contexts: Sequence[tuple[int, ...]], max_length: int
) -> SyncedEngine:
    """Start what this rank has of the engine of several; the probe waits for the sharded policy.

    Args:
        config: the run.
        model_path: directory with weights, configuration and tokenizer.
        contexts: the probe's token sequences.
        max_length: longest prompt and response together, tokens.

    Returns:
        The engine; its ``probe.policy`` must be set before the first sync.

    Raises:
        InputError: if the engine is not installed.
    """
    longest = max([max_length, *(len(context) + 1 for context in contexts)])
    engine: RolloutEngine = AbsentEngine()
    if config.rollout.placement == "colocated":
        engine = DividedEngine(start_engine(config.rollout, model_path, longest))
    elif ranks.is_first():
        engine = start_engine(config.rollout, model_path, longest)
    return SyncedEngine(engine, _probe(config, None, contexts, max_length))
