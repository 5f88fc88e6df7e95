import math
import time
from dataclasses import replace

import pytest
import torch

from tests.unit.builders import make_batch, make_measurement
from trm_repro.config_sections import LossConfig, MaskConfig
from trm_repro.stage_clock import StageClock
from trm_repro.step_metrics import UpdateRecord, mask_confusions, step_metrics

PADDING = 1e6  # stands on padding: any metric that hears it is far off


def make_records():
    """Two updates of two sequences: 2 + 1 and 1 + 3 tokens, prompts in two groups, one right answer."""
    first = replace(
        make_batch([(2, 2), (2, 1)]),
        rewards=torch.tensor([1.0, 0.0]),
        groups=torch.tensor([0, 0]),
        advantages=torch.tensor([1.0, -1.0]),
        weight_versions=torch.tensor([7, 7]),
    )
    second = replace(
        make_batch([(2, 1), (2, 3)], seed=1),
        rewards=torch.tensor([0.0, 0.0]),
        groups=torch.tensor([1, 1]),
        advantages=torch.tensor([0.0, -1.0]),
        weight_versions=torch.tensor([7, 7]),
    )
    return [
        UpdateRecord(
            batch=first,
            measurement=make_measurement(
                [[0.5, -0.3], [0.1, PADDING]],
                kl=[[0.01, 0.02], [0.03, PADDING]],
                entropy=[[1.0, 2.0], [3.0, PADDING]],
                is_flipped=[[True, False], [False, True]],
                rollout_logprobs=first.rollout_logprobs,
            ),
            sequence_mask=torch.tensor([True, False]),
            loss=0.5,
            gradient_norm=2.0,
            is_skipped=False,
            learning_rate=0.1,
        ),
        UpdateRecord(
            batch=second,
            measurement=make_measurement(
                [[0.4, PADDING, PADDING], [-0.4, 0.0, 0.2]],
                kl=[[0.04, PADDING, PADDING], [0.05, 0.0, 0.08]],
                entropy=[[1.0, PADDING, PADDING], [0.0, 0.0, 7.0]],
                is_flipped=[[False, True, True], [True, False, False]],
                rollout_logprobs=second.rollout_logprobs,
            ),
            sequence_mask=torch.tensor([True, True]),
            loss=-0.1,
            gradient_norm=4.0,
            is_skipped=True,
            learning_rate=0.2,
        ),
    ]


LOG_RATIOS = [0.5, -0.3, 0.1, 0.4, -0.4, 0.0, 0.2]


@pytest.fixture
def metrics():
    return step_metrics(make_records(), LossConfig(clip_low=0.2, clip_high=0.2))


def test_rollout_metrics_by_hand(metrics):
    assert metrics["rollout/reward_mean"] == pytest.approx(0.25)
    assert metrics["rollout/mixed_group_fraction"] == 0.5  # group 0 has both rewards, group 1 one
    assert metrics["rollout/response_length_mean"] == pytest.approx(7 / 4)
    assert metrics["rollout/num_tokens"] == 7.0
    assert metrics["rollout/weight_version"] == 7.0


def test_sampled_divergences_are_averaged_over_tokens(metrics):
    k3 = [math.exp(x) - 1 - x for x in LOG_RATIOS]
    assert metrics["divergence/k1_mean"] == pytest.approx(-sum(LOG_RATIOS) / 7, abs=1e-6)
    assert metrics["divergence/k2_mean"] == pytest.approx(sum(x * x / 2 for x in LOG_RATIOS) / 7, abs=1e-6)
    assert metrics["divergence/k3_mean"] == pytest.approx(sum(k3) / 7, abs=1e-6)
    assert metrics["divergence/k2_max"] == pytest.approx(0.125, abs=1e-6)
    assert metrics["divergence/k3_max"] == pytest.approx(max(k3), abs=1e-6)


