import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.builders import (
    EXPERTS_PER_TOKEN,
    NUM_LAYERS,
    TOKENIZER,
    make_batch,
    near_policy,
    tiny_config,
    tiny_policy,
)
from trm_repro.config import PolicyConfig
from trm_repro.errors import InputError
from trm_repro.policy import (
    build_policy,
    build_tokenizer,
    context_length,
    first_line,
    load_tokenizer,
    model_config,
    predicting_positions,
    save_policy,
)

LENGTHS = [(2, 3), (5, 1), (1, 6), (3, 4)]  # (prompt, response)
ARCHITECTURES = ["dense", "moe"]


def naive_rows(policy, batch, temperature=1.0):
    """Score each sequence by itself, without padding, with the Hugging Face model's own logits."""
    for ids, prompt_length, length in zip(
        batch.input_ids, batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True
    ):
        sequence = ids[: prompt_length + length]
        with torch.no_grad():
            logits = policy.model(input_ids=sequence[None]).logits[0]
        for position in range(prompt_length, prompt_length + length):
            yield int(sequence[position]), torch.log_softmax(logits[position - 1].double() / temperature, dim=-1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tie_word_embeddings", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_equal_a_forward_pass_of_each_sequence_by_itself(architecture, tie_word_embeddings, temperature):
    policy = tiny_policy(architecture, tie_word_embeddings=tie_word_embeddings)
    batch = make_batch(LENGTHS)
    expected = [row[token].item() for token, row in naive_rows(policy, batch, temperature)]
    assert policy(batch, temperature=temperature).logprobs.tolist() == pytest.approx(expected, abs=2e-5)
    measured = policy(batch, temperature=temperature, measure=True)
    assert measured.logprobs.tolist() == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_measured_statistics_equal_loops_over_the_vocabulary(architecture):
    policy = tiny_policy(architecture)
    batch = make_batch(LENGTHS)
    measured = policy(batch, measure=True)
    for index, (_, row) in enumerate(naive_rows(policy, batch)):
        q, p = row.tolist(), batch.rollout_log_distribution[index].tolist()
        pairs = list(zip(p, q, strict=True))
        assert measured.entropy[index].item() == pytest.approx(-sum(math.exp(b) * b for b in q), abs=1e-4)
        assert measured.kl[index].item() == pytest.approx(sum(math.exp(a) * (a - b) for a, b in pairs), abs=1e-4)
        expected = 0.5 * sum(abs(math.exp(a) - math.exp(b)) for a, b in pairs)
        assert measured.total_variation[index].item() == pytest.approx(expected, abs=1e-4)


def test_a_policy_has_no_divergence_from_its_own_distributions():
    policy = tiny_policy("moe")
    batch = near_policy(make_batch(LENGTHS), policy, torch.zeros(4), temperature=0.8)
    measured = policy(batch, temperature=0.8, measure=True)
    assert measured.kl.max().item() < 1e-5
    assert policy(batch, temperature=1.0, measure=True).kl.max().item() > 1e-3


def test_the_routing_is_that_of_the_position_that_predicts_each_token():
    policy = tiny_policy("moe")
    batch = make_batch(LENGTHS)
    seen = {}
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, args, result, index=index: seen.update({index: args[0]}))
        for index, layer in enumerate(policy.model.model.layers)
    ]
    experts = policy(batch, measure=True).experts
    for hook in hooks:
        hook.remove()
    assert experts.shape[1:] == (NUM_LAYERS, EXPERTS_PER_TOKEN)
    token = 0
    for row, (prompt_length, length) in enumerate(LENGTHS):
        for position in range(prompt_length - 1, prompt_length - 1 + length):
            for index, layer in enumerate(policy.model.model.layers):
                state = seen[index].reshape(len(LENGTHS), batch.input_ids.shape[1], -1)[row, position]
                scores = (layer.mlp.gate.weight @ state).tolist()
                best = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[:EXPERTS_PER_TOKEN]
                assert sorted(experts[token, index].tolist()) == sorted(best)
            token += 1


