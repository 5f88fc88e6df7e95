import math

import pytest
import torch

from trm_repro.masks import (
    finite_mask,
    length_matched_mask,
    max_divergence_mask,
    mean_divergence_mask,
    random_mask,
    sequence_mask,
)
from trm_repro.masks.controls import fit_counts


def random_case(seed):
    """Draw divergences with ragged lengths, empty responses among them, and garbage on padding."""
    generator = torch.Generator().manual_seed(seed)
    divergence = torch.rand(20, 9, generator=generator) ** 4
    lengths = torch.randint(0, 10, (20,), generator=generator)
    mask = torch.arange(9) < lengths[:, None]
    garbage = torch.tensor([math.nan, math.inf, 1e30])[torch.randint(3, (20, 9), generator=generator)]
    return torch.where(mask, divergence, garbage), mask


def naive_max(divergence, mask, threshold):
    kept = []
    for values, row in zip(divergence.tolist(), mask.tolist(), strict=True):
        kept.append(all(value <= threshold for value, real in zip(values, row, strict=True) if real))
    return kept


def naive_mean(divergence, mask, threshold):
    kept = []
    for values, row in zip(divergence.tolist(), mask.tolist(), strict=True):
        tokens = [value for value, real in zip(values, row, strict=True) if real]
        kept.append(not tokens or sum(tokens) / len(tokens) <= threshold)
    return kept


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.7])
def test_masks_equal_a_loop_over_tokens_whatever_stands_on_padding(seed, threshold):
    divergence, mask = random_case(seed)
    largest, mean = naive_max(divergence, mask, threshold), naive_mean(divergence, mask, threshold / 3)
    assert max_divergence_mask(divergence, mask, threshold).tolist() == largest
    assert mean_divergence_mask(divergence, mask, threshold / 3).tolist() == mean
    both = sequence_mask(divergence, mask, max_threshold=threshold, avg_threshold=threshold / 3)
    assert both.tolist() == [a and b for a, b in zip(largest, mean, strict=True)]


def test_max_and_mean_by_hand():
    divergence = torch.tensor([[0.04, 0.0, 0.0, 0.0], [0.06, 0.0, 0.0, 0.0], [0.03, 0.03, 0.03, 0.03]])
    mask = torch.ones(3, 4, dtype=torch.bool)
    assert max_divergence_mask(divergence, mask, 0.05).tolist() == [True, False, True]
    assert mean_divergence_mask(divergence, mask, 0.02).tolist() == [True, True, False]
    assert sequence_mask(divergence, mask, max_threshold=0.05, avg_threshold=0.02).tolist() == [True, False, False]
    assert sequence_mask(divergence, mask, max_threshold=0.05).tolist() == [True, False, True]
    assert sequence_mask(divergence, mask, avg_threshold=0.02).tolist() == [True, True, False]


def test_the_mean_is_over_the_response_and_not_over_the_padded_length():
    divergence = torch.tensor([[0.3, 0.0, 0.0, 0.0]])
    short, long = torch.tensor([[True, False, False, False]]), torch.ones(1, 4, dtype=torch.bool)
    assert mean_divergence_mask(divergence, short, 0.1).tolist() == [False]
    assert mean_divergence_mask(divergence, long, 0.1).tolist() == [True]


def test_a_divergence_equal_to_the_threshold_is_kept():
    divergence, mask = torch.tensor([[0.5, 0.25], [0.5, 0.5]]), torch.ones(2, 2, dtype=torch.bool)
    assert max_divergence_mask(divergence, mask, 0.5).tolist() == [True, True]
    assert mean_divergence_mask(divergence, mask, 0.375).tolist() == [True, False]


@pytest.mark.parametrize("criterion", [max_divergence_mask, mean_divergence_mask])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_non_finite_divergence_rejects_its_sequence_and_no_other(criterion, value, position):
    divergence, mask = torch.zeros(3, 3), torch.ones(3, 3, dtype=torch.bool)
    divergence[1, position] = value
    assert criterion(divergence, mask, 1e6).tolist() == [True, False, True]


def test_an_infinite_threshold_keeps_every_sequence_without_nan():
    divergence, mask = torch.tensor([[1e30, 0.0], [0.0, math.nan]]), torch.ones(2, 2, dtype=torch.bool)
    for criterion in (max_divergence_mask, mean_divergence_mask):
        assert criterion(divergence, mask, math.inf).tolist() == [True, False]


