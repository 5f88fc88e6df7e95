import math
from dataclasses import replace

import pytest
import torch

from tests.unit.builders import EXPERTS_PER_TOKEN, VOCAB_SIZE, make_batch, make_measurement, near_policy, tiny_policy
from trm_repro.batch import Rollout, RolloutBatch
from trm_repro.config_sections import LossConfig, MaskConfig
from trm_repro.gate_specs import GATE_SPECS
from trm_repro.measurement import measure
from trm_repro.steps import CRITERIA, Control, ReferenceUpdate, clip_range, gate, surrogate_loss

LENGTHS = [(2, 3), (4, 5), (1, 2), (3, 6), (2, 4)]  # (prompt, response)
NOISE = torch.tensor([0.05, 1.0, 0.05, 0.8, 0.05])  # how far the rollout policy is from the policy, per sequence
TEMPERATURE = 0.9
LETTER = LossConfig(name="token_is", length_normalizer=1.0)  # Algorithm 1 to the letter


def gradient_of(policy):
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


def algorithm_1(policy, batch, mask_config, loss_config=LETTER):
    """Run lines 1 to 4 with the project's functions; return the mask and the gradient of the loss."""
    measurement = measure(policy, batch, temperature=TEMPERATURE, tokens_per_micro_batch=1000)
    kept = gate(measurement, batch.response_mask, mask_config)
    policy.zero_grad()
    surrogate_loss(
        policy, batch.select(kept), loss_config, temperature=TEMPERATURE, denominator=batch.num_sequences
    ).backward()
    return kept, gradient_of(policy)


def naive_algorithm_1(policy, batch, keeps):
    """Write Algorithm 1 as loops over sequences, tokens and the vocabulary, with one forward pass a token."""
    model = policy.model
    parameters = list(model.parameters())
    total = torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=torch.float64)
    mask, row = [], 0
    for i in range(batch.num_sequences):
        prompt_length, length = LENGTHS[i]
        divergences, sequence_gradient = [], torch.zeros_like(total)
        for t in range(length):
            context = batch.input_ids[i, : prompt_length + t][None]
            log_policy = torch.log_softmax(model(input_ids=context).logits[0, -1].double() / TEMPERATURE, dim=-1)
            log_rollout = batch.rollout_log_distribution[row].tolist()
            divergences.append(
                sum(math.exp(p) * (p - q) for p, q in zip(log_rollout, log_policy.tolist(), strict=True))
            )
            chosen = log_policy[batch.response_ids[i, t]]
            ratio = math.exp(chosen.item() - batch.rollout_logprobs[i, t].item())
            gradients = torch.autograd.grad(chosen, parameters)
            sequence_gradient += ratio * torch.cat([gradient.flatten() for gradient in gradients])
            row += 1
        mask.append(keeps(divergences))
        total += mask[-1] * batch.advantages[i].item() * sequence_gradient
    return mask, total / batch.num_sequences


@pytest.mark.parametrize("architecture", ["dense", "moe"])
@pytest.mark.parametrize(
    ("mask_config", "keeps"),
    [
        (MaskConfig(criterion="trm_max", max_threshold=0.05), lambda kl: max(kl) <= 0.05),
        (
            MaskConfig(criterion="trm_avg", avg_estimator="exact", avg_threshold=0.02),
            lambda kl: sum(kl) / len(kl) <= 0.02,
        ),
        (MaskConfig(criterion="none"), lambda kl: True),
    ],
    ids=["max", "avg", "none"],
)
def test_the_gradient_is_algorithm_1_written_as_loops(architecture, mask_config, keeps):
    policy = tiny_policy(architecture)
    batch = near_policy(make_batch(LENGTHS), policy, NOISE, temperature=TEMPERATURE)
    kept, gradient = algorithm_1(policy, batch, mask_config)
    mask, expected = naive_algorithm_1(policy, batch, keeps)
    if mask_config.criterion != "none":
        assert mask == [True, False, True, False, True]
    assert kept.tolist() == mask
    assert expected.norm() > 0.1
    assert (-gradient.double() - expected).norm() < 1e-4 * expected.norm()  # the loss is minimised


