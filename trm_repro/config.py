"""The configuration of a run: its sections joined, and loading it from files and ``key=value`` overrides.

The command line merges, in order: the defaults, each file, the arm's file, each ``key=value``.
Loads without torch.
"""

import copy
import dataclasses
import difflib
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from trm_repro.config_sections import (
    ClaimThresholds,
    EvaluationConfig,
    HealthConfig,
    LossConfig,
    MaskConfig,
    OutputConfig,
    PolicyConfig,
    ReproduceConfig,
    RolloutConfig,
    TaskConfig,
    TrackingConfig,
    TrainerConfig,
    UpdateConfig,
    WarmStartConfig,
    require,
    require_plain_name,
)
from trm_repro.errors import InputError

LEAST_TOP_FOR_AVERAGE = 1024
MAX_MESSAGE = 300  # characters of a library's message that are repeated
MAX_THREADS = 1024
MOST_STEPS = 10**7
LARGEST_SEED = 2**62 - 1
CONF_DIR = Path(__file__).resolve().parents[1] / "conf"


def derive_seed(seed: int, *labels: str | int) -> int:
    """Derive the seed of one use of randomness from the run's one seed.

    Args:
        seed: the run's seed.
        labels: what the seed is for, such as ``"rollout", step, prompt, sample``.

    Returns:
        An integer in [0, 2**31), the same on every machine for the same arguments.
    """
    text = "/".join(str(label) for label in (seed, *labels))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: one arm with one seed; `trm-repro reproduce` makes several from it."""

    name: str = "miniature"
    """Name of the experiment, shown in MLflow and the report."""
    arm: str = "trm_avg_0.001"
    """Name of this arm; a letter or digit, then letters, digits, dots, dashes and underscores."""
    seed: int = 101
    """The one seed; those of every stage and step are derived from it."""
    num_steps: int = 60
    """Reinforcement-learning steps."""
    num_threads: int = 1
    """CPU threads of one process; the last bits of every result depend on it."""
    task: TaskConfig = field(default_factory=TaskConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    mask: MaskConfig = field(default_factory=MaskConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    claims: ClaimThresholds = field(default_factory=ClaimThresholds)
    reproduce: ReproduceConfig = field(default_factory=ReproduceConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        """Check ranges and what sections demand of one another."""
        require(0 <= self.seed <= LARGEST_SEED, "seed", f">= 0 and at most {LARGEST_SEED}", self.seed)
        require(1 <= self.num_steps <= MOST_STEPS, "num_steps", f">= 1 and at most {MOST_STEPS}", self.num_steps)
        require(1 <= self.num_threads <= MAX_THREADS, "num_threads", f"between 1 and {MAX_THREADS}", self.num_threads)
        for key, value in (("arm", self.arm), ("name", self.name)):
            require_plain_name(key, value)
        if self.task.name == "math":
            self._require_math()
        require(self.mask.reference_arm != self.arm, "mask.reference_arm", "another arm than its own", self.arm)
        longest = self.rollout.max_prompt_tokens + max(
            self.rollout.max_response_tokens, self.evaluation.max_response_tokens
        )
        require(
            self.policy.path is not None or longest <= self.policy.max_position_embeddings,
            "policy.max_position_embeddings",
            f">= {longest}, the longest prompt and response together",
            self.policy.max_position_embeddings,
        )
        num_sequences = self.rollout.num_prompts * self.rollout.group_size
        require(
            num_sequences % self.update.num_updates_per_rollout == 0,
            "update.num_updates_per_rollout",
            f"a divisor of the {num_sequences} sequences of a step",
            self.update.num_updates_per_rollout,
        )
        size = num_sequences // self.update.num_updates_per_rollout
        require(
            size % self.trainer.num_ranks == 0,
            "trainer.devices * trainer.num_nodes",
            f"a divisor of the {size} sequences of an update",
            self.trainer.num_ranks,
        )
        require(
            self.trainer.num_ranks == 1 or self.rollout.engine != "vllm" or self.rollout.placement != "in_process",
            "rollout.placement",
            "colocated or server where trainer.devices * trainer.num_nodes > 1 and rollout.engine is vllm",
            self.rollout.placement,
        )
        require(
            not (self.mask.has_exact_max or self.mask.has_exact_avg) or self.rollout.distribution != "sampled",
            "rollout.distribution",
            "full, hidden or top_k for a mask on exact divergences (or mask.max_estimator=k2, mask.avg_estimator=k3)",
            self.rollout.distribution,
        )
        self._check_gate()
        is_settled = self.rollout.distribution != "top_k" or self.rollout.num_top_logprobs >= LEAST_TOP_FOR_AVERAGE
        require(
            not self.mask.has_exact_avg or is_settled,
            "rollout.num_top_logprobs",
            f">= {LEAST_TOP_FOR_AVERAGE} for exact TRM-Avg: with fewer the interval is wider than its threshold",
            self.rollout.num_top_logprobs,
        )

    def _require_math(self) -> None:
        """Check what training on a data set demands of the other sections."""
        path, task, sizes = self.policy.path, self.evaluation.task, self.evaluation.length_operands
        wanted = "a pretrained model where task.name is math (the warm start teaches chain arithmetic only)"
        require(path is not None, "policy.path", wanted, path)
        require(
            task != "chain_arithmetic", "evaluation.task", "a data set such as aime25 where task.name is math", task
        )
        require(not sizes, "evaluation.length_operands", "[] where task.name is math", list(sizes))

    def _check_gate(self) -> None:
        """Check that the rollouts carry what the gate needs, and that its weights meet the loss they are made for."""
        gate = self.mask.gate
        require(
            not gate.needs & {"kl", "total_variation"} or self.rollout.distribution not in ("sampled", "top_k"),
            "rollout.distribution",
            f"one that carries the whole distribution for mask.criterion {gate.name}",
            self.rollout.distribution,
        )
        require(
            not gate.is_weight or self.loss.name == "token_is",
            "loss.name",
            f"token_is for mask.criterion {gate.name}, whose weights multiply its ratios",
            self.loss.name,
        )


def load_config(files: Sequence[str | Path] = (), overrides: Sequence[str] = ()) -> RunConfig:
    """Merge the defaults, YAML files and overrides into a checked configuration.

    Args:
        files: YAML files, later ones winning.
        overrides: ``key=value`` with dotted keys, winning over the files, such as ``update.learning_rate=0.1``.

    Returns:
        The configuration.

    Raises:
        InputError: if a file cannot be read, a key is unknown, or a value has the wrong type or range.
    """
    merged = copy.deepcopy(_defaults())
    for file in files:
        merged = _merge(merged, _read_yaml(Path(file)), source=str(file))
    for override in overrides:
        key, separator, _ = override.partition("=")
        if not separator or not key:
            raise InputError(f"{override!r}: expected key=value, such as num_steps=10")
        try:
            parsed = OmegaConf.from_dotlist([override])
        except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
            raise InputError(f"{override!r}: the value is not valid YAML ({_first_line(error)})") from None
        merged = _merge(merged, parsed, source="command line")
    try:
        config = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        named = getattr(error, "full_key", "") or ""
        raise InputError(f"{named}: {_first_line(error)}" if named else _first_line(error)) from None
    assert isinstance(config, RunConfig)
    return config


def load_arm(name: str, files: Sequence[str | Path] = (), overrides: Sequence[str] = ()) -> RunConfig:
    """Load the configuration of one arm: files, then conf/arms/NAME.yaml, then overrides.

    Args:
        name: an arm's name, the stem of a file in conf/arms.
        files: YAML files merged before the arm's.
        overrides: ``key=value``, merged last.

    Returns:
        The configuration, with ``arm`` set to ``name``.

    Raises:
        InputError: if there is no such arm, or as `load_config`.
    """
    known = arm_names()
    if name not in known:
        raise InputError(f"unknown arm {name!r}{_suggestion(name, known)}; the files of conf/arms are the arms")
    return load_config([*files, CONF_DIR / "arms" / f"{name}.yaml"], overrides)


def arm_names() -> list[str]:
    """List the arms of conf/arms by name."""
    return sorted(path.stem for path in (CONF_DIR / "arms").glob("*.yaml"))


def to_yaml(config: RunConfig) -> str:
    """Write a configuration out in full, as a file that `load_config` reads back unchanged."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def config_hash(*sections: object) -> str:
    """Hash configuration sections (dataclasses or plain values) to 12 hexadecimal digits."""
    plain = [dataclasses.asdict(s) if dataclasses.is_dataclass(s) and not isinstance(s, type) else s for s in sections]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]


