import math
from dataclasses import replace

import pytest
import torch

from tests.unit.builders import TOKENIZER, VOCAB_SIZE, tiny_policy
from trm_repro.batch import Rollout, RolloutBatch
from trm_repro.config_sections import RolloutConfig
from trm_repro.errors import InputError
from trm_repro.measurement import measure
from trm_repro.policy import save_policy
from trm_repro.rollout import SamplingRequest, SamplingSettings
from trm_repro.rollout.precision import round_weight
from trm_repro.rollout.synced_engine import policy_weights
from trm_repro.rollout.transformers_engine import TransformersEngine, processed_log_distribution

PROMPTS = [(1, 8, 14), (1, 5), (1, 9, 14, 4, 15), (1, 12, 14)]
EOS = TOKENIZER.eos_token_id


def start(path, precision="float32", *, max_concurrent_sequences=256):
    config = RolloutConfig(
        engine="transformers", precision=precision, max_concurrent_sequences=max_concurrent_sequences
    )
    return TransformersEngine(config, path)


@pytest.fixture(scope="module", params=["dense", "moe"])
def architecture(request):
    return request.param


@pytest.fixture(scope="module")
def policy(architecture):
    return tiny_policy(architecture)


@pytest.fixture(scope="module")
def saved(policy, architecture, tmp_path_factory):
    path = tmp_path_factory.mktemp(architecture)
    save_policy(policy, TOKENIZER, path)
    return path


@pytest.fixture(scope="module")
def engine(saved):
    return start(saved)


def requests_for(prompts, *, seed=0):
    return [SamplingRequest(prompt_ids=prompt, seed=seed + index) for index, prompt in enumerate(prompts)]


@torch.no_grad()
def own_logits(policy, tokens):
    return policy.model(input_ids=torch.tensor([tokens])).logits[0]


def test_greedy_answers_equal_a_loop_of_argmax_without_a_cache(policy, engine):
    completions = engine.sample(requests_for(PROMPTS), SamplingSettings(max_tokens=12, temperature=0.0))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        tokens = []
        while len(tokens) < 12 and EOS not in tokens:
            tokens.append(int(own_logits(policy, (*prompt, *tokens))[-1].argmax()))
        assert completion.token_ids == tuple(tokens)
        assert completion.finished == (EOS in tokens)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_full_log_probs_equal_the_models_log_softmax(policy, engine, temperature):
    settings = SamplingSettings(max_tokens=10, temperature=temperature, distribution="full")
    for prompt, completion in zip(PROMPTS, engine.sample(requests_for(PROMPTS), settings), strict=True):
        logits = own_logits(policy, (*prompt, *completion.token_ids))[len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits.double() / temperature, dim=-1)
        assert torch.allclose(completion.log_distribution.double(), expected, atol=2e-5)
        chosen = [row[token] for row, token in zip(completion.log_distribution, completion.token_ids, strict=True)]
        assert completion.logprobs.tolist() == [value.item() for value in chosen]


def test_only_sampled_log_probs_are_returned_where_no_more_are_asked_for(engine):
    full, sampled = (
        engine.sample(requests_for(PROMPTS), SamplingSettings(max_tokens=6, distribution=distribution))
        for distribution in ("full", "sampled")
    )
    for left, right in zip(full, sampled, strict=True):
        assert right.log_distribution is None
        assert right.token_ids == left.token_ids
        assert torch.equal(right.logprobs, left.logprobs)


def test_the_same_seed_gives_the_same_tokens_and_other_seeds_others(engine):
    settings = SamplingSettings(max_tokens=10)
    first, again = engine.sample(requests_for(PROMPTS), settings), engine.sample(requests_for(PROMPTS), settings)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    different = engine.sample([SamplingRequest(prompt_ids=PROMPTS[0], seed=seed) for seed in range(20)], settings)
    assert len({completion.token_ids for completion in different}) > 10


