import itertools

import numpy as np
import pytest

from trm_repro.bounds import Divergences, every_bound, unified_bound
from trm_repro.trees import (
    BoundCheck,
    PolicyPairs,
    advantages,
    check_bounds,
    draw_policy_pairs,
    error_weights,
    gradient_reach,
    improvement,
    largest_response_kl,
    measure_divergences,
    prefix_probabilities,
    response_ratio_sums,
    routing_flips,
    surrogate,
    unsupported_mass,
    worst_error,
)


def one_pair(rollout, policy, prompt_weights=(1.0,)):
    """A pair from T nested lists ``[P, C, V]`` (or ``[C, V]`` with one prompt)."""
    shaped = [
        tuple(np.asarray(p, dtype=float).reshape(1, len(prompt_weights), -1, np.shape(p)[-1]) for p in policies)
        for policies in (rollout, policy)
    ]
    return PolicyPairs(prompt_weights=np.array([prompt_weights]), rollout=shaped[0], policy=shaped[1])


def enumerate_responses(pairs, n):
    """Walk through pair n by its definitions, one response at a time."""
    num_tokens, length = pairs.rollout[0].shape[-1], pairs.length
    for prompt in range(pairs.prompt_weights.shape[1]):
        for tokens in itertools.product(range(num_tokens), repeat=length):
            p, q, context, steps = [], [], 0, []
            for t, token in enumerate(tokens):
                before, after = pairs.rollout[t][n, prompt, context], pairs.policy[t][n, prompt, context]
                p.append(before[token])
                q.append(after[token])
                steps.append((before, after))
                context = context * num_tokens + token
            yield prompt, context, np.array(p), np.array(q), steps


def batches(seed, count, *, size=50, **options):
    rng = np.random.default_rng(seed)
    return [draw_policy_pairs(rng, size, **options) for _ in range(count)]


def test_vectorised_measures_equal_the_definitions_one_response_at_a_time():
    rng = np.random.default_rng(0)
    for pairs in batches(1, 12, size=2, length=3):
        num_responses = pairs.rollout[-1].shape[-2] * pairs.rollout[-1].shape[-1]
        rewards = rng.random((2, pairs.prompt_weights.shape[1], num_responses))
        divergences = measure_divergences(pairs)
        for n in range(2):
            gain = surrogate_value = shift = kl_seq = delta = epsilon = 0.0
            mean_tv, mean_kl = np.zeros(3), np.zeros(3)
            for prompt, response, p, q, steps in enumerate_responses(pairs, n):
                weight, reward = pairs.prompt_weights[n, prompt], rewards[n, prompt, response]
                gain += weight * (q.prod() - p.prod()) * reward
                shift += weight * abs(q.prod() - p.prod()) / 2
                if p.prod() == 0:
                    continue
                surrogate_value += weight * p.prod() * reward * (q / p - 1).sum()
                with np.errstate(divide="ignore"):
                    kl_seq += weight * p.prod() * np.log(p.prod() / q.prod())
                for t, (before, after) in enumerate(steps):
                    tv = np.abs(before - after).sum() / 2
                    seen = before > 0
                    with np.errstate(divide="ignore"):
                        kl = (before[seen] * np.log(before[seen] / after[seen])).sum()
                    epsilon, delta = max(epsilon, tv), max(delta, kl)
                    mean_tv[t] += weight * p.prod() * tv
                    mean_kl[t] += weight * p.prod() * kl
            assert improvement(pairs, rewards)[n] == pytest.approx(gain, abs=1e-12)
            assert surrogate(pairs, rewards)[n] == pytest.approx(surrogate_value, abs=1e-12)
            assert divergences.tv_seq[n] == pytest.approx(shift, abs=1e-12)
            assert divergences.kl_seq[n] == pytest.approx(kl_seq, abs=1e-12)
            assert divergences.delta[n] == pytest.approx(delta, abs=1e-12)
            assert divergences.epsilon[n] == pytest.approx(epsilon, abs=1e-12)
            assert divergences.mean_tv[n] == pytest.approx(mean_tv, abs=1e-12)
            assert divergences.mean_kl[n] == pytest.approx(mean_kl, abs=1e-12)


