import math

import pytest
import torch
from torch.func import functional_call

from tests.unit.builders import TOKENIZER, VOCAB_SIZE, tiny_policy
from trm_repro.config import RunConfig
from trm_repro.errors import FaultError
from trm_repro.rollout import Completion, Probe, probe_contexts
from trm_repro.rollout.precision import round_weight
from trm_repro.rollout.sampler import chain_probe_contexts
from trm_repro.rollout.synced_engine import SyncedEngine, policy_weights

CONTEXTS = chain_probe_contexts(RunConfig(), TOKENIZER)[:16]
FACTOR = 5.0


class FakeEngine:
    """Answers with the rounded weights it holds, its rounding error magnified.

    The divergence grows with the square of ``magnification``; 1 is what rounding alone makes. ``is_deaf`` engines
    keep their weights whatever they are sent. ``num_flipped`` contexts get another answer.
    """

    vocab_size = VOCAB_SIZE

    def __init__(self, policy, *, precision="bfloat16", magnification=1.0):
        self.model = policy.model
        self.precision = precision
        self.magnification = magnification
        self.is_deaf = False
        self.num_flipped = 0
        self.load_weights(policy_weights(policy))

    def load_weights(self, weights):
        if not self.is_deaf:
            self.weights = dict(weights)
            self.rounded = {name: round_weight(name, weight, self.precision) for name, weight in weights.items()}

    @torch.no_grad()
    def sample(self, requests, settings):
        assert (settings.max_tokens, settings.distribution) == (1, "full")
        completions = []
        for index, request in enumerate(requests):
            inputs = {"input_ids": torch.tensor([request.prompt_ids])}
            exact, rounded = (
                functional_call(self.model, weights, kwargs=inputs).logits[0, -1].float()
                for weights in (self.weights, self.rounded)
            )
            logits = exact + self.magnification * (rounded - exact)
            if index < self.num_flipped:
                logits = logits.flip(0)
            log_distribution = torch.log_softmax(logits, dim=-1)[None]
            completions.append(
                Completion(
                    token_ids=(0,),
                    logprobs=log_distribution[:, 0],
                    log_distribution=log_distribution,
                    finished=False,
                )
            )
        return completions


def probe_for(policy, precision="bfloat16"):
    return Probe(policy, CONTEXTS, precision, FACTOR)


def trained(policy, *, rate=0.01):
    """Weights a little further on: every one moved by the given share of its own size."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: weight * (1 + rate * torch.randn(weight.shape, generator=generator))
        for name, weight in policy_weights(policy).items()
    }


def geometric_mean_of_kl(policy, weights):
    """Compute what rounding alone makes of the probe's gap, context by context."""
    logs = []
    for context in CONTEXTS:
        inputs = {"input_ids": torch.tensor([context])}
        rounded = {name: weight.bfloat16() for name, weight in weights.items()}
        with torch.no_grad():
            p = torch.log_softmax(functional_call(policy.model, rounded, kwargs=inputs).logits[0, -1].double(), dim=-1)
            q = torch.log_softmax(functional_call(policy.model, weights, kwargs=inputs).logits[0, -1].double(), dim=-1)
        logs.append(math.log(max(float((p.exp() * (p - q)).sum()), 1e-9)))
    return math.exp(sum(logs) / len(logs))


@pytest.fixture(params=["dense", "moe"])
def policy(request):
    return tiny_policy(request.param)


def test_the_gap_is_the_geometric_mean_of_the_exact_kl_over_contexts(policy):
    weights = policy_weights(policy)
    reading = probe_for(policy).start(FakeEngine(policy), weights)
    assert reading.gap == pytest.approx(geometric_mean_of_kl(policy, weights), rel=0.1)
    assert reading.threshold == pytest.approx(FACTOR * reading.gap)


@pytest.mark.parametrize("magnification", [1.0, 2.0])
def test_an_engine_at_its_measured_noise_passes_after_every_sync(policy, magnification):
    probe, engine = probe_for(policy), FakeEngine(policy, magnification=magnification)
    probe.start(engine, policy_weights(policy))
    for version in range(1, 6):
        weights = trained(policy, rate=0.1 * version)
        engine.load_weights(weights)
        reading = probe.check(engine, weights, version=version)
        assert reading.gap < 0.6 * reading.threshold


def test_ten_times_the_noise_stops_the_run(policy):
    probe, engine = probe_for(policy), FakeEngine(policy)
    weights = policy_weights(policy)
    probe.start(engine, weights)
    engine.magnification = math.sqrt(10.0)  # ten times the divergence
    with pytest.raises(FaultError, match=r"stale weights: after the sync of weight version 8 .* 5 times its own noise"):
        probe.check(engine, weights, version=8)


