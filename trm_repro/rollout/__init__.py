"""Rollouts: inference engines behind one protocol, weight sync, and the probe that checks it."""

from trm_repro.rollout.engine import (
    Completion,
    RolloutEngine,
    Sampler,
    SamplingRequest,
    SamplingSettings,
    start_engine,
)
from trm_repro.rollout.probe import Probe, ProbeReading, probe_contexts

__all__ = [
    "Completion",
    "Probe",
    "ProbeReading",
    "RolloutEngine",
    "Sampler",
    "SamplingRequest",
    "SamplingSettings",
    "probe_contexts",
    "start_engine",
]
