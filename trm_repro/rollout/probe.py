"""The probe: after every weight sync, engine and policy must agree on fixed contexts.

Stale or misread weights change the rollout policy without any error. The probe compares the engine's
distributions with the policy's, on the same contexts, and stops the run when the gap exceeds the engine's own noise.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from trm_repro import ranks
from trm_repro.config_sections import Precision
from trm_repro.divergence import exact_kl_divergence
from trm_repro.errors import FaultError
from trm_repro.policy import Policy
from trm_repro.rollout.engine import RolloutEngine, SamplingRequest, SamplingSettings
from trm_repro.rollout.leading import lead
from trm_repro.rollout.precision import round_weight
from trm_repro.sharding import ShardedWeights

NOISE_FLOOR = 1e-9
"""Smallest gap told from none, nats."""
LARGEST_START_RATIO = 30.0
"""Engine noise over the policy's own rounding noise above which the engine did not load the model it was given."""
LARGEST_KERNEL_GAP = 1e-2
"""Largest start gap where engine and policy compute in one precision, nats."""


@dataclass(frozen=True, kw_only=True)
class ProbeReading:
    """One comparison of engine and policy, nats.

    Attributes:
        gap: geometric mean over contexts of KL(engine || policy).
        threshold: largest gap the engine's own noise explains.
    """

    gap: float
    threshold: float


class Probe:
    """Compares an engine with the policy whose weights it was given.

    The engine's noise changes with the weights, so it is not fixed once: `start` measures how large the engine's
    gap is compared with the gap that rounding the weights and computing in the engine's dtype makes in the policy;
    `check` measures the latter at the current weights and scales it by that ratio.
    """

    def __init__(
        self, policy: Policy | None, contexts: Sequence[tuple[int, ...]], precision: Precision, factor: float
    ) -> None:
        """Set up the comparison.

        Args:
            policy: gives the architecture; its own weights are not used. None where a sharded one is set later.
            contexts: token sequences whose next-token distributions are compared.
            precision: the engine's precision.
            factor: gaps up to this many times the noise pass.
        """
        self.policy = policy
        self.contexts = list(contexts)
        self.precision = precision
        self.factor = factor
        self.ratio = 1.0

    @property
    def model(self) -> Any:  # noqa: ANN401 - as Policy.model
        """The policy's Hugging Face model."""
        assert self.policy is not None
        return self.policy.model

    def start(self, engine: RolloutEngine, weights: Mapping[str, Tensor]) -> ProbeReading:
        """Measure the noise of an engine that has just loaded these weights from disk.

        Args:
            engine: the engine.
            weights: the same weights, float32.

        Returns:
            The gap, and the threshold it sets: ``factor`` times the gap.

        Raises:
            FaultError: if engine and policy differ far beyond what rounding explains.
        """
        gap, noise = self._measure(engine, weights)
        self.ratio = gap / noise
        # A policy that computes in the engine's precision is not moved by rounding: only the kernels differ.
        is_same_precision = noise <= NOISE_FLOOR
        largest = LARGEST_KERNEL_GAP / noise if is_same_precision else LARGEST_START_RATIO
        if not self.ratio <= largest:  # also catches NaN
            raise FaultError(
                f"engine and policy disagree on the model they both loaded: {gap:.1e} nats, {self.ratio:.0f} times "
                f"what {self.precision} rounding explains; the engine does not run this model correctly"
            )
        return ProbeReading(gap=gap, threshold=self.factor * gap)

    def check(self, engine: RolloutEngine, weights: Mapping[str, Tensor], *, version: int) -> ProbeReading:
        """Compare after a sync.

        Args:
            engine: the engine.
            weights: the weights it was given, float32.
            version: their version, for the message.

        Returns:
            Gap and threshold.

        Raises:
            FaultError: if the gap exceeds the threshold.
        """
        gap, noise = self._measure(engine, weights)
        reading = ProbeReading(gap=gap, threshold=self.factor * max(1.0, self.ratio) * noise)
        if not gap <= reading.threshold:
            raise FaultError(
                f"stale weights: after the sync of weight version {version} the engine differs from the policy by "
                f"{gap:.1e} nats, above {reading.threshold:.1e}, {self.factor:g} times its own noise; nothing was "
                "trained on its rollouts"
            )
        return reading

    @torch.no_grad()
    def _measure(self, engine: RolloutEngine, weights: Mapping[str, Tensor]) -> tuple[float, float]:
        """Return the engine's gap to the policy, and the gap that precision alone makes in the policy."""
        requests = [SamplingRequest(prompt_ids=context, seed=index) for index, context in enumerate(self.contexts)]
        sampled = lead(engine, lambda: engine.sample(requests, SamplingSettings(max_tokens=1, distribution="full")))
        policy_distribution = self._next_token(weights)
        noise = typical_divergence(self._next_token(weights, rounded=True), policy_distribution)
        gap = 0.0
        if sampled is not None:
            engine_distribution = torch.cat([c.log_distribution for c in sampled if c.log_distribution is not None])
            gap = typical_divergence(engine_distribution, policy_distribution)  # of [contexts, V] each
        return ranks.broadcast((gap, noise))

    def _next_token(self, weights: Mapping[str, Tensor], *, rounded: bool = False) -> Tensor:
        """Compute the policy's next-token log-distributions ``[contexts, V]`` with the given weights.

        Args:
            weights: of the policy.
            rounded: whether to round them to the engine's precision first.
        """
        assert self.policy is not None

        def change(name: str, weight: Tensor) -> Tensor:
            return round_weight(name, weight, self.precision) if rounded else weight

        lengths = torch.tensor([len(context) for context in self.contexts])
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(c) for c in self.contexts], batch_first=True)
        if isinstance(weights, ShardedWeights):
            device = next(self.policy.parameters()).device
            lower = torch.autocast(device.type, torch.bfloat16, enabled=rounded and self.precision != "float32")
            with weights.swapped_in(change), lower:
                return self.policy.next_token_distribution(padded.to(device), lengths.to(device)).cpu()
        changed = {name: change(name, weight) for name, weight in weights.items()}
        output = functional_call(self.policy.model, changed, kwargs={"input_ids": padded})
        logits = output.logits[torch.arange(len(lengths)), lengths - 1]  # [contexts, V]
        return torch.log_softmax(logits.float(), dim=-1)


