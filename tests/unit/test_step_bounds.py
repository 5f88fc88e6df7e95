"""The bounds measured on a step: profiles over all sequences, the surrogate in reward units, refutation."""

import math

import pytest
import torch

from tests.unit.builders import make_rollout
from trm_repro.batch import RolloutBatch
from trm_repro.bounds import Divergences, unified_bound
from trm_repro.config_sections import MaskConfig
from trm_repro.measurement import Measurement
from trm_repro.step_bounds import step_bounds, surrogate_in_reward_units
from trm_repro.step_metrics import UpdateRecord, mask_confusions


def record_of(lengths: list[int], kl: list[list[float]] | None, ratios: list[list[float]], rewards, groups):
    rollouts = [
        make_rollout(length, reward=reward, group=group)
        for length, reward, group in zip(lengths, rewards, groups, strict=True)
    ]
    batch = RolloutBatch.from_rollouts(rollouts)
    width = batch.response_mask.shape[1]

    def dense(rows: list[list[float]], fill: float) -> torch.Tensor:
        return torch.tensor([row + [fill] * (width - len(row)) for row in rows])

    log_ratio = dense([[math.log(r) for r in row] for row in ratios], 0.0)
    kl_tensor = None if kl is None else dense(kl, 0.0)
    measurement = Measurement(
        policy_logprobs=batch.rollout_logprobs + log_ratio,
        log_ratio=log_ratio,
        entropy=torch.zeros_like(log_ratio),
        normalizers=torch.zeros_like(log_ratio),
        kl=kl_tensor,
        total_variation=None if kl_tensor is None else (kl_tensor / 2).sqrt(),
        is_flipped=None,
    )
    return UpdateRecord(
        batch=batch,
        measurement=measurement,
        sequence_mask=torch.ones(len(lengths), dtype=torch.bool),
        loss=0.0,
        gradient_norm=0.0,
        is_skipped=False,
        learning_rate=0.0,
    )


def two_records():
    ones = [[1.0], [1.0, 1.0, 1.0]]
    return [
        record_of([1, 3], [[0.02], [0.0, 0.08, 0.0]], ones, [1.0, 0.0], [0, 0]),
        record_of([2, 2], [[0.0, 0.0], [0.02, 0.0]], [[1.0, 1.0], [1.0, 1.0]], [1.0, 1.0], [1, 1]),
    ]


def test_profiles_average_over_all_sequences_with_ended_ones_as_zero():
    _, profiles = step_bounds(two_records(), length_limit=5, divergence_threshold=0.05)
    # Four sequences: at position 1 KL 0.02, 0, 0, 0.02; at position 2 one of 0.08; later nothing.
    assert profiles["mean_kl"] == pytest.approx([0.01, 0.02, 0.0, 0.0, 0.0], abs=1e-8)
    # TV sqrt(KL / 2): 0.1 twice at position 1, 0.2 once at position 2.
    assert profiles["mean_tv"] == pytest.approx([0.05, 0.05, 0.0, 0.0, 0.0], abs=1e-8)


def test_bounds_are_those_of_the_measured_divergences():
    metrics, profiles = step_bounds(two_records(), length_limit=5, divergence_threshold=0.05)
    assert metrics["bounds/delta"] == pytest.approx(0.08)
    assert metrics["bounds/epsilon"] == pytest.approx(0.2)
    assert metrics["bounds/kl_seq"] == pytest.approx(0.03)
    worked = Divergences.at_most(5, 0.08, epsilon=0.2, mean_kl=profiles["mean_kl"], mean_tv=profiles["mean_tv"])
    assert metrics["bounds/unified_paper"] == pytest.approx(float(unified_bound(worked)), rel=1e-6)
    assert metrics["bounds/unified_sharp"] <= metrics["bounds/unified_paper"] / 2 + 1e-12
    # Trivial: TV_seq + sum Dbar with TV_seq <= min(sqrt(0.03 / 2), 0.1) = 0.1.
    assert metrics["bounds/trivial"] == pytest.approx(0.2, rel=1e-6)


def test_one_token_above_the_threshold_refutes_the_condition():
    metrics, _ = step_bounds(two_records(), length_limit=5, divergence_threshold=0.05)
    assert metrics["bounds/num_refuting_sequences"] == 1
    assert "bounds/refuting_probability_at_most" not in metrics


def test_without_refutation_only_the_probability_is_bounded():
    metrics, _ = step_bounds(two_records(), length_limit=5, divergence_threshold=0.1)
    assert metrics["bounds/num_refuting_sequences"] == 0
    assert metrics["bounds/refuting_probability_at_most"] == pytest.approx(1 - 0.05 ** (1 / 4))


def test_nothing_is_said_without_exact_or_finite_divergences():
    ones = [[1.0], [1.0]]
    sampled = record_of([1, 1], None, ones, [1.0, 0.0], [0, 0])
    assert step_bounds([sampled], length_limit=5, divergence_threshold=0.05) == ({}, {})
    infinite = record_of([1, 1], [[math.inf], [0.0]], ones, [1.0, 0.0], [0, 0])
    assert step_bounds([infinite], length_limit=5, divergence_threshold=0.05) == ({}, {})


def test_surrogate_weighs_drift_by_reward_above_the_other_responses():
    # Prompt 0: rewards 1 and 0, drifts 0.5 and -0.25: (1 - 0) 0.5 + (0 - 1) (-0.25) = 0.75.
    # Prompt 1: rewards 1 and 1: baseline equals reward, nothing. Mean over four sequences: 0.1875.
    records = [
        record_of([1, 2], None, [[1.5], [0.75, 1.0]], [1.0, 0.0], [0, 0]),
        record_of([1, 1], None, [[3.0], [2.0]], [1.0, 1.0], [1, 1]),
    ]
    assert surrogate_in_reward_units(records) == pytest.approx(0.1875, rel=1e-5)


def test_confusion_counts_what_sampled_estimators_miss_and_lose():
    # Sequence 1: exact KL 0.2 but ratio 1: k2 and k3 see nothing. Sequence 2: KL 0 but ratio 2: k2 = 0.24, k3 = 0.31.
    record = record_of([1, 1], [[0.2], [0.0]], [[1.0], [2.0]], [1.0, 0.0], [0, 0])
    metrics = mask_confusions([record], MaskConfig(max_threshold=0.05, avg_threshold=0.001))
    for name in ("max", "avg"):
        assert metrics[f"confusion/{name}_wrongly_accepted_fraction"] == 0.5
        assert metrics[f"confusion/{name}_wrongly_rejected_fraction"] == 0.5
        assert metrics[f"confusion/{name}_exact_kept_fraction"] == 0.5
