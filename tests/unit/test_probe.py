import math

import pytest
import torch
from torch.func import functional_call

from tests.unit.builders import TOKENIZER, VOCAB_SIZE, tiny_policy
from trm_repro.config import RunConfig
from trm_repro.errors import FaultError
from trm_repro.rollout import Completion, Probe, probe_contexts
from trm_repro.rollout.precision import round_weight
from trm_repro.rollout.probe import CACHE_BLOCK_TOKENS, NUM_LONG_CONTEXTS, long_probe_contexts
from trm_repro.rollout.sampler import chain_probe_contexts
from trm_repro.rollout.synced_engine import SyncedEngine, policy_weights

CONTEXTS = chain_probe_contexts(RunConfig(), TOKENIZER)[:16]
FACTOR = 5.0


class FakeEngine:
    """Answers with the rounded weights it holds, its rounding error magnified.

    The divergence grows with the square of ``magnification``; 1 is what rounding alone makes. ``is_deaf`` engines
    keep their weights whatever they are sent, ``is_deaf_to_head`` ones their output head. ``num_flipped`` contexts get
    another answer. ``keeps_cache`` engines answer a long prompt that they have seen as they did then.
    """

    vocab_size = VOCAB_SIZE

    def __init__(self, policy, *, precision="bfloat16", magnification=1.0):
        self.model = policy.model
        self.precision = precision
        self.magnification = magnification
        self.is_deaf = self.is_deaf_to_head = self.keeps_cache = False
        self.head, self.cache = None, {}
        self.num_flipped = 0
        self.load_weights(policy_weights(policy))

    def load_weights(self, weights):
        if not self.is_deaf:
            self.weights = dict(weights)
            self.rounded = {name: round_weight(name, weight, self.precision) for name, weight in weights.items()}
            if not (self.is_deaf_to_head and self.head is not None):
                self.head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        if not self.keeps_cache:
            self.cache = {}

    @torch.no_grad()
    def sample(self, requests, settings):
        assert settings.max_tokens == 1
        prompts = [torch.tensor(request.prompt_ids) for request in requests]
        padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)  # what follows a prompt does not change it
        inputs = {"input_ids": padded, "output_hidden_states": True}
        outputs = [functional_call(self.model, weights, kwargs=inputs) for weights in (self.weights, self.rounded)]
        completions = []
        for index, request in enumerate(requests):
            last = len(request.prompt_ids) - 1
            hidden = outputs[1].hidden_states[-1][index, last][None]
            exact, rounded = (output.logits[index, last].float() for output in outputs)
            if self.is_deaf_to_head:
                exact = rounded = (hidden.float() @ self.head.T)[0]
            logits = exact + self.magnification * (rounded - exact)
            if len(request.prompt_ids) > CACHE_BLOCK_TOKENS:
                logits = self.cache.setdefault(request.prompt_ids, logits)
            if index < self.num_flipped:
                logits = logits.flip(0)
            log_distribution = torch.log_softmax(logits, dim=-1)[None]
            completions.append(
                Completion(
                    token_ids=(0,),
                    logprobs=log_distribution[:, 0],
                    log_distribution=log_distribution if settings.distribution == "full" else None,
                    hidden=hidden if settings.distribution == "hidden" else None,
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
    assert reading.gap == pytest.approx(geometric_mean_of_kl(policy, weights), rel=0.25)  # batches round otherwise
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


def synced(policy, **settings):
    """An engine that holds the policy's weights, with long contexts in its probe."""
    engine = FakeEngine(policy, **settings)
    long_contexts = long_probe_contexts(CONTEXTS, 200)
    probe = Probe(policy, CONTEXTS, "bfloat16", FACTOR, long_contexts=long_contexts)
    return SyncedEngine(engine, probe, probe.start(engine, policy_weights(policy)))


def test_each_way_to_be_stale_is_told_by_its_name():
    policy = tiny_policy()
    weights = trained(policy, rate=0.3)
    for fault, told in (
        ("is_deaf", r"it answers as before: the sync did not reach it"),
        ("is_deaf_to_head", r"the output head, lm_head\.weight, did not reach it"),
        ("keeps_cache", r"contexts of more than 128 tokens \(its prefix cache, .* was not emptied"),
    ):
        engine = synced(policy)
        setattr(engine.engine, fault, True)
        with pytest.raises(FaultError, match=f"stale weights: after the sync of weight version 4 .*{told}"):
            engine.sync(weights, run="a", version=4)
        setattr(engine.engine, fault, False)
        engine.sync(weights, run="a", version=4)


def test_weights_that_are_wrong_in_no_known_way_are_only_called_stale():
    policy = tiny_policy()
    engine = synced(policy)
    engine.engine.load_weights(trained(policy, rate=0.5))
    engine.engine.is_deaf = True
    with pytest.raises(FaultError, match=r"5 times its own noise; nothing was trained"):
        engine.sync(trained(policy, rate=0.3), run="a", version=1)


def test_a_cache_that_nothing_filled_is_filled_before_the_sync():
    """Rollouts may have pushed the last probe's keys and values out of the cache."""
    policy = tiny_policy()
    engine = synced(policy)
    engine.engine.keeps_cache = True
    engine.engine.cache = {}
    with pytest.raises(FaultError, match="was not emptied"):
        engine.sync(trained(policy, rate=0.3), run="a", version=1)


def test_long_contexts_fill_a_block_and_fit_the_engine():
    for max_length in (130, 131, 500):
        contexts = long_probe_contexts(CONTEXTS, max_length)
        assert len(set(contexts)) == NUM_LONG_CONTEXTS
        assert all(CACHE_BLOCK_TOKENS < len(context) < max_length for context in contexts)
    assert long_probe_contexts(CONTEXTS, 129) == []


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
