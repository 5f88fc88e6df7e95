"""Whether a run's last steps still make sense; pure, so that a resumed run decides as an undisturbed one."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from trm_repro.config_sections import HealthConfig

KEPT = "mask/kept_sequence_fraction"
ENTROPY = "policy/entropy_mean"
MIXED = "rollout/mixed_group_fraction"
NONFINITE = "train/num_nonfinite_updates"


def health_problem(steps: Iterable[Mapping[str, float]], config: HealthConfig, fault_dir: Path) -> str | None:
    """Say why a run should stop.

    Args:
        steps: metrics of its last steps, oldest first.
        config: the health section.
        fault_dir: where the run's batches that were not finite are, for the message.

    Returns:
        What is wrong and which key to change, in one line; None while all is well.
    """
    recent = list(steps)
    last = recent[-config.max_nonfinite_steps :]
    if len(last) == config.max_nonfinite_steps and all(step.get(NONFINITE, 0.0) > 0 for step in last):
        return (
            f"log-probs, loss or gradient were not finite in each of the last {len(last)} steps; the batches are in "
            f"{fault_dir}; lower update.learning_rate, or look at the rewards and log-probs in them"
        )
    window = recent[-config.patience :]
    if len(window) < config.patience:
        return None
    if all(step[KEPT] < config.acceptance_floor for step in window):
        return (
            f"less than {config.acceptance_floor:g} of the sequences was kept in each of the last {len(window)} steps "
            f"({window[-1][KEPT]:.3g} in the last); raise the mask's thresholds or lower health.acceptance_floor"
        )
    if all(step[ENTROPY] < config.entropy_floor for step in window):
        return (
            f"the policy's entropy was below {config.entropy_floor:g} nats in each of the last {len(window)} steps; it "
            "has collapsed: lower update.learning_rate or health.entropy_floor"
        )
    if config.stop_without_variance and all(step[MIXED] == 0 for step in window):
        return (
            f"no group had differing rewards in the last {len(window)} steps, so nothing was learned; take easier or "
            "harder problems, or set health.stop_without_variance=false"
        )
    return None
