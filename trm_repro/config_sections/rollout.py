"""How responses are sampled."""

from dataclasses import dataclass
from typing import Literal

from trm_repro.config_sections.checks import (
    require,
    require_at_least,
    require_positive,
    require_texts,
)

Precision = Literal["bfloat16", "float32", "int8", "fp8"]


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled, and what is kept of the distribution they were sampled from."""

    engine: Literal["vllm", "transformers"] = "vllm"
    """Inference engine."""
    placement: Literal["in_process", "colocated", "server"] = "in_process"
    """in_process: in the trainer's first process; colocated: a vLLM in each; server: vLLM's OpenAI-compatible one."""
    server_urls: tuple[str, ...] = ()
    """placement server: base URLs of servers that run already; empty starts one on 127.0.0.1."""
    weight_transfer: Literal["file", "nccl"] = "file"
    """placement server: how weights reach it; file: a safetensors file in memory on one machine; nccl: between GPUs."""
    overlap: bool = False
    """Sample the next step's rollouts while this one trains; needs staleness_steps >= 1 and placement server."""
    precision: Precision = "bfloat16"
    """Engine arithmetic; int8 and fp8 round the weights at every sync and compute in bfloat16."""
    distribution: Literal["full", "hidden", "top_k", "sampled"] = "full"
    """Stored per token: log-probs of the whole vocabulary, hidden states that rebuild them, the top few, or one."""
    num_top_logprobs: int = 8
    """K of distribution top_k; exact KL is then known to lie in an interval."""
    staleness_steps: int = 4
    """Rollouts come from weights this many steps old; the first steps use the oldest there are."""
    num_prompts: int = 16
    """Prompts per step."""
    group_size: int = 8
    """Responses per prompt."""
    temperature: float = 1.0
    """Sampling temperature; the policy's logits are divided by it too."""
    top_p: float = 1.0
    """Nucleus sampling; only 1 is accepted in training: otherwise the rollout policy lacks support."""
    max_prompt_tokens: int = 32
    """Longest prompt, tokens."""
    max_response_tokens: int = 90
    """Longest response, tokens; a response cut here is unfinished and earns no reward."""
    stop_tokens: tuple[str, ...] = ()
    """Tokens that end a response, beside the model's own; a base model under a chat template needs the template's."""
    prefix_caching: bool = False
    """Let the engine reuse key-value blocks of equal prompts; emptied at every sync."""
    kv_cache_bytes: int = 268435456
    """Memory for the engine's key-value cache, bytes."""
    max_concurrent_sequences: int = 256
    """Sequences the engine decodes together."""
    probe_contexts: int = 32
    """Fixed contexts on which engine and policy are compared after every sync."""
    probe_factor: float = 3.0
    """Stop when the probe's gap exceeds this many times the engine's own noise."""

    def __post_init__(self) -> None:
        """Check ranges."""
        require_at_least("rollout", 0, staleness_steps=self.staleness_steps)
        require(self.staleness_steps <= 10_000, "rollout.staleness_steps", "at most 10000", self.staleness_steps)
        counts = ["num_prompts", "max_prompt_tokens", "max_response_tokens", "kv_cache_bytes"]
        counts += ["max_concurrent_sequences", "probe_contexts", "num_top_logprobs"]
        require_at_least("rollout", 1, **{name: getattr(self, name) for name in counts})
        require_at_least("rollout", 2, group_size=self.group_size)
        require_positive("rollout", temperature=self.temperature)
        require(
            self.top_p == 1.0,
            "rollout.top_p",
            "1 in training (a truncated rollout policy lacks support, so no divergence bound holds)",
            self.top_p,
        )
        require(
            self.engine == "vllm" or self.placement == "in_process",
            "rollout.placement",
            "in_process for rollout.engine=transformers",
            self.placement,
        )
        require(
            not self.overlap or (self.placement == "server" and self.staleness_steps >= 1),
            "rollout.overlap",
            "false unless rollout.placement=server and rollout.staleness_steps >= 1",
            self.overlap,
        )
        require(
            self.distribution != "hidden" or self.placement != "server",
            "rollout.distribution",
            "full, top_k or sampled for rollout.placement=server: its interface carries no hidden states",
            self.distribution,
        )
        require(
            self.weight_transfer == "file" or len(self.server_urls) <= 1,
            "rollout.weight_transfer",
            "file for more than one of rollout.server_urls (vLLM's own data parallelism serves many GPUs at one)",
            self.weight_transfer,
        )
        require_texts("rollout", stop_tokens=self.stop_tokens, server_urls=self.server_urls)
        for url in self.server_urls:
            require(
                str(url).startswith(("http://", "https://")), "rollout.server_urls", "http:// or https:// URLs", url
            )
            if "@" in str(url) or "?" in str(url):  # not shown: it may hold a password, and urllib takes none
                raise ValueError("rollout.server_urls must be URLs without user, password and query")
        require(1 < self.probe_factor < 10, "rollout.probe_factor", "in (1, 10)", self.probe_factor)