def test_the_worst_error_is_the_largest_over_all_rewards_of_zero_and_one():
    for pairs in batches(2, 10, size=3, length=2):
        shape = error_weights(pairs).shape
        if shape[1] * shape[2] > 9:
            continue
        errors = []
        for choice in itertools.product([0.0, 1.0], repeat=shape[1] * shape[2]):
            rewards = np.broadcast_to(np.reshape(choice, (1, *shape[1:])), shape)
            errors.append(np.abs(improvement(pairs, rewards) - surrogate(pairs, rewards)))
        assert np.max(errors, axis=0) == pytest.approx(worst_error(pairs), abs=1e-12)


def test_every_bound_holds_on_thousands_of_random_trees():
    checks = {}
    num_pairs = 0
    for pairs in batches(3, 100):
        divergences, error = measure_divergences(pairs), worst_error(pairs)
        num_pairs += len(error)
        for constants in ("paper", "sharp"):
            for name, check in check_bounds(error, divergences, constants=constants).items():
                checks[constants, name] = check.merged(checks.get((constants, name), BoundCheck()))
    assert num_pairs == 5000
    assert {key for key, check in checks.items() if check.num_violations} == set()
    for name in ("classical", "coupling", "adaptive_tv", "adaptive_hybrid", "prefix_adaptive", "unified"):
        assert checks["sharp", name].worst_ratio > 0.999, name
        assert checks["paper", name].worst_ratio <= 0.5 + 1e-9, name


def test_an_error_above_a_bound_is_counted():
    pairs = equal_shifts(0.2)
    checks = check_bounds(1.01 * worst_error(pairs), measure_divergences(pairs), constants="sharp")
    assert checks["prefix_adaptive"].num_violations == 1
    assert checks["prefix_adaptive"].worst_ratio == pytest.approx(1.01)
    assert checks["mixed_tv"].num_violations == 0


def test_orderings_hold_on_random_trees():
    for pairs in batches(5, 40):
        bounds = every_bound(measure_divergences(pairs), constants="sharp")
        for looser in ("coupling", "pinsker_marginal_kl", "pinsker_marginal_tv", "mixed_kl", "mixed_tv"):
            assert np.all(bounds["prefix_adaptive"] <= bounds[looser] * (1 + 1e-9) + 1e-12), looser
        assert np.all(bounds["adaptive_kl"] <= bounds["pinsker_marginal_kl"] * (1 + 1e-9) + 1e-12)
        assert np.all(bounds["adaptive_tv"] <= bounds["coupling"] * (1 + 1e-9) + 1e-12)


def test_neither_trivial_nor_the_others_is_always_smaller():
    smaller = []
    for pairs in batches(6, 40):
        bounds = every_bound(measure_divergences(pairs), constants="sharp")
        others = np.min([bounds[name] for name in bounds if name not in ("trivial", "unified")], axis=0)
        smaller.append(bounds["trivial"] < others)
    assert 0.05 < np.mean(smaller) < 0.5


def equal_shifts(epsilon):
    """T = 2, V = 2: the first token and both second ones move by epsilon from even odds."""
    even, up, down = [0.5, 0.5], [0.5 + epsilon, 0.5 - epsilon], [0.5 - epsilon, 0.5 + epsilon]
    return one_pair([[even], [even, even]], [[up], [up, down]])


def test_two_tokens_attain_the_halved_constants():
    # Error = sum over first tokens of |q1 - p1| times the TV of the second: 2 epsilon^2, which is T (T-1) epsilon^2.
    pairs = equal_shifts(0.2)
    assert worst_error(pairs) == pytest.approx(2 * 0.2**2)
    bounds = every_bound(measure_divergences(pairs), constants="sharp")
    for name in ("classical", "coupling", "adaptive_tv", "adaptive_hybrid", "prefix_adaptive", "unified"):
        assert bounds[name] == pytest.approx(0.08), name


def test_two_tokens_attain_the_halved_kl_forms_in_the_limit():
    for epsilon, gap in ((0.1, 3e-2), (0.01, 3e-4)):
        pairs = equal_shifts(epsilon)
        bounds = every_bound(measure_divergences(pairs), constants="sharp")
        for name in ("pinsker_marginal_kl", "pinsker_marginal_tv", "adaptive_kl"):
            assert 1 - gap <= worst_error(pairs) / bounds[name] < 1, name


