"""Weights into a vLLM server by its own weight-transfer interface, from a safetensors file on the same machine.

vLLM's engines for this copy between GPUs. This one needs none. It is registered when this module is imported, which
every worker process of the server does on the way to its ``worker_extension_cls``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

NAME = "trm_file"


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """Where a part of the weights lies: a safetensors file."""

    path: str


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Loads weights in checkpoint format from files, between ``start_weight_update`` and ``finish_weight_update``."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    model: Any
    model_config: Any

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Begin vLLM's layer-wise reload, experts' kernels forgotten first; see `WorkerExtension`."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        from trm_repro.rollout.vllm.worker import forget_expert_kernels

        forget_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Load one file."""
        self.model.load_weights(_read(Path(update_info.path)))

    def finish_weight_update(self) -> None:
        """End the reload."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing."""


def _read(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file.get_tensor(name)


class TransferExtension:
    """What a server's worker is extended by: nothing but the engine, registered on import."""


if NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(NAME, FileWeightTransferEngine)