def test_measuring_carries_no_gradient_and_scoring_does():
    policy = tiny_policy()
    batch = make_batch(LENGTHS)
    assert not policy(batch, measure=True).logprobs.requires_grad
    policy(batch).logprobs.sum().backward()
    assert all(parameter.grad is not None for parameter in policy.parameters())


def test_a_dense_policy_has_no_routing_and_scoring_measures_nothing():
    policy, batch = tiny_policy("dense"), make_batch(LENGTHS)
    assert policy(batch, measure=True).experts is None
    assert all(value is None for value in policy(batch)[1:])


def test_a_token_is_predicted_one_position_before_it_stands():
    batch = make_batch([(2, 3), (4, 1)])
    rows, columns = predicting_positions(batch)
    assert rows.tolist() == [0, 0, 0, 1]
    assert columns.tolist() == [1, 2, 3, 3]
    assert torch.equal(batch.input_ids[rows, columns + 1], batch.response_ids[batch.response_mask])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_randomness_alone(architecture):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first = tiny_policy(architecture, seed=5)
    assert torch.equal(torch.rand(4), expected)
    again, other = tiny_policy(architecture, seed=5), tiny_policy(architecture, seed=6)
    for left, right in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(left, right)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_saved_policy_is_loaded_with_the_same_weights(architecture, tmp_path):
    policy = tiny_policy(architecture)
    save_policy(policy, TOKENIZER, tmp_path)
    loaded = build_policy(PolicyConfig(path=str(tmp_path)), TOKENIZER, seed=99)
    expected = dict(policy.named_parameters())
    assert {name for name, _ in loaded.named_parameters()} == set(expected)
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.named_parameters())
    batch = make_batch(LENGTHS)
    assert torch.equal(policy(batch).logprobs, loaded(batch).logprobs)


def test_a_saved_policy_says_how_long_a_sequence_it_can_represent(tmp_path):
    save_policy(tiny_policy(), TOKENIZER, tmp_path)
    assert context_length(tmp_path) == 128


def test_a_path_without_a_model_is_refused_by_its_key(tmp_path):
    with pytest.raises(InputError, match=r"policy\.path=.*no model can be loaded"):
        build_policy(PolicyConfig(path=str(tmp_path)), TOKENIZER, seed=0)


