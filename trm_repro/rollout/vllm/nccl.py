"""Weights from the trainer's GPU to a server's GPUs by vLLM's own NCCL engine. Not run without a GPU."""

import json
import socket
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from trm_repro.config_sections import Precision
from trm_repro.rollout.precision import round_weight
from trm_repro.rollout.vllm.weights import checkpoint_weights
from trm_repro.sharding import ShardedWeights


class PolicySource(WeightSource):
    """The policy's weights in checkpoint format, rounded to the engine's precision."""

    def __init__(self, weights: Mapping[str, Tensor], precision: Precision) -> None:
        """Take the weights of one version; ``weights`` is replaced for the next."""
        self.weights = weights
        self.precision = precision

    def metadata(self) -> list[ParamMeta]:
        """Name, dtype and shape of everything that iteration yields, without gathering it."""
        layout = self.weights.layout if isinstance(self.weights, ShardedWeights) else self.weights
        shapes = {name: torch.empty(weight.shape, device="meta") for name, weight in layout.items()}
        dtype = round_weight("", torch.zeros(1), self.precision).dtype
        return [ParamMeta(name, dtype, tuple(weight.shape)) for name, weight in checkpoint_weights(shapes)]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Gather, round and yield one weight after another, on this rank's GPU."""
        for name, weight in checkpoint_weights(
            self.weights, lambda key, value: round_weight(key, value.cuda(), self.precision)
        ):
            yield name, weight.contiguous()


def send_weights(url: str, weights: Mapping[str, Tensor], precision: Precision, sender: Any) -> Any:  # noqa: ANN401
    """Send one version of the weights.

    Args:
        url: of the server.
        weights: the policy's, by name.
        precision: the engine's.
        sender: what the last call returned, or None.

    Returns:
        The sender, for the next call.
    """
    if sender is None:
        with urllib.request.urlopen(f"{url}/get_world_size", timeout=60) as response:
            num_workers = int(json.loads(response.read())["world_size"])
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        host = "127.0.0.1" if "127.0.0.1" in url else socket.gethostbyname(socket.gethostname())
        # The other ranks gather along in `AbsentEngine`; to vLLM this is the only trainer.
        sender = NCCLTrainerWeightTransferEngine.trainer_init(
            NCCLTrainerInitInfo(rank=0, master_address=host, master_port=port, world_size=1 + num_workers),
            client=HTTPVLLMWeightSyncClient(url),
            source=PolicySource(weights, precision),
        )
    sender.source.weights = weights
    sender.send_weights()
    return sender