def test_a_response_does_not_depend_on_its_neighbours(engine, saved):
    settings = SamplingSettings(max_tokens=10)
    requests = requests_for(PROMPTS * 3)
    together = engine.sample(requests, settings)
    backwards = engine.sample(requests[::-1], settings)[::-1]
    narrow = start(saved, max_concurrent_sequences=2).sample(requests, settings)
    for request, *completions in zip(requests, together, backwards, narrow, strict=True):
        alone = engine.sample([request], settings)[0]
        assert {completion.token_ids for completion in completions} == {alone.token_ids}


def test_responses_end_at_the_end_of_sequence_token_or_at_the_limit(engine):
    requests = [SamplingRequest(prompt_ids=PROMPTS[0], seed=seed) for seed in range(60)]
    completions = engine.sample(requests, SamplingSettings(max_tokens=8, distribution="full"))
    assert {completion.finished for completion in completions} == {True, False}
    for completion in completions:
        assert completion.finished == (completion.token_ids[-1] == EOS)
        assert EOS not in completion.token_ids[:-1]
        assert completion.finished or len(completion.token_ids) == 8
        assert len(completion.log_distribution) == len(completion.logprobs) == len(completion.token_ids)


def test_tokens_are_drawn_as_often_as_their_probability_says(policy, engine):
    num_draws = 1500
    requests = [SamplingRequest(prompt_ids=PROMPTS[0], seed=seed) for seed in range(num_draws)]
    completions = engine.sample(requests, SamplingSettings(max_tokens=1, temperature=0.8))
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=VOCAB_SIZE)
    probs = torch.softmax(own_logits(policy, PROMPTS[0])[-1] / 0.8, dim=-1)
    for count, probability in zip(counts.tolist(), probs.tolist(), strict=True):
        deviation = math.sqrt(num_draws * probability * (1 - probability))
        assert abs(count - num_draws * probability) < 4.5 * deviation + 1


def test_the_policy_agrees_with_a_float32_engine_in_log_probs_divergence_and_routing(policy, engine, architecture):
    completions = engine.sample(requests_for(PROMPTS * 4), SamplingSettings(max_tokens=10, distribution="full"))
    batch = RolloutBatch.from_rollouts(
        [
            Rollout(
                group=0,
                prompt_ids=prompt,
                response_ids=completion.token_ids,
                logprobs=completion.logprobs,
                log_distribution=completion.log_distribution,
                experts=completion.experts,
            )
            for prompt, completion in zip(PROMPTS * 4, completions, strict=True)
        ]
    )
    measurement = measure(policy, batch, temperature=1.0, tokens_per_micro_batch=60)
    assert measurement.log_ratio.abs().max().item() < 1e-4
    assert measurement.kl.max().item() < 1e-5
    if architecture == "moe":
        assert not measurement.is_flipped.any()
    else:
        assert measurement.is_flipped is None


def test_loaded_weights_are_those_sampled_from(architecture, saved):
    engine = start(saved)
    other = tiny_policy(architecture, seed=1)
    engine.load_weights(policy_weights(other))
    settings = SamplingSettings(max_tokens=1, distribution="full")
    for prompt, completion in zip(PROMPTS, engine.sample(requests_for(PROMPTS), settings), strict=True):
        expected = torch.log_softmax(own_logits(other, prompt)[-1], dim=-1)
        assert torch.allclose(completion.log_distribution[0], expected, atol=2e-5)


def test_loaded_weights_of_an_untied_head_are_those_sampled_from(architecture, tmp_path):
    first, other = (tiny_policy(architecture, seed=seed, tie_word_embeddings=False) for seed in (0, 1))
    save_policy(first, TOKENIZER, tmp_path)
    engine = start(tmp_path)
    engine.load_weights(policy_weights(other))
    completion = engine.sample(requests_for(PROMPTS[:1]), SamplingSettings(max_tokens=1, distribution="full"))[0]
    expected = torch.log_softmax(own_logits(other, PROMPTS[0])[-1], dim=-1)
    assert torch.allclose(completion.log_distribution[0], expected, atol=2e-5)


