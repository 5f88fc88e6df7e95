"""One step's rollouts: draw problems, sample groups of responses, grade them, compare within each group."""

import random
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerFast

from trm_repro.advantages import grpo_advantages
from trm_repro.batch import Rollout
from trm_repro.config import RunConfig, derive_seed
from trm_repro.errors import FaultError, InputError
from trm_repro.rollout.completion_checks import check_completions
from trm_repro.rollout.engine import SamplingRequest, SamplingSettings
from trm_repro.rollout.math_problems import prompt_token_ids, read_math_problems
from trm_repro.rollout.probe import probe_contexts
from trm_repro.rollout.synced_engine import SyncedEngine
from trm_repro.tasks import ChainArithmetic, Problem, Response, Task


class RolloutSampler:
    """Makes the rollouts of any step of a run; the same step gives the same prompts and seeds every time."""

    def __init__(self, config: RunConfig, engine: SyncedEngine, tokenizer: PreTrainedTokenizerFast) -> None:
        """Set up the run's task and held-out problems.

        Args:
            config: the run.
            engine: holds the weights to sample from.
            tokenizer: of the policy.

        Raises:
            InputError: if a data set cannot be read, or the held-out problems are not of the kind trained on.
        """
        self.config = config
        self.engine = engine
        self.tokenizer = tokenizer
        self.math = read_math_problems(config, tokenizer) if config.task.name == "math" else None
        self.task: Task
        self.held_out_task: Task
        if self.math is not None:
            self.task, self.held_out_task, self.held_out = self.math.task, self.math.held_out_task, self.math.held_out
            return
        if config.evaluation.task != "chain_arithmetic":
            raise InputError(
                f"evaluation.task={config.evaluation.task} does not go with training on chain_arithmetic; set "
                "task.name=math"
            )
        self.chain = ChainArithmetic(config.task.min_operands, config.task.max_operands)
        self.task = self.held_out_task = self.chain
        self.held_out = held_out_problems(config)
        self._held_out_ids = frozenset(problem.id for problem in self.held_out)

    def problems(self, step: int) -> list[Problem]:
        """Draw a step's problems, none of them held out."""
        if self.math is not None:
            return self.math.task.draw(step, self.config.rollout.num_prompts)
        rng = random.Random(derive_seed(self.config.seed, "training problems", step))
        return self.chain.sample(self.config.rollout.num_prompts, rng, exclude=self._held_out_ids)

    def sample_step(self, step: int, weight_version: int) -> list[Rollout]:
        """Sample, grade and compare a step's responses.

        Args:
            step: index of the step, from 0.
            weight_version: version of the weights the engine holds.

        Returns:
            ``num_prompts * group_size`` rollouts, group by group.

        Raises:
            InputError: if a prompt is longer than ``rollout.max_prompt_tokens``.
            FaultError: if the engine returned other than what was asked for, or a reward is outside [0, 1].
        """
        settings = self.config.rollout
        problems = self.problems(step)
        prompts = [encode_prompt(problem.prompt, self.tokenizer, settings.max_prompt_tokens) for problem in problems]
        requests = [
            SamplingRequest(prompt_ids=prompt, seed=derive_seed(self.config.seed, "rollout", step, group, sample))
            for group, prompt in enumerate(prompts)
            for sample in range(settings.group_size)
        ]
        sampling = SamplingSettings(
            max_tokens=settings.max_response_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            distribution=settings.distribution,
            num_top=settings.num_top_logprobs,
        )
        completions = self.engine.sample(requests, sampling)
        check_completions(completions, requests, sampling, self.engine.vocab_size, self.engine.stop_ids)
        rollouts = []
        for index, (request, completion) in enumerate(zip(requests, completions, strict=True)):
            group = index // settings.group_size
            text = self.tokenizer.decode(completion.text_ids, skip_special_tokens=True)
            grade = self.task.grade(problems[group], Response(text=text, finished=completion.finished))
            if not 0 <= grade.reward <= 1:  # the bounds hold for rewards in [0, 1]; NaN is outside too
                raise FaultError(f"the reward of problem {problems[group].id} is {grade.reward}, not in [0, 1]")
            rollouts.append(
                Rollout(
                    group=group,
                    prompt_ids=request.prompt_ids,
                    response_ids=completion.token_ids,
                    logprobs=completion.logprobs,
                    log_distribution=completion.log_distribution,
                    hidden=completion.hidden,
                    top_ids=completion.top_ids,
                    top_logprobs=completion.top_logprobs,
                    experts=completion.experts,
                    finished=completion.finished,
                    reward=grade.reward,
                    weight_version=weight_version,
                )
            )
        return with_advantages(rollouts, self.config.loss.advantage_epsilon)


