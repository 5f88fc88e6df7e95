import math
import random
from dataclasses import replace

import pytest
import torch

from trm_repro.certified import FLOAT32_ROUNDING, TopLogprobs, certified_kl_interval, default_normalizer_error
from trm_repro.divergence import exact_kl_divergence

EXACT = {"rounding": 2.0**-52, "normalizer_error": 1e-14}  # for log-probs that are right to float64


def stored(logprobs, num_top, sampled_ids=None):
    """Keep of ``[N, V]`` log-probs what an engine stores; the likeliest token is sampled unless said."""
    values, ids = logprobs.topk(num_top, dim=-1)
    sampled_ids = ids[:, 0] if sampled_ids is None else sampled_ids
    sampled_logprobs = logprobs.gather(-1, sampled_ids[:, None])[:, 0]
    return TopLogprobs(ids=ids, logprobs=values, sampled_ids=sampled_ids, sampled_logprobs=sampled_logprobs)


def logs(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def kl(rollout, policy):
    """Exact KL in float64 from ``[N, V]`` logits."""
    return exact_kl_divergence(rollout.double().log_softmax(dim=-1), policy.double().log_softmax(dim=-1))


def sample(logits, generator):
    return torch.multinomial(logits.double().softmax(dim=-1), 1, generator=generator)[:, 0]


def contains(interval, truth, slack=1e-15):
    return (interval.low <= truth + slack) & (truth <= interval.high)


# Hand cases


def test_both_ends_of_a_hand_case_with_a_sampled_token_beyond_the_top_two():
    rollout = logs([0.2, 0.03, 0.07, 0.6, 0.1])
    policy = logs([0.25, 0.05, 0.1, 0.5, 0.1])
    interval = certified_kl_interval(stored(rollout, 2, torch.tensor([4])), policy, **EXACT)
    known = 0.6 * math.log(0.6 / 0.5) + 0.2 * math.log(0.2 / 0.25) + 0.1 * math.log(1.0)
    assert float(interval.low) == pytest.approx(known + 0.1 * math.log(0.1 / 0.15), abs=1e-12)
    # The cap, 0.2, lets one token hold the whole tail mass of 0.1: the one that the policy gives 0.05.
    assert float(interval.high) == pytest.approx(known + 0.1 * math.log(0.1 / 0.05), abs=1e-12)


def test_the_tail_fills_the_tokens_with_the_smallest_policy_up_to_the_cap():
    rollout = logs([0.4, 0.25, 0.15, 0.12, 0.08])
    policy = logs([0.3, 0.3, 0.1, 0.08, 0.22])
    interval = certified_kl_interval(stored(rollout, 2), policy, **EXACT)
    known = 0.4 * math.log(0.4 / 0.3) + 0.25 * math.log(0.25 / 0.3)
    assert float(interval.high) == pytest.approx(
        known + 0.25 * math.log(0.25 / 0.08) + 0.1 * math.log(0.1 / 0.1), abs=1e-12
    )
    assert float(interval.low) == pytest.approx(known + 0.35 * math.log(0.35 / 0.4), abs=1e-12)


def test_equal_policies_have_low_zero_and_a_positive_width():
    rollout = logs([0.5, 0.2, 0.2, 0.1])
    interval = certified_kl_interval(stored(rollout, 1), rollout, **EXACT)
    assert float(interval.low) == pytest.approx(0.0, abs=1e-12)
    assert float(interval.high) == pytest.approx(0.5 * math.log(0.5 / 0.1), abs=1e-12)


# Independent formulas


def loop_interval(probabilities, policy, known_ids, cap):
    """Both ends by plain loops, for one token and exact inputs."""
    tail_ids = [token for token in range(len(policy)) if token not in known_ids]
    known = sum(probabilities[v] * math.log(probabilities[v] / policy[v]) for v in known_ids)
    mass = 1 - math.fsum(probabilities[v] for v in known_ids)
    low = high = known
    if tail_ids and mass > 1e-14:
        low += mass * math.log(mass / math.fsum(policy[v] for v in tail_ids))
        for token in sorted(tail_ids, key=lambda v: policy[v]):
            part = min(cap, mass)
            if part > 0:
                high += part * math.log(part / policy[token])
            mass -= part
    return low, high


def test_both_ends_equal_plain_loops_on_random_tokens():
    generator = torch.Generator().manual_seed(0)
    for trial in range(400):
        vocabulary = 2 + trial % 40
        num_top = 1 + trial % vocabulary
        scale = 0.1 + 4 * float(torch.rand(1, generator=generator))
        rollout = (torch.randn(1, vocabulary, generator=generator, dtype=torch.float64) * scale).log_softmax(dim=-1)
        policy = rollout + torch.randn(1, vocabulary, generator=generator, dtype=torch.float64) * (trial % 3)
        policy = policy.log_softmax(dim=-1)
        sampled = torch.randint(vocabulary, (1,), generator=generator)
        entry = stored(rollout, num_top, sampled)
        interval = certified_kl_interval(entry, policy, **EXACT)
        known_ids = {*entry.ids[0].tolist(), int(sampled)}
        low, high = loop_interval(
            rollout.exp()[0].tolist(), policy.exp()[0].tolist(), known_ids, float(entry.logprobs.min().exp())
        )
        assert float(interval.low) == pytest.approx(max(low, 0), abs=1e-11)
        assert float(interval.high) == pytest.approx(high, abs=1e-11)


def random_tail(mass, cap, num_tokens, chance):
    """Draw any distribution of a mass over tokens with none above the cap, often one with most at an end."""
    order, tail = chance.sample(range(num_tokens), num_tokens), [0.0] * num_tokens
    left = mass
    for place, token in enumerate(order):
        room = cap * (num_tokens - place - 1)
        part = chance.choice([min(cap, left), max(0.0, left - room), chance.uniform(max(0.0, left - room), cap)])
        tail[token] = min(part, left)
        left -= tail[token]
    return tail


def test_no_tail_that_fits_the_stored_log_probs_leaves_the_interval_and_some_reach_its_ends():
    chance = random.Random(0)
    for trial in range(40):
        num_tail = 2 + trial % 7
        cap = 0.5 / (2 + trial % 5)
        top = [0.5 - cap / 3, cap, cap]
        mass = 1 - sum(top)
        if mass > cap * num_tail:
            num_tail = math.ceil(mass / cap)
        weights = [chance.expovariate(1) + 1e-3 for _ in range(3 + num_tail)]
        policy = logs([weight / sum(weights) for weight in weights])
        entry = TopLogprobs(
            ids=torch.tensor([[0, 1, 2]]),
            logprobs=logs(top),
            sampled_ids=torch.tensor([0]),
            sampled_logprobs=logs(top)[:, 0],
        )
        interval = certified_kl_interval(entry, policy, **EXACT)
        rows = [top + random_tail(mass, cap, num_tail, chance) for _ in range(60)]
        truths = exact_kl_divergence(logs(*rows), policy.expand(60, -1))
        assert (truths <= float(interval.high) + 1e-12).all()
        assert (truths >= float(interval.low) - 1e-12).all()
        # The greedy tail reaches the upper end.
        tail, left = [0.0] * num_tail, mass
        for token in sorted(range(num_tail), key=lambda v: weights[3 + v]):
            tail[token] = min(cap, left)
            left -= tail[token]
        assert float(kl(logs(top + tail), policy)) == pytest.approx(float(interval.high), abs=1e-11)
        # A tail in the policy's proportions reaches the lower end where it fits under the cap.
        tail_policy = policy.exp()[0, 3:]
        proportional = (mass * tail_policy / tail_policy.sum()).tolist()
        if max(proportional) <= cap:
            assert float(kl(logs(top + proportional), policy)) == pytest.approx(float(interval.low), abs=1e-11)


# Width


@pytest.mark.parametrize("scale", [0.5, 2.0, 5.0])
def test_more_entries_raise_the_low_end_and_lower_the_high_one(scale):
    generator = torch.Generator().manual_seed(0)
    rollout = (torch.randn(50, 60, generator=generator, dtype=torch.float64) * scale).log_softmax(dim=-1)
    policy = (rollout + 0.3 * torch.randn(50, 60, generator=generator, dtype=torch.float64)).log_softmax(dim=-1)
    sampled = sample(rollout, generator)
    intervals = [certified_kl_interval(stored(rollout, k, sampled), policy, **EXACT) for k in range(1, 61)]
    for narrow, wide in zip(intervals[1:], intervals, strict=False):
        assert (narrow.low >= wide.low - 1e-12).all()
        assert (narrow.high <= wide.high + 1e-12).all()


def test_the_whole_vocabulary_gives_exact_kl():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 18, generator=generator) * 4
    policy = logits + 0.3 * torch.randn(300, 18, generator=generator)
    truth = kl(logits, policy)
    in_float32 = certified_kl_interval(stored(logits.log_softmax(dim=-1), 18), policy.log_softmax(dim=-1))
    assert (in_float32.high - in_float32.low).max() < 1e-5
    in_float64 = certified_kl_interval(
        stored(logits.double().log_softmax(dim=-1), 18), policy.double().log_softmax(dim=-1), **EXACT
    )
    for end in in_float64:
        torch.testing.assert_close(end, truth, atol=1e-13, rtol=0)


