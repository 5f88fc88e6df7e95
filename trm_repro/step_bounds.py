"""The bounds of one step, from the exact divergences of its batch: measured on samples, not certified.

The bounds need the largest divergence over every context that the rollout policy can reach. A batch shows only the
contexts it visited, so these numbers can be too small; what they are for, and what a run may claim, is in
docs/theory.md. Shape letters: B sequences of the step, T the response-length limit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trm_repro.bounds import Divergences, prefix_adaptive_bound, trivial_bound, unified_bound
from trm_repro.divergence import importance_ratio
from trm_repro.intervals import empirical_bernstein_interval, no_event_upper_bound
from trm_repro.step_metrics import UpdateRecord


def step_bounds(
    records: Sequence[UpdateRecord], *, length_limit: int, divergence_threshold: float
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Compute what the bounds say at the divergences of a step's batch.

    Each sequence is measured at the update it is used in. A response that has ended counts 0 at later positions.
    Source: TRM (arXiv 2512.23075v3), Unified bound; the sharp constants, Prefix-Adaptive and Trivial are ours.

    Args:
        records: the step's updates.
        length_limit: T, the response-length limit, tokens.
        divergence_threshold: delta of TRM-Max, nats: a sequence with a token above it refutes the condition of the
            paper's guarantee.

    Returns:
        Metrics named bounds/quantity, and the profiles ``mean_tv`` and ``mean_kl``, T values each; both empty where the
        batch has no exact divergences or one is not finite.
    """
    kl = _padded([record.measurement.kl for record in records], length_limit)  # [B, T]
    total_variation = _padded([record.measurement.total_variation for record in records], length_limit)
    if kl is None or total_variation is None or not bool(kl.isfinite().all()):
        return {}, {}
    mean_kl, mean_tv = kl.mean(dim=0).numpy(), total_variation.clamp(max=1.0).mean(dim=0).numpy()  # [T]
    measured = Divergences.at_most(
        length_limit,
        float(kl.max()),
        epsilon=float(total_variation.clamp(max=1.0).max()),
        mean_kl=mean_kl,
        mean_tv=mean_tv,
    )
    num_refuting = int((kl.amax(dim=-1) > divergence_threshold).sum())
    per_sequence_tv = total_variation.mean(dim=-1).clamp(max=1.0).numpy()  # [B]
    interval = empirical_bernstein_interval(per_sequence_tv)
    metrics = {
        "bounds/delta": float(measured.delta),
        "bounds/epsilon": float(measured.epsilon),
        "bounds/kl_seq": float(measured.kl_seq),
        "bounds/unified_paper": float(unified_bound(measured, constants="paper")),
        "bounds/unified_sharp": float(unified_bound(measured, constants="sharp")),
        "bounds/prefix_adaptive_sharp": float(prefix_adaptive_bound(measured, constants="sharp")),
        "bounds/trivial": float(trivial_bound(measured)),
        "bounds/surrogate": surrogate_in_reward_units(records),
        "bounds/mean_tv": float(interval.mean),
        "bounds/mean_tv_low": float(interval.low),
        "bounds/mean_tv_high": float(interval.high),
        "bounds/num_refuting_sequences": float(num_refuting),
    }
    if num_refuting == 0:
        metrics["bounds/refuting_probability_at_most"] = no_event_upper_bound(kl.shape[0])
    return metrics, {"mean_tv": mean_tv.tolist(), "mean_kl": mean_kl.tolist()}


def surrogate_in_reward_units(records: Sequence[UpdateRecord]) -> float:
    """Estimate L' = E_roll[(R - b) sum_t (rho_t - 1)], b the mean reward of the other responses to the prompt.

    Leaving the response itself out keeps its own reward from shrinking the estimate. Source: TRM
    (arXiv 2512.23075v3), Setting; never computed with advantages divided by a deviation.

    Args:
        records: the step's updates.

    Returns:
        L' in reward units; NaN where a log-ratio is.
    """
    rewards = torch.cat([record.batch.rewards for record in records]).double()  # [B]
    groups = torch.cat([record.batch.groups for record in records])  # [B]
    drift = torch.cat(
        [
            torch.where(
                record.batch.response_mask, importance_ratio(record.measurement.log_ratio.double()) - 1.0, 0.0
            ).sum(dim=-1)
            for record in records
        ]
    )  # [B]
    same_group = (groups[:, None] == groups[None, :]).double()  # [B, B]
    others = (same_group.sum(dim=-1) - 1.0).clamp(min=1.0)
    baseline = (same_group @ rewards - rewards) / others  # [B]
    return float(((rewards - baseline) * drift).mean())


def _padded(parts: Sequence[Tensor | None], length_limit: int) -> Tensor | None:
    present = [part.double() for part in parts if part is not None]
    if len(present) != len(parts):
        return None
    width = max(length_limit, *(part.shape[1] for part in present))
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in present])