@pytest.mark.parametrize(("factor", "passes"), [(4.0, True), (6.0, False)])
def test_the_threshold_is_the_configured_multiple_of_the_noise(policy, factor, passes):
    probe, engine = probe_for(policy), FakeEngine(policy)
    weights = policy_weights(policy)
    probe.start(engine, weights)
    engine.magnification = math.sqrt(factor)
    if passes:
        probe.check(engine, weights, version=1)
    else:
        with pytest.raises(FaultError):
            probe.check(engine, weights, version=1)


def test_the_threshold_follows_the_policy(policy):
    """A policy whose weights make rounding matter more is not taken for a stale one."""
    probe, engine = probe_for(policy), FakeEngine(policy)
    started = probe.start(engine, policy_weights(policy))
    larger = {name: 3 * weight for name, weight in policy_weights(policy).items()}
    engine.load_weights(larger)
    reading = probe.check(engine, larger, version=1)
    assert reading.gap > 2 * started.gap
    assert reading.threshold > 2 * started.threshold


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "fp8"])
def test_an_engine_that_only_rounds_passes_and_one_with_stale_weights_does_not(policy, precision):
    probe, engine = probe_for(policy, precision), FakeEngine(policy, precision=precision)
    probe.start(engine, policy_weights(policy))
    weights = trained(policy, rate=0.3)
    engine.load_weights(weights)
    fresh = probe.check(engine, weights, version=1)
    assert fresh.gap <= fresh.threshold
    engine.is_deaf = True
    later = trained(policy, rate=0.6)
    engine.load_weights(later)
    with pytest.raises(FaultError, match="stale weights"):
        probe.check(engine, later, version=2)


def test_a_few_flipped_contexts_pass_and_many_do_not(policy):
    probe, engine = probe_for(policy), FakeEngine(policy)
    weights = policy_weights(policy)
    probe.start(engine, weights)
    engine.num_flipped = 1  # of 16
    probe.check(engine, weights, version=1)
    engine.num_flipped = 8
    with pytest.raises(FaultError, match="stale weights"):
        probe.check(engine, weights, version=1)


def test_an_engine_that_does_not_run_the_model_is_refused_at_the_start(policy):
    engine = FakeEngine(policy, magnification=10.0)
    with pytest.raises(FaultError, match="disagree on the model they both loaded"):
        probe_for(policy).start(engine, policy_weights(policy))


def test_an_engine_that_answers_nan_is_refused_at_the_start(policy):
    engine = FakeEngine(policy, magnification=math.nan)
    with pytest.raises(FaultError):
        probe_for(policy).start(engine, policy_weights(policy))


def test_an_engine_that_answers_nan_later_stops_the_run(policy):
    probe, engine = probe_for(policy), FakeEngine(policy)
    weights = policy_weights(policy)
    probe.start(engine, weights)
    engine.magnification = math.nan
    with pytest.raises(FaultError, match="stale weights"):
        probe.check(engine, weights, version=1)


def test_a_synced_engine_is_loaded_and_probed_once_per_version(policy):
    probe, engine = probe_for(policy), FakeEngine(policy)
    synced = SyncedEngine(engine, probe, probe.start(engine, policy_weights(policy)))
    first, second = trained(policy, rate=0.1), trained(policy, rate=0.2)
    synced.sync(first, run="a", version=1)
    held = engine.weights
    synced.sync(first, run="a", version=1)
    assert engine.weights is held
    synced.sync(second, run="b", version=1)  # the same version of another run
    assert engine.weights is not held
    assert synced.holds == ("b", 1)


def test_after_a_failed_sync_a_synced_engine_holds_nothing_and_is_loaded_again(policy):
    probe, engine = probe_for(policy), FakeEngine(policy)
    synced = SyncedEngine(engine, probe, probe.start(engine, policy_weights(policy)))
    first, second = trained(policy, rate=0.3), trained(policy, rate=0.6)
    synced.sync(first, run="a", version=1)
    held = engine.weights
    engine.is_deaf = True
    for _ in range(2):
        with pytest.raises(FaultError, match="weight version 2"):
            synced.sync(second, run="a", version=2)
        assert synced.holds is None
    engine.is_deaf = False
    synced.sync(first, run="a", version=1)
    assert engine.weights is not held
    assert synced.holds == ("a", 1)


def test_contexts_are_beginnings_of_the_texts_taken_in_turn():
    texts = [tuple(range(10)), (90, 91), tuple(range(50, 57))]
    contexts = probe_contexts(texts, 30, seed=0)
    assert len(contexts) == 30
    for index, context in enumerate(contexts):
        text = texts[index % 3]
        assert 0 < len(context) < len(text)
        assert text[: len(context)] == context
    assert len({len(context) for context in contexts[::3]}) > 3
    assert contexts == probe_contexts(texts, 30, seed=0)
    assert contexts != probe_contexts(texts, 30, seed=1)