def with_advantages(rollouts: list[Rollout], epsilon: float) -> list[Rollout]:
    """Give rollouts their group-relative advantages.

    Args:
        rollouts: with rewards.
        epsilon: added to a group's deviation.

    Returns:
        The rollouts with advantages.
    """
    rewards = torch.tensor([rollout.reward for rollout in rollouts])
    groups = torch.tensor([rollout.group for rollout in rollouts])
    advantages = grpo_advantages(rewards, groups, epsilon).tolist()
    return [replace(rollout, advantage=value) for rollout, value in zip(rollouts, advantages, strict=True)]


def held_out_problems(config: RunConfig) -> list[Problem]:
    """Draw the run's held-out problems, which depend on its seed and are never trained on in it.

    Raises:
        InputError: if there are not so many different problems.
    """
    task = ChainArithmetic(config.task.min_operands, config.task.max_operands)
    count = config.evaluation.num_held_out
    num_problems = 0
    for length in range(config.task.min_operands, config.task.max_operands + 1):
        num_problems += 10**length
        if num_problems >= count:
            break
    drawn: dict[str, Problem] = {}
    if num_problems >= count:
        rng = random.Random(derive_seed(config.seed, "held-out problems"))
        for _ in range(100):
            for problem in task.sample(count, rng):
                drawn.setdefault(problem.id, problem)
            if len(drawn) >= count:
                return list(drawn.values())[:count]
    raise InputError(
        f"there are not {count} different problems of {config.task.min_operands} to {config.task.max_operands} "
        f"operands, only {max(num_problems, len(drawn))}; lower evaluation.num_problems, "
        "num_sampled_problems and num_final_problems, or raise task.max_operands"
    )


def encode_prompt(
    prompt: str, tokenizer: PreTrainedTokenizerFast, max_tokens: int, limit_name: str = "rollout.max_prompt_tokens"
) -> tuple[int, ...]:
    """Tokenize a prompt.

    Args:
        prompt: its text.
        tokenizer: of the policy.
        max_tokens: longest prompt allowed.
        limit_name: what sets that limit, for the message.

    Returns:
        At least one token id.

    Raises:
        InputError: if the prompt has no token or more than ``max_tokens``.
    """
    token_ids = prompt_token_ids(prompt, tokenizer)
    if not 0 < len(token_ids) <= max_tokens:
        raise InputError(
            f"a prompt of {len(token_ids)} tokens ({prompt[:40]!r}...); expected 1 to {max_tokens}, set by {limit_name}"
        )
    return token_ids


def chain_probe_contexts(config: RunConfig, tokenizer: PreTrainedTokenizerFast) -> list[tuple[int, ...]]:
    """Make the probe's contexts: beginnings of solved problems, the same for every run."""
    task = ChainArithmetic(config.task.min_operands, config.task.max_operands)
    problems = task.sample(config.rollout.probe_contexts, random.Random(derive_seed(0, "probe")))
    texts = [tuple(tokenizer(f"{problem.prompt}{problem.solution}").input_ids) for problem in problems]
    return probe_contexts(texts, config.rollout.probe_contexts, derive_seed(0, "probe contexts"))
