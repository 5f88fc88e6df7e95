import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from trm_repro.certified import TopLogprobs
from trm_repro.divergence import exact_kl_divergence, exact_total_variation
from trm_repro.errors import FaultError
from trm_repro.vocab import HiddenRollout, chunks, token_logprobs, token_statistics

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


def log_softmax64(hidden, head_weight, temperature=1.0):
    return torch.log_softmax(hidden.double() @ head_weight.double().T / temperature, dim=-1)


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
        rollout=rollout,
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
    own = log_softmax64(hidden, head_weight).float()
    statistics = token_statistics(hidden, head_weight, token_ids, rollout=own, chunk_tokens=7)
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
    statistics = token_statistics(leaf, head_weight, token_ids, rollout=rollout)
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


def surrogate(logprobs):
    """An objective of the kind losses have: an advantage times the exponential of a log-ratio."""
    rollout_logprobs = torch.linspace(-3.0, -1.0, NUM_TOKENS, dtype=logprobs.dtype)
    advantages = torch.tensor([1.0, -0.5, 2.0, 0.0, -1.0, 0.3, 1.5], dtype=logprobs.dtype)
    return (advantages * torch.exp(logprobs - rollout_logprobs)).sum()


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
@pytest.mark.parametrize("tile_rows", [1, 4, 13, 4096])
def test_log_prob_gradients_pass_gradcheck_in_float64(inputs, chunk_tokens, tile_rows, monkeypatch):
    monkeypatch.setattr(chunks, "TILE_ROWS", tile_rows)
    hidden, head_weight, token_ids, _ = inputs
    leaves = hidden.double().requires_grad_(), head_weight.double().requires_grad_()
    settings = {"temperature": 0.7, "chunk_tokens": chunk_tokens}
    assert torch.autograd.gradcheck(lambda h, w: token_logprobs(h, w, token_ids, **settings), leaves)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100, None])
@pytest.mark.parametrize("is_given", [False, True])
def test_log_probs_and_gradients_equal_autograds_of_the_naive_form(inputs, chunk_tokens, is_given):
    hidden, head_weight, token_ids, _ = (value.double() if value.is_floating_point() else value for value in inputs)
    normalizers = (hidden @ head_weight.T / 0.7).logsumexp(dim=-1) if is_given else None

    def naive(h, w):
        return torch.log_softmax(h @ w.T / 0.7, dim=-1).gather(-1, token_ids[:, None])[:, 0]

    def ours(h, w):
        settings = {"temperature": 0.7, "chunk_tokens": chunk_tokens, "normalizers": normalizers}
        return token_logprobs(h, w, token_ids, **settings)

    results = []
    for function in (naive, ours):
        leaves = hidden.clone().requires_grad_(), head_weight.clone().requires_grad_()
        logprobs = function(*leaves)
        (-0.25 * surrogate(logprobs)).backward()
        results.append((logprobs.detach(), leaves[0].grad, leaves[1].grad))
    for expected, value in zip(*results, strict=True):
        torch.testing.assert_close(value, expected, atol=1e-12, rtol=1e-12)


def test_the_normalizers_of_the_statistics_are_those_that_log_probs_need(inputs):
    hidden, head_weight, token_ids, _ = inputs
    normalizers = token_statistics(hidden, head_weight, token_ids, temperature=0.6, chunk_tokens=2).normalizers
    logits = hidden.double() @ head_weight.double().T / 0.6
    torch.testing.assert_close(normalizers.double(), logits.logsumexp(dim=-1), atol=1e-6, rtol=1e-6)
    given = token_logprobs(hidden, head_weight, token_ids, normalizers=normalizers, temperature=0.6)
    torch.testing.assert_close(given, token_logprobs(hidden, head_weight, token_ids, temperature=0.6))