def test_exact_divergences_and_entropy_are_averaged_over_tokens(metrics):
    kl = [0.01, 0.02, 0.03, 0.04, 0.05, 0.0, 0.08]
    assert metrics["divergence/kl_mean"] == pytest.approx(sum(kl) / 7, abs=1e-6)
    assert metrics["divergence/kl_max"] == pytest.approx(0.08, abs=1e-6)
    assert metrics["divergence/tv_mean"] == pytest.approx(sum(kl) / 70, abs=1e-6)
    assert metrics["policy/entropy_mean"] == pytest.approx(14 / 7)


def test_the_perplexity_gap_is_averaged_over_sequences(metrics):
    gaps = [abs(0.5 - 0.3) / 2, 0.1, 0.4, abs(-0.4 + 0.0 + 0.2) / 3]
    assert metrics["divergence/ppl_gap"] == pytest.approx(sum(gaps) / 4, abs=1e-6)


def test_mask_metrics_by_hand(metrics):
    # kept T F T T; right T F F F; lengths 2 1 1 3, of which 2 and 3 are long
    assert metrics["mask/kept_sequence_fraction"] == pytest.approx(3 / 4)
    assert metrics["mask/kept_correct_fraction"] == 1.0
    assert metrics["mask/kept_wrong_fraction"] == pytest.approx(2 / 3)
    assert metrics["mask/kept_long_fraction"] == 1.0
    assert metrics["mask/kept_short_fraction"] == 0.5


def test_router_metrics_by_hand(metrics):
    # flipped tokens: the first of sequences 0 and 3
    assert metrics["router/agreement_fraction"] == pytest.approx(5 / 7)
    assert metrics["router/kl_flipped_mean"] == pytest.approx((0.01 + 0.05) / 2, abs=1e-6)
    assert metrics["router/kl_unflipped_mean"] == pytest.approx((0.02 + 0.03 + 0.04 + 0.0 + 0.08) / 5, abs=1e-6)


def test_training_metrics_by_hand(metrics):
    assert metrics["train/surrogate_loss"] == pytest.approx(0.2)
    assert metrics["train/gradient_norm_mean"] == 3.0
    assert metrics["train/gradient_norm_max"] == 4.0
    assert metrics["train/num_skipped_updates"] == 1.0
    assert metrics["train/num_nonfinite_gradients"] == 0.0
    assert metrics["train/learning_rate"] == 0.2


def test_the_clip_fraction_counts_tokens_beyond_the_range_on_the_side_of_their_advantage(metrics):
    # log 1.2 = 0.182, log 0.8 = -0.223. A > 0: 0.5 is clipped, -0.3 not; A < 0: -0.4 is clipped, 0.1, 0 and 0.2 not;
    # A = 0: 0.4 is not.
    assert metrics["train/clip_fraction"] == pytest.approx(2 / 7)


def test_non_finite_log_ratios_are_counted_and_left_out():
    records = make_records()
    ratio = records[0].measurement.log_ratio.clone()
    ratio[0, 1], ratio[1, 0] = math.nan, -math.inf
    measurement = replace(records[0].measurement, log_ratio=ratio, policy_logprobs=ratio)
    metrics = step_metrics([replace(records[0], measurement=measurement), records[1]], LossConfig())
    finite = [0.5, 0.4, -0.4, 0.0, 0.2]
    assert metrics["divergence/num_nonfinite_tokens"] == 2.0
    assert metrics["divergence/k1_mean"] == pytest.approx(-sum(finite) / 5, abs=1e-6)
    assert metrics["divergence/ppl_gap"] == pytest.approx((0.4 + 0.2 / 3) / 2, abs=1e-6)  # of sequences 2 and 3


def test_clamped_log_ratios_are_counted():
    records = make_records()
    ratio = records[0].measurement.log_ratio.clone()
    ratio[0] = torch.tensor([20.5, -21.0])
    metrics = step_metrics(
        [replace(records[0], measurement=replace(records[0].measurement, log_ratio=ratio))], LossConfig()
    )
    assert metrics["divergence/num_clamped_tokens"] == 2.0
    assert metrics["divergence/num_nonfinite_tokens"] == 0.0


