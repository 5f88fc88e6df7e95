"""What runs inside a vLLM worker: taking weights in, and reading the routers of a mixture of experts."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class WorkerExtension:
    """Methods added to vLLM's worker through ``worker_extension_cls``, called by ``collective_rpc``."""

    model_runner: Any

    def load_policy_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        """Load weights in checkpoint format through vLLM's own reload, experts included.

        vLLM's reload re-packs a linear layer, but on CPU it re-packs experts only while their kernel is being
        made: with a kernel in place it leaves them in checkpoint layout, which the kernel misreads. Forgetting
        the kernel first makes it again from the loaded weights.
        """
        for module in self.model_runner.model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
        self.model_runner.reload_weights(weights_iterator=iter(weights))

    def watch_routers(self, top_k: int) -> bool:
        """Record, from now on, the experts chosen where each token is predicted.

        Args:
            top_k: experts per token.

        Returns:
            Whether the model has routers.
        """
        model = self.model_runner.model
        gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
        if not gates:
            return False
        recorder = RouterRecorder(self.model_runner, top_k)
        for gate in gates:
            gate.register_forward_hook(recorder.on_gate)
        model.compute_logits = recorder.around(model.compute_logits)
        self.router_recorder = recorder
        return True

    def take_experts(self) -> dict[str, dict[int, Tensor]]:
        """Return and forget what was recorded: request id -> length of the sequence so far -> ``[L, K]`` uint8."""
        recorded: dict[str, dict[int, Tensor]] = self.router_recorder.recorded
        self.router_recorder.recorded = {}
        return recorded


class RouterRecorder:
    """Collects router logits layer by layer and keeps the rows from which a token is about to be sampled."""

    def __init__(self, model_runner: Any, top_k: int) -> None:  # noqa: ANN401
        """Watch one model runner."""
        self.model_runner = model_runner
        self.top_k = top_k
        self.layers: list[Tensor] = []
        self.recorded: dict[str, dict[int, Tensor]] = {}

    def on_gate(self, gate: nn.Module, inputs: object, output: Any) -> None:  # noqa: ANN401
        """Keep one layer's router logits, ``[tokens of this engine step, experts]``."""
        self.layers.append(output[0] if isinstance(output, tuple) else output)

    def around(self, compute_logits: Any) -> Any:  # noqa: ANN401
        """Wrap the model's ``compute_logits``, which sees one row per request in the batch's order."""

        def recording(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self.record(hidden.shape[0])
            return compute_logits(hidden, *args, **kwargs)

        return recording

    def record(self, num_requests: int) -> None:
        """Choose experts from the kept logits at the last scheduled token of each request."""
        layers, self.layers = self.layers, []
        if not layers:
            return
        last = torch.as_tensor(self.model_runner.query_start_loc.np[1 : num_requests + 1] - 1)
        chosen = [layer[last].topk(self.top_k, dim=-1).indices for layer in layers]
        experts = torch.stack(chosen, dim=1).to(torch.uint8)  # [requests, L, K]
        for request_id, row in zip(self._request_ids(num_requests), experts, strict=True):
            length = self.model_runner.requests[request_id].num_tokens
            # A chunk of a prompt records under the same length as the whole prompt after it, which wins.
            self.recorded.setdefault(request_id, {})[length] = row

    def _request_ids(self, num_requests: int) -> Iterator[str]:
        return iter(list(self.model_runner.input_batch.req_ids)[:num_requests])