def test_the_advantage_of_a_context_is_at_most_its_tv():
    rng = np.random.default_rng(7)
    p, q = rng.dirichlet(np.ones(5), 1000), rng.dirichlet(np.ones(5), 1000)
    values = rng.random((1000, 5))  # expected rewards after each token, in [0, 1]
    tv = np.abs(q - p).sum(axis=-1) / 2
    assert np.all(np.abs(((q - p) * values).sum(axis=-1)) <= tv)
    assert ((q - p) * (q > p)).sum(axis=-1) == pytest.approx(tv)  # attained: the paper's 2 TV is not


def test_a_surrogate_above_its_bound_means_improvement():
    num_promised = 0
    for pairs in batches(8, 40):
        rewards = (response_ratio_sums(pairs) > 0).astype(float)
        lower = surrogate(pairs, rewards) - unified_bound(measure_divergences(pairs), constants="sharp")
        num_promised += (lower > 0).sum()
        gain = improvement(pairs, rewards)
        assert np.all(gain[lower > 0] > 0)
        assert np.all(gain >= lower - 1e-12)
    assert num_promised > 500


def test_rare_violations_cost_their_probability_times_the_length():
    # With P_roll(max_t KL > delta) = eta: |error| <= B(delta) + (T + 1) eta + min(1, sqrt(T delta / 2)).
    num_partial = 0
    for pairs in batches(16, 60):
        largest_kl = largest_response_kl(pairs)
        probability = prefix_probabilities(pairs.prompt_weights, pairs.rollout)[-1]
        reached = np.where(probability > 0, largest_kl, 0.0)
        threshold = np.quantile(np.where(np.isfinite(reached), reached, 0.0), 0.7, axis=(1, 2))
        eta = (probability * (largest_kl > threshold[:, None, None])).sum(axis=(1, 2))
        within = unified_bound(Divergences.at_most(pairs.length, threshold), constants="sharp")
        limit = within + (pairs.length + 1) * eta + np.minimum(1, np.sqrt(pairs.length * threshold / 2))
        assert np.all(worst_error(pairs) <= limit + 1e-12)
        num_partial += ((eta > 0) & (eta < 0.1)).sum()
    assert num_partial > 100


def test_a_baseline_changes_nothing_without_a_mask():
    pairs = batches(9, 1)[0]
    rewards = np.random.default_rng(0).random(error_weights(pairs).shape)
    probability = prefix_probabilities(pairs.prompt_weights, pairs.rollout)[-1]
    without_baseline = (probability * rewards * response_ratio_sums(pairs)).sum(axis=(1, 2))
    assert surrogate(pairs, rewards) == pytest.approx(without_baseline, abs=1e-12)
    assert (probability * advantages(pairs, rewards)).sum(axis=-1) == pytest.approx(0.0, abs=1e-12)


def test_a_hole_in_the_rollout_policy_is_refused():
    pairs = one_pair([[[1.0, 0.0]]], [[[0.9, 0.1]]])
    assert unsupported_mass(pairs) == pytest.approx(0.1)
    with pytest.raises(ValueError, match=r"^pi_theta must have no mass where pi_roll has none, got 0\.1$"):
        measure_divergences(pairs)


def test_a_hole_in_the_rollout_policy_breaks_the_bounds():
    # T = 1, R = (0, 1): J rises by 0.1, L' sees nothing, and the context-shift bounds are 0.
    pairs = one_pair([[[1.0, 0.0]]], [[[0.9, 0.1]]])
    rewards = np.array([[[0.0, 1.0]]])
    assert improvement(pairs, rewards) - surrogate(pairs, rewards) == pytest.approx(0.1)
    assert unified_bound(Divergences.at_most(1, np.inf, epsilon=0.1)) == 0
    num_holed = num_broken = 0
    for holed in batches(10, 20, has_holes=True):
        # What one would claim without looking for holes: Coupling from the largest token TV.
        tv = [np.abs(q - p).sum(axis=-1) / 2 for p, q in zip(holed.rollout, holed.policy, strict=True)]
        epsilon = np.minimum(np.max([distance.max(axis=(1, 2)) for distance in tv], axis=0), 1.0)
        claimed = every_bound(Divergences.at_most(holed.length, epsilon=epsilon), constants="sharp")["coupling"]
        num_holed += (unsupported_mass(holed) > 0).sum()
        num_broken += (worst_error(holed) > claimed + 1e-9).sum()
        with pytest.raises(ValueError, match="pi_theta must have no mass where pi_roll has none"):
            measure_divergences(holed)
    assert num_holed > 500
    assert num_broken > 0


