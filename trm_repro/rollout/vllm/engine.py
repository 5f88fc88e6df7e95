"""vLLM in this process: sampling with full log-probs, weights in place, routing of each token.

Importing vllm takes seconds, so it happens when an engine starts.
"""

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trm_repro import ranks
from trm_repro.config_sections import RolloutConfig
from trm_repro.errors import FaultError, InputError
from trm_repro.memory_limits import engine_start_problem
from trm_repro.policy import first_line, load_model
from trm_repro.rollout.completion_checks import check_length
from trm_repro.rollout.engine import Completion, SamplingRequest, SamplingSettings
from trm_repro.rollout.precision import compute_dtype, round_weight
from trm_repro.rollout.stopping import stop_token_ids
from trm_repro.rollout.vllm.weights import checkpoint_weights

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process, so weights need no copy between two
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two workers would otherwise be bound to the same core
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
BLOCK_TOKENS = 16  # max_model_len is rounded up to a multiple of this
CPU_BATCH_TOKENS = 8192
_in_process: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""vLLM's engines of this process that have not been collected."""


class VllmEngine:
    """A `RolloutEngine` on vLLM."""

    def __init__(self, config: RolloutConfig, model_path: Path, max_length: int) -> None:
        """Start the engine on a saved model.

        Args:
            config: the rollout section.
            model_path: directory with weights, configuration and tokenizer.
            max_length: longest prompt and response together, tokens.

        Raises:
            InputError: if vLLM is not installed, does not start on the directory, or has too little memory.
        """
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())  # vLLM does so after its import
        try:
            from vllm import LLM
        except ImportError as error:
            raise InputError(
                f"rollout.engine=vllm: vLLM cannot be imported ({error}); install it (make setup) or set "
                "rollout.engine=transformers"
            ) from None
        if config.placement == "in_process":
            _end_earlier_engines()
        self.precision = config.precision
        self.stop_ids = stop_token_ids(config.stop_tokens, model_path)
        self.can_sleep = self.is_asleep = False
        model_length = -(-max_length // BLOCK_TOKENS) * BLOCK_TOKENS
        on_cpu: dict[str, Any] = {}
        if not torch.cuda.is_available():
            # A request whose prompt is cut into chunks makes vLLM rewind its seeded generator, which a CPU generator
            # cannot do ("CPU Generator does not use offset").
            on_cpu = {
                "enforce_eager": True,
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(CPU_BATCH_TOKENS, model_length),
            }
        try:
            self.llm = LLM(
                model=str(model_path),
                dtype=str(compute_dtype(config.precision)).removeprefix("torch."),
                max_model_len=model_length,
                kv_cache_memory_bytes=config.kv_cache_bytes,
                max_num_seqs=config.max_concurrent_sequences,
                enable_prefix_caching=config.prefix_caching,
                max_logprobs=-1,
                logprobs_mode="processed_logprobs",
                worker_extension_cls="trm_repro.rollout.vllm.worker.WorkerExtension",
                trust_remote_code=False,
                disable_log_stats=True,
                use_tqdm_on_load=False,
                seed=0,
                **on_cpu,
                **_placement(config),
            )
        except Exception as error:  # pydantic's, safetensors', transformers' or torch's, as the directory is damaged
            if problem := engine_start_problem(str(error), config.kv_cache_bytes, model_length):
                raise InputError(problem) from error
            raise InputError(
                f"{model_path}: vLLM does not start on it ({first_line(error)}); expected a model it supports, with "
                "config.json, model.safetensors and tokenizer.json"
            ) from error
        if config.placement == "in_process":
            _in_process.add(self.llm)
        if config.placement == "colocated" and ranks.num_ranks() > 1:
            _check_colocation(self.llm.llm_engine.model_config.hf_config)
        self.can_sleep = config.placement == "colocated" and torch.cuda.is_available()
        hf_config = self.llm.llm_engine.model_config.hf_config
        self.vocab_size = int(hf_config.vocab_size)
        top_k = getattr(hf_config, "num_experts_per_tok", None)
        self.has_routers = top_k is not None and all(self.llm.collective_rpc("watch_routers", args=(top_k,)))
        self.llm.collective_rpc("watch_hidden")
        if config.precision in ("int8", "fp8"):
            self._round_loaded_weights(model_path)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights and empty the prefix cache, whose keys and values belong to the old ones."""
        self.wake()
        # A stream: gathered from shards, one weight at a time is whole.
        stream = checkpoint_weights(weights, lambda name, weight: round_weight(name, weight, self.precision))
        self.llm.collective_rpc("load_policy_weights", args=(stream,))
        for _ in stream:  # what vLLM did not ask for is gathered by the other ranks all the same
            pass
        if not self.llm.reset_prefix_cache():
            raise FaultError("the engine did not empty its prefix cache after a weight sync; rollouts would be stale")

    def sample(self, requests: Sequence[SamplingRequest], settings: SamplingSettings) -> list[Completion]:
        """Sample one response per request, in order."""
        from vllm import SamplingParams, TokensPrompt

        self.wake()
        prompts = [TokensPrompt(prompt_token_ids=list(request.prompt_ids)) for request in requests]
        params = [
            SamplingParams(
                temperature=settings.temperature,
                top_p=settings.top_p,
                max_tokens=settings.max_tokens,
                seed=request.seed,
                ignore_eos=True,  # the model's own is among the stop tokens
                stop_token_ids=list(self.stop_ids),
                logprobs=self._num_logprobs(settings),
                flat_logprobs=True,
                detokenize=False,
            )
            for request in requests
        ]
        self.llm.collective_rpc("keep_hidden", args=(settings.distribution == "hidden",))
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        experts = self._take_experts()
        hidden = self._take_hidden() if settings.distribution == "hidden" else {}
        completions = [self._to_completion(output, settings, experts.get(output.request_id)) for output in outputs]
        return [
            replace(completion, hidden=response_hidden(output, hidden)) if hidden else completion
            for output, completion in zip(outputs, completions, strict=True)
        ]

    def sleep(self) -> None:
        """Leave the GPU to the trainer: weights to host memory, cache freed. Does nothing on a CPU."""
        if self.can_sleep and not self.is_asleep:
            self.llm.sleep(level=1)
            self.is_asleep = True

    def wake(self) -> None:
        """Come back from sleep."""
        if self.is_asleep:
            self.llm.wake_up()
            self.is_asleep = False

    def _num_logprobs(self, settings: SamplingSettings) -> int:
        """Say how many log-probs to ask for beside the sampled token's; -1 is all."""
        return {"full": -1, "top_k": min(settings.num_top, self.vocab_size)}.get(settings.distribution, 0)

    def _to_completion(
        self,
        output: Any,  # noqa: ANN401
        settings: SamplingSettings,
        experts: dict[int, Tensor] | None,
    ) -> Completion:
        completion = output.outputs[0]
        token_ids = tuple(completion.token_ids)
        check_length(len(token_ids), settings.max_tokens, f"the engine's response to request {output.request_id}")
        flat = completion.logprobs
        starts = np.asarray(flat.start_indices)
        values = np.asarray(flat.logprobs, dtype=np.float32)
        distribution = None
        if settings.distribution == "full":
            widths = np.asarray(flat.end_indices) - starts
            rows = np.repeat(np.arange(len(token_ids)), widths)
            full = np.full((len(token_ids), self.vocab_size), -np.inf, dtype=np.float32)
            full[rows, np.asarray(flat.token_ids)] = values
            distribution = torch.from_numpy(full)  # [T, V]
        top_ids = top_logprobs = None
        if settings.distribution == "top_k":
            # Each token's entries are the sampled one, then the K likeliest, the sampled one among them once more.
            top_ids = torch.from_numpy(np.asarray(flat.token_ids, dtype=np.int32).reshape(len(token_ids), -1)[:, 1:])
            top_logprobs = torch.from_numpy(values.reshape(len(token_ids), -1)[:, 1:].copy())
        routed = None
        if experts is not None:
            first = len(output.prompt_token_ids)
            routed = torch.stack([experts[first + position] for position in range(len(token_ids))])  # [T, L, K]
        return Completion(
            token_ids=token_ids,
            logprobs=torch.from_numpy(values[starts].copy()),  # each token's entries begin with the sampled one
            log_distribution=distribution,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            experts=routed,
            finished=completion.finish_reason == "stop",
        )

    def _take_experts(self) -> dict[str, dict[int, Tensor]]:
        if not self.has_routers:
            return {}
        recorded: dict[str, dict[int, Tensor]] = self.llm.collective_rpc("take_experts")[0]
        # Inside the engine a request id carries a random suffix.
        return {request_id.partition("-")[0]: experts for request_id, experts in recorded.items()}

    def _take_hidden(self) -> dict[str, tuple[list[int], Tensor]]:
        recorded: dict[str, tuple[list[int], Tensor]] = self.llm.collective_rpc("take_hidden")[0]
        self.llm.collective_rpc("keep_hidden", args=(False,))
        return {request_id.partition("-")[0]: rows for request_id, rows in recorded.items()}

    def _round_loaded_weights(self, model_path: Path) -> None:
        """Round the weights vLLM read from disk, as every later sync does."""
        self.load_weights(load_model(model_path).state_dict())


def response_hidden(output: Any, recorded: Mapping[str, tuple[list[int], Tensor]]) -> Tensor:  # noqa: ANN401
    """Take the hidden states of one response out of what the worker recorded.

    Args:
        output: vLLM's.
        recorded: by request id: lengths of the sequence before each token, ascending, and the rows ``[lengths, H]``.

    Returns:
        ``[T, H]`` in the engine's dtype.

    Raises:
        FaultError: if a token's state is missing.
    """
    first = len(output.prompt_token_ids)
    expected = list(range(first, first + len(output.outputs[0].token_ids)))
    lengths, rows = recorded.get(output.request_id, ([], torch.zeros(0, 0)))
    if lengths[: len(expected)] != expected:
        raise FaultError(
            f"the engine recorded hidden states of {len(set(lengths) & set(expected))} of {len(expected)} response "
            "tokens; the divergence of the others would be unknown"
        )
    return rows[: len(expected)]


def _placement(config: RolloutConfig) -> dict[str, Any]:
    """Return vLLM's settings for one engine in each rank, which step together, or for one engine alone."""
    if config.placement != "colocated":
        return {}
    settings: dict[str, Any] = {"enable_sleep_mode": torch.cuda.is_available()}
    if ranks.num_ranks() > 1:
        settings |= {"distributed_executor_backend": "external_launcher", "data_parallel_size": ranks.num_ranks()}
    return settings


def _check_colocation(hf_config: Any) -> None:  # noqa: ANN401
    """Refuse what vLLM's data parallelism lacks on a CPU: the exchange of tokens among experts.

    Raises:
        InputError: for a mixture of experts without a GPU.
    """
    if getattr(hf_config, "num_experts", None) and not torch.cuda.is_available():
        raise InputError(
            "rollout.placement=colocated: vLLM runs a mixture of experts in several processes on GPUs only; set "
            "rollout.placement=server or policy.architecture=dense"
        )


def _end_earlier_engines() -> None:
    """Shut down the engines that this process had before: it can have one at a time.

    vLLM's process groups belong to the process. A second engine would take over the first one's, and a dense model's
    lack those of experts; and an engine that Python collects at some later moment destroys the groups that are there
    then, whoever made them.
    """
    from vllm.distributed.parallel_state import destroy_model_parallel, model_parallel_is_initialized

    for llm in list(_in_process):
        llm.llm_engine.engine_core.shutdown()
    _in_process.clear()
    if model_parallel_is_initialized():  # by an engine that did not come to its start
        destroy_model_parallel()
