"""The policy over several processes: FSDP2 shards, their snapshots, and full weights gathered one at a time.

Each decoder layer is a unit of its own, and so is what is left of the policy: embedding, last norm and output head.
Masters are float32; what a forward or backward pass gathers is `trainer.compute_dtype`; gradients are summed in
float32.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from trm_repro import ranks
from trm_repro.config_sections import PolicyConfig, TrainerConfig
from trm_repro.policy import Policy, build_policy


def prepare_policy(policy: Policy, config: TrainerConfig) -> None:
    """Set what does not depend on processes: attention kernel, activation checkpointing, packing."""
    policy.model.set_attn_implementation(config.attention)
    if config.activation_checkpointing:
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.is_packing = config.packing


def shard_policy(policy: Policy, config: TrainerConfig, mesh: DeviceMesh) -> None:
    """Divide a policy's parameters over the ranks of a mesh, in place.

    The root is resharded after its forward pass too: measuring has no backward pass that would do it, and the
    optimizer changes the shards.

    Args:
        policy: whole on every rank, with equal weights.
        config: gives compute dtype and offloading.
        mesh: of one dimension.
    """
    precision = {"param_dtype": getattr(torch, config.compute_dtype), "reduce_dtype": torch.float32}
    options: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy(),
        "reshard_after_forward": True,
    }
    for layer in policy.model.model.layers:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(**precision, cast_forward_inputs=True), **options)
    # FSDP would cast what it finds in a batch, too: log-probs to bfloat16, or bfloat16 hidden states to float32.
    fully_shard(policy, mp_policy=MixedPrecisionPolicy(**precision, cast_forward_inputs=False), **options)
    register_fsdp_forward_method(policy, "next_token_distribution")


def load_sharded(
    policy: PolicyConfig, tokenizer: PreTrainedTokenizerFast, config: TrainerConfig, mesh: DeviceMesh
) -> Policy:
    """Make a sharded policy from a saved one; collective.

    The first rank alone reads the weights and sends each tensor to all, which keep their shards: a machine holds one
    whole copy, however many ranks it has.

    Args:
        policy: gives the path.
        tokenizer: of the policy.
        config: gives compute dtype and offloading.
        mesh: of one dimension.

    Returns:
        The policy, prepared and sharded.

    Raises:
        InputError: on the first rank, if no model can be loaded.
    """
    read = build_policy(policy, tokenizer, seed=0) if ranks.is_first() else None
    description = ranks.broadcast(None if read is None else read.model.config)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(description, dtype=torch.float32, attn_implementation="sdpa")
    sharded = Policy(empty)
    prepare_policy(sharded, config)
    shard_policy(sharded, config, mesh)
    sharded.to_empty(device="cpu" if config.cpu_offload else mesh.device_type)
    sharded.model.tie_weights()  # which the move took apart
    buffers = ranks.broadcast(None if read is None else dict(read.named_buffers())) or {}
    for name, buffer in sharded.named_buffers():
        buffer.copy_(buffers[name])  # those that are not saved, such as rotary frequencies
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=config.cpu_offload)
    set_model_state_dict(sharded, {} if read is None else read.state_dict(), options=options)
    return sharded


def is_sharded(module: nn.Module) -> bool:
    """Whether a module's parameters are shards."""
    return any(isinstance(weight, DTensor) for weight in module.parameters())


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, or the tensor itself where it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor from its shards, on every rank; collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class ShardedWeights(Mapping[str, Tensor]):
    """A copy of a sharded policy's weights: shards in host memory, gathered one tensor at a time when asked for.

    Every rank must ask for the same tensors in the same order.
    """

    def __init__(self, policy: Policy, shards: Mapping[str, Tensor] | None = None) -> None:
        """Copy the policy's weights, or take shards that were copied before.

        Args:
            policy: gives the layout.
            shards: this rank's part of each weight by name.
        """
        self.layout: dict[str, DTensor] = dict(policy.model.named_parameters())
        if shards is None:
            shards = {name: local(weight.detach()).to("cpu", copy=True) for name, weight in self.layout.items()}
        self.shards = dict(shards)

    def __getitem__(self, name: str) -> Tensor:
        """Gather one weight; collective."""
        return self.distributed(name).full_tensor()

    def distributed(self, name: str) -> DTensor:
        """Return one weight as a distributed tensor that shares this copy's memory where it lies on the same device."""
        like = self.layout[name]
        return DTensor.from_local(
            self.shards[name].to(like.to_local().device),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )

    def __contains__(self, name: object) -> bool:
        """Whether there is such a weight; not collective, as the default, which asks for it, would be."""
        return name in self.layout

    def __iter__(self) -> Iterator[str]:
        """Names, in the policy's order."""
        return iter(self.layout)

    def __len__(self) -> int:
        """Number of weights."""
        return len(self.layout)

    @contextmanager
    def swapped_in(self, change: Callable[[str, Tensor], Tensor] | None = None) -> Iterator[None]:
        """Give the policy these weights for a while.

        Args:
            change: applied to each shard, by name; shards divide the first dimension, so whole rows stay together.
        """
        saved = {name: local(weight.detach()).clone() for name, weight in self.layout.items()}
        try:
            with torch.no_grad():
                for name, shard in self.shards.items():
                    local(self.layout[name]).copy_(shard if change is None else change(name, shard))
            yield
        finally:
            with torch.no_grad():
                for name, shard in saved.items():
                    local(self.layout[name]).copy_(shard)


def save_snapshots(folder: Path, snapshots: Sequence[tuple[int, ShardedWeights]]) -> None:
    """Write snapshots, each rank its shards; any number of ranks can read them.

    Args:
        folder: to write to.
        snapshots: (weight version, weights).
    """
    save(_state(snapshots), checkpoint_id=folder)


def load_snapshots(folder: Path, versions: Sequence[int], policy: Policy) -> list[tuple[int, ShardedWeights]]:
    """Read snapshots back, each rank its shards.

    Args:
        folder: as written by `save_snapshots`.
        versions: the weight versions in it.
        policy: gives the layout.

    Returns:
        (weight version, weights), in the order of ``versions``.
    """
    snapshots = [(version, ShardedWeights(policy)) for version in versions]
    state = _state(snapshots)
    load(state, checkpoint_id=folder)
    for version, weights in snapshots:
        weights.shards = {name: local(state[f"{version}/{name}"]).cpu() for name in weights}
    return snapshots


def _state(snapshots: Sequence[tuple[int, ShardedWeights]]) -> dict[str, Tensor]:
    return {f"{version}/{name}": weights.distributed(name) for version, weights in snapshots for name in weights}


def policy_weights(policy: Policy) -> Mapping[str, Tensor]:
    """Copy the policy's weights under its model's own names; tied weights once."""
    if is_sharded(policy):
        return ShardedWeights(policy)
    return {name: weight.detach().clone() for name, weight in policy.model.named_parameters()}


def whole_weights(policy: Policy) -> dict[str, Tensor] | None:
    """Gather a sharded policy's weights in host memory of the first rank; collective.

    Args:
        policy: any.

    Returns:
        The model's weights by name, none on other ranks; None where the policy is not sharded.
    """
    if not is_sharded(policy):
        return None
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    names = {name for name, _ in (*policy.model.named_parameters(), *policy.model.named_buffers())}  # tied ones once
    gathered = get_model_state_dict(policy.model, options=options)
    return {name: weight for name, weight in gathered.items() if name in names and isinstance(weight, Tensor)}
