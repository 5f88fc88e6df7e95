"""The miniature's starting policy: supervised training on chain arithmetic, stopped at a pass rate.

The same number of steps gives very different policies from different seeds, so training stops when the chance
of writing the exact solution reaches a target. The result is cached in a directory named by what it depends on.
"""

import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from trm_repro import __version__
from trm_repro.batch import Rollout, RolloutBatch
from trm_repro.config import RunConfig, config_hash, derive_seed
from trm_repro.errors import FaultError
from trm_repro.file_locks import file_lock
from trm_repro.policy import Policy, build_policy, build_tokenizer, save_policy
from trm_repro.tasks.chain_arithmetic import ALPHABET, ChainArithmetic
from trm_repro.tasks.problems import Problem

LEARNING_RATE_WARMUP_STEPS = 50
REPORT = "warm_start.json"


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """A starting policy on disk.

    Attributes:
        pass_rate: chance of writing the exact solution at temperature 1, on problems not trained on.
        num_steps: supervised steps taken.
        seconds: wall-clock time it took.
    """

    pass_rate: float
    num_steps: int
    seconds: float


def warm_start_path(config: RunConfig) -> Path:
    """Name the directory of a starting policy by what it depends on."""
    digest = config_hash(__version__, config.task, config.policy, config.warm_start, config.seed, config.num_threads)
    return Path(config.output.warm_start_dir) / digest


def ensure_warm_start(config: RunConfig, progress: Callable[[int, float], None] | None = None) -> Path:
    """Return the starting policy's directory, training it first where it is not there.

    Args:
        config: the run.
        progress: called with the step and the pass rate measured at it.

    Returns:
        A directory with weights, configuration, tokenizer and ``warm_start.json``.

    Raises:
        FaultError: if the target pass rate is not reached within ``warm_start.max_steps``.
    """
    path = warm_start_path(config)
    if (path / REPORT).is_file():
        return path
    with file_lock(path.with_name(f"{path.name}.lock")):
        if (path / REPORT).is_file():  # another process made it while this one waited
            return path
        policy, tokenizer, result = train_warm_start(config, progress)
        partial = path.with_name(f"{path.name}.partial")
        for leftover in (partial, path):  # of a process that was killed here
            shutil.rmtree(leftover, ignore_errors=True)
        save_policy(policy, tokenizer, partial)
        (partial / REPORT).write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
        os.replace(partial, path)
    return path


def train_warm_start(
    config: RunConfig, progress: Callable[[int, float], None] | None = None
) -> tuple[Policy, PreTrainedTokenizerFast, WarmStart]:
    """Train a policy on written-out solutions until it passes often enough.

    Args:
        config: the run.
        progress: called with the step and the pass rate measured at it.

    Returns:
        The policy, its tokenizer, and how it went.

    Raises:
        FaultError: if the target pass rate is not reached within ``warm_start.max_steps``.
    """
    settings = config.warm_start
    began = time.perf_counter()
    tokenizer = build_tokenizer(ALPHABET)
    policy = build_policy(config.policy, tokenizer, derive_seed(config.seed, "initial weights"))
    rng = random.Random(derive_seed(config.seed, "warm start"))
    check_rng = random.Random(derive_seed(config.seed, "warm start check"))
    check_task = ChainArithmetic(config.task.min_operands, config.task.max_operands)
    check = solution_batch(check_task.sample(settings.num_problems, check_rng), tokenizer)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, settings.cosine_steps)
    )
    pass_rate = 0.0
    for step in range(settings.max_steps):
        batch = solution_batch(_curriculum_problems(config, step, rng), tokenizer)
        loss = -policy(batch).logprobs.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % settings.check_every == 0:
            pass_rate = exact_solution_rate(policy, check, config.update.tokens_per_micro_batch)
            if progress is not None:
                progress(step + 1, pass_rate)
            if pass_rate >= settings.target_pass_rate:
                seconds = time.perf_counter() - began
                return policy, tokenizer, WarmStart(pass_rate=pass_rate, num_steps=step + 1, seconds=seconds)
    raise FaultError(
        f"the warm start reached a pass rate of {pass_rate:.2f} in {settings.max_steps} steps, not "
        f"{settings.target_pass_rate:g}; raise warm_start.max_steps, lower warm_start.target_pass_rate, or take fewer "
        "operands (task.max_operands)"
    )


@torch.no_grad()
def exact_solution_rate(policy: Policy, solutions: RolloutBatch, tokens_per_micro_batch: int) -> float:
    """Compute the mean chance that sampling at temperature 1 writes exactly the given solutions.

    Args:
        policy: the policy.
        solutions: problems with their solutions as responses.
        tokens_per_micro_batch: padded tokens in one forward pass.

    Returns:
        A number in [0, 1]; a lower bound of the pass rate, close to it where a response seldom recovers from a slip.
    """
    rates = []
    for micro_batch in solutions.split(tokens_per_micro_batch):
        logprobs = micro_batch.dense(policy(micro_batch).logprobs)  # [B, T]
        rates.append(logprobs.sum(dim=-1).exp())  # [B]
    return float(torch.cat(rates).mean())


def solution_batch(problems: list[Problem], tokenizer: PreTrainedTokenizerFast) -> RolloutBatch:
    """Make a batch of the problems' own solutions, each ended by the end-of-sequence token."""
    rollouts = []
    for group, problem in enumerate(problems):
        assert problem.solution is not None
        prompt = tuple(tokenizer(problem.prompt).input_ids)
        response = (*tokenizer(problem.solution, add_special_tokens=False).input_ids, tokenizer.eos_token_id)
        logprobs = torch.zeros(len(response))
        rollouts.append(Rollout(group=group, prompt_ids=prompt, response_ids=response, logprobs=logprobs))
    return RolloutBatch.from_rollouts(rollouts)


def learning_rate_factor(step: int, cosine_steps: int) -> float:
    """Return the factor on the peak rate: linear warm-up, then a cosine to a tenth, where it stays."""
    warmup = min(1.0, (step + 1) / LEARNING_RATE_WARMUP_STEPS)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / cosine_steps)))
    return warmup * (0.1 + 0.9 * cosine)


def _curriculum_problems(config: RunConfig, step: int, rng: random.Random) -> list[Problem]:
    """Draw problems of one length; the longest length grows until half of ``cosine_steps``."""
    settings = config.warm_start
    progress = min(1.0, 2.0 * step / settings.cosine_steps)
    longest = settings.min_operands + int(progress * (settings.max_operands - settings.min_operands))
    length = rng.randint(settings.min_operands, longest)
    num_problems = max(16, settings.tokens_per_step // (6 * length))
    return ChainArithmetic(length, length).sample(num_problems, rng)