def test_policies_that_agree_are_kept_at_any_threshold():
    divergence, mask = torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.bool)
    assert sequence_mask(divergence, mask, max_threshold=1e-30, avg_threshold=1e-30).tolist() == [True, True]


def test_an_empty_response_is_kept():
    divergence, mask = torch.full((1, 3), math.nan), torch.zeros(1, 3, dtype=torch.bool)
    assert sequence_mask(divergence, mask, max_threshold=0.1, avg_threshold=0.1).tolist() == [True]
    assert finite_mask(divergence, mask).tolist() == [True]


def test_the_max_criterion_rejects_more_of_longer_responses_and_the_mean_does_not():
    # Each token is far off with chance 0.02, independently: TRM-Max keeps (1 - 0.02)^T of the sequences.
    generator = torch.Generator().manual_seed(3)
    num_sequences = 4000
    kept = {}
    for length in (10, 100):
        divergence = (torch.rand(num_sequences, length, generator=generator) < 0.02).float()
        mask = torch.ones(num_sequences, length, dtype=torch.bool)
        kept[length] = max_divergence_mask(divergence, mask, 0.5).float().mean().item()
        assert kept[length] == pytest.approx(0.98**length, abs=0.03)
        assert mean_divergence_mask(divergence, mask, 0.15).float().mean().item() > 0.95
    assert kept[10] > 0.8 > 0.2 > kept[100]


@pytest.mark.parametrize("criterion", [max_divergence_mask, mean_divergence_mask])
@pytest.mark.parametrize("threshold", [0.0, -1.0, math.nan])
def test_a_threshold_that_is_not_positive_is_refused(criterion, threshold):
    with pytest.raises(ValueError, match="the threshold must be > 0, got"):
        criterion(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), threshold)


@pytest.mark.parametrize("criterion", [max_divergence_mask, mean_divergence_mask])
def test_shapes_that_would_broadcast_are_refused(criterion):
    with pytest.raises(ValueError, match=r"token_divergence \(3, 1\) and response_mask \(3, 4\)"):
        criterion(torch.zeros(3, 1), torch.ones(3, 4, dtype=torch.bool), 1.0)


def test_a_mask_without_any_threshold_is_refused():
    with pytest.raises(ValueError, match="give max_threshold, avg_threshold or both"):
        sequence_mask(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_finite_mask_looks_at_response_tokens_only(value):
    log_ratio = torch.tensor([[0.0, value], [value, 0.0], [0.0, 0.0]])
    mask = torch.tensor([[True, False], [True, True], [True, True]])
    assert finite_mask(log_ratio, mask).tolist() == [True, False, True]


@pytest.mark.parametrize("num_kept", [0, 1, 4, 7])
def test_the_random_mask_keeps_exactly_the_number_asked_for(num_kept):
    for seed in range(20):
        mask = random_mask(7, num_kept, torch.Generator().manual_seed(seed))
        assert len(mask) == 7
        assert int(mask.sum()) == num_kept


def test_the_random_mask_keeps_every_sequence_equally_often():
    generator = torch.Generator().manual_seed(0)
    num_draws = 4000
    counts = sum(random_mask(5, 2, generator).long() for _ in range(num_draws))
    deviation = math.sqrt(num_draws * 0.4 * 0.6)
    assert all(abs(count - 0.4 * num_draws) < 4.5 * deviation for count in counts.tolist())


def test_the_random_mask_depends_on_its_generator_alone():
    torch.manual_seed(1)
    first = random_mask(40, 20, torch.Generator().manual_seed(5))
    torch.manual_seed(2)
    assert torch.equal(first, random_mask(40, 20, torch.Generator().manual_seed(5)))
    assert not torch.equal(first, random_mask(40, 20, torch.Generator().manual_seed(6)))


@pytest.mark.parametrize("num_kept", [-1, 4])
def test_the_random_mask_cannot_keep_more_than_there_are(num_kept):
    with pytest.raises(ValueError, match=f"between 0 and 3, got {num_kept}"):
        random_mask(3, num_kept, torch.Generator())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_a_response_mask_that_is_not_bool_is_refused(dtype):
    values, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=dtype)
    calls = [
        lambda: max_divergence_mask(values, mask, 0.1),
        lambda: mean_divergence_mask(values, mask, 0.1),
        lambda: sequence_mask(values, mask, max_threshold=0.1),
        lambda: finite_mask(values, mask),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="response_mask must be bool"):
            call()