def typical_divergence(log_distribution: Tensor, reference: Tensor) -> float:
    """Compute the geometric mean over contexts of KL(distribution || reference).

    Rounding moves a nearly certain prediction by 1e-9 nats and an open one by 1e-3; a mean or a quantile would hear a
    few contexts only, and a routing flip most of all. The geometric mean hears every context alike. Rows are
    normalised again in float64, without which float32 log-probs hide every gap below 1e-7.

    Args:
        log_distribution: ``[contexts, V]`` float, nats.
        reference: ``[contexts, V]`` float, nats.

    Returns:
        A number of nats, at least NOISE_FLOOR.
    """
    rows = (torch.log_softmax(values.double(), dim=-1) for values in (log_distribution, reference))
    return float(exact_kl_divergence(*rows).clamp(min=NOISE_FLOOR).log().mean().exp())


def probe_contexts(texts: Sequence[tuple[int, ...]], num_contexts: int, seed: int) -> list[tuple[int, ...]]:
    """Cut token sequences at random places.

    Args:
        texts: token sequences such as prompts with solutions, each of two tokens or more.
        num_contexts: how many contexts to make.
        seed: seed of the places.

    Returns:
        Non-empty beginnings of the texts, taken in turn.
    """
    rng = random.Random(seed)
    chosen = [texts[index % len(texts)] for index in range(num_contexts)]
    return [text[: rng.randint(len(text) // 4 + 1, len(text) - 1)] for text in chosen]