def test_gradients_are_formed_for_the_inputs_that_need_them_only(inputs):
    hidden, head_weight, token_ids, _ = inputs
    both = hidden.clone().requires_grad_(), head_weight.clone().requires_grad_()
    surrogate(token_logprobs(*both, token_ids)).backward()
    for index, gradient in enumerate((both[0].grad, both[1].grad)):
        leaves = [hidden, head_weight]
        leaves[index] = leaves[index].clone().requires_grad_()
        surrogate(token_logprobs(*leaves, token_ids)).backward()
        torch.testing.assert_close(leaves[index].grad, gradient)
    with torch.no_grad():
        assert not token_logprobs(*both, token_ids).requires_grad


@pytest.mark.parametrize("shift", [0.01, -0.01])
def test_normalizers_that_are_not_these_tokens_are_told_in_the_backward_pass(inputs, shift):
    hidden, head_weight, token_ids, _ = inputs
    leaf = hidden.clone().requires_grad_()
    normalizers = token_statistics(hidden, head_weight, token_ids).normalizers
    one_off = normalizers + shift * (torch.arange(NUM_TOKENS) == 3)  # a single token may differ, by a broken tie
    token_logprobs(leaf, head_weight, token_ids, normalizers=one_off).sum().backward()
    logprobs = token_logprobs(leaf, head_weight, token_ids, normalizers=normalizers + shift)
    with pytest.raises(FaultError, match=f"add up to {math.exp(-shift):.4f}, not 1"):
        logprobs.sum().backward()


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_no_token_and_one_token_are_valid(num_tokens):
    hidden = torch.ones(num_tokens, 2, requires_grad=True)
    head_weight = torch.zeros(3, 2, requires_grad=True)
    token_ids = torch.zeros(num_tokens, dtype=torch.int64)
    logprobs = token_logprobs(hidden, head_weight, token_ids)
    logprobs.sum().backward()
    assert hidden.grad.shape == (num_tokens, 2)
    assert logprobs.tolist() == pytest.approx([-math.log(3.0)] * num_tokens)
    # onehot - p = (2/3, -1/3, -1/3) for the one token
    assert head_weight.grad[:, 0].tolist() == pytest.approx([num_tokens * x for x in (2 / 3, -1 / 3, -1 / 3)])
    assert token_statistics(hidden, head_weight, token_ids).logprobs.shape == (num_tokens,)


def test_half_precision_inputs_are_accumulated_in_float32_and_their_logits_not_rounded():
    hidden = torch.tensor([[1.0, 2.0**-9]], dtype=torch.bfloat16, requires_grad=True)
    head_weight = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.bfloat16, requires_grad=True)
    # logits 1 + 2^-9 and 1 - 2^-9: bfloat16 would round the first to 1 and the distance of 2^-8 to 2^-9
    logprobs = token_logprobs(hidden, head_weight, torch.tensor([0]))
    assert logprobs.dtype == torch.float32
    assert logprobs.item() == pytest.approx(-math.log1p(math.exp(-(2.0**-8))), abs=1e-7)
    logprobs.backward()
    assert hidden.grad.dtype == head_weight.grad.dtype == torch.bfloat16
    p_other = 1 / (1 + math.exp(2.0**-8))
    assert head_weight.grad[0, 0].item() == pytest.approx(p_other, rel=2**-8)
    assert hidden.grad[0, 1].item() == pytest.approx(2 * p_other, rel=2**-8)


@pytest.mark.parametrize("tile_rows", [1, 5, 4096])
@pytest.mark.parametrize("chunk_tokens", [3, 100])
def test_half_precision_gradients_are_those_of_the_same_numbers_in_float64(
    inputs, chunk_tokens, tile_rows, monkeypatch
):
    monkeypatch.setattr(chunks, "TILE_ROWS", tile_rows)
    hidden, head_weight, token_ids, _ = inputs
    leaves = hidden.bfloat16().requires_grad_(), head_weight.bfloat16().requires_grad_()
    surrogate(token_logprobs(*leaves, token_ids, chunk_tokens=chunk_tokens)).backward()
    exact = leaves[0].detach().double().requires_grad_(), leaves[1].detach().double().requires_grad_()
    surrogate(token_logprobs(*exact, token_ids)).backward()
    for leaf, wanted in zip(leaves, exact, strict=True):
        # half a unit in the last place of bfloat16, from the one rounding at the end
        torch.testing.assert_close(leaf.grad.double(), wanted.grad, rtol=2**-8, atol=1e-5)