def test_a_path_without_a_tokenizer_is_refused_by_its_name(tmp_path):
    with pytest.raises(InputError, match="no tokenizer can be loaded") as raised:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_a_saved_tokenizer_reads_and_writes_as_before(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded("4+8=").input_ids == TOKENIZER("4+8=").input_ids
    assert loaded.eos_token_id == TOKENIZER.eos_token_id


def test_the_vocabulary_size_comes_from_the_configuration_or_the_tokenizer():
    assert model_config(tiny_config(), TOKENIZER).vocab_size == 18
    assert model_config(PolicyConfig(vocab_size=20), TOKENIZER).vocab_size == 20
    with pytest.raises(InputError, match="vocab_size must be given"):
        model_config(tiny_config())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_sizes_reach_the_weights(architecture):
    names = {name: tuple(weight.shape) for name, weight in tiny_policy(architecture).model.named_parameters()}
    assert names["model.embed_tokens.weight"] == (18, 32)
    assert names["model.layers.1.self_attn.q_proj.weight"] == (2 * 16, 32)
    assert names["model.layers.1.self_attn.k_proj.weight"] == (1 * 16, 32)
    assert "model.layers.2.self_attn.q_proj.weight" not in names
    if architecture == "dense":
        assert names["model.layers.0.mlp.gate_proj.weight"] == (48, 32)
    else:
        assert names["model.layers.0.mlp.gate.weight"] == (4, 32)
        assert names["model.layers.0.mlp.experts.down_proj"] == (4, 32, 16)


def test_weights_start_with_the_configured_deviation():
    for deviation in (0.02, 0.2):
        weight = build_policy(
            replace(tiny_config(), initializer_range=deviation), TOKENIZER, seed=0
        ).model.lm_head.weight
        assert weight.std().item() == pytest.approx(deviation, rel=0.15)


def test_the_tokenizer_has_one_token_per_character_after_a_beginning():
    tokenizer = build_tokenizer("abc")
    assert tokenizer("cab").input_ids == [1, 6, 4, 5]  # <pad> <bos> <eos> <unk> a b c
    assert tokenizer("a?").input_ids == [1, 4, 3]
    assert tokenizer("ab", add_special_tokens=False).input_ids == [4, 5]
    assert tokenizer.decode([1, 6, 4, 5, 2], skip_special_tokens=True) == "cab"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_the_tokens_of_the_batch_docstring_are_the_miniatures():
    assert TOKENIZER("4+8=").input_ids == [1, 8, 14, 12, 15]
    assert TOKENIZER("4+8=2;#2", add_special_tokens=False).input_ids == [8, 14, 12, 15, 6, 16, 17, 6]


@pytest.fixture
def saved(tmp_path):
    save_policy(tiny_policy(tie_word_embeddings=False), TOKENIZER, tmp_path)
    return tmp_path


def refusal(call, *arguments):
    with pytest.raises(InputError) as raised:
        call(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def build_from(path):
    return build_policy(PolicyConfig(path=str(path)), TOKENIZER, seed=0)


def truncated(path):
    path.write_bytes(path.read_bytes()[:-1000])


def without_a_tensor(path):
    weights = load_file(path)
    weights.pop("lm_head.weight")
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "damage",
    [truncated, without_a_tensor, lambda path: path.write_bytes(b""), lambda path: path.unlink()],
    ids=["truncated", "without a tensor", "empty", "missing"],
)
def test_damaged_weights_are_refused_by_the_key_of_their_directory(saved, damage):
    damage(saved / "model.safetensors")
    message = refusal(build_from, saved)
    assert message.startswith(f"policy.path={saved}: no model can be loaded (")
    assert "expected config.json, model.safetensors and tokenizer.json" in message


@pytest.mark.parametrize("text", ["[]", "{}", "", "null", '"x"', '{"model_type": "no such"}'])
def test_a_configuration_that_is_none_is_refused_wherever_it_is_read(saved, text):
    (saved / "config.json").write_text(text)
    assert refusal(build_from, saved).startswith(f"policy.path={saved}: ")
    assert refusal(context_length, saved).startswith(f"{saved}: its config.json does not say how long")


def test_weights_of_another_size_than_the_configuration_are_refused(saved):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"intermediate_size": 7}))
    assert "no model can be loaded (" in refusal(build_from, saved)


def test_a_model_without_the_parts_that_scoring_uses_is_refused(tmp_path):
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertLMHeadModel(BertConfig(vocab_size=18, **sizes)).save_pretrained(tmp_path)
    assert "a BertLMHeadModel cannot be scored; expected a causal model" in refusal(build_from, tmp_path)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(saved):
    large = build_tokenizer("abcdefghijklmnopqrstuvwxyz")
    message = refusal(build_policy, PolicyConfig(path=str(saved)), large, 0)
    assert "the tokenizer has 30 tokens, the model 18" in message


def test_a_directory_with_a_model_alone_has_no_tokenizer(tmp_path):
    tiny_policy().model.save_pretrained(tmp_path)
    assert refusal(load_tokenizer, tmp_path).startswith(f"{tmp_path}: no tokenizer can be loaded (no tokenizer.json)")


@pytest.mark.parametrize("text", ["", "[]", "{}", "not json"])
def test_a_damaged_tokenizer_is_refused(saved, text):
    (saved / "tokenizer.json").write_text(text)
    assert refusal(load_tokenizer, saved).startswith(f"{saved}: no tokenizer can be loaded (")


def test_the_reason_of_a_validation_error_is_its_message_and_not_its_heading():
    text = "1 validation error for ModelConfig\n  Value error, no such model [type=value_error, input_value=1]\n    For"
    assert first_line(ValueError(text)) == "Value error, no such model"
    assert first_line(ValueError("model\n  more")) == "model"
    assert first_line(KeyError()) == "KeyError"