def test_a_hole_in_a_context_that_is_never_reached_does_no_harm():
    pairs = one_pair([[[1.0, 0.0]], [[0.5, 0.5], [1.0, 0.0]]], [[[1.0, 0.0]], [[0.4, 0.6], [0.0, 1.0]]])
    assert unsupported_mass(pairs) == 0
    divergences = measure_divergences(pairs)
    assert divergences.epsilon == pytest.approx(0.1)
    assert divergences.delta == pytest.approx(0.5 * np.log(0.5 / 0.4) + 0.5 * np.log(0.5 / 0.6))


def test_a_token_that_the_policy_drops_leaves_the_tv_forms():
    pairs = one_pair([[[0.5, 0.5]], [[0.5, 0.5]] * 2], [[[1.0, 0.0]], [[0.6, 0.4]] * 2])
    divergences = measure_divergences(pairs)
    assert divergences.delta == np.inf
    assert divergences.epsilon == pytest.approx(0.5)
    assert worst_error(pairs) <= every_bound(divergences, constants="sharp")["coupling"]


def test_the_shift_averages_over_prompts_and_does_not_pool_their_responses():
    # Pooled over the two prompts both policies answer with even odds; each prompt alone is shifted by 0.4.
    pairs = one_pair([[[[0.9, 0.1]], [[0.1, 0.9]]]], [[[[0.5, 0.5]], [[0.5, 0.5]]]], prompt_weights=(0.5, 0.5))
    divergences = measure_divergences(pairs)
    assert divergences.tv_seq == pytest.approx(0.4)
    assert divergences.mean_tv == pytest.approx(0.4)


def test_finished_responses_count_as_zero_in_the_average():
    # Token 0 ends the response with probability 0.75; the others differ by 0.2 at the second position.
    pairs = one_pair([[[0.75, 0.25]], [[1, 0], [0.5, 0.5]]], [[[0.75, 0.25]], [[1, 0], [0.7, 0.3]]])
    divergences = measure_divergences(pairs)
    assert divergences.mean_tv[0] == pytest.approx([0.0, 0.25 * 0.2])
    assert divergences.epsilon == pytest.approx(0.2)


def test_the_draw_covers_what_it_says():
    drawn = batches(11, 60, size=4)
    assert {pairs.length for pairs in drawn} == {2, 3, 4, 5, 6}
    assert {pairs.rollout[0].shape[-1] for pairs in drawn} == {2, 3, 4}
    assert {pairs.prompt_weights.shape[1] for pairs in drawn} == {1, 2, 3}
    divergences = [measure_divergences(pairs) for pairs in drawn]
    assert any(np.isinf(d.delta).any() for d in divergences)
    assert any((d.epsilon < 0.01).any() for d in divergences)
    assert any((d.epsilon > 0.9).any() for d in divergences)
    for pairs in drawn:
        for p, q in zip(pairs.rollout, pairs.policy, strict=True):
            assert p.sum(axis=-1) == pytest.approx(1.0)
            assert q.sum(axis=-1) == pytest.approx(1.0)


def test_lengths_beyond_enumeration_are_refused():
    with pytest.raises(ValueError, match="length must be from 1 to 10, got 11"):
        draw_policy_pairs(np.random.default_rng(0), 1, length=11)


def test_token_methods_leave_the_largest_kl_and_the_sequence_mask_does_not():
    probability = np.array([0.9, 0.5, 0.1, 0.01, 0.001])
    pairs, rewards = routing_flips(probability)
    # Half of the rest goes to each of the other two tokens, against 0.05 under the policy.
    rest = (1 - probability) / 2
    flip_kl = probability * np.log(probability / 0.9) + 2 * rest * np.log(rest / 0.05)
    elsewhere = 0.5 * np.log(0.5 / 0.48) + 0.3 * np.log(0.3 / 0.31) + 0.2 * np.log(0.2 / 0.21)
    reach = gradient_reach(pairs, rewards, clip_range=0.2, delta=0.05)
    for name in ("no_mask", "ppo_clip", "token_mask"):
        assert reach[name].max_kl == pytest.approx(np.maximum(flip_kl, elsewhere)), name
    assert reach["trm_max"].max_kl == pytest.approx(elsewhere)


