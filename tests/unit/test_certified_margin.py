import math
import random

import pytest
import torch

from trm_repro.certified import TopLogprobs, certified_kl_interval, default_normalizer_error
from trm_repro.divergence import exact_kl_divergence


def stored(logprobs, num_top, sampled_ids=None):
    """Keep of ``[N, V]`` log-probs what an engine stores; the likeliest token is sampled unless said."""
    values, ids = logprobs.topk(num_top, dim=-1)
    sampled_ids = ids[:, 0] if sampled_ids is None else sampled_ids
    sampled_logprobs = logprobs.gather(-1, sampled_ids[:, None])[:, 0]
    return TopLogprobs(ids=ids, logprobs=values, sampled_ids=sampled_ids, sampled_logprobs=sampled_logprobs)


def kl(rollout, policy):
    """Exact KL in float64 from ``[N, V]`` logits."""
    return exact_kl_divergence(rollout.double().log_softmax(dim=-1), policy.double().log_softmax(dim=-1))


def sample(logits, generator):
    return torch.multinomial(logits.double().softmax(dim=-1), 1, generator=generator)[:, 0]


def contains(interval, truth, slack=1e-15):
    return (interval.low <= truth + slack) & (truth <= interval.high)


# The truth is never excluded


@pytest.mark.parametrize("scale", [0.0, 0.5, 2.0, 6.0, 20.0, 60.0])
@pytest.mark.parametrize("noise", [0.0, 1e-4, 0.03, 0.3, 5.0])
def test_the_interval_holds_the_truth_for_float32_log_probs(scale, noise):
    generator = torch.Generator().manual_seed(round(1000 * scale + 10 * noise))
    for vocabulary in (2, 7, 40, 300):
        for num_top in sorted({1, 2, vocabulary // 3 + 1, vocabulary - 1, vocabulary}):
            logits = torch.randn(40, vocabulary, generator=generator) * scale
            policy = logits + torch.randn(40, vocabulary, generator=generator) * noise
            entry = stored(logits.log_softmax(dim=-1), num_top, sample(logits, generator))
            interval = certified_kl_interval(entry, policy.log_softmax(dim=-1))
            assert contains(interval, kl(logits, policy)).all()
            assert (interval.low <= interval.high).all()


def adversarial_pairs():
    """Name pairs of logits ``[1, V]`` float32 that stress one step each."""
    vocabulary = 200
    ramp = torch.arange(vocabulary, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(vocabulary, generator=generator)
    one_high = torch.zeros(vocabulary)
    one_high[17] = 16.6  # the others share a mass of 1.2e-5
    step = torch.where(ramp < 64, 0.0, -30.0)
    holes = torch.where(ramp % 3 == 0, -torch.inf, noise)
    return {
        "peaked on both sides": (one_high, one_high + 0.1 * noise),
        "peaked, policy flat": (one_high, 0.1 * noise),
        "flat, policy peaked": (0.1 * noise, one_high),
        "all tied": (torch.zeros(vocabulary), noise),
        "a steep ramp": (-ramp, -ramp + 0.2 * noise),
        "a ramp against its reverse": (-ramp / 8, ramp.flip(0) / 8),
        "a cliff": (step, step + 0.5 * noise),
        "a cliff in the rollout only": (step, noise),
        "tokens that cannot be sampled": (holes, holes + 0.1 * noise),
        "one token has everything": (torch.where(ramp == 5, 0.0, -torch.inf), noise),
        "near-certain": (torch.where(ramp == 5, 0.0, -90.0), torch.where(ramp == 5, 0.0, -80.0)),
        "far from zero": (noise + 60000.0, noise.flip(0) - 60000.0),
    }


@pytest.mark.parametrize("name", adversarial_pairs())
@pytest.mark.parametrize("num_top", [1, 2, 63, 64, 65, 133, 199, 200])
def test_the_interval_holds_the_truth_for_adversarial_distributions(name, num_top):
    rollout, policy = (logits[None] for logits in adversarial_pairs()[name])
    interval = certified_kl_interval(stored(rollout.log_softmax(dim=-1), num_top), policy.log_softmax(dim=-1))
    assert contains(interval, kl(rollout, policy)).all()


def test_the_interval_holds_the_truth_where_one_minus_the_sum_cancels_in_float32():
    # 1 - 3e-7 on one token, the rest of the mass on tokens the policy nearly drops: KL is about 8e-6.
    generator = torch.Generator().manual_seed(0)
    num_missed = 0
    for _ in range(200):
        rollout = torch.full((1, 50), -15.0) + 0.5 * torch.randn(1, 50, generator=generator)
        rollout[0, 0] = 4.0 + float(torch.rand(1, generator=generator))
        policy = rollout - 30.0 * (torch.arange(50) > 0)
        truth = kl(rollout, policy)
        entry = stored(rollout.log_softmax(dim=-1), 4)
        interval = certified_kl_interval(entry, policy.log_softmax(dim=-1))
        assert contains(interval, truth).all()
        mass = 1 - entry.logprobs.exp().sum(dim=-1)  # float32: a multiple of 6e-8, often 0 or less
        known = entry.logprobs.exp() * (entry.logprobs - policy.log_softmax(dim=-1).gather(-1, entry.ids))
        naive_high = known.sum() + mass.clamp(min=0) * 45
        num_missed += int(naive_high < truth)
    assert num_missed > 20


def test_the_interval_holds_the_truth_for_float16_log_probs_when_told_so():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 80, generator=generator) * 3
    policy = logits + 0.2 * torch.randn(500, 80, generator=generator)
    entry = stored(logits.log_softmax(dim=-1).half(), 79, sample(logits, generator))
    told = certified_kl_interval(entry, policy.log_softmax(dim=-1), rounding=2.0**-11)
    assert contains(told, kl(logits, policy)).all()
    untold = certified_kl_interval(entry, policy.log_softmax(dim=-1))
    assert not contains(untold, kl(logits, policy)).all()


def test_the_error_of_a_float32_normalizer_on_a_large_vocabulary_is_within_the_margin():
    vocabulary = 151_936
    logits = torch.full((1, vocabulary), math.log(0.01 / vocabulary))
    logits[0, 0] = 0.0
    logprobs = logits.log_softmax(dim=-1)
    shift = (logprobs.double() - logits.double().log_softmax(dim=-1)).abs().max()
    assert shift <= default_normalizer_error(vocabulary)
    policy = logits.clone()
    policy[0, 0] = 0.2
    assert contains(certified_kl_interval(stored(logprobs, 64), policy.log_softmax(dim=-1)), kl(logits, policy)).all()


def logs(row):
    return torch.tensor([row], dtype=torch.float64).log()


def greedy_tail(mass, cap, policy, *, ascending):
    """Fill tail tokens up to the cap, those with the smallest (or the largest) policy first."""
    tail = [0.0] * len(policy)
    for token in sorted(range(len(policy)), key=lambda v: policy[v], reverse=not ascending):
        tail[token] = min(cap, mass)
        mass -= tail[token]
    return tail


def draw_pair(chance):
    """Draw the stored part, its tail at an end of what the cap allows, and a policy; probabilities."""
    num_top, num_tail = chance.randint(1, 4), chance.choice([chance.randint(1, 6), 40])
    top = sorted((chance.expovariate(1) + 0.1 for _ in range(num_top)), reverse=True)
    share = chance.choice([1.0, chance.random()])  # of the room below the cap that the tail takes up
    total = sum(top) + share * num_tail * top[-1]
    top = [value / total for value in top]
    spread = chance.choice([0.3, 2.0])
    weights = [math.exp(chance.gauss(0, spread)) for _ in range(num_top + num_tail)]
    boost = chance.choice([0.05, 1.0, 20.0])  # the policy's tail lies below or above the rollout's
    weights[num_top:] = [boost * weight for weight in weights[num_top:]]
    policy = [weight / sum(weights) for weight in weights]
    mass, tail_policy = share * num_tail * top[-1], policy[num_top:]
    tail = greedy_tail(mass, top[-1], tail_policy, ascending=chance.random() < 0.8)
    proportional = [mass * value / sum(tail_policy) for value in tail_policy]
    if max(proportional) <= top[-1] and chance.random() < 0.5:
        tail = proportional
    return top, tail, policy


@pytest.mark.parametrize(("rounding", "normalizer_error"), [(1e-12, 0.2), (1e-12, 0.01), (0.01, 1e-12), (0.002, 0.02)])
def test_the_interval_holds_the_truth_for_any_error_within_the_stated_margins(rounding, normalizer_error):
    chance = random.Random(0)
    slack = 1e-12
    for _ in range(500):
        top, tail, policy = draw_pair(chance)
        num_top, vocabulary = len(top), len(policy)
        truth = sum(p * math.log(p / q) for p, q in zip(top + tail, policy, strict=True) if p > 0)
        shift = normalizer_error * chance.choice([-1, 1, chance.uniform(-1, 1)])
        side = chance.choice([-1, 1, 0])  # errors of one side, or of either
        signs = [side or chance.choice([-1, 1]) for _ in range(vocabulary)]
        # A true log-prob l is stored as l / (1 +- rounding), so that it lies within rounding times the stored one.
        logprobs = [math.log(p) / (1 + rounding * sign) + shift for p, sign in zip(top, signs, strict=False)]
        other = chance.choice([-1, 1])
        stored_policy = [math.log(q) / (1 + other * rounding * sign) for q, sign in zip(policy, signs, strict=True)]
        entry = TopLogprobs(
            ids=torch.arange(num_top)[None],
            logprobs=torch.tensor([logprobs], dtype=torch.float64),
            sampled_ids=torch.tensor([0]),
            sampled_logprobs=torch.tensor(logprobs[:1], dtype=torch.float64),
        )
        interval = certified_kl_interval(
            entry,
            torch.tensor([stored_policy], dtype=torch.float64),
            # The shift moves a log-prob's size, and with it the rounding that is granted to it.
            rounding=rounding / (1 - rounding),
            normalizer_error=normalizer_error * (1 + rounding / (1 - rounding)),
        )
        assert float(interval.low) <= truth + slack
        assert float(interval.high) >= truth - slack


def test_both_ends_are_the_extremes_over_the_error_that_a_row_shares():
    chance = random.Random(1)
    error = 0.05
    for _ in range(400):
        top, _, policy = draw_pair(chance)
        num_top, num_tail = len(top), len(policy) - len(top)
        if num_tail > 6:
            continue
        entry = TopLogprobs(
            ids=torch.arange(num_top)[None],
            logprobs=logs(top),
            sampled_ids=torch.tensor([0]),
            sampled_logprobs=logs(top)[:, 0],
        )
        interval = certified_kl_interval(entry, logs(policy), rounding=2.0**-52, normalizer_error=error)
        cap = top[-1] * math.exp(error)
        shape_kl = sum(p / sum(top) * math.log(p / sum(top) / q) for p, q in zip(top, policy, strict=False))
        tail_policy = policy[num_top:]
        least = max(0.0, 1 - sum(top) * math.exp(error))
        most = min(1 - sum(top) * math.exp(-error), num_tail * cap)
        low, high = math.inf, -math.inf
        masses = [least + (most - least) * step / 50 for step in range(51)]
        masses += [count * cap for count in range(num_tail + 1) if least <= count * cap <= most]
        for mass in masses:
            known = (1 - mass) * (math.log(1 - mass) + shape_kl)
            tail = greedy_tail(mass, cap, tail_policy, ascending=True)
            largest = sum(p * math.log(p / q) for p, q in zip(tail, tail_policy, strict=True) if p > 0)
            bucket = mass * math.log(mass / sum(tail_policy)) if mass else 0.0
            low, high = min(low, known + bucket), max(high, known + largest)
        assert float(interval.low) == pytest.approx(max(low, 0), abs=1e-3)
        assert high - 1e-12 <= float(interval.high)
        # The stored part is bounded by a line: its curvature over the masses is the excess.
        assert float(interval.high) <= high + (most - least) ** 2 / (1 - most) + 1e-3