def test_without_any_token_every_sequence_is_kept():
    values, mask = torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)
    assert max_divergence_mask(values, mask, 0.1).tolist() == [True, True]
    assert mean_divergence_mask(values, mask, 0.1).tolist() == [True, True]
    assert sequence_mask(values, mask, max_threshold=0.1, avg_threshold=0.1).tolist() == [True, True]
    assert finite_mask(values, mask).tolist() == [True, True]


def test_negative_divergences_are_compared_as_they_are():
    values, mask = torch.tensor([[-1.0, -2.0], [-1.0, 0.5]]), torch.ones(2, 2, dtype=torch.bool)
    assert max_divergence_mask(values, mask, 0.1).tolist() == [True, False]
    assert mean_divergence_mask(values, mask, 0.1).tolist() == [True, True]


def test_a_log_ratio_of_another_shape_than_the_mask_is_refused():
    with pytest.raises(ValueError, match="differ in shape"):
        finite_mask(torch.zeros(2, 3), torch.ones(2, 1, dtype=torch.bool))


# --- length-matched control ---


def rejected(lengths, rejected_lengths, num_bins, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = length_matched_mask(torch.tensor(lengths), rejected_lengths, num_bins, generator)
    return sorted(length for length, kept in zip(lengths, mask.tolist(), strict=True) if not kept)


@pytest.mark.parametrize(
    ("wanted", "room", "expected"),
    [
        ([2, 1, 0], [3, 3, 3], [2, 1, 0]),  # all fit
        ([3, 0, 0], [1, 1, 5], [1, 1, 1]),  # nearest bin first, then the next
        ([0, 3, 0], [1, 1, 1], [1, 1, 1]),
        ([0, 2, 0], [1, 1, 1], [1, 1, 0]),  # of two as near the lower
        ([0, 4, 2], [2, 1, 4], [2, 1, 3]),  # room that a later bin wants itself is not taken twice
        ([0, 0], [0, 2], [0, 0]),
    ],
)
def test_counts_that_do_not_fit_move_to_the_nearest_bin_with_room(wanted, room, expected):
    assert fit_counts(wanted, room) == expected


def test_the_length_matched_mask_rejects_by_bin_of_length():
    lengths = [4, 5, 6, 7, 40, 41, 42, 43]  # two bins, the median between them
    for seed in range(20):
        assert [length >= 40 for length in rejected(lengths, [100, 30, 3], 2, seed)] == [False, True, True]


def test_inside_a_bin_chance_alone_decides_whom_the_length_matched_mask_rejects():
    counts = dict.fromkeys([4, 5, 6, 7, 40, 41, 42, 43], 0)
    generator = torch.Generator().manual_seed(0)
    num_draws = 4000
    for _ in range(num_draws):
        mask = length_matched_mask(torch.tensor(list(counts)), [4, 40, 40], 2, generator)
        for length, kept in zip(counts, mask.tolist(), strict=True):
            counts[length] += not kept
    shares = [count / num_draws for count in counts.values()]
    assert shares == pytest.approx([0.25] * 4 + [0.5] * 4, abs=0.04)  # 4 standard errors are 0.03


def test_with_one_bin_the_length_matched_mask_is_the_random_one():
    lengths = torch.arange(3, 13)
    found = length_matched_mask(lengths, [1, 2, 3, 4], 1, torch.Generator().manual_seed(3))
    others = random_mask(10, 4, torch.Generator().manual_seed(3))  # keeps whom the other rejects
    assert torch.equal(found, ~others)


@pytest.mark.parametrize("rejected_lengths", [[], [7] * 5, [7] * 6, [1, 2, 3, 900, 901, 902]])
def test_the_length_matched_mask_rejects_as_many_as_it_is_told(rejected_lengths):
    for lengths in ([5, 5, 5, 5, 5, 5], [1, 2, 3, 4, 5, 60]):
        assert len(rejected(lengths, rejected_lengths, 4, 0)) == len(rejected_lengths)


def test_the_length_matched_mask_cannot_reject_more_than_there_are():
    with pytest.raises(ValueError, match="at most 2 lengths, got 3"):
        length_matched_mask(torch.tensor([1, 2]), [1, 1, 1], 4, torch.Generator())
    with pytest.raises(ValueError, match="num_bins must be >= 1"):
        length_matched_mask(torch.tensor([1, 2]), [1], 0, torch.Generator())
