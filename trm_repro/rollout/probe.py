"""The probe: after every weight sync, engine and policy must agree on fixed contexts.

Stale or misread weights change the rollout policy without any error. The probe compares the engine's
distributions with the policy's, on the same contexts, and stops the run when the gap exceeds the engine's own noise.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
CACHE_BLOCK_TOKENS = 128
"""Largest block of vLLM's prefix cache, tokens (on a CPU; 16 on a GPU): a shorter prompt is never read from it."""
NUM_LONG_CONTEXTS = 16
SAME_ANSWERS = 0.01
"""An engine that moved less than this share of its gap answers as it did before."""
LARGEST_HIDDEN_ERROR = 0.2
"""Relative error of hidden states that rounding explains; other weights make one of about 1."""


OLD_WEIGHTS = " (it answers as before: the sync did not reach it)"
OLD_HEAD = " (its hidden states are right and its logits are not: the output head, lm_head.weight, did not reach it)"
OLD_CACHE = (
    f" on contexts of more than {CACHE_BLOCK_TOKENS} tokens (its prefix cache, with keys and values of the old "
    "weights, was not emptied)"
)


class _Gaps(NamedTuple):
    """The engine's gap and that of rounding alone, nats, on the usual and on the long contexts."""

    usual: tuple[float, float]
    long: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class ProbeReading:
    """One comparison of engine and policy, nats.

    Attributes:
        gap: geometric mean over the contexts, but for the long ones, of KL(engine || policy).
        threshold: largest gap the engine's own noise explains.
    """

    gap: float
    threshold: float


