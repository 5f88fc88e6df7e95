"""`trm-repro plan`: memory, operations, storage and time of a run on GPUs, before anything is started."""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Literal

from pipelines.arguments import add_arm_argument, add_config_arguments, config_from
from trm_repro.capacity import (
    BF16,
    FLOAT32,
    GPUS,
    TOKEN_BYTES,
    Efficiency,
    Gpu,
    ModelShape,
    StageCost,
    Workload,
    stage_costs,
    stored_bytes_per_token,
)
from trm_repro.config import CONF_DIR, RunConfig
from trm_repro.errors import InputError
from trm_repro.memory import Host, Memory, Sampling, Trainer, gpu_memory, host_memory, host_total

HELP = "print memory, operations, storage and time of a run on GPUs before it is started"
RESERVE = 3e9  # bytes of a GPU for the CUDA context and fragmentation
MOST_GPUS = 100_000
FEWER = "use more GPUs (trainer.devices), or trainer.cpu_offload=true"
LARGER = "use GPUs with more memory (--gpu)"
SHORTER = "lower update.tokens_per_micro_batch"
SUGGESTIONS = {
    "masters": FEWER,
    "gradients": FEWER,
    "optimizer": FEWER,
    "step_workspace": FEWER,
    "rollout_head": "set rollout.distribution=top_k, which needs no head",
    "rollout_distributions": "use more GPUs (trainer.devices), or lower rollout.num_prompts",
    "gathered_root": LARGER,
    "gathered_layers": LARGER,
    "head_gradient": LARGER,
    "layer_reduction": LARGER,
    "root_reduction": LARGER,
    "saved_activations": f"{SHORTER}, or set trainer.activation_checkpointing=true",
    "layer_activations": SHORTER,
    "logit_chunk": LARGER,
    "engine_weights": LARGER,
    "key_value_cache": "lower rollout.kv_cache_bytes",
    "streamed_weight": LARGER,
}
HOST_SUGGESTIONS = {
    "starting": "use a machine with more memory: the first rank reads the model whole",
    "snapshots": "lower rollout.staleness_steps",
    "offloaded_states": "set trainer.cpu_offload=false",
    "sleeping_engines": "set rollout.placement=server",
    "rollout_distributions": "lower rollout.num_prompts, or set rollout.distribution=top_k",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config_arguments(parser, default="conf/paper.yaml")
    add_arm_argument(parser)
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h100-80gb", help="kind of GPU; default: h100-80gb")
    parser.add_argument("--gpus", type=int, help="number of GPUs; default: trainer.num_nodes x trainer.devices")
    parser.add_argument(
        "--mean-response", type=float, help="mean response length, tokens; default: rollout.max_response_tokens"
    )
    parser.add_argument("--mean-prompt", type=float, help="mean prompt length; default: rollout.max_prompt_tokens")
    parser.add_argument(
        "--training-efficiency", type=float, default=0.4, help="share of the GPU's operations reached; default 0.4"
    )
    parser.add_argument(
        "--decoding-efficiency", type=float, default=0.6, help="share of its bandwidth reached; default 0.6"
    )
    parser.add_argument("--host-memory", type=float, help="memory of one machine, GB; default: not checked")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if not arguments.settings:
        arguments.settings = [str(CONF_DIR / "paper.yaml")]
    config = config_from(arguments)
    plan = make_plan(arguments, config)
    check_fit(plan)
    check_host(plan, arguments.host_memory)
    sys.stdout.write(json.dumps(plan.as_dict(), indent=2) + "\n" if arguments.json else plan.text())
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What `make_plan` found, ready to print."""

    source: str
    model: ModelShape
    gpu: Gpu
    num_gpus: int
    memory: Memory
    costs: list[StageCost]
    workload: Workload
    efficiency: Efficiency
    num_steps: int
    bytes_per_token: int
    kept_steps: int
    host: dict[str, float]

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain values."""
        return {
            "model": dataclasses.asdict(self.model) | {"parameters": self.model.num_parameters, "source": self.source},
            "gpu": dataclasses.asdict(self.gpu) | {"count": self.num_gpus},
            "memory_bytes_per_gpu": dataclasses.asdict(self.memory)
            | {moment: sum(parts.values()) for moment, parts in self.memory.moments().items()}
            | {"training": self.memory.training},
            "stages": [dataclasses.asdict(cost) for cost in self.costs],
            "step_seconds": self.step_seconds,
            "run_seconds": self.step_seconds * self.num_steps,
            "rollout_bytes_per_step": self.step_bytes,
            "rollout_bytes_kept": self.step_bytes * self.kept_steps,
            "host_bytes": self.host | {"total": host_total(self.host)},
            "assumptions": dataclasses.asdict(self.efficiency) | dataclasses.asdict(self.workload),
        }

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, stages one after another."""
        return sum(cost.seconds for cost in self.costs)

    @property
    def step_bytes(self) -> float:
        """Bytes of one step's rollouts."""
        return self.workload.num_sequences * self.workload.response_tokens * self.bytes_per_token

    def text(self) -> str:
        """Write the plan for a terminal."""
        usable = self.gpu.memory_bytes - RESERVE
        lines = [
            f"model     {self.model.num_parameters / 1e9:.2f} B parameters ({self.source})",
            f"machine   {self.num_gpus} x {self.gpu.name}, {self.gpu.memory_bytes / 1e9:.0f} GB each",
            f"step      {self.workload.num_sequences} responses of "
            f"{self.workload.response_tokens:,.0f} tokens, "
            f"prompts of {self.workload.prompt_tokens:,.0f}",
            "",
            "memory of one GPU, GB",
            *(_line(name, value) for name, value in self.memory.categories().items() if value > 0),
            *(
                f"  {'fullest while ' + moment:<28}{sum(parts.values()) / 1e9:8.2f} of {usable / 1e9:.1f}"
                for moment, parts in self.memory.moments().items()
            ),
            "",
            "memory of the first machine, GB",
            *(_line(name, value) for name, value in self.host.items() if value > 0),
            f"  {'at its fullest':<28}{host_total(self.host) / 1e9:8.2f}, and about 3 a process",
            "",
            f"{'stage':<10}{'operations':>12}{'GB read':>12}{'seconds':>10}",
            *(
                f"{cost.stage:<10}{cost.flops:12.2e}{cost.bytes_read / 1e9:12,.0f}{cost.seconds:10.1f}"
                for cost in self.costs
            ),
            f"{'step':<34}{self.step_seconds:10.1f}",
            f"{self.num_steps} steps: {self.step_seconds * self.num_steps / 3600:.1f} hours, evaluation left out",
            "",
            f"rollouts  {self.step_bytes / 1e9:.2f} GB a step ({self.bytes_per_token} bytes a token), "
            f"{self.step_bytes * self.kept_steps / 1e9:.1f} GB kept of {self.kept_steps} steps, before compression",
            "",
            f"Assumed: {self.efficiency.training:.0%} of the data sheet's operations, "
            f"{self.efficiency.decoding:.0%} of its bandwidth while decoding,",
            "every response of the same length, stages one after another. Not measured on a GPU.",
        ]
        return "\n".join(lines) + "\n"


def _line(name: str, value: float) -> str:
    return f"  {name.replace('_', ' '):<28}{value / 1e9:8.2f}"


def make_plan(arguments: argparse.Namespace, config: RunConfig) -> Plan:
    """Work the plan out.

    Args:
        arguments: machine, lengths and efficiencies.
        config: the run.

    Returns:
        The plan; `check_fit` says whether it can run.

    Raises:
        InputError: if an argument is out of range or the model's shape is not known.
    """
    for name in ("training_efficiency", "decoding_efficiency"):
        if not 0 < getattr(arguments, name) <= 1:
            raise InputError(f"--{name.replace('_', '-')} must be in (0, 1], got {getattr(arguments, name)}")
    num_gpus = config.trainer.num_ranks if arguments.gpus is None else arguments.gpus
    if not 1 <= num_gpus <= MOST_GPUS:
        raise InputError(f"--gpus must be >= 1 and at most {MOST_GPUS}, got {num_gpus}")
    given = arguments.mean_response, arguments.mean_prompt
    longest = config.rollout.max_response_tokens, config.rollout.max_prompt_tokens
    response, prompt = (float(most) if mean is None else mean for mean, most in zip(given, longest, strict=True))
    for name, value, most in zip(("response", "prompt"), (response, prompt), longest, strict=True):
        if not 0 < value <= most:
            raise InputError(f"--mean-{name} must be > 0 and at most rollout.max_{name}_tokens = {most}, got {value}")
    model, source = model_shape(config)
    gpu = GPUS[arguments.gpu]
    trainer = trainer_of(config, num_gpus)
    distribution = config.rollout.distribution
    workload = Workload(
        num_sequences=config.rollout.num_prompts * config.rollout.group_size,
        prompt_tokens=prompt,
        response_tokens=response,
        num_epochs=config.update.num_epochs,
        is_rebuilding=distribution == "hidden",
    )
    bytes_per_token = stored_bytes_per_token(
        distribution,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        num_top_logprobs=config.rollout.num_top_logprobs,
    )
    distribution_bytes = (bytes_per_token - TOKEN_BYTES) * workload.num_sequences * response
    engine = engine_of(config)
    sampling = Sampling(
        engine_ranks=1,
        key_value_cache=float(config.rollout.kv_cache_bytes),
        engine=engine,
        has_head=workload.is_rebuilding,
        distribution_bytes=distribution_bytes / num_gpus,
    )
    ranks_here = min(num_gpus, config.trainer.devices) if config.trainer.num_nodes > 1 else num_gpus
    host = Host(
        ranks_here=ranks_here,
        num_snapshots=config.rollout.staleness_steps + 2,
        distribution_bytes=distribution_bytes,
        sleeping_bytes=float(BF16 * model.num_parameters * ranks_here) if engine == "sleeping" else 0.0,
    )
    efficiency = Efficiency(training=arguments.training_efficiency, decoding=arguments.decoding_efficiency)
    return Plan(
        source=source,
        model=model,
        gpu=gpu,
        num_gpus=num_gpus,
        memory=gpu_memory(model, trainer, sampling),
        costs=stage_costs(
            model,
            workload,
            gpu,
            num_gpus=num_gpus,
            engine_ranks=1,
            concurrent_sequences=config.rollout.max_concurrent_sequences,
            is_checkpointing=trainer.is_checkpointing,
            is_half_precision=trainer.compute_bytes < FLOAT32,
            efficiency=efficiency,
        ),
        workload=workload,
        efficiency=efficiency,
        num_steps=config.num_steps,
        bytes_per_token=bytes_per_token,
        kept_steps=1 + (config.num_steps - 1) // config.output.keep_shards_every,
        host=host_memory(model, trainer, host),
    )


def trainer_of(config: RunConfig, num_ranks: int) -> Trainer:
    """Say how the trainer holds the model on GPUs."""
    from trm_repro.vocab.chunks import CUDA_CHUNK_ELEMENTS

    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    return Trainer(
        num_ranks=num_ranks,
        optimizer_moments=2 * (config.update.optimizer == "adamw") + (config.update.step_limit is not None),
        is_sharded=config.trainer.is_sharded or num_ranks > 1,
        is_checkpointing=config.trainer.activation_checkpointing,
        is_offloading=config.trainer.cpu_offload,
        compute_bytes=FLOAT32 if config.trainer.compute_dtype == "float32" else BF16,
        tokens_per_micro_batch=max(config.update.tokens_per_micro_batch, longest),
        chunk_elements=CUDA_CHUNK_ELEMENTS,
    )


def engine_of(config: RunConfig) -> Literal["sleeping", "resident", "elsewhere"]:
    """Say where the engine is while the trainer works."""
    if config.rollout.placement == "server":
        return "elsewhere"
    return "sleeping" if config.rollout.placement == "colocated" else "resident"


def model_shape(config: RunConfig) -> tuple[ModelShape, str]:
    """Find the policy's shape: config.json of policy.path where it is a folder, else the sizes in the config.

    Args:
        config: the run.

    Returns:
        The shape, and where it was found.

    Raises:
        InputError: if config.json cannot be read, or the vocabulary's size is not given.
    """
    policy = config.policy
    if policy.path is not None and Path(policy.path).is_dir():
        return _shape_of_file(Path(policy.path) / "config.json"), f"{policy.path}/config.json"
    if policy.path is not None and policy.path.startswith(("/", ".")):
        raise InputError(f"policy.path={policy.path}: no such directory; expected config.json in it, or a hub name")
    if policy.vocab_size is None:
        raise InputError("policy.vocab_size is not set, so the model's size is not known; give policy.vocab_size")
    is_moe = policy.architecture == "moe"
    shape = ModelShape(
        hidden_size=policy.hidden_size,
        num_layers=policy.num_layers,
        num_attention_heads=policy.num_attention_heads,
        num_key_value_heads=policy.num_key_value_heads,
        head_dim=policy.head_dim,
        intermediate_size=policy.moe_intermediate_size if is_moe else policy.intermediate_size,
        vocab_size=policy.vocab_size,
        tie_word_embeddings=policy.tie_word_embeddings,
        num_experts=policy.num_experts if is_moe else 1,
        num_experts_per_token=policy.num_experts_per_token if is_moe else 1,
    )
    return shape, "the sizes under policy"


def _shape_of_file(file: Path) -> ModelShape:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        heads = int(found["num_attention_heads"])
        num_experts = int(found.get("num_experts") or 1)
        inner = "moe_intermediate_size" if num_experts > 1 else "intermediate_size"
        return ModelShape(
            hidden_size=int(found["hidden_size"]),
            num_layers=int(found["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(found.get("num_key_value_heads") or heads),
            head_dim=int(found.get("head_dim") or int(found["hidden_size"]) // heads),
            intermediate_size=int(found[inner]),
            vocab_size=int(found["vocab_size"]),
            tie_word_embeddings=bool(found.get("tie_word_embeddings", False)),
            num_experts=num_experts,
            num_experts_per_token=int(found.get("num_experts_per_tok") or 1),
        )
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}; expected the configuration of a decoder model") from None
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        message = f"{file}: no configuration of a decoder model ({type(error).__name__}: {error})"
        raise InputError(message) from None


def check_fit(plan: Plan) -> None:
    """Refuse a plan that needs more memory than a GPU has.

    Args:
        plan: from `make_plan`.

    Raises:
        InputError: naming the largest category and the setting to change.
    """
    usable = plan.gpu.memory_bytes - RESERVE
    one_sequence = plan.workload.sequence_tokens * plan.model.key_value_bytes_per_token
    if plan.memory.key_value_cache < one_sequence:
        raise InputError(
            f"rollout.kv_cache_bytes = {plan.memory.key_value_cache:.3g} holds less than one sequence, which takes "
            f"{one_sequence:.3g} bytes; raise it"
        )
    for moment, parts in plan.memory.moments().items():
        need = sum(parts.values())
        if need > usable:
            worst = max(parts, key=lambda name: parts[name])
            raise InputError(
                f"{moment} needs {need / 1e9:.1f} GB on each {plan.gpu.name}, which has {usable / 1e9:.1f} usable; "
                f"{worst.replace('_', ' ')} is the largest with {parts[worst] / 1e9:.1f} GB: {SUGGESTIONS[worst]}"
            )


def check_host(plan: Plan, host_memory_gb: float | None) -> None:
    """Refuse a plan that needs more memory than a machine has.

    Args:
        plan: from `make_plan`.
        host_memory_gb: of one machine; None where it is not known.

    Raises:
        InputError: naming the largest category and the setting to change.
    """
    if host_memory_gb is None:
        return
    if not 0 < host_memory_gb < math.inf:
        raise InputError(f"--host-memory must be a number of GB > 0, got {host_memory_gb}")
    need = host_total(plan.host)
    if need > host_memory_gb * 1e9:
        worst = max(plan.host, key=lambda name: plan.host[name])
        raise InputError(
            f"the first machine needs {need / 1e9:.1f} GB, it has {host_memory_gb:g}; {worst.replace('_', ' ')} takes "
            f"{plan.host[worst] / 1e9:.1f} GB: {HOST_SUGGESTIONS[worst]}"
        )