def test_what_stands_in_a_rejected_sequence_changes_no_bit_of_the_gradient():
    policy = tiny_policy()
    config = MaskConfig(criterion="trm_max", max_threshold=0.05)
    batch = near_policy(make_batch(LENGTHS), policy, NOISE, temperature=TEMPERATURE)
    kept, gradient = algorithm_1(policy, batch, config)
    rejected = ~kept
    assert rejected.tolist() == [False, True, False, True, False]
    garbled = replace(
        batch,
        rollout_logprobs=torch.where(rejected[:, None], torch.tensor(math.nan), batch.rollout_logprobs),
        advantages=torch.where(rejected, torch.tensor(1e9), batch.advantages),
    )
    again, garbled_gradient = algorithm_1(policy, garbled, config)
    assert torch.equal(again, kept)
    assert torch.equal(garbled_gradient, gradient)


def test_the_loss_by_hand_at_the_rollout_policy_itself_is_minus_advantage_times_length():
    policy = tiny_policy()
    batch = near_policy(make_batch(LENGTHS), policy, torch.zeros(5), temperature=TEMPERATURE)
    loss = surrogate_loss(policy, batch, LETTER, temperature=TEMPERATURE, denominator=5.0)
    # ratio 1 at every token: -1/N sum_i A_i T_i with A = .5, -1, 1.5, -2, 2.5 and T = 3, 5, 2, 6, 4
    assert loss.item() == pytest.approx(-(1.5 - 5.0 + 3.0 - 12.0 + 10.0) / 5, abs=1e-4)


@pytest.mark.parametrize("name", ["token_is", "ppo_clip"])
def test_the_loss_equals_a_loop_over_tokens(name):
    policy = tiny_policy()
    batch = near_policy(make_batch(LENGTHS), policy, NOISE, temperature=TEMPERATURE)
    config = LossConfig(name=name, clip_low=0.1, clip_high=0.2, length_normalizer=10.0)
    measurement = measure(policy, batch, temperature=TEMPERATURE, tokens_per_micro_batch=1000)
    total = 0.0
    for i, (_, length) in enumerate(LENGTHS):
        for t in range(length):
            ratio, advantage = math.exp(measurement.log_ratio[i, t].item()), batch.advantages[i].item()
            value = ratio * advantage
            if name == "ppo_clip":
                value = min(value, min(max(ratio, 0.9), 1.2) * advantage)
            total += value
    loss = surrogate_loss(policy, batch, config, temperature=TEMPERATURE, denominator=8.0)
    assert loss.item() == pytest.approx(-total / 80.0, rel=1e-4)


def test_gradients_of_micro_batches_add_up_to_that_of_the_batch():
    policy = tiny_policy("moe")
    batch = near_policy(make_batch(LENGTHS), policy, NOISE, temperature=TEMPERATURE)
    gradients = []
    for max_tokens in (1000, 14, 1):
        policy.zero_grad()
        for part in batch.split(max_tokens):
            surrogate_loss(policy, part, LETTER, temperature=TEMPERATURE, denominator=5.0).backward()
        gradients.append(gradient_of(policy))
    assert torch.allclose(gradients[0], gradients[1], atol=1e-5)
    assert torch.allclose(gradients[0], gradients[2], atol=1e-5)


@pytest.mark.parametrize("architecture", ["dense", "moe"])
def test_micro_batches_do_not_change_a_measurement(architecture):
    policy = tiny_policy(architecture)
    batch = near_policy(make_batch(LENGTHS, experts=True), policy, NOISE)
    whole = measure(policy, batch, temperature=1.0, tokens_per_micro_batch=1000)
    for tokens in (1, 14):
        parts = measure(policy, batch, temperature=1.0, tokens_per_micro_batch=tokens)
        for name in ("policy_logprobs", "log_ratio", "entropy", "kl", "total_variation"):
            assert torch.allclose(getattr(parts, name), getattr(whole, name), atol=1e-5), name
        assert architecture == "dense" or torch.equal(parts.is_flipped, whole.is_flipped)


def test_a_measurement_is_zero_on_padding_and_its_ratio_is_policy_over_rollout():
    policy = tiny_policy()
    batch = make_batch(LENGTHS)
    measurement = measure(policy, batch, temperature=1.0, tokens_per_micro_batch=1000)
    expected = batch.dense(policy(batch).logprobs.detach()) - batch.rollout_logprobs
    assert torch.allclose(measurement.log_ratio, expected, atol=1e-6)
    for name in ("policy_logprobs", "log_ratio", "entropy", "kl", "total_variation"):
        values = getattr(measurement, name)
        assert values[~batch.response_mask].eq(0.0).all(), name
        assert values[batch.response_mask].ne(0.0).all(), name


