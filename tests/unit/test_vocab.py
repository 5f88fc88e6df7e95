import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trm_repro.vocab import log_distribution, token_logprobs, token_statistics

NUM_TOKENS, HIDDEN, VOCAB = 7, 5, 13


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
    head_weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    token_ids = torch.randint(VOCAB, (NUM_TOKENS,), generator=generator)
    rollout = torch.log_softmax(torch.randn(NUM_TOKENS, VOCAB, generator=generator), dim=-1)
    return hidden, head_weight, token_ids, rollout


def naive_log_distribution(hidden, head_weight, temperature):
    rows = []
    for state in hidden.tolist():
        logits = [sum(w * s for w, s in zip(row, state, strict=True)) / temperature for row in head_weight.tolist()]
        log_total = math.log(sum(math.exp(logit) for logit in logits))
        rows.append([logit - log_total for logit in logits])
    return rows


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_log_distribution_equals_a_loop_over_the_vocabulary(inputs, temperature):
    hidden, head_weight, _, _ = inputs
    expected = torch.tensor(naive_log_distribution(hidden, head_weight, temperature))
    assert torch.allclose(log_distribution(hidden, head_weight, temperature), expected, atol=1e-5)


def test_half_precision_logits_become_float32_before_the_softmax():
    hidden, head_weight = torch.ones(1, 1, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.bfloat16)
    result = log_distribution(hidden, head_weight)
    assert result.dtype == torch.float32
    assert result.tolist() == [[pytest.approx(-math.log(3.0), abs=1e-6)] * 3]