def test_at_the_whole_vocabulary_an_error_that_a_row_shares_is_removed():
    rollout = logs([0.5, 0.3, 0.2])
    policy = logs([0.4, 0.4, 0.2])
    interval = certified_kl_interval(stored(rollout + 1e-4, 3), policy, rounding=2.0**-52, normalizer_error=2e-4)
    for end in interval:
        torch.testing.assert_close(end, kl(rollout, policy), atol=1e-13, rtol=0)


def test_the_policy_may_be_given_without_its_normalizer():
    rollout, policy = logs([0.5, 0.3, 0.2]), logs([0.4, 0.4, 0.2])
    normalized = certified_kl_interval(stored(rollout, 2), policy, **EXACT)
    shifted = certified_kl_interval(stored(rollout, 2), policy + 3.0, **EXACT)
    torch.testing.assert_close(normalized, shifted, atol=1e-12, rtol=0)


def test_widths_on_a_large_vocabulary_fall_with_the_entries_and_with_the_entropy():
    generator = torch.Generator().manual_seed(0)
    vocabulary = 151_936
    rank = torch.arange(1, vocabulary + 1)
    widths = {}
    for exponent in (1.5, 2.5, 4.0):  # Zipf tails; entropy near 3.2, 1.1 and 0.4 nats
        logits = -exponent * rank.log() + 0.5 * torch.randn(4, vocabulary, generator=generator)
        policy = logits + 0.1 * torch.randn(4, vocabulary, generator=generator)
        accurate = logits.double().log_softmax(dim=-1).float()
        for num_top in (64, 256, 1024):
            interval = certified_kl_interval(stored(accurate, num_top), policy, normalizer_error=4e-6)
            assert contains(interval, kl(logits, policy)).all()
            widths[exponent, num_top] = float((interval.high - interval.low).mean())
    for exponent in (1.5, 2.5, 4.0):
        assert widths[exponent, 64] > widths[exponent, 256] > widths[exponent, 1024]
    for num_top in (64, 256, 1024):
        assert widths[1.5, num_top] > widths[2.5, num_top] > widths[4.0, num_top]
    assert widths[1.5, 1024] > 0.05  # a broad distribution is beyond a thousand entries
    assert widths[2.5, 1024] < 1e-3
    assert widths[4.0, 64] < 1e-3


