import pytest
import torch

from trm_repro.confusion import mask_confusion
from trm_repro.divergence import k2_divergence, k3_divergence
from trm_repro.masks.trust_region import max_divergence_mask, mean_divergence_mask


def booleans(text):
    return torch.tensor([character == "1" for character in text])


def test_a_hand_case_is_counted():
    confusion = mask_confusion(booleans("11001"), booleans("10101"))
    assert confusion.num_accepted_by_both == 2
    assert confusion.num_rejected_by_both == 1
    assert confusion.num_wrongly_accepted == 1
    assert confusion.num_wrongly_rejected == 1
    assert confusion.num_sequences == 5
    assert confusion.agreement_fraction == pytest.approx(0.6)
    assert confusion.wrongly_accepted_fraction == confusion.wrongly_rejected_fraction == pytest.approx(0.2)
    assert confusion.missed_fraction == pytest.approx(1 / 2)
    assert confusion.lost_fraction == pytest.approx(1 / 3)


def test_equal_masks_agree_on_everything():
    mask = booleans("1101")
    confusion = mask_confusion(mask, mask)
    assert confusion.agreement_fraction == 1.0
    assert confusion.missed_fraction == confusion.lost_fraction == 0.0


def test_a_fraction_of_nothing_is_none():
    assert mask_confusion(booleans("10"), booleans("11")).missed_fraction is None
    assert mask_confusion(booleans("10"), booleans("00")).lost_fraction is None


def test_exchanging_the_masks_exchanges_the_two_errors():
    generator = torch.Generator().manual_seed(0)
    sampled, exact = (torch.rand(1000, generator=generator) < 0.7 for _ in range(2))
    confusion, exchanged = mask_confusion(sampled, exact), mask_confusion(exact, sampled)
    assert confusion.num_wrongly_accepted == exchanged.num_wrongly_rejected
    assert confusion.num_sequences == exchanged.num_sequences == 1000
    pairs = list(zip(sampled.tolist(), exact.tolist(), strict=True))
    assert confusion.num_wrongly_accepted == sum(1 for kept, truly in pairs if kept and not truly)
    assert confusion.num_rejected_by_both == sum(1 for kept, truly in pairs if not kept and not truly)


def test_k2_misses_a_divergence_on_a_token_that_was_not_sampled():
    # pi_roll = (0.5, 0.5), pi_theta = (0.5, 0.01, 0.49 elsewhere): a sampled first token shows log-ratio 0.
    exact = torch.tensor([[0.5 * torch.log(torch.tensor(50.0)).item()]])
    mask = torch.ones(1, 1, dtype=torch.bool)
    sampled_max = max_divergence_mask(k2_divergence(torch.zeros(1, 1)), mask, 0.05)
    sampled_avg = mean_divergence_mask(k3_divergence(torch.zeros(1, 1)), mask, 0.001)
    assert mask_confusion(sampled_max, max_divergence_mask(exact, mask, 0.05)).num_wrongly_accepted == 1
    assert mask_confusion(sampled_avg, mean_divergence_mask(exact, mask, 0.001)).num_wrongly_accepted == 1


def test_masks_that_cannot_be_compared_are_refused():
    for sampled, exact in (("11", "1"), ("", "")):
        with pytest.raises(ValueError, match="one shape"):
            mask_confusion(booleans(sampled), booleans(exact))
    with pytest.raises(ValueError, match="one shape"):
        mask_confusion(torch.ones(2, 2, dtype=torch.bool), torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="must be bool"):
        mask_confusion(torch.ones(2), torch.ones(2))
