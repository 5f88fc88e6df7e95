"""`trm-repro plan`: memory, operations, storage and time of a run on GPUs, before anything is started."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from pipelines.arguments import add_arm_argument, add_config_arguments, config_from
from trm_repro.capacity import (
    BF16,
    FLOAT32,
    GPUS,
    Efficiency,
    Gpu,
    Memory,
    ModelShape,
    StageCost,
    Trainer,
    Workload,
    stage_costs,
    stored_bytes_per_token,
    trainer_memory,
)
from trm_repro.config import CONF_DIR, RunConfig
from trm_repro.errors import InputError

HELP = "print memory, operations, storage and time of a run on GPUs before it is started"
RESERVE = 3e9  # bytes of a GPU for the CUDA context and fragmentation
CHUNK_TOKENS = 512
MOST_GPUS = 100_000
SUGGESTIONS = {
    "masters": "use more GPUs (trainer.devices), or trainer.cpu_offload=true",
    "gradients": "use more GPUs (trainer.devices), or trainer.cpu_offload=true",
    "optimizer": "use more GPUs (trainer.devices), or trainer.cpu_offload=true",
    "gathered_layers": "use GPUs with more memory (--gpu)",
    "activations": "lower update.tokens_per_micro_batch, or set trainer.activation_checkpointing=true",
    "logit_chunk": "lower update.tokens_per_micro_batch",
    "engine_weights": "use GPUs with more memory (--gpu)",
    "key_value_cache": "lower rollout.kv_cache_bytes",
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
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if not arguments.settings:
        arguments.settings = [str(CONF_DIR / "paper.yaml")]
    config = config_from(arguments)
    plan = make_plan(arguments, config)
    check_fit(plan)
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
    host_bytes: float

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain values."""
        return {
            "model": dataclasses.asdict(self.model) | {"parameters": self.model.num_parameters, "source": self.source},
            "gpu": dataclasses.asdict(self.gpu) | {"count": self.num_gpus},
            "memory_bytes_per_gpu": dataclasses.asdict(self.memory)
            | {"training": self.memory.training, "sampling": self.memory.resident + self.memory.sampling},
            "stages": [dataclasses.asdict(cost) for cost in self.costs],
            "step_seconds": self.step_seconds,
            "run_seconds": self.step_seconds * self.num_steps,
            "rollout_bytes_per_step": self.step_bytes,
            "rollout_bytes_kept": self.step_bytes * self.kept_steps,
            "host_bytes": self.host_bytes,
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
            *(
                f"  {field.name.replace('_', ' '):<18}{getattr(self.memory, field.name) / 1e9:8.2f}"
                for field in dataclasses.fields(self.memory)
            ),
            f"  while training    {self.memory.training / 1e9:8.2f} of {usable / 1e9:.1f}",
            f"  while sampling    {(self.memory.resident + self.memory.sampling) / 1e9:8.2f} of {usable / 1e9:.1f}",
            f"memory of the host, GB: {self.host_bytes / 1e9:.1f} (snapshots of weights, offloaded states)",
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
    response = arguments.mean_response or float(config.rollout.max_response_tokens)
    prompt = arguments.mean_prompt or float(config.rollout.max_prompt_tokens)
    for name, value, most in (
        ("response", response, config.rollout.max_response_tokens),
        ("prompt", prompt, config.rollout.max_prompt_tokens),
    ):
        if not 0 < value <= most:
            raise InputError(f"--mean-{name} must be > 0 and at most rollout.max_{name}_tokens = {most}, got {value}")
    model, source = model_shape(config)
    gpu = GPUS[arguments.gpu]
    trainer = Trainer(
        num_ranks=num_gpus,
        optimizer_moments=2 if config.update.optimizer == "adamw" else 0,
        is_checkpointing=config.trainer.activation_checkpointing,
        is_offloading=config.trainer.cpu_offload,
        tokens_per_micro_batch=config.update.tokens_per_micro_batch,
        chunk_tokens=CHUNK_TOKENS,
    )
    workload = Workload(
        num_sequences=config.rollout.num_prompts * config.rollout.group_size,
        prompt_tokens=prompt,
        response_tokens=response,
        num_epochs=config.update.num_epochs,
        is_exact=config.rollout.distribution not in ("sampled", "top_k"),
    )
    efficiency = Efficiency(training=arguments.training_efficiency, decoding=arguments.decoding_efficiency)
    return Plan(
        source=source,
        model=model,
        gpu=gpu,
        num_gpus=num_gpus,
        memory=trainer_memory(model, trainer, engine_ranks=1, key_value_cache=float(config.rollout.kv_cache_bytes)),
        costs=stage_costs(
            model,
            workload,
            gpu,
            num_gpus=num_gpus,
            engine_ranks=1,
            concurrent_sequences=config.rollout.max_concurrent_sequences,
            is_checkpointing=trainer.is_checkpointing,
            efficiency=efficiency,
        ),
        workload=workload,
        efficiency=efficiency,
        num_steps=config.num_steps,
        bytes_per_token=stored_bytes_per_token(
            config.rollout.distribution,
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            num_top_logprobs=config.rollout.num_top_logprobs,
        ),
        kept_steps=1 + (config.num_steps - 1) // config.output.keep_shards_every,
        host_bytes=host_bytes(config, model),
    )


def host_bytes(config: RunConfig, model: ModelShape) -> float:
    """Count bytes in host memory: bfloat16 snapshots of the weights sampled from, and what is offloaded."""
    snapshots = (config.rollout.staleness_steps + 1) * BF16 * model.num_parameters
    moments = 2 if config.update.optimizer == "adamw" else 0
    offloaded = (2 + moments) * FLOAT32 * model.num_parameters if config.trainer.cpu_offload else 0
    return float(snapshots + offloaded)


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
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
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
    training = ("masters", "gradients", "optimizer", "gathered_layers", "activations", "logit_chunk")
    sampling = ("masters", "optimizer", "engine_weights", "key_value_cache")
    for phase, names in (("training", training), ("sampling", sampling)):
        need = sum(getattr(plan.memory, name) for name in names)
        if need > usable:
            worst = max(names, key=lambda name: float(getattr(plan.memory, name)))
            size = getattr(plan.memory, worst) / 1e9
            raise InputError(
                f"{phase} needs {need / 1e9:.1f} GB on each {plan.gpu.name}, which has {usable / 1e9:.1f} usable; "
                f"{worst.replace('_', ' ')} is the largest with {size:.1f} GB: {SUGGESTIONS[worst]}"
            )