# Zeros, repetitions, contradictions


def test_a_policy_zero_in_the_tail_makes_the_high_end_infinite():
    interval = certified_kl_interval(stored(logs([0.7, 0.2, 0.06, 0.04]), 2), logs([0.6, 0.3, 0.1, 0.0]), **EXACT)
    assert interval.high.isinf().all()
    assert interval.low.isfinite().all()


def test_a_policy_without_any_tail_makes_both_ends_infinite():
    interval = certified_kl_interval(stored(logs([0.7, 0.2, 0.06, 0.04]), 2), logs([0.6, 0.4, 0.0, 0.0]), **EXACT)
    assert interval.low.isinf().all()
    assert interval.high.isinf().all()


def test_a_policy_zero_on_a_stored_token_makes_both_ends_infinite():
    interval = certified_kl_interval(stored(logs([0.7, 0.2, 0.1]), 2), logs([0.6, 0.0, 0.4]), **EXACT)
    assert interval.low.isinf().all()
    assert interval.high.isinf().all()


def test_stored_zeros_say_that_the_tail_is_empty():
    rollout, policy = logs([0.7, 0.3, 0.0, 0.0, 0.0]), logs([0.5, 0.3, 0.2, 0.0, 0.0])
    interval = certified_kl_interval(stored(rollout, 3), policy, **EXACT)
    for end in interval:
        assert float(end) == pytest.approx(0.7 * math.log(0.7 / 0.5), abs=1e-12)