def test_over_all_tokens_of_a_context_the_means_of_k1_and_k3_are_the_measured_kl():
    policy = tiny_policy()
    distribution = torch.log_softmax(torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0)), dim=-1)
    batch = RolloutBatch.from_rollouts(
        [
            Rollout(
                group=0,
                prompt_ids=(1, 8, 14),
                response_ids=(token,),
                logprobs=distribution[token][None],
                log_distribution=distribution[None],
            )
            for token in range(VOCAB_SIZE)
        ]
    )
    measurement = measure(policy, batch, temperature=1.0, tokens_per_micro_batch=20)
    ratio, rollout = measurement.log_ratio[:, 0].double(), distribution.double().exp()
    exact = measurement.kl[0, 0].item()
    assert exact > 0.1
    assert -(rollout * ratio).sum().item() == pytest.approx(exact, rel=1e-4)
    assert (rollout * (ratio.exp() - 1 - ratio)).sum().item() == pytest.approx(exact, rel=1e-4)


def test_routing_is_flipped_where_some_layer_chose_another_set_of_experts():
    policy = tiny_policy("moe")
    batch = make_batch(LENGTHS)
    experts = policy(batch, measure=True).experts  # [N, L, K]
    rollout_experts = experts.flip(-1).to(torch.uint8)  # the same sets in another order
    rollout_experts[4, 1, 0] = next(e for e in range(4) if e not in experts[4, 1].tolist())
    batch = replace(batch, rollout_experts=rollout_experts)
    measurement = measure(policy, batch, temperature=1.0, tokens_per_micro_batch=14)
    flat = measurement.is_flipped[batch.response_mask]
    assert flat.nonzero().flatten().tolist() == [4]
    assert rollout_experts.shape[-1] == EXPERTS_PER_TOKEN


def test_routing_and_divergences_are_none_where_the_rollouts_do_not_carry_them():
    batch = replace(make_batch(LENGTHS), rollout_log_distribution=None)
    measurement = measure(tiny_policy("moe"), batch, temperature=1.0, tokens_per_micro_batch=1000)
    assert (measurement.kl, measurement.total_variation, measurement.is_flipped) == (None, None, None)
    dense = measure(tiny_policy(), make_batch(LENGTHS, experts=True), temperature=1.0, tokens_per_micro_batch=1000)
    assert dense.is_flipped is None


# Two tokens each; exact KL and the estimates disagree on purpose. At log r = 0.4 k2 = 0.0800, k3 = 0.0918 and
# r - 1 = 0.4918; at -0.4 k3 = 0.0703 and 1 - r = 0.3297; at 0.1 r - 1 = 0.1052.
MEASUREMENT = make_measurement(
    [[0.1, 0.0], [-0.4, -0.4], [0.4, 0.4], [0.0, 0.4]], kl=[[0.0, 0.0], [0.3, 0.0], [0.0, 0.0], [0.04, 0.04]]
)
FULL = torch.ones(4, 2, dtype=torch.bool)
CONTROLS = {"random", "length_matched"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"criterion": "none"}, [True, True, True, True]),
        ({"criterion": "trm_max", "max_threshold": 0.05}, [True, False, True, True]),
        ({"criterion": "trm_max", "max_threshold": 0.085, "max_estimator": "k2"}, [True, True, True, True]),
        ({"criterion": "trm_max", "max_threshold": 0.075, "max_estimator": "k2"}, [True, False, False, False]),
        ({"criterion": "trm_avg", "avg_threshold": 0.03, "avg_estimator": "exact"}, [True, False, True, False]),
        ({"criterion": "trm_avg", "avg_threshold": 0.085}, [True, True, False, True]),
        ({"criterion": "trm_avg", "avg_threshold": 0.075}, [True, True, False, True]),
        ({"criterion": "trm_max_avg", "max_threshold": 0.05, "avg_threshold": 0.085}, [True, False, False, True]),
        ({"criterion": "ser", "ser_threshold": 0.06}, [True, False, False, False]),
        ({"criterion": "ser", "ser_threshold": 0.34}, [True, True, False, True]),
        # of two tokens, the last has weight 0: the first decides
        ({"criterion": "ln_trm", "ln_trm_threshold": 0.06}, [False, False, False, True]),
        ({"criterion": "ln_trm", "ln_trm_threshold": 0.34}, [True, True, False, True]),
    ],
)
def test_each_criterion_reads_its_own_divergence_and_threshold(config, expected):
    assert gate(MEASUREMENT, FULL, MaskConfig(**config)).tolist() == expected


