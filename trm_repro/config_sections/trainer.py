"""Where and how the trainer computes: processes, precision, attention, packing."""

from dataclasses import dataclass
from typing import Literal

from trm_repro.config_sections.checks import require


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Processes and arithmetic of the trainer; more than one process shares the policy's weights by FSDP2."""

    strategy: Literal["auto", "fsdp2"] = "auto"
    """auto: FSDP2 for more than one process, bfloat16 compute or cpu_offload, else plain; fsdp2: always."""
    accelerator: Literal["cpu", "gpu"] = "cpu"
    """Device of the trainer."""
    num_nodes: int = 1
    """Machines; with more than one, start the command by torchrun on each."""
    devices: int = 1
    """Processes on each machine, one GPU each."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of forward and backward passes; weights, gradient sums and optimizer stay in float32."""
    attention: Literal["sdpa", "flash_attention_2", "eager"] = "sdpa"
    """Attention kernel; flash_attention_2 needs a GPU, the flash-attn package and bfloat16."""
    activation_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass instead of keeping what is inside it."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer states in host memory, a decoder layer at a time on the GPU."""
    packing: bool = False
    """Lay the sequences of a micro-batch one after another in one row, without padding."""

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("num_nodes", "devices"):
            value = getattr(self, name)
            require(1 <= value <= 10_000, f"trainer.{name}", "between 1 and 10000", value)
        require(
            self.attention != "flash_attention_2" or (self.accelerator == "gpu" and self.compute_dtype == "bfloat16"),
            "trainer.attention",
            "sdpa or eager unless trainer.accelerator=gpu and trainer.compute_dtype=bfloat16",
            self.attention,
        )
        require(
            not self.cpu_offload or self.accelerator == "gpu",
            "trainer.cpu_offload",
            "false unless trainer.accelerator=gpu",
            self.cpu_offload,
        )

    @property
    def num_ranks(self) -> int:
        """Processes on all machines."""
        return self.num_nodes * self.devices

    @property
    def is_sharded(self) -> bool:
        """Whether the policy is an FSDP2 module."""
        needs_it = self.num_ranks > 1 or self.compute_dtype != "float32" or self.cpu_offload
        return self.strategy == "fsdp2" or needs_it