def test_a_sampled_token_among_the_stored_ones_is_counted_once():
    rollout, policy = logs([0.5, 0.3, 0.1, 0.1]), logs([0.4, 0.3, 0.2, 0.1])
    first, second = (certified_kl_interval(stored(rollout, 2, torch.tensor([v])), policy, **EXACT) for v in (0, 1))
    assert first == second


def test_a_sampled_token_beyond_the_stored_ones_narrows_the_interval():
    rollout, policy = logs([0.5, 0.3, 0.12, 0.08]), logs([0.4, 0.3, 0.2, 0.1])
    inside, beyond = (certified_kl_interval(stored(rollout, 2, torch.tensor([v])), policy, **EXACT) for v in (0, 3))
    assert beyond.low > inside.low
    assert beyond.high < inside.high


def test_the_order_of_the_stored_tokens_does_not_matter():
    rollout, policy = logs([0.5, 0.3, 0.12, 0.08]), logs([0.4, 0.3, 0.2, 0.1])
    entry = stored(rollout, 3)
    reverse = replace(entry, ids=entry.ids.flip(-1), logprobs=entry.logprobs.flip(-1))
    torch.testing.assert_close(
        certified_kl_interval(entry, policy), certified_kl_interval(reverse, policy), atol=1e-15, rtol=0
    )


def contradictions():
    entry = stored(logs([0.5, 0.3, 0.12, 0.08]), 2, torch.tensor([3]))
    nan = torch.tensor([[math.nan, -1.2]], dtype=torch.float64)
    return {
        "more than 1 in all": replace(entry, logprobs=logs([0.9, 0.3])),
        "more left than the tail can hold": replace(
            entry, logprobs=logs([0.5, 0.05]), sampled_logprobs=logs([0.01])[0]
        ),
        "nothing stored": replace(entry, logprobs=logs([0.0, 0.0]), sampled_logprobs=logs([0.0])[0]),
        "two values of the sampled token": replace(entry, sampled_ids=torch.tensor([1])),
        "NaN among the stored": replace(entry, logprobs=nan),
        "NaN for the sampled token": replace(entry, sampled_logprobs=torch.tensor([math.nan])),
        "infinite": replace(entry, logprobs=torch.tensor([[math.inf, -1.2]], dtype=torch.float64)),
    }


@pytest.mark.parametrize("name", contradictions())
def test_log_probs_that_fit_no_distribution_certify_nothing(name):
    interval = certified_kl_interval(contradictions()[name], logs([0.4, 0.3, 0.2, 0.1]))
    assert interval.low.isnan().all()
    assert interval.high.isnan().all()


