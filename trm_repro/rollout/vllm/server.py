"""vLLM as servers of their own: responses over the OpenAI interface, weights over vLLM's weight-transfer interface.

A server started here listens on 127.0.0.1 and ends with this process. One that runs already may be elsewhere; its
routes for weights have no password, so it must not be reachable from outside.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from trm_repro.config_sections import RolloutConfig
from trm_repro.errors import FaultError, InputError
from trm_repro.memory_limits import engine_start_problem
from trm_repro.parent_death import ending_with_this_process
from trm_repro.policy import load_model
from trm_repro.rollout.completion_checks import check_length
from trm_repro.rollout.engine import Completion, SamplingRequest, SamplingSettings
from trm_repro.rollout.precision import compute_dtype, round_weight
from trm_repro.rollout.stopping import stop_token_ids
from trm_repro.rollout.vllm.weights import checkpoint_weights

FILE_BYTES = 512 * 2**20  # of one weight file, about
START_SECONDS = 600.0
REQUEST_SECONDS = 3600.0
LARGEST_PARALLEL = 64  # requests under way from this process
SHARED_MEMORY = Path("/dev/shm")


class ServerEngine:
    """A `RolloutEngine` on vLLM servers; requests are dealt out among them."""

    def __init__(self, config: RolloutConfig, model_path: Path, max_length: int) -> None:
        """Connect to the servers, or start one on a saved model.

        Args:
            config: the rollout section.
            model_path: directory with weights, configuration and tokenizer; servers that run already serve it too.
            max_length: longest prompt and response together, tokens.

        Raises:
            InputError: if a server does not answer, or none starts.
        """
        self.precision = config.precision
        self.stop_ids = stop_token_ids(config.stop_tokens, model_path)
        self.vocab_size = int(AutoConfig.from_pretrained(model_path, trust_remote_code=False).vocab_size)
        self.model = str(model_path)
        self.transfer = config.weight_transfer
        self.process: subprocess.Popen[bytes] | None = None
        self.urls = [url.rstrip("/") for url in config.server_urls]
        if not self.urls:
            self.urls = [self._start(config, max_length)]
        for url in self.urls:
            if not is_alive(url):
                raise InputError(f"rollout.server_urls: no vLLM server answers at {url}; start it, or give none")
        parallel = min(config.max_concurrent_sequences, LARGEST_PARALLEL)
        self.pool = ThreadPoolExecutor(max_workers=parallel, thread_name_prefix="rollout-server")
        self.sender: Any = None
        if self.transfer == "file":
            for url in self.urls:
                post(url, "/init_weight_transfer_engine", {"init_info": {}})
        if config.precision in ("int8", "fp8"):
            self.load_weights(load_model(model_path).state_dict())

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights of all servers and empty their prefix caches."""
        if self.transfer == "nccl":
            from trm_repro.rollout.vllm.nccl import send_weights

            self.sender = send_weights(self.urls[0], weights, self.precision, self.sender)
        else:
            for url in self.urls:
                post(url, "/start_weight_update")
            for path in weight_files(weights, self.precision):
                for url in self.urls:
                    post(url, "/update_weights", {"update_info": {"path": str(path)}})
            for url in self.urls:
                post(url, "/finish_weight_update", {"weight_version": None})
        for url in self.urls:
            post(url, "/reset_prefix_cache")

    def sample(self, requests: Sequence[SamplingRequest], settings: SamplingSettings) -> list[Completion]:
        """Sample one response per request, in order."""
        urls = [self.urls[index % len(self.urls)] for index in range(len(requests))]
        return list(self.pool.map(lambda url, request: self._sample_one(url, request, settings), urls, requests))

    def _sample_one(self, url: str, request: SamplingRequest, settings: SamplingSettings) -> Completion:
        num_logprobs = {"full": -1, "top_k": min(settings.num_top, self.vocab_size)}.get(settings.distribution, 0)
        body = {
            "model": self.model,
            "prompt": list(request.prompt_ids),
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": request.seed,
            "ignore_eos": True,  # the model's own is among the stop tokens
            "stop_token_ids": list(self.stop_ids),
            "logprobs": num_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        return read_completion(post(url, "/v1/completions", body)["choices"][0], settings, self.vocab_size)

    def _start(self, config: RolloutConfig, max_length: int) -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        log = tempfile.NamedTemporaryFile(prefix="trm_repro_server_", suffix=".log", delete=False)  # noqa: SIM115
        environment = os.environ | {
            "VLLM_SERVER_DEV_MODE": "1",  # the routes for weights
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)  # of the trainer's ranks
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        self.process = subprocess.Popen(
            server_command(config, self.model, max_length, port),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            preexec_fn=ending_with_this_process(signal.SIGTERM),
        )
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS
        while not is_alive(url):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.close()
                said = Path(log.name).read_text(errors="replace")
                if problem := engine_start_problem(said, config.kv_cache_bytes, max_length):
                    raise InputError(f"{problem} (see {log.name})")
                tail = said.strip().splitlines()[-1:]
                raise InputError(f"{self.model}: no vLLM server started on it ({''.join(tail)[:200]}; see {log.name})")
            time.sleep(0.5)
        Path(log.name).unlink()  # the server goes on writing to it; nobody needs to read it
        return url

    def close(self) -> None:
        """End the server that was started here."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()


def server_command(config: RolloutConfig, model: str, max_length: int, port: int) -> list[str]:
    """Write the command that starts a server like the engine in this process.

    Args:
        config: the rollout section.
        model: what to serve.
        max_length: longest prompt and response together, tokens.
        port: to listen on, on 127.0.0.1.

    Returns:
        Program and arguments.
    """
    length = -(-max_length // 16) * 16
    backend = "trm_file" if config.weight_transfer == "file" else "nccl"
    arguments = {
        "--model": model,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": str(compute_dtype(config.precision)).removeprefix("torch."),
        "--max-model-len": length,
        "--kv-cache-memory-bytes": config.kv_cache_bytes,
        "--max-num-seqs": config.max_concurrent_sequences,
        "--max-logprobs": -1,
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--weight-transfer-config": json.dumps({"backend": backend}),
        "--worker-extension-cls": "trm_repro.rollout.vllm.transfer.TransferExtension",
        "--seed": 0,
    }
    switches = ["--enable-prefix-caching" if config.prefix_caching else "--no-enable-prefix-caching"]
    switches += ["--disable-log-stats", "--disable-uvicorn-access-log"]
    if not torch.cuda.is_available():
        arguments["--max-num-batched-tokens"] = max(8192, length)
        switches += ["--enforce-eager", "--no-enable-chunked-prefill"]
    words = [str(word) for pair in arguments.items() for word in pair]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, *switches]


def weight_files(weights: Mapping[str, Tensor], precision: Any) -> Iterator[Path]:  # noqa: ANN401
    """Write weights to files in memory, one after another; each is gone when the next is asked for.

    Args:
        weights: the policy's, by name.
        precision: the engine's.

    Yields:
        A safetensors file of about FILE_BYTES.
    """
    from safetensors.torch import save_file

    directory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="trm_repro_weights_", dir=directory) as folder:
        path = Path(folder) / "part.safetensors"
        part: dict[str, Tensor] = {}
        for name, weight in checkpoint_weights(weights, lambda key, value: round_weight(key, value, precision)):
            part[name] = weight.cpu().clone(memory_format=torch.contiguous_format)
            if sum(tensor.nbytes for tensor in part.values()) >= FILE_BYTES:
                save_file(part, path)
                yield path
                part = {}
        if part:
            save_file(part, path)
            yield path


def read_completion(choice: Mapping[str, Any], settings: SamplingSettings, vocab_size: int) -> Completion:
    """Read one response out of a server's answer.

    Args:
        choice: one of its ``choices``, with token ids and log-probs keyed ``token_id:N``.
        settings: what was asked for.
        vocab_size: V.

    Returns:
        The response.

    Raises:
        FaultError: if the answer is empty, longer than what was asked for, or lacks rows of log-probs.
    """
    token_ids = tuple(choice["token_ids"])
    logprobs = choice["logprobs"]
    check_length(len(token_ids), settings.max_tokens, "the rollout server's response")
    distribution = top_ids = top_logprobs = None
    if settings.distribution in ("full", "top_k"):
        rows = [{int(key.rpartition(":")[2]): value for key, value in row.items()} for row in logprobs["top_logprobs"]]
        if len(rows) != len(token_ids):
            raise FaultError(f"the rollout server returned {len(rows)} rows of log-probs for {len(token_ids)} tokens")
        if settings.distribution == "full":
            distribution = torch.full((len(token_ids), vocab_size), -torch.inf)  # [T, V]
            for position, row in enumerate(rows):
                distribution[position, list(row)] = torch.tensor(list(row.values()))
        else:
            # A row holds the likeliest tokens and, where it is not among them, the sampled one.
            best = [sorted(row.items(), key=lambda item: -item[1])[: settings.num_top] for row in rows]
            top_ids = torch.tensor([[token for token, _ in row] for row in best], dtype=torch.int32)  # [T, K]
            top_logprobs = torch.tensor([[value for _, value in row] for row in best])  # [T, K]
    return Completion(
        token_ids=token_ids,
        logprobs=torch.tensor(logprobs["token_logprobs"], dtype=torch.float32),
        log_distribution=distribution,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        finished=choice["finish_reason"] == "stop",
    )


def post(url: str, route: str, body: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401
    """Send JSON to a server and read its answer.

    Raises:
        FaultError: if it does not answer, or with an error.
    """
    request = urllib.request.Request(
        url + route, data=json.dumps(body or {}).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
            text = response.read()
    except urllib.error.HTTPError as error:
        detail = error.read().decode(errors="replace")[:200]
        raise FaultError(f"the rollout server at {url} answered {error.code} to {route} ({detail})") from None
    except OSError as error:
        raise FaultError(f"the rollout server at {url} did not answer {route} ({error})") from None
    return json.loads(text) if text else None


def is_alive(url: str) -> bool:
    """Whether a server answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10):
            return True
    except OSError:
        return False