def test_non_finite_gradient_norms_are_counted_and_left_out():
    records = [replace(make_records()[0], gradient_norm=math.nan), make_records()[1]]
    metrics = step_metrics(records, LossConfig())
    assert metrics["train/num_nonfinite_gradients"] == 1.0
    assert metrics["train/gradient_norm_mean"] == 4.0
    assert "train/gradient_norm_mean" not in step_metrics(records[:1], LossConfig())


def test_what_was_not_observed_is_left_out():
    record = make_records()[1]
    bare = replace(record.measurement, kl=None, total_variation=None, is_flipped=None)
    metrics = step_metrics([replace(record, measurement=bare)], LossConfig())
    assert not [name for name in metrics if name.startswith(("router/", "divergence/kl", "divergence/tv"))]
    assert "mask/kept_correct_fraction" not in metrics  # there was no right answer
    assert "divergence/k3_mean" in metrics


def test_the_99th_percentile_of_100_tokens_is_the_second_largest():
    ratios = [[math.sqrt(2 * value) for value in range(100)]]
    record = replace(
        make_records()[0],
        batch=make_batch([(2, 100)]),
        measurement=make_measurement(ratios, kl=[[0.0] * 100]),
        sequence_mask=torch.tensor([True]),
    )
    metrics = step_metrics([record], LossConfig())
    assert metrics["divergence/k2_p99"] == pytest.approx(98.0, rel=1e-5)
    assert metrics["divergence/k2_max"] == pytest.approx(99.0, rel=1e-5)


def test_masks_from_sampled_tokens_are_compared_with_those_of_exact_kl_by_hand():
    # max at 0.05: k2 keeps F T F F (0.125, 0.005, 0.08, 0.08), exact KL T T T F (0.02, 0.03, 0.04, 0.08)
    # avg at 0.035: k3 keeps F T F T (0.095, 0.005, 0.092, 0.031), exact KL T T F F (0.015, 0.03, 0.04, 0.043)
    confusions = mask_confusions(make_records(), MaskConfig(max_threshold=0.05, avg_threshold=0.035))
    assert confusions == {
        "confusion/max_wrongly_accepted_fraction": 0.0,
        "confusion/max_wrongly_rejected_fraction": 0.5,
        "confusion/max_exact_kept_fraction": 0.75,
        "confusion/avg_wrongly_accepted_fraction": 0.25,
        "confusion/avg_wrongly_rejected_fraction": 0.25,
        "confusion/avg_exact_kept_fraction": 0.5,
    }


def test_masks_are_not_compared_where_there_is_no_exact_kl():
    record = make_records()[0]
    bare = replace(record, measurement=replace(record.measurement, kl=None, total_variation=None))
    assert mask_confusions([bare], MaskConfig()) == {}


def test_the_clock_adds_up_the_time_of_a_stage_and_starts_again_when_taken():
    clock = StageClock()
    before = time.time()
    for stage in ("rollout", "mask", "rollout"):
        with clock.measure(stage):
            time.sleep(0.02)
    seconds, spans = clock.take()
    assert set(seconds) == {"rollout", "mask"}
    assert seconds["rollout"] >= 0.04
    assert seconds["mask"] >= 0.02
    assert [stage for stage, _, _ in spans] == ["rollout", "mask", "rollout"]
    for _, begin, end in spans:
        assert before <= begin < end <= time.time() + 1.0
    for stage, total in seconds.items():
        assert sum(end - begin for name, begin, end in spans if name == stage) == pytest.approx(total, abs=1e-5)
    assert clock.take() == ({}, [])


def test_the_clock_counts_a_stage_that_failed():
    clock = StageClock()
    with pytest.raises(RuntimeError, match="stop"), clock.measure("update"):
        raise RuntimeError("stop")
    assert list(clock.take()[0]) == ["update"]