@functools.cache
def _defaults() -> DictConfig:
    return OmegaConf.structured(RunConfig)


def _read_yaml(path: Path) -> DictConfig:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such configuration file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{str(path)!r}: cannot be read as UTF-8 text ({error})") from None
    try:
        loaded = OmegaConf.create(text)
    except AssertionError:  # a file that holds one bare value
        loaded = None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise InputError(f"{path}: not valid YAML{line} ({error.problem or error.context})") from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: not valid YAML ({_first_line(error)})") from None
    if not isinstance(loaded, DictConfig):
        raise InputError(f"{path}: expected a mapping of keys to values, such as num_steps: 10")
    return loaded


def _merge(base: DictConfig, update: DictConfig, source: str) -> DictConfig:
    if "${" in OmegaConf.to_yaml(update):
        raise InputError(f"{source}: references ${{...}} are not supported; write the value out")
    for section in base:
        if isinstance(base[section], DictConfig) and not isinstance(update.get(section, base[section]), DictConfig):
            raise InputError(f"{source}: {section} is a section with keys of its own, got {update[section]!r}")
    items = flat_items(update)
    for key, value in items:
        if isinstance(value, str) and value == "???":
            raise InputError(f"{source}: {key}=??? is no value")
    try:
        merged = OmegaConf.unsafe_merge(base, update)  # into the base, which no other configuration shares
    except ConfigKeyError as error:
        key = str(error.full_key)
        raise InputError(f"{source}: unknown key {key!r}{_suggestion(key, _all_keys(base))}") from None
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        named = getattr(error, "full_key", "") or ", ".join(key for key, _ in items)
        raise InputError(f"{source}: {named}: {_first_line(error)}") from None
    assert isinstance(merged, DictConfig)
    for key, value in items:  # OmegaConf takes a 1 for a true
        if isinstance(OmegaConf.select(merged, key), bool) and not isinstance(value, bool):
            raise InputError(f"{source}: {key}: expected true or false, got {value!r}")
    return merged


def flat_items(config: DictConfig, prefix: str = "") -> list[tuple[str, object]]:
    """List the leaves of a configuration under dotted keys; a list is one leaf."""
    return list(_flat(OmegaConf.to_container(config, throw_on_missing=False), prefix))


def _flat(section: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _all_keys(config: DictConfig, prefix: str = "") -> list[str]:
    keys = []
    for key, value in config.items():
        keys.append(f"{prefix}{key}")
        if isinstance(value, DictConfig):
            keys.extend(_all_keys(value, prefix=f"{prefix}{key}."))
    return keys


def _suggestion(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1) or [
        key for key in known if key.rpartition(".")[2] == name.rpartition(".")[2]
    ]
    return f"; did you mean {close[0]!r}?" if close else ""


def _first_line(error: Exception) -> str:
    line = (str(error).splitlines() or [type(error).__name__])[0]
    if "$VALUE" in line:  # a message the library did not fill in
        line = "a value has the wrong type"
    return line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]}..."
