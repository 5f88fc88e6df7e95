"""One whole step of Qwen3-8B on one of eight ranks, with tensors that have shapes and no memory.

A fake process group stands for the other ranks and a fake tensor mode for the GPU, so that this runs without weights,
in seconds. Prints JSON: shapes, dtypes, shard sizes and bytes by category. `python -m tests.fake_8b [LAYERS] [TOKENS]`.
"""

import gc
import json
import sys
import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from tests.conftest import ROOT
from trm_repro.config import load_config
from trm_repro.divergence import importance_ratio, log_ratio
from trm_repro.masks import sequence_mask
from trm_repro.policy import Policy, model_config
from trm_repro.sharding import prepare_policy, shard_policy
from trm_repro.vocab import HiddenRollout, TokenStatistics, chunks, token_logprobs, token_statistics
from trm_repro.vocab import gradients as gradients_module
from trm_repro.vocab.chunks import write_logits

NUM_RANKS = 8
SEQUENCES = 4


class OneVersion(HiddenRollout):
    """Rollouts of one weight version; which version a token has cannot be asked of a tensor without values."""

    def write_logits(self, out: Tensor, chunk: slice) -> None:
        """As `HiddenRollout.write_logits`, with the one head there is."""
        write_logits(out, self.hidden[chunk], self.heads[0])


class FixedShapes(Policy):
    """A policy whose tokens to score are all positions: masks of unknown content would give unknown shapes."""

    def forward(self, input_ids: Tensor, token_ids: Tensor, rollout: HiddenRollout | None):
        """Measure against a rollout distribution, or compute log-probs with gradient."""
        hidden = self.model.model(input_ids=input_ids, use_cache=False).last_hidden_state.flatten(0, 1)
        if rollout is not None:
            return hidden, token_statistics(hidden, self.model.lm_head.weight, token_ids, rollout=rollout)
        return hidden, token_logprobs(hidden, self.model.lm_head.weight, token_ids)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, and how many they were at most."""

    def __init__(self):
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                storage = (value.to_local() if isinstance(value, DTensor) else value).untyped_storage()
                self._note(storage)
        self.most = max(self.most, self.now)
        return result

    def watch_fsdp(self) -> None:
        """Count what FSDP gathers into and frees, too: it resizes storages, of which no operation tells."""

        def noted(resize):
            def resize_and_note(tensor: Tensor) -> None:
                resize(tensor)
                self._note(tensor.untyped_storage())

            return resize_and_note

        _fsdp_param.free_storage = noted(_fsdp_param.free_storage)
        _fsdp_param.alloc_storage = _fsdp_param_group.alloc_storage = noted(_fsdp_param.alloc_storage)

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.sizes:
            weakref.finalize(storage, self._forget, key)
        self.now += size - self.sizes.get(key, 0)
        self.sizes[key] = size

    def _forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def num_bytes(tensors) -> int:
    """Add up the bytes of this rank's parts."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(part.numel() * part.element_size() for part in parts)


def build(num_layers: int | None, mesh: DeviceMesh) -> FixedShapes:
    """Build the policy of conf/paper.yaml and share it over the ranks."""
    paper = load_config([ROOT / "conf" / "paper.yaml"], [])
    sizes = model_config(paper.policy)
    sizes.num_hidden_layers = num_layers or sizes.num_hidden_layers
    model = AutoModelForCausalLM.from_config(sizes, dtype=torch.float32, attn_implementation="sdpa")
    policy = FixedShapes(model)
    prepare_policy(policy, paper.trainer)
    shard_policy(policy, paper.trainer, mesh)
    return policy


def run_step(policy: FixedShapes, length: int) -> dict[str, object]:
    """Run forward, divergence, mask, backward and optimizer step; returns what they made."""
    sizes = policy.model.config
    num_tokens = SEQUENCES * length
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
    input_ids = torch.zeros(SEQUENCES, length, dtype=torch.long)
    token_ids = torch.zeros(num_tokens, dtype=torch.long)
    rollout = OneVersion(
        hidden=torch.zeros(num_tokens, sizes.hidden_size, dtype=torch.bfloat16),
        versions=torch.zeros(num_tokens, dtype=torch.long),
        heads={0: torch.zeros(sizes.vocab_size, sizes.hidden_size, dtype=torch.bfloat16)},
    )
    with torch.no_grad():
        hidden, statistics = policy(input_ids, token_ids, rollout)
    assert isinstance(statistics, TokenStatistics)
    response_mask = torch.ones(SEQUENCES, length, dtype=torch.bool)
    keep = sequence_mask(statistics.kl.view(SEQUENCES, length), response_mask, max_threshold=0.05)
    weights, rollout_logprobs = keep.repeat_interleave(length).float(), statistics.rebuilt_logprobs
    _, logprobs = policy(input_ids, token_ids, None)
    total = (weights * importance_ratio(log_ratio(logprobs, rollout_logprobs))).sum()
    (-total / SEQUENCES).backward()
    gradients = [weight.grad for weight in policy.parameters()]
    optimizer.step()
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    layer = policy.model.model.layers[0].mlp.up_proj.weight
    shapes = {
        "hidden": hidden,
        "kl": statistics.kl,
        "mask": keep,
        "logprobs": logprobs,
        "up_proj_shard": layer.to_local(),
    }
    return {name: [list(value.shape), str(value.dtype)] for name, value in shapes.items()} | {
        "parameters": sum(weight.numel() for weight in policy.parameters()),
        "local_parameters": num_bytes(policy.parameters()) // 4,
        "masters_bytes": num_bytes(policy.parameters()),
        "without_gradient": sum(gradient is None for gradient in gradients),
        "gradient_dtypes": sorted({str(gradient.dtype) for gradient in gradients}),
        "gradients_bytes": num_bytes(gradients),
        "optimizer_bytes": num_bytes(states),
    }


def main() -> None:
    """Print what one step makes."""
    words = [int(word) for word in sys.argv[1:]]
    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    gradients_module._check_mass = lambda mass: None  # looks at values, which these tensors do not have
    mesh = init_device_mesh("cpu", (NUM_RANKS,))  # has values, so it is made outside
    chunks.CPU_CHUNK_ELEMENTS = chunks.CUDA_CHUNK_ELEMENTS  # as on a GPU
    live = LiveBytes()
    live.watch_fsdp()
    with FakeTensorMode(allow_non_fake_inputs=True):
        with live:
            policy = build(words[0] if words else None, mesh)
        gc.collect()
        live.most = live.now
        with live:
            found = run_step(policy, words[1] if len(words) > 1 else 512)
    found["peak_bytes"] = live.most
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
