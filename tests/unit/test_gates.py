"""The registry and every gate in it: expected masks worked out by hand, or by numpy from the source's formula."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from trm_repro.gate_specs import GATE_SPECS, fill_thresholds, find_spec, gate_table
from trm_repro.masks import GATES, TokenStatistics, gate_mask, kept_sequences, token_weights
from trm_repro.masks.token_gates import _quantile


def statistics(ratios, *, lengths=None, rollout=0.5, **given):
    """Sequences of the given ratios; the rollout probability of each token is 0.5 unless said."""
    log_ratio = torch.tensor(ratios, dtype=torch.float64).log()
    length = log_ratio.shape[1]
    mask = torch.arange(length) < torch.tensor(lengths or [length] * len(ratios))[:, None]
    rollout_logprobs = torch.tensor(rollout, dtype=torch.float64).log().expand_as(log_ratio)
    values = {name: None if value is None else torch.tensor(value) for name, value in given.items()}
    return TokenStatistics(
        log_ratio=torch.where(mask, log_ratio, math.nan),  # whatever stands on padding must not matter
        response_mask=mask,
        rollout_logprobs=rollout_logprobs,
        policy_logprobs=rollout_logprobs + log_ratio,
        **values,
    )


def test_sequence_mis_judges_the_product_of_ratios_and_so_long_responses_harder():
    data = statistics([[1.2, 1.2, 1.2], [1.2, 1.2, 1.2], [0.9, 0.7, 0.7]], lengths=[3, 2, 3])
    # products 1.728, 1.44, 0.441
    assert gate_mask("sequence_mis", data, low=0.5, high=1.5).tolist() == [False, True, False]
    assert gate_mask("sequence_mis", data, low=0.0, high=3.0).tolist() == [True, True, True]


def test_the_geometric_gate_judges_the_mean_log_ratio_and_so_all_lengths_alike():
    data = statistics([[1.2, 1.2, 1.2], [1.2, 1.2, 1.2], [1.3, 1 / 1.3, 1.0]], lengths=[3, 1, 3])
    assert gate_mask("geometric", data, low=0.9, high=1.21).tolist() == [True, True, True]
    assert gate_mask("geometric", data, low=0.9, high=1.19).tolist() == [False, False, True]  # means 1.2, 1.2, 1
    assert gate_mask("geometric", data).tolist() == [False, False, True]


def test_opsm_rejects_negative_advantages_whose_tokens_have_become_unlikelier():
    far, near = [0.3, 0.4], [0.9, 1.0]  # mean k1: -(log 0.3 + log 0.4) / 2 = 1.06 and 0.053
    data = statistics([far, far, near, [3.0, 3.0]], advantages=[-1.0, 1.0, -1.0, -1.0])
    assert gate_mask("opsm", data, threshold=0.5).tolist() == [False, True, True, True]
    assert gate_mask("opsm", data, threshold=1.07).tolist() == [True, True, True, True]


def test_gspo_rejects_where_its_clip_leaves_no_gradient():
    up, down = [1.5, 1.2], [0.5, 0.9]  # geometric means 1.342 and 0.671
    data = statistics([up, up, down, down], advantages=[1.0, -1.0, 1.0, -1.0])
    assert gate_mask("gspo", data, low=0.2, high=0.2).tolist() == [False, True, True, False]
    assert gate_mask("gspo", data, low=0.35, high=0.35).tolist() == [True, True, True, True]


def test_token_tis_carries_the_capped_ratio():
    data = statistics([[0.5, 2.0, 8.0]])
    weights = gate_mask("token_tis", data, cap=4.0)
    assert (weights * torch.tensor([[0.5, 2.0, 8.0]])).tolist() == [[pytest.approx(v) for v in (0.5, 2.0, 4.0)]]


def test_cispo_carries_the_clipped_ratio():
    data = statistics([[0.5, 1.0, 8.0]])
    carried = [[0.8, 1.0, 1.28]]
    weights = gate_mask("cispo", data, low=0.2, high=0.28)
    assert (weights * torch.tensor([[0.5, 1.0, 8.0]])).tolist() == [[pytest.approx(v) for v in carried[0]]]
    assert gate_mask("cispo", data)[0, 0].item() == pytest.approx(1.0)  # low = 1: the lower end is open


def test_minpro_carries_the_ratio_times_the_smallest_before_it():
    data = statistics([[2.0, 0.5, 3.0, 4.0], [4.0, 2.0, 1.0, 1.0]], lengths=[4, 3])
    free = gate_mask("minpro", data, high=math.inf)
    assert free[0].tolist() == [pytest.approx(v) for v in (1.0, 2.0, 0.5, 0.5)]
    assert free[1].tolist() == [pytest.approx(v) for v in (1.0, 4.0, 2.0, 0.0)]
    clipped = gate_mask("minpro", data, low=0.2, high=0.6)[0] * torch.tensor([2.0, 0.5, 3.0, 4.0])
    assert clipped.tolist() == [pytest.approx(v) for v in (1.6, 1.0, 1.5, 1.6)]  # of 2, 1, 1.5, 2
    low = gate_mask("minpro", statistics([[0.5, 0.5]]), low=0.6, high=0.6)[0] * torch.tensor([0.5, 0.5])
    assert low.tolist() == [pytest.approx(v) for v in (0.5, 0.4)]  # 0.25 is below 1 - low


def test_icepop_keeps_the_tokens_inside_the_band():
    data = statistics([[0.49, 0.51, 4.9, 5.1]])
    assert gate_mask("icepop", data).tolist() == [[False, True, True, False]]


def test_ipo_keeps_tokens_by_the_change_of_probability_whatever_the_advantage():
    data = statistics([[1.5, 1.7, 0.5, 0.3]], rollout=[[0.5, 0.5, 0.5, 0.5]])  # changes .25, .35, -.25, -.35
    assert gate_mask("ipo", data).tolist() == [[True, False, True, False]]


def test_dppo_binary_tv_rejects_what_moves_further_away():
    ratios = [[1.5, 1.3, 0.5, 0.7]]  # from 0.5: changes .25, .15, -.25, -.15
    up, down = statistics(ratios, advantages=[1.0]), statistics(ratios, advantages=[-1.0])
    assert gate_mask("dppo_binary_tv", up, low=0.2, high=0.2).tolist() == [[False, True, True, True]]
    assert gate_mask("dppo_binary_tv", down, low=0.2, high=0.2).tolist() == [[True, True, False, True]]


def test_a_rare_tokens_large_ratio_is_no_large_divergence_for_dppo():
    data = statistics([[100.0]], rollout=[[0.001]], advantages=[1.0])  # from 0.001 to 0.1
    assert gate_mask("dppo_binary_tv", data, low=0.2, high=0.2).tolist() == [[True]]
    assert gate_mask("icepop", data).tolist() == [[False]]


def test_dppo_binary_kl_is_the_two_point_kl_of_the_rollout_policy_from_the_policy():
    q, p = np.array([0.5, 0.5, 0.9, 0.2]), np.array([0.75, 0.25, 0.5, 0.21])
    kl = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))  # .144, .144, .368, .0003
    data = statistics([(p / q).tolist()], rollout=[q.tolist()], advantages=[1.0])
    for threshold in (0.1, 0.2):
        expected = [bool(k <= threshold or b <= a) for k, a, b in zip(kl, q, p, strict=True)]
        assert gate_mask("dppo_binary_kl", data, low=1.0, high=threshold).tolist() == [expected]
    down = statistics([(p / q).tolist()], rollout=[q.tolist()], advantages=[-1.0])
    assert gate_mask("dppo_binary_kl", down, low=0.2, high=1.0).tolist() == [[True, True, False, True]]
    assert gate_mask("dppo_binary_kl", down, low=0.1, high=1.0).tolist() == [[True, False, False, True]]


def test_dppo_with_more_of_the_vocabulary_takes_the_direction_from_the_ratio():
    ratios, far = [[1.1, 0.9, 1.1]], [[0.3, 0.3, 0.1]]
    tv = statistics(ratios, advantages=[1.0], total_variation=far)
    assert gate_mask("dppo_top_k_tv", tv, threshold=0.2).tolist() == [[False, True, True]]
    kl = statistics(ratios, advantages=[-1.0], kl=far)
    assert gate_mask("dppo_top_k_kl", kl, threshold=0.2).tolist() == [[True, False, True]]


CPPO = {"threshold": 0.15, "weight_floor": 0.8, "budget": 0.02, "budget_quantile": 0.9, "budget_scale": 1.0}


def cppo_by_recurrence(policy, rollout, advantage, *, threshold, weight_floor, budget):
    """Algorithm 1 of the CPPO paper, one token after the other, with its calibration of the budget."""
    divergence = np.abs(policy - rollout)
    allowed = np.clip(np.quantile(divergence, 0.9), budget, 2 * budget)
    spent = weight_sum = 0.0
    kept = []
    for t, (p, q, d) in enumerate(zip(policy, rollout, divergence, strict=True), start=1):
        weight = 1 - (1 - weight_floor) / (len(policy) - 1) * (t - 1)
        limit = min(threshold, threshold + allowed * weight_sum - spent)
        kept.append(bool(advantage * (p / q - 1) <= 0 or weight * d <= limit))
        spent, weight_sum = spent + weight * d, weight_sum + weight
    return kept


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_cppo_follows_its_recurrence(advantage):
    generator = np.random.default_rng(5)
    num_rejected = num_by_prefix = 0
    for _ in range(30):
        rollout = generator.uniform(0.05, 0.9, size=12)
        policy = np.clip(rollout + generator.normal(0, 0.06, size=12), 0.01, 0.99)
        data = statistics([(policy / rollout).tolist()], rollout=[rollout.tolist()], advantages=[advantage])
        expected = cppo_by_recurrence(policy, rollout, advantage, threshold=0.15, weight_floor=0.8, budget=0.02)
        assert gate_mask("cppo", data, **CPPO).tolist() == [expected]
        num_rejected += expected.count(False)
        num_by_prefix += sum(not k and abs(p - q) < 0.14 for k, p, q in zip(expected, policy, rollout, strict=True))
    assert num_rejected > num_by_prefix > 0  # both of its conditions decide


def test_cppo_weighs_a_single_token_as_the_first_and_counts_realised_lengths():
    data = statistics([[1.5, 1.0, 1.0]], lengths=[1], advantages=[1.0])  # change .25
    assert gate_mask("cppo", data, threshold=0.26).tolist() == [[True, False, False]]
    assert gate_mask("cppo", data, threshold=0.24).tolist() == [[False, False, False]]


def test_m2po_drops_the_fewest_tokens_that_bring_the_second_moment_down():
    ratios = [[math.exp(0.1), math.exp(-0.5), math.exp(0.2)], [math.exp(0.3), 1.0, 1.0]]
    data = statistics(ratios, lengths=[3, 2], advantages=[1.0, 1.0])
    # pushed further away, so competing: .01 and .04 of the first, .09 of the second: mean .0467, without .09 .025
    assert gate_mask("m2po", data, threshold=0.0467).tolist() == [[True, True, True], [True, True, False]]
    assert gate_mask("m2po", data, threshold=0.04).tolist() == [[True, True, True], [False, True, False]]
    assert gate_mask("m2po", data, threshold=0.02).tolist() == [[True, True, False], [False, True, False]]
    assert gate_mask("m2po", data, threshold=-1.0).tolist() == [[False, True, False], [False, True, False]]
    down = replace(data, advantages=torch.tensor([-1.0, 1.0]))  # competing: .25 and .09
    assert gate_mask("m2po", down, threshold=0.1).tolist() == [[True, False, True], [True, True, False]]


def test_m2po_does_not_count_sequences_that_are_rejected_for_their_log_probs():
    data = statistics([[math.exp(0.05), 0.0], [math.exp(0.2), 1.0]], advantages=[1.0, 1.0])  # log 0: infinite
    assert gate_mask("m2po", data, threshold=0.03).tolist() == [[False, False], [False, True]]  # .0025 does not help


def test_the_controls_copy_the_rate_of_the_reference_and_one_of_them_its_lengths():
    lengths = [1] * 10 + [4] * 10
    reference = [True] * 10 + [False] * 5 + [True] * 5
    data = statistics([[1.0] * 4] * 20, lengths=lengths, reference_mask=reference)
    random = [gate_mask("random", data, seed=seed) for seed in range(20)]
    assert {int(mask.sum()) for mask in random} == {15}
    assert any(not mask[:10].all() for mask in random)
    matched = [gate_mask("length_matched", data, num_length_bins=2, seed=seed) for seed in range(20)]
    assert all(mask[:10].all() and int(mask[10:].sum()) == 5 for mask in matched)
    assert len({tuple(mask.tolist()) for mask in matched}) > 1


def test_the_papers_gates_take_exact_kl_where_it_is_given_and_estimators_where_it_is_not():
    ratios = [[math.exp(0.4), 1.0], [1.0, 1.0]]
    sampled, exact = statistics(ratios), statistics(ratios, kl=[[0.0, 0.0], [0.0, 0.2]])
    assert gate_mask("trm_max", sampled, max_threshold=0.07).tolist() == [False, True]  # k2 = .08
    assert gate_mask("trm_max", exact, max_threshold=0.07).tolist() == [True, False]
    assert gate_mask("trm_avg", sampled, avg_threshold=0.045).tolist() == [False, True]  # k3 = .0918 / 2
    assert gate_mask("trm_avg", exact, avg_threshold=0.11).tolist() == [True, True]
    assert gate_mask("trm_max_avg", exact, max_threshold=0.3, avg_threshold=0.09).tolist() == [True, False]


ALL = {
    "advantages": [1.0, -1.0, 1.0],
    "kl": [[0.0] * 3] * 3,
    "total_variation": [[0.0] * 3] * 3,
    "reference_mask": [True] * 3,
}


@pytest.mark.parametrize("name", GATES)
def test_every_gate_keeps_all_of_a_policy_that_is_the_rollout_policy_and_no_padding(name):
    data = statistics([[1.0] * 3] * 3, lengths=[3, 1, 2], **ALL)
    mask = gate_mask(name, data)
    assert kept_sequences(mask).tolist() == [True] * 3
    assert mask.shape == ((3,) if GATES[name].level == "sequence" else (3, 3))
    assert mask.is_floating_point() == GATES[name].is_weight
    assert token_weights(mask, data.response_mask).tolist() == data.response_mask.double().tolist()


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("ratio", [math.nan, math.inf, 0.0])
def test_every_gate_rejects_a_sequence_with_a_log_ratio_that_is_not_finite_and_no_other(name, ratio):
    mask = gate_mask(name, statistics([[1.0, 1.0, 1.0], [1.0, ratio, 1.0], [1.0, 1.0, 1.0]], **ALL))
    assert kept_sequences(mask).tolist() == [True, False, True]


@pytest.mark.parametrize("name", GATES)
def test_every_gate_says_what_it_needs(name):
    gate = GATES[name]
    if gate.needs == {"log_ratio"}:
        gate_mask(name, TokenStatistics(log_ratio=torch.zeros(2, 3), response_mask=torch.ones(2, 3, dtype=torch.bool)))
    for need in gate.needs - {"log_ratio"}:
        data = statistics([[1.0] * 3] * 3, **{key: value for key, value in ALL.items() if key != need})
        if need in ("rollout_logprobs", "policy_logprobs"):
            data = TokenStatistics(
                log_ratio=data.log_ratio, response_mask=data.response_mask, advantages=data.advantages
            )
        with pytest.raises(ValueError, match=f"gate {name} needs .*{need}"):
            gate_mask(name, data)


def test_every_gate_has_a_direction_and_a_source_and_one_function_of_its_own():
    for spec in GATE_SPECS.values():
        assert spec.direction
        assert spec.source or spec.name == "none"
    functions = [spec.function for spec in GATE_SPECS.values()]
    assert len(set(functions)) == len(functions)


def test_an_unknown_gate_or_threshold_is_named_with_the_nearest():
    with pytest.raises(ValueError, match=r"no gate 'trm_maxx'; did you mean 'trm_max'\?"):
        find_spec("trm_maxx")
    with pytest.raises(ValueError, match=r"gate ser has no threshold 'ser_treshold'; did you mean 'ser_threshold'\?"):
        gate_mask("ser", statistics([[1.0]]), ser_treshold=0.1)
    with pytest.raises(ValueError, match="threshold high of gate icepop must be a number"):
        fill_thresholds(find_spec("icepop"), {"high": math.nan})


def test_statistics_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match="differ in shape"):
        TokenStatistics(log_ratio=torch.zeros(2, 3), response_mask=torch.ones(2, 2, dtype=torch.bool))
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"advantages \(2, 1\) must be \[B\]"):
        TokenStatistics(log_ratio=torch.zeros(2, 3), response_mask=mask, advantages=torch.zeros(2, 1))


def test_statistics_from_log_probs_carry_no_gradient():
    policy = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    data = TokenStatistics.from_logprobs(policy, torch.tensor([[-1.5, -1.5]]), torch.ones(1, 2, dtype=torch.bool))
    assert data.log_ratio.tolist() == [[0.5, -0.5]]
    assert not data.log_ratio.requires_grad


BLOCKED = ["numpy", "transformers", "lightning", "vllm", "mlflow", "pyarrow", "omegaconf", "pandas", "matplotlib"]


def run_blocked(code, blocked):
    """Run code in a process in which these packages cannot be imported."""
    lines = [f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))", code]
    return subprocess.run([sys.executable, "-W", "ignore", "-c", "\n".join(lines)], capture_output=True, text=True)


def test_masks_and_divergences_import_torch_alone():
    code = (
        "import torch; from trm_repro.divergence import k3_divergence; from trm_repro.masks import *\n"
        "data = TokenStatistics(log_ratio=torch.zeros(1, 2), response_mask=torch.ones(1, 2, dtype=torch.bool))\n"
        "assert gate_mask('ser', data).tolist() == [True] and gate_mask('icepop', data).all()\n"
    )
    done = run_blocked(code, BLOCKED)
    assert done.returncode == 0, done.stderr


def test_bounds_import_numpy_alone_and_the_registrys_names_nothing():
    done = run_blocked("import trm_repro.bounds, trm_repro.gate_specs", ["torch", *BLOCKED[1:]])
    assert done.returncode == 0, done.stderr
    done = run_blocked("import trm_repro.gate_specs, trm_repro.config_sections", ["torch", *BLOCKED])
    assert done.returncode == 0, done.stderr


def test_the_documented_table_is_the_registry():
    text = (Path(__file__).resolve().parents[2] / "docs" / "masks.md").read_text(encoding="utf-8")
    table = text.partition("<!-- gates -->\n")[2].partition("<!-- end of gates -->")[0]
    assert table.strip() == gate_table().strip()


def test_what_lies_on_a_threshold_is_kept():
    even = statistics([[1.0, 1.0]])
    for name in ("sequence_mis", "geometric", "icepop"):
        assert kept_sequences(gate_mask(name, even, low=1.0, high=1.0)).tolist() == [True]
    drifted = TokenStatistics(
        log_ratio=torch.tensor([[-0.5, -0.5]]),
        response_mask=torch.ones(1, 2, dtype=torch.bool),
        advantages=torch.tensor([-1.0]),
    )
    assert gate_mask("opsm", drifted, threshold=0.5).tolist() == [True]
    assert gate_mask("opsm", drifted, threshold=0.499).tolist() == [False]


@pytest.mark.parametrize("level", [0.0, 0.37, 0.9, 1.0])
def test_a_quantile_from_the_largest_values_is_that_of_all(level):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([[1], [2], [7], [30]])
    is_real = torch.arange(30) < lengths
    values = torch.where(is_real, torch.rand(4, 30, generator=generator), 0.0)
    expected = torch.nanquantile(values.masked_fill(~is_real, math.nan), level, dim=-1, keepdim=True)
    assert torch.equal(_quantile(values, lengths, level), expected)
    assert _quantile(torch.zeros(1, 3), torch.zeros(1, 1, dtype=torch.long), level).tolist() == [[0.0]]