def rollout_parts(dtype=torch.float32):
    """Hidden states of another width than the policy's, from weights of two versions."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(NUM_TOKENS, 4, generator=generator).to(dtype)
    heads = {version: torch.randn(VOCAB, 4, generator=generator).to(dtype) for version in (3, 8)}
    versions = torch.tensor([3, 3, 8, 3, 8, 8, 8])
    return HiddenRollout(hidden=hidden, versions=versions, heads=heads)


@pytest.mark.parametrize("chunk_tokens", [1, 2, 7, 100])
@pytest.mark.parametrize("tile_rows", [1, 5, 4096])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_divergence_from_hidden_states_equals_that_from_full_log_probs(
    inputs, chunk_tokens, tile_rows, temperature, monkeypatch
):
    monkeypatch.setattr(chunks, "TILE_ROWS", tile_rows)
    hidden, head_weight, token_ids, _ = inputs
    rollout = rollout_parts()
    rows = zip(rollout.hidden, rollout.versions.tolist(), strict=True)
    full = torch.stack([log_softmax64(row, rollout.heads[version], temperature) for row, version in rows])
    policy = log_softmax64(hidden, head_weight, temperature)
    statistics = token_statistics(
        hidden, head_weight, token_ids, rollout=rollout, temperature=temperature, chunk_tokens=chunk_tokens
    )
    exact = {"atol": 2e-6, "rtol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(statistics.kl, exact_kl_divergence(full, policy), **exact)
    torch.testing.assert_close(statistics.total_variation, exact_total_variation(full, policy), **exact)
    torch.testing.assert_close(statistics.rebuilt_logprobs, full.gather(-1, token_ids[:, None])[:, 0], **exact)
    stored = token_statistics(hidden, head_weight, token_ids, rollout=full.float(), temperature=temperature)
    torch.testing.assert_close(statistics.kl, stored.kl, **exact)


def test_rebuilt_logits_are_rounded_to_the_engines_dtype():
    rollout = HiddenRollout(
        hidden=torch.tensor([[1.0, 2.0**-9]], dtype=torch.bfloat16),
        versions=torch.tensor([0]),
        heads={0: torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.bfloat16)},
    )
    statistics = token_statistics(torch.zeros(1, 1), torch.zeros(2, 1), torch.tensor([0]), rollout=rollout)
    # 1 + 2^-9 rounds to 1; 1 - 2^-9 stays, below 1 the spacing is 2^-8 / 2
    rounded = torch.tensor([1.0, 1.0 - 2.0**-9], dtype=torch.bfloat16).double()
    expected = torch.log_softmax(rounded, dim=-1)[0]
    assert statistics.rebuilt_logprobs.item() == pytest.approx(expected.item(), abs=1e-7)
    # one unit in the last place, 2^-7 of the largest logit, on either side of the difference
    assert statistics.rebuilt_tolerance.item() == pytest.approx(2 * 2.0**-7, rel=0.01)


def test_an_error_of_a_whole_row_of_log_probs_hardly_changes_its_kl(inputs):
    hidden, head_weight, token_ids, rollout = inputs
    right = token_statistics(hidden, head_weight, token_ids, rollout=rollout)
    # float32 log-softmax over 151,936 words is off by up to 5e-4; summed as p (log p - log q), so would be the KL
    shifted = token_statistics(hidden, head_weight, token_ids, rollout=rollout + 5e-4)
    assert float((shifted.kl - right.kl).abs().max()) < 5e-4 * float(right.kl.max()) + 1e-6
    own = log_softmax64(hidden, head_weight).float()
    assert float(token_statistics(hidden, head_weight, token_ids, rollout=own + 5e-4).kl.max()) < 1e-6


def test_a_token_that_the_rollout_policy_cannot_sample_adds_nothing_and_one_that_the_policy_drops_is_infinite():
    token_ids = torch.tensor([0])
    rollout = torch.tensor([[math.log(0.5), math.log(0.5), -math.inf]])
    uniform = token_statistics(torch.zeros(1, 1), torch.zeros(3, 1), token_ids, rollout=rollout)
    assert uniform.kl.item() == pytest.approx(math.log(1.5), abs=1e-6)
    certain = token_statistics(torch.ones(1, 1), torch.tensor([[300.0], [0.0], [0.0]]), token_ids, rollout=rollout)
    assert certain.kl.item() == pytest.approx(0.5 * 300 - math.log(2.0), rel=1e-6)


def test_the_interval_from_the_likeliest_tokens_holds_the_exact_divergence(inputs):
    hidden, head_weight, token_ids, rollout = inputs
    top = rollout.topk(4)
    sampled = rollout.gather(-1, token_ids[:, None])[:, 0]
    known = TopLogprobs(ids=top.indices, logprobs=top.values, sampled_ids=token_ids, sampled_logprobs=sampled)
    exact = token_statistics(hidden, head_weight, token_ids, rollout=rollout).kl
    interval = token_statistics(hidden, head_weight, token_ids, rollout=known, chunk_tokens=3)
    assert bool((interval.kl_low <= exact + 1e-6).all() & (exact <= interval.kl_high + 1e-6).all())
    assert interval.kl is None


def test_chunks_cover_the_tokens_in_nearly_equal_parts():
    cpu = torch.device("cpu")
    sizes = [chunk.stop - chunk.start for chunk in chunks.token_chunks(512, 151_936, None, cpu)]
    assert sizes == [128, 128, 128, 128]  # 20 x 2^20 logits are 138 tokens
    assert [(c.start, c.stop) for c in chunks.token_chunks(5, 10, 2, cpu)] == [(0, 2), (2, 4), (4, 5)]
    assert list(chunks.token_chunks(0, 10, None, cpu)) == []
    assert len(list(chunks.token_chunks(2, 2**30, None, cpu))) == 2  # a vocabulary too large for one token's budget


def test_nothing_of_the_size_of_the_vocabulary_is_kept_for_the_backward_pass(many_tokens):
    num_kept = []

    def keep(tensor):
        num_kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs = token_logprobs(*many_tokens, chunk_tokens=8)
    logprobs.sum().backward()
    assert max(num_kept) == 50 * 4  # the head; without recomputation every chunk, 8 x 50


def test_no_more_than_one_chunk_of_the_vocabulary_exists_at_a_time_forward_or_backward(many_tokens):
    hidden, head_weight, token_ids = many_tokens
    vocab, chunk = 50, 8  # whole: 2000 elements; a chunk: 400, two of them where both policies are needed
    rollout = HiddenRollout(
        hidden=hidden.detach(), versions=torch.zeros(40, dtype=torch.int64), heads={0: head_weight.detach()}
    )
    with LargestTensor() as largest:
        token_logprobs(hidden, head_weight, token_ids, chunk_tokens=chunk).sum().backward()
        token_statistics(hidden, head_weight, token_ids, chunk_tokens=chunk)
    assert largest.num_elements == chunk * vocab
    with LargestTensor() as largest:
        token_statistics(hidden, head_weight, token_ids, rollout=rollout, chunk_tokens=chunk)
    assert largest.num_elements == 2 * chunk * vocab


def test_gradients_cost_three_matrix_products_given_the_normalizers_and_four_without(many_tokens):
    hidden, head_weight, token_ids = many_tokens
    product = 2 * 40 * 50 * 4  # operations of tokens x vocabulary x hidden size
    normalizers = token_statistics(hidden, head_weight, token_ids).normalizers
    forms = {
        3: lambda: token_logprobs(*many_tokens, normalizers=normalizers, chunk_tokens=8).sum().backward(),
        4: lambda: token_logprobs(*many_tokens, chunk_tokens=8).sum().backward(),
        1: lambda: token_statistics(*many_tokens, chunk_tokens=8),
    }
    for num_products, form in forms.items():
        with FlopCounterMode(display=False) as counter:
            form()
        gathered = 0 if num_products == 1 else 2 * 40 * 4  # each token's own row of the head
        assert counter.get_total_flops() - num_products * product in (0, gathered)
