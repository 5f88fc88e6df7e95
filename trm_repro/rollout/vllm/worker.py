"""What runs inside a vLLM worker: taking weights in, reading routers of a mixture of experts and hidden states."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class WorkerExtension:
    """Methods added to vLLM's worker through ``worker_extension_cls``, called by ``collective_rpc``."""

    model_runner: Any

    def load_policy_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load weights in checkpoint format through vLLM's own reload, experts included.

        vLLM's reload re-packs a linear layer, but on CPU it re-packs experts only while their kernel is being
        made: with a kernel in place it leaves them in checkpoint layout, which the kernel misreads. Forgetting
        the kernel first makes it again from the loaded weights.
        """
        forget_expert_kernels(self.model_runner.model)
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

    def watch_hidden(self) -> None:
        """Be ready to record final hidden states; `keep_hidden` begins."""
        model = self.model_runner.model
        self.hidden_recorder = HiddenRecorder(self.model_runner)
        model.compute_logits = self.hidden_recorder.around(model.compute_logits)

    def keep_hidden(self, is_kept: bool) -> None:
        """Record, from now on or no longer, the final hidden state from which each token is sampled."""
        self.hidden_recorder.is_kept = is_kept
        self.hidden_recorder.steps = []

    def take_hidden(self) -> dict[str, tuple[list[int], Tensor]]:
        """Return and forget what was recorded: request id -> lengths of the sequence so far, and ``[lengths, H]``."""
        return self.hidden_recorder.take()


class HiddenRecorder:
    """Keeps the rows that the model's ``compute_logits`` turns into logits: the states after the last norm."""

    def __init__(self, model_runner: Any) -> None:  # noqa: ANN401
        """Watch one model runner."""
        self.model_runner = model_runner
        self.is_kept = False
        self.steps: list[tuple[list[tuple[str, int]], Tensor]] = []

    def around(self, compute_logits: Any) -> Any:  # noqa: ANN401
        """Wrap the model's ``compute_logits``, which sees one row per request in the batch's order."""

        def recording(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if self.is_kept:
                request_ids = list(self.model_runner.input_batch.req_ids)[: hidden.shape[0]]
                keys = [(request_id, self.model_runner.requests[request_id].num_tokens) for request_id in request_ids]
                self.steps.append((keys, hidden.detach().to("cpu", copy=True)))
            return compute_logits(hidden, *args, **kwargs)

        return recording

    def take(self) -> dict[str, tuple[list[int], Tensor]]:
        """Sort the rows by request and length.

        A part of a prompt, or a request that was evicted and computed again, records under a length that comes once
        more: the last row is the one its token was sampled from.
        """
        steps, self.steps = self.steps, []
        rows = torch.cat([rows for _, rows in steps]) if steps else torch.zeros(0, 0)  # [engine steps' requests, H]
        places: dict[str, dict[int, int]] = {}
        for place, (request_id, length) in enumerate(key for keys, _ in steps for key in keys):
            places.setdefault(request_id, {})[length] = place
        return {
            request_id: (sorted(by_length), rows[[by_length[length] for length in sorted(by_length)]])
            for request_id, by_length in places.items()
        }


def forget_expert_kernels(model: nn.Module) -> None:
    """Make vLLM build the experts' kernels again from the weights that are about to be loaded."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


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
