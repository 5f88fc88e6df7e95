"""Whether a policy can score the rollouts of a shard."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from trm_repro.batch import Rollout
from trm_repro.errors import InputError


def check_fits(
    path: Path,
    rollouts: Sequence[Rollout],
    model_config: Any,  # noqa: ANN401
    heads: Mapping[int, Tensor] | None = None,
) -> None:
    """Check that a policy can score rollouts: vocabulary, longest sequence, experts.

    Args:
        path: the shard they were read from, for the message.
        rollouts: as read by `read_rollouts`.
        model_config: Hugging Face configuration of the policy.
        heads: for hidden states, the output head of each weight version.

    Raises:
        InputError: if they were sampled from a policy of another shape; names the file and the row.
    """
    vocab_size = int(model_config.vocab_size)
    _check_heads(path, heads or {}, vocab_size)
    longest = getattr(model_config, "max_position_embeddings", None)
    for number, rollout in enumerate(rollouts):
        reason = None
        num_tokens = len(rollout.prompt_ids) + len(rollout.response_ids)
        for name in ("prompt_ids", "response_ids"):
            if max(getattr(rollout, name)) >= vocab_size:
                reason = f"{name} holds token {max(getattr(rollout, name))}, the policy's are 0 to {vocab_size - 1}"
        if longest is not None and num_tokens > longest:
            reason = f"prompt and response take {num_tokens} tokens, the policy's limit is {longest}"
        width = vocab_size if rollout.log_distribution is None else rollout.log_distribution.shape[1]
        if width != vocab_size:
            reason = f"log_distribution is over {width} tokens, the policy's vocabulary has {vocab_size}"
        if rollout.hidden is not None and rollout.hidden.shape[1] != model_config.hidden_size:
            width, expected = rollout.hidden.shape[1], model_config.hidden_size
            reason = f"hidden states are of {width} values, the policy's of {expected}"
        if rollout.top_ids is not None and int(rollout.top_ids.max()) >= vocab_size:
            reason = f"top_ids holds token {int(rollout.top_ids.max())}, the policy's are 0 to {vocab_size - 1}"
        reason = reason or _expert_misfit(rollout.experts, model_config)
        if reason is not None:
            raise InputError(
                f"{path}: row {number} does not fit the policy ({reason}); give the policy or checkpoint the shard was "
                "sampled from"
            )


def check_versions(path: Path, rollouts: Sequence[Rollout], step: int, staleness_steps: int) -> None:
    """Check that rollouts were sampled from the weights that their step should be sampled from.

    Args:
        path: the shard they were read from, for the message.
        rollouts: of the step.
        step: from 0.
        staleness_steps: rollout.staleness_steps.

    Raises:
        InputError: if one has another weight version; names the file and the row.
    """
    expected = max(0, step - staleness_steps)
    for number, rollout in enumerate(rollouts):
        if rollout.weight_version != expected:
            raise InputError(
                f"{path}: row {number} was sampled from weight version {rollout.weight_version}, but step {step} with "
                f"rollout.staleness_steps={staleness_steps} samples from version {expected}; give the shard and the "
                "configuration of one run"
            )


def _check_heads(path: Path, heads: Mapping[int, Tensor], vocab_size: int) -> None:
    for version, head in heads.items():
        if head.shape[0] != vocab_size:
            raise InputError(
                f"{path}: the head of weight version {version} beside it is over {head.shape[0]} tokens, the policy's "
                f"vocabulary has {vocab_size}; give the policy or checkpoint the shard was sampled from"
            )


def _expert_misfit(experts: Tensor | None, model_config: Any) -> str | None:  # noqa: ANN401
    """Say why a policy cannot have routed tokens to these experts, ``[T, L, K]``; None where it can."""
    if experts is None:
        return None
    num_experts, top_k = (getattr(model_config, name, None) for name in ("num_experts", "num_experts_per_tok"))
    if num_experts is None or top_k is None:
        return "it has experts, the policy is dense"
    every = getattr(model_config, "decoder_sparse_step", 1)
    dense = getattr(model_config, "mlp_only_layers", None) or ()
    layers = [i for i in range(model_config.num_hidden_layers) if i not in dense and (i + 1) % every == 0]
    if tuple(experts.shape[1:]) != (len(layers), top_k):
        found, expected = "{} layers of {}".format(*experts.shape[1:]), f"{len(layers)} layers of {top_k}"
        return f"each token has {found} experts, the policy routes in {expected}"
    if int(experts.max()) >= num_experts:
        return f"experts holds expert {int(experts.max())}, the policy's are 0 to {num_experts - 1}"
    return None