def test_weights_of_another_model_are_refused(saved, engine):
    weights = dict(engine.model.state_dict())
    weights["model.layers.7.input_layernorm.weight"] = torch.zeros(32)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        start(saved).load_weights(weights)


@pytest.mark.parametrize("precision", ["bfloat16", "int8", "fp8"])
def test_weights_are_rounded_when_they_are_read_from_disk_and_nowhere_else(policy, saved, precision):
    engine = start(saved, precision)
    loaded = dict(engine.model.named_parameters())
    for name, weight in policy_weights(policy).items():
        assert torch.equal(loaded[name], round_weight(name, weight, precision)), name


def test_the_vocabulary_is_that_of_the_model(engine):
    assert engine.vocab_size == VOCAB_SIZE


HAND = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log()
SETTINGS = SamplingSettings(max_tokens=1)


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (1.0, [0.15, 0.5, 0.05, 0.3]),
        (0.96, [0.15, 0.5, 0.05, 0.3]),
        (0.9, [0.15 / 0.95, 0.5 / 0.95, 0.0, 0.3 / 0.95]),
        (0.7, [0.0, 0.625, 0.0, 0.375]),
        (0.4, [0.0, 1.0, 0.0, 0.0]),
        (0.01, [0.0, 1.0, 0.0, 0.0]),
    ],
)
def test_the_nucleus_by_hand(top_p, expected):
    result = processed_log_distribution(HAND, replace(SETTINGS, top_p=top_p))
    assert result.exp().tolist()[0] == pytest.approx(expected, abs=1e-6)
    assert [value == -math.inf for value in result[0].tolist()] == [value == 0.0 for value in expected]


def test_the_temperature_by_hand():
    # at temperature 1/2 probabilities are squared: 0.0225, 0.25, 0.0025 and 0.09 of 0.365
    result = processed_log_distribution(HAND, replace(SETTINGS, temperature=0.5)).exp()
    assert result.tolist()[0] == pytest.approx([0.0225 / 0.365, 0.25 / 0.365, 0.0025 / 0.365, 0.09 / 0.365])
    assert torch.allclose(processed_log_distribution(HAND, replace(SETTINGS, temperature=0.0)), HAND)


def test_the_nucleus_is_taken_after_the_temperature():
    # after squaring, the first token has 0.68: a nucleus of 0.6 holds it alone, which it does not before
    settings = replace(SETTINGS, temperature=0.5, top_p=0.6)
    assert processed_log_distribution(HAND, settings).exp().tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_nothing_outside_the_nucleus_is_sampled(policy, engine):
    settings = SamplingSettings(max_tokens=1, top_p=0.5, distribution="full")
    requests = [SamplingRequest(prompt_ids=PROMPTS[0], seed=seed) for seed in range(200)]
    probs = torch.softmax(own_logits(policy, PROMPTS[0])[-1], dim=-1).tolist()
    nucleus, mass = set(), 0.0
    for token in sorted(range(VOCAB_SIZE), key=lambda token: -probs[token]):
        if mass >= 0.5:
            break
        nucleus.add(token)
        mass += probs[token]
    completions = engine.sample(requests, settings)
    assert {completion.token_ids[0] for completion in completions} <= nucleus
    assert len(nucleus) < VOCAB_SIZE
    for completion in completions:
        token = completion.token_ids[0]
        assert completion.logprobs.item() == pytest.approx(math.log(probs[token] / mass), abs=1e-4)


def test_more_of_the_likeliest_tokens_than_there_are_gives_all_of_them(engine):
    settings = SamplingSettings(max_tokens=3, distribution="top_k", num_top=VOCAB_SIZE + 50)
    for completion in engine.sample(requests_for(PROMPTS), settings):
        assert completion.top_ids.shape == completion.top_logprobs.shape == (len(completion.token_ids), VOCAB_SIZE)
        assert sorted(completion.top_ids[0].tolist()) == list(range(VOCAB_SIZE))


def test_a_directory_without_a_model_is_refused_by_its_name(tmp_path):
    with pytest.raises(InputError, match="no model can be loaded") as raised:
        start(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}: ")