class Probe:
    """Compares an engine with the policy whose weights it was given.

    The engine's noise changes with the weights, so it is not fixed once: `start` measures how large the engine's
    gap is compared with the gap that rounding the weights and computing in the engine's dtype makes in the policy;
    `check` measures the latter at the current weights and scales it by that ratio. Long contexts, which an engine
    with a prefix cache would read from it, are judged by themselves: the others would drown them.
    """

    def __init__(
        self,
        policy: Policy | None,
        contexts: Sequence[tuple[int, ...]],
        precision: Precision,
        factor: float,
        *,
        long_contexts: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """Set up the comparison.

        Args:
            policy: gives the architecture; its own weights are not used. None where a sharded one is set later.
            contexts: token sequences whose next-token distributions are compared.
            precision: the engine's precision.
            factor: gaps up to this many times the noise pass.
            long_contexts: as `contexts`, each longer than a block of the engine's prefix cache; empty without one.
        """
        self.policy = policy
        self.contexts = list(contexts)
        self.long_contexts = list(long_contexts)
        self.precision = precision
        self.factor = factor
        self.ratio = self.long_ratio = 1.0
        self.answers: Tensor | None = None
        """What the engine said last, ``[contexts, V]`` log-probs; on the first rank."""

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
        gaps = self._measure(engine, weights)
        for gap, noise in (gaps.usual, gaps.long):
            # A policy that computes in the engine's precision is not moved by rounding: only the kernels differ.
            is_same_precision = noise <= NOISE_FLOOR
            largest = LARGEST_KERNEL_GAP / noise if is_same_precision else LARGEST_START_RATIO
            if not gap / noise <= largest:  # also catches NaN
                raise FaultError(
                    f"engine and policy disagree on the model they both loaded: {gap:.1e} nats, {gap / noise:.0f} "
                    f"times what {self.precision} rounding explains; the engine does not run this model correctly"
                )
        self.ratio, self.long_ratio = (gap / noise for gap, noise in (gaps.usual, gaps.long))
        return ProbeReading(gap=gaps.usual[0], threshold=self.factor * gaps.usual[0])

    def fill_cache(self, engine: RolloutEngine) -> None:
        """Have the engine compute the long contexts before a sync, so that a cache that outlives it is noticed."""
        if self.long_contexts:
            requests = [SamplingRequest(prompt_ids=context, seed=0) for context in self.long_contexts]
            lead(engine, lambda: engine.sample(requests, SamplingSettings(max_tokens=1)))

    def check(self, engine: RolloutEngine, weights: Mapping[str, Tensor], *, version: int) -> ProbeReading:
        """Compare after a sync.

        Args:
            engine: the engine.
            weights: the weights it was given, float32.
            version: their version, for the message.

        Returns:
            Gap and threshold.

        Raises:
            FaultError: if the gap exceeds the threshold; says what it looks like.
        """
        before = self.answers
        gaps = self._measure(engine, weights)
        limits = [
            self.factor * max(1.0, ratio) * noise
            for ratio, (_, noise) in ((self.ratio, gaps.usual), (self.long_ratio, gaps.long))
        ]
        for (gap, _), limit, is_long in zip((gaps.usual, gaps.long), limits, (False, True), strict=True):
            if not gap <= limit:
                cause = OLD_CACHE if is_long else self._cause(engine, weights, before, gap=gap)
                raise FaultError(
                    f"stale weights: after the sync of weight version {version} the engine differs from the policy by "
                    f"{gap:.1e} nats, above {limit:.1e}, {self.factor:g} times its own noise{cause}; nothing was "
                    "trained on its rollouts"
                )
        return ProbeReading(gap=gaps.usual[0], threshold=limits[0])

    @torch.no_grad()
    def _measure(self, engine: RolloutEngine, weights: Mapping[str, Tensor]) -> _Gaps:
        """Measure the engine's gap to the policy, and the gap that precision alone makes in the policy."""
        contexts = [*self.contexts, *self.long_contexts]
        requests = [SamplingRequest(prompt_ids=context, seed=index) for index, context in enumerate(contexts)]
        sampled = lead(engine, lambda: engine.sample(requests, SamplingSettings(max_tokens=1, distribution="full")))
        policy_distribution = self._next_token(weights)
        rounded = self._next_token(weights, rounded=True)
        usual, long = slice(0, len(self.contexts)), slice(len(self.contexts), None)
        gaps = _Gaps(usual=(NOISE_FLOOR, NOISE_FLOOR), long=(NOISE_FLOOR, NOISE_FLOOR))
        if sampled is not None:
            answers = torch.cat([c.log_distribution for c in sampled if c.log_distribution is not None])
            self.answers = answers[usual]
            gap, long_gap = (typical_divergence(answers[part], policy_distribution[part]) for part in (usual, long))
            noise, long_noise = (typical_divergence(rounded[part], policy_distribution[part]) for part in (usual, long))
            gaps = _Gaps(usual=(gap, noise), long=(long_gap, long_noise))
        return ranks.broadcast(gaps)

    @torch.no_grad()
    def _cause(self, engine: RolloutEngine, weights: Mapping[str, Tensor], before: Tensor | None, *, gap: float) -> str:
        """Say what a gap looks like, where one process knows enough to tell."""
        if before is None or self.answers is None or isinstance(weights, ShardedWeights) or ranks.num_ranks() > 1:
            return ""
        if typical_divergence(self.answers, before) < SAME_ANSWERS * gap:
            return OLD_WEIGHTS
        requests = [SamplingRequest(prompt_ids=context, seed=0) for context in self.contexts]
        sampled = engine.sample(requests, SamplingSettings(max_tokens=1, distribution="hidden"))
        if any(completion.hidden is None for completion in sampled):  # a server does not return them
            return ""
        assert self.policy is not None
        padded, lengths = self._padded(self.contexts)
        output = functional_call(
            self.policy.model, dict(weights), kwargs={"input_ids": padded, "output_hidden_states": True}
        )
        hidden = output.hidden_states[-1][torch.arange(len(lengths)), lengths - 1]  # [contexts, H], after the norm
        engine_hidden = torch.cat([c.hidden for c in sampled if c.hidden is not None]).float()
        error = (engine_hidden - hidden).norm(dim=-1) / hidden.norm(dim=-1)  # [contexts]
        return OLD_HEAD if float(error.median()) < LARGEST_HIDDEN_ERROR else ""

    def _padded(self, contexts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        """Return contexts padded on the right, ``[contexts, S]``, and their lengths."""
        rows = [torch.tensor(context) for context in contexts]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])

    def _next_token(self, weights: Mapping[str, Tensor], *, rounded: bool = False) -> Tensor:
        """Compute the policy's next-token log-distributions ``[contexts, V]`` with the given weights.

        Args:
            weights: of the policy.
            rounded: whether to round them to the engine's precision first.
        """
        assert self.policy is not None

        def change(name: str, weight: Tensor) -> Tensor:
            return round_weight(name, weight, self.precision) if rounded else weight

        padded, lengths = self._padded([*self.contexts, *self.long_contexts])
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
        A number of nats, at least NOISE_FLOOR, which it is without contexts.
    """
    if not len(reference):
        return NOISE_FLOOR
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


def long_probe_contexts(texts: Sequence[tuple[int, ...]], max_length: int) -> list[tuple[int, ...]]:
    """Join token sequences to contexts that fill a block of any prefix cache.

    Args:
        texts: token sequences, none of them empty.
        max_length: longest prompt and response together that the engine takes, tokens.

    Returns:
        NUM_LONG_CONTEXTS contexts that begin differently; none where no prompt fills a block.
    """
    if max_length < CACHE_BLOCK_TOKENS + 2:  # a block, one token behind it, one to sample
        return []
    contexts = []
    for number in range(NUM_LONG_CONTEXTS):
        tokens: list[int] = []
        while len(tokens) <= CACHE_BLOCK_TOKENS + number:
            tokens += texts[(number + len(tokens)) % len(texts)]
        contexts.append(tuple(tokens[: min(CACHE_BLOCK_TOKENS + 1 + number, max_length - 1)]))
    return contexts