@pytest.mark.parametrize("chunk_tokens", [1, 3, 6, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_change_neither_log_probs_nor_gradients(inputs, chunk_tokens, temperature):
    hidden, head_weight, token_ids, _ = inputs
    weights = torch.arange(1.0, NUM_TOKENS + 1)

    def run(chunk):
        leaves = hidden.clone().requires_grad_(), head_weight.clone().requires_grad_()
        logprobs = token_logprobs(*leaves, token_ids, temperature=temperature, chunk_tokens=chunk)
        (logprobs * weights).sum().backward()
        return logprobs.detach(), leaves[0].grad, leaves[1].grad

    for chunked, whole in zip(run(chunk_tokens), run(NUM_TOKENS), strict=True):
        assert torch.allclose(chunked, whole, atol=1e-6)


def test_token_log_probs_pick_the_sampled_token(inputs):
    hidden, head_weight, token_ids, _ = inputs
    rows = naive_log_distribution(hidden, head_weight, 1.0)
    expected = [row[token] for row, token in zip(rows, token_ids.tolist(), strict=True)]
    assert token_logprobs(hidden, head_weight, token_ids).tolist() == pytest.approx(expected, abs=1e-5)


def test_the_gradient_in_the_hidden_state_is_the_formula(inputs):
    hidden, head_weight, token_ids, _ = inputs
    temperature = 0.7
    leaf = hidden.clone().requires_grad_()
    token_logprobs(leaf, head_weight, token_ids, temperature=temperature, chunk_tokens=3).sum().backward()
    # d log p(y) / d logits = (onehot(y) - p) / temperature
    probs = torch.softmax(hidden.double() @ head_weight.double().T / temperature, dim=-1)
    onehot = torch.nn.functional.one_hot(token_ids, VOCAB).double()
    expected = (onehot - probs) / temperature @ head_weight.double()
    assert torch.allclose(leaf.grad.double(), expected, atol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [2, 7, 100])
def test_statistics_equal_loops_over_the_vocabulary(inputs, chunk_tokens):
    hidden, head_weight, token_ids, rollout = inputs
    statistics = token_statistics(
        hidden,
        head_weight,
        token_ids,
        rollout_log_distribution=rollout,
        temperature=1.5,
        chunk_tokens=chunk_tokens,
    )
    for index, (q, p) in enumerate(
        zip(naive_log_distribution(hidden, head_weight, 1.5), rollout.tolist(), strict=True)
    ):
        pairs = list(zip(p, q, strict=True))
        assert statistics.logprobs[index].item() == pytest.approx(q[token_ids[index]], abs=1e-5)
        assert statistics.entropy[index].item() == pytest.approx(-sum(math.exp(b) * b for b in q), abs=1e-5)
        assert statistics.kl[index].item() == pytest.approx(sum(math.exp(a) * (a - b) for a, b in pairs), abs=1e-5)
        expected = 0.5 * sum(abs(math.exp(a) - math.exp(b)) for a, b in pairs)
        assert statistics.total_variation[index].item() == pytest.approx(expected, abs=1e-5)


def test_statistics_and_log_probs_agree(inputs):
    hidden, head_weight, token_ids, _ = inputs
    statistics = token_statistics(hidden, head_weight, token_ids, temperature=0.8, chunk_tokens=2)
    direct = token_logprobs(hidden, head_weight, token_ids, temperature=0.8)
    assert torch.allclose(statistics.logprobs, direct, atol=1e-6)


def test_divergences_are_none_without_a_rollout_distribution(inputs):
    hidden, head_weight, token_ids, _ = inputs
    statistics = token_statistics(hidden, head_weight, token_ids)
    assert statistics.kl is None
    assert statistics.total_variation is None


def test_divergences_from_the_own_distribution_are_zero(inputs):
    hidden, head_weight, token_ids, _ = inputs
    own = log_distribution(hidden, head_weight)
    statistics = token_statistics(hidden, head_weight, token_ids, rollout_log_distribution=own, chunk_tokens=7)
    assert statistics.kl.max().item() < 1e-6
    assert statistics.total_variation.max().item() < 1e-6


def test_the_entropy_of_a_uniform_policy_is_log_v_and_of_a_certain_one_zero():
    uniform = token_statistics(torch.zeros(1, 2), torch.zeros(8, 2), torch.tensor([3]))
    assert uniform.entropy.item() == pytest.approx(math.log(8.0), abs=1e-6)
    certain = token_statistics(torch.ones(1, 1), torch.tensor([[200.0], [0.0]]), torch.tensor([0]))
    assert certain.entropy.item() == 0.0


def test_statistics_carry_no_gradient(inputs):
    hidden, head_weight, token_ids, rollout = inputs
    leaf = hidden.clone().requires_grad_()
    statistics = token_statistics(leaf, head_weight, token_ids, rollout_log_distribution=rollout)
    assert not any(value.requires_grad for value in statistics if value is not None)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor any operation returned."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, list | tuple) else [result]:
            if isinstance(value, torch.Tensor):
                self.num_elements = max(self.num_elements, value.numel())
        return result


@pytest.fixture
def many_tokens():
    generator = torch.Generator().manual_seed(0)  # 40 tokens of a vocabulary of 50, hidden size 4
    hidden = torch.randn(40, 4, generator=generator, requires_grad=True)
    head_weight = torch.randn(50, 4, generator=generator, requires_grad=True)
    return hidden, head_weight, torch.randint(50, (40,), generator=generator)


def test_nothing_of_the_size_of_the_vocabulary_is_kept_for_the_backward_pass(many_tokens):
    num_kept = []

    def keep(tensor):
        num_kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs = token_logprobs(*many_tokens, chunk_tokens=8)
    logprobs.sum().backward()
    assert max(num_kept) < 8 * 50  # the head, 50 x 4; without recomputation every chunk, 8 x 50


def test_no_more_than_one_chunk_of_the_vocabulary_exists_at_a_time_forward_or_backward(many_tokens):
    hidden, head_weight, token_ids = many_tokens
    vocab, chunk = 50, 8  # whole: 2000 elements; a chunk: 400
    with LargestTensor() as largest:
        token_logprobs(hidden, head_weight, token_ids, chunk_tokens=chunk).sum().backward()
    assert largest.num_elements == chunk * vocab
    with LargestTensor() as largest:
        token_statistics(hidden, head_weight, token_ids, chunk_tokens=chunk)
    assert largest.num_elements == chunk * vocab