def test_a_sampled_token_above_the_smallest_stored_one_certifies_nothing():
    entry = stored(logs([0.5, 0.1, 0.2, 0.1, 0.1]), 2, torch.tensor([2]))
    entry = replace(entry, ids=torch.tensor([[0, 1]]), logprobs=logs([0.5, 0.1]))
    assert certified_kl_interval(entry, logs([0.2] * 5)).high.isnan().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("token", [0, 3])
def test_a_policy_that_is_not_a_distribution_certifies_nothing(bad, token):
    policy = logs([0.4, 0.3, 0.2, 0.1])
    policy[0, token] = bad
    interval = certified_kl_interval(stored(logs([0.5, 0.3, 0.12, 0.08]), 2), policy)
    assert interval.low.isnan().all()
    assert interval.high.isnan().all()


def test_one_bad_token_leaves_the_others_as_they_are():
    rollout, policy = logs(*[[0.5, 0.3, 0.12, 0.08]] * 3), logs(*[[0.4, 0.3, 0.2, 0.1]] * 3)
    entry = stored(rollout, 2)
    alone = certified_kl_interval(entry, policy)
    logprobs = entry.logprobs.clone()
    logprobs[1, 0] = math.nan
    together = certified_kl_interval(replace(entry, logprobs=logprobs), policy)
    for end, expected in zip(together, alone, strict=True):
        assert end[1].isnan()
        assert torch.equal(end[[0, 2]], expected[[0, 2]])


def test_chunks_do_not_change_the_result():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(37, 50, generator=generator) * 3
    policy = (logits + torch.randn(37, 50, generator=generator)).log_softmax(dim=-1)
    entry = stored(logits.log_softmax(dim=-1), 9, sample(logits, generator))
    whole = certified_kl_interval(entry, policy)
    for chunk_elements in (1, 50, 499, 500):
        chunked = certified_kl_interval(entry, policy, chunk_elements=chunk_elements)
        torch.testing.assert_close(chunked, whole, atol=1e-13, rtol=1e-12)


def test_no_tokens_give_no_intervals():
    empty = TopLogprobs(
        ids=torch.zeros(0, 2, dtype=torch.long),
        logprobs=torch.zeros(0, 2),
        sampled_ids=torch.zeros(0, dtype=torch.long),
        sampled_logprobs=torch.zeros(0),
    )
    assert certified_kl_interval(empty, torch.zeros(0, 5)).low.shape == (0,)


def test_inputs_that_do_not_fit_together_are_refused():
    policy = logs([0.4, 0.3, 0.2, 0.1])
    entry = stored(policy, 2)
    with pytest.raises(ValueError, match="got one twice"):
        certified_kl_interval(replace(entry, ids=torch.tensor([[1, 1]])), policy)
    for ids in ([[0, 4]], [[-1, 0]]):
        with pytest.raises(ValueError, match="ids must be in"):
            certified_kl_interval(replace(entry, ids=torch.tensor(ids)), policy)
    with pytest.raises(ValueError, match="tokens, the policy"):
        certified_kl_interval(entry, policy.expand(2, -1))
    with pytest.raises(ValueError, match="logprobs must be"):
        replace(entry, logprobs=entry.logprobs[:, :1])
    with pytest.raises(ValueError, match="sampled_ids must be"):
        replace(entry, sampled_ids=torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="at least one token"):
        replace(entry, ids=entry.ids[:, :0], logprobs=entry.logprobs[:, :0])
    for rounding in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="rounding must be"):
            certified_kl_interval(entry, policy, rounding=rounding)
    for normalizer_error in (-1e-9, 1.0, math.nan):
        with pytest.raises(ValueError, match="normalizer_error must be"):
            certified_kl_interval(entry, policy, normalizer_error=normalizer_error)


def test_the_default_margin_is_the_stated_one():
    assert default_normalizer_error(151_936) == pytest.approx(1.13e-3, rel=0.01)
    assert default_normalizer_error(18) < 3e-6
    assert torch.finfo(torch.float32).eps == FLOAT32_ROUNDING