def test_the_clip_lets_a_large_ratio_with_negative_advantage_through():
    pairs, rewards = routing_flips(np.array([0.001]))
    reach = gradient_reach(pairs, rewards, clip_range=0.2, delta=0.05)
    assert reach["no_mask"].largest_opposed_ratio == pytest.approx(900)
    assert reach["ppo_clip"].largest_opposed_ratio == pytest.approx(900)
    assert reach["token_mask"].largest_opposed_ratio == pytest.approx(0.21 / 0.2)
    assert reach["trm_max"].largest_opposed_ratio == 0


def clipped_objective(ratio, advantage):
    return min(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)


def test_what_is_kept_equals_a_walk_through_the_definitions():
    rng = np.random.default_rng(12)
    for pairs in batches(13, 15, size=2, length=3):
        rewards = rng.integers(0, 2, error_weights(pairs).shape).astype(float)
        reach = gradient_reach(pairs, rewards, clip_range=0.2, delta=0.05)
        baseline = (prefix_probabilities(np.ones_like(pairs.prompt_weights), pairs.rollout)[-1] * rewards).sum(-1)
        for n in range(2):
            expected = {name: (0.0, 0.0) for name in reach}
            for prompt, response, p, q, steps in enumerate_responses(pairs, n):
                advantage = rewards[n, prompt, response] - baseline[n, prompt]
                if p.prod() == 0 or advantage == 0:
                    continue
                ratio = q / p
                with np.errstate(divide="ignore"):
                    max_kl = max((b[b > 0] * np.log(b[b > 0] / a[b > 0])).sum() for b, a in steps)
                for t, (_, after) in enumerate(steps):
                    if after.max() == 1:
                        continue  # a certain token has no gradient
                    step = 1e-6 * max(ratio[t], 1e-6)
                    above, below = (clipped_objective(ratio[t] + side, advantage) for side in (step, -step))
                    kept = {
                        "no_mask": True,
                        "ppo_clip": above != below,
                        "token_mask": 0.8 <= ratio[t] <= 1.2,
                        "trm_max": max_kl <= 0.05,
                    }
                    for name in (name for name, is_kept in kept.items() if is_kept):
                        largest_kl, largest_ratio = expected[name]
                        opposed = ratio[t] if advantage < 0 else 0.0
                        expected[name] = (max(largest_kl, max_kl), max(largest_ratio, opposed))
            for name, (largest_kl, largest_ratio) in expected.items():
                assert reach[name].max_kl[n] == pytest.approx(largest_kl, abs=1e-12), name
                assert reach[name].largest_opposed_ratio[n] == pytest.approx(largest_ratio, abs=1e-12), name


def test_the_bound_at_the_threshold_does_not_cover_the_masked_surrogate():
    rng = np.random.default_rng(14)
    num_rejecting = num_above = 0
    for pairs in batches(15, 40):
        rewards = rng.integers(0, 2, error_weights(pairs).shape).astype(float)
        delta = measure_divergences(pairs).delta
        threshold = np.where(np.isfinite(delta), delta / 2, 0.05)
        is_kept = largest_response_kl(pairs) <= threshold[:, None, None]
        probability = prefix_probabilities(pairs.prompt_weights, pairs.rollout)[-1]
        rejected_mass = (probability * ~is_kept).sum(axis=(1, 2))
        error = np.abs(improvement(pairs, rewards) - surrogate(pairs, rewards, is_kept))
        bound = unified_bound(Divergences.at_most(pairs.length, threshold))
        num_rejecting += (rejected_mass > 0).sum()
        num_above += ((rejected_mass > 0) & (error > bound)).sum()
        # Where every response passes, the condition of the guarantee holds and so does the bound.
        assert np.all((error <= bound * (1 + 1e-9) + 1e-12)[rejected_mass == 0])
    assert num_rejecting > 500
    assert 0.1 < num_above / num_rejecting < 0.3