def agreeing_batch(num_sequences):
    """Sequences of two tokens that the rollout policy was certain of."""
    batch = make_batch([(1, 2)] * num_sequences)
    return replace(batch, rollout_logprobs=torch.zeros_like(batch.rollout_logprobs))


@pytest.mark.parametrize("criterion", GATE_SPECS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_log_ratio_rejects_its_sequence_under_every_criterion(criterion, value):
    measurement = make_measurement([[0.0, 0.0], [0.0, value], [0.0, 0.0]], kl=[[0.0, 0.0]] * 3)
    response_mask = torch.tensor([[True, True], [True, True], [True, False]])
    config = MaskConfig(criterion=criterion, reference_arm="other" if criterion in CONTROLS else None)
    reference = ReferenceUpdate(num_kept=3, rejected_lengths=())
    control = Control(reference=reference, generator=torch.Generator().manual_seed(0))
    mask = gate(measurement, response_mask, config, control, agreeing_batch(3))
    assert mask.tolist() == [True, False, True]


@pytest.mark.parametrize("criterion", sorted(set(GATE_SPECS) - CONTROLS))
def test_garbage_on_padding_rejects_nothing(criterion):
    measurement = make_measurement([[0.0, math.nan], [0.0, 0.0]], kl=[[0.0, math.nan], [0.0, math.inf]])
    response_mask = torch.tensor([[True, False], [True, False]])
    mask = gate(measurement, response_mask, MaskConfig(criterion=criterion), batch=agreeing_batch(2))
    assert mask.tolist() == [True, True]


def test_the_random_criterion_keeps_as_many_as_it_is_told_by_chance_alone():
    config = MaskConfig(criterion="random", reference_arm="other")
    masks = set()
    for seed in range(40):
        control = Control(reference=ReferenceUpdate(num_kept=2), generator=torch.Generator().manual_seed(seed))
        mask = gate(MEASUREMENT, FULL, config, control)
        assert int(mask.sum()) == 2
        masks.add(tuple(mask.tolist()))
    assert len(masks) == 6  # all pairs of four turn up


def test_the_length_matched_criterion_rejects_among_those_of_the_length_it_is_told():
    measurement = make_measurement([[0.0, 0.0]] * 4)
    response_mask = torch.tensor([[True, False], [True, True], [True, False], [True, True]])
    config = MaskConfig(criterion="length_matched", reference_arm="other", num_length_bins=2)
    masks = set()
    for seed in range(20):
        reference = ReferenceUpdate(num_kept=3, rejected_lengths=(2,))
        control = Control(reference=reference, generator=torch.Generator().manual_seed(seed))
        masks.add(tuple(gate(measurement, response_mask, config, control).tolist()))
    assert masks == {(True, False, True, True), (True, True, True, False)}


@pytest.mark.parametrize("criterion", sorted(CONTROLS))
def test_a_control_without_what_it_copies_names_the_arm_it_lacks(criterion):
    with pytest.raises(ValueError, match=r"copies the rate of trm_avg_0\.001"):
        gate(MEASUREMENT, FULL, MaskConfig(criterion=criterion, reference_arm="trm_avg_0.001"))


def test_a_length_matched_control_without_lengths_is_refused():
    control = Control(reference=ReferenceUpdate(num_kept=2), generator=torch.Generator())
    with pytest.raises(ValueError, match="needs the lengths that other rejected"):
        gate(MEASUREMENT, FULL, MaskConfig(criterion="length_matched", reference_arm="other"), control)


def test_an_exact_criterion_without_distributions_is_refused():
    with pytest.raises(ValueError, match="whole distribution"):
        gate(replace(MEASUREMENT, kl=None), FULL, MaskConfig(criterion="trm_max"))


def test_every_criterion_that_can_be_configured_exists():
    assert set(CRITERIA) == set(GATE_SPECS)


def test_the_clip_range_is_that_of_the_configuration():
    clip = clip_range(LossConfig(clip_low=0.1, clip_high=0.4))
    assert (clip.low, clip.high) == (0.1, 0.4)
