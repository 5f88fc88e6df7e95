"""An engine that always says which weights it holds, and is probed after every change of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from trm_repro.config import RunConfig
from trm_repro.policy import Policy
from trm_repro.rollout.engine import Completion, RolloutEngine, SamplingRequest, SamplingSettings, start_engine
from trm_repro.rollout.probe import Probe, ProbeReading


class SyncedEngine:
    """An engine with its probe; one per process, reused for every run of the same architecture."""

    def __init__(self, engine: RolloutEngine, probe: Probe, reading: ProbeReading) -> None:
        """Take an engine that has been started and probed; see `open_engine`."""
        self.engine = engine
        self.probe = probe
        self.reading = reading
        self.holds: tuple[str, int] | None = None

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
        self.engine.load_weights(weights)
        self.reading = self.probe.check(self.engine, weights, version=version)
        self.holds = (run, version)

    def sample(self, requests: Sequence[SamplingRequest], settings: SamplingSettings) -> list[Completion]:
        """Sample one response per request, in order."""
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
    probe = Probe(policy, contexts, config.rollout.precision, config.rollout.probe_factor)
    return SyncedEngine(engine, probe, probe.start(engine, policy_weights(policy)))


def policy_weights(policy: Policy) -> dict[str, Tensor]:
    """Copy the policy's weights under its own names; tied weights once."""
    return {name: weight.detach().clone() for name, weight in policy.model.named_parameters()}
