"""`trm-repro evaluate`: score a policy on held-out problems, or on a file of problems such as AIME25."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.arguments import add_config_arguments, config_from

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from evaluation.scores import ScoredResponse
    from trm_repro.config import RunConfig
    from trm_repro.tasks import Problem, Task

HELP = "score a policy on held-out problems, or on a file of problems such as AIME25"
INSTRUCTION = "\n\nReason step by step, and put the final answer within \\boxed{}."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config_arguments(parser)
    parser.add_argument("--in", dest="policy", type=Path, help="directory of a policy; default: the starting policy")
    parser.add_argument(
        "--task",
        choices=("chain_arithmetic", "aime24", "aime25"),
        default="chain_arithmetic",
        help="aime24 and aime25 need --data",
    )
    parser.add_argument("--data", type=Path, help="problems with integer answers, .jsonl or .parquet")
    parser.add_argument("--limit", type=int, help="answer only the first so many problems")
    parser.add_argument("--out", type=Path, help="folder for scores.json and answers.parquet")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from evaluation.scores import average_at_k, score_problems
    from pipelines.session import set_threads
    from pipelines.train import starting_policy
    from trm_repro.policy import check_vocabulary, context_length, load_tokenizer
    from trm_repro.rollout import SamplingSettings, start_engine
    from trm_repro.rollout.sampler import encode_prompt
    from trm_repro.shards import check_folder

    config = config_from(arguments)
    if arguments.out is not None:
        check_folder(arguments.out)
    set_threads(config.num_threads)
    task, problems = _problems(arguments, config)
    policy = arguments.policy or starting_policy(config, show_progress=True)
    tokenizer = load_tokenizer(policy)
    context = context_length(policy)
    settings = config.evaluation
    prompts = [
        encode_prompt(text, tokenizer, context, "the model's context length")
        for text in _prompt_texts(problems, arguments.task, settings, tokenizer)
    ]
    length = max(map(len, prompts)) + settings.max_response_tokens
    _check_context(length, context, settings.max_response_tokens)
    engine = start_engine(config.rollout, policy, length)
    check_vocabulary(tokenizer, engine.vocab_size, policy)
    questions = list(zip(problems, prompts, strict=True))
    sampled = score_problems(
        engine,
        tokenizer,
        task,
        questions,
        num_samples=settings.num_samples,
        settings=SamplingSettings(
            max_tokens=settings.max_response_tokens, temperature=settings.temperature, top_p=settings.top_p
        ),
        seed=config.seed,
    )
    scores: dict[str, float | int | str] = {
        "task": arguments.task,
        "policy": str(policy),
        "num_problems": len(problems),
        "k": settings.num_samples,
        "avg_at_k": average_at_k(sampled),
        "unfinished_fraction": sum(not answer.finished for answer in sampled) / len(sampled),
    }
    if arguments.task == "chain_arithmetic":
        greedy_settings = SamplingSettings(max_tokens=settings.max_response_tokens, temperature=0.0)
        greedy = score_problems(engine, tokenizer, task, questions, num_samples=1, settings=greedy_settings)
        scores["greedy"] = average_at_k(greedy)
    if arguments.out is not None:
        _write_answers(arguments.out, scores, sampled)
    sys.stdout.write(json.dumps(scores) + "\n")
    return 0


def _problems(arguments: argparse.Namespace, config: "RunConfig") -> "tuple[Task, list[Problem]]":
    from trm_repro.errors import InputError
    from trm_repro.rollout.sampler import held_out_problems
    from trm_repro.tasks import ChainArithmetic, DatasetTask, load_problems

    if arguments.limit is not None and arguments.limit < 1:
        raise InputError(f"--limit must be >= 1, got {arguments.limit}")
    if arguments.task == "chain_arithmetic":
        if arguments.data is not None:
            raise InputError("--data goes with --task aime24 or aime25; chain_arithmetic draws its own problems")
        task = ChainArithmetic(config.task.min_operands, config.task.max_operands)
        return task, held_out_problems(config)[: arguments.limit]
    if arguments.data is None:
        raise InputError(f"--task {arguments.task} needs --data FILE with its problems, .jsonl or .parquet")
    return DatasetTask(), load_problems(arguments.data)[: arguments.limit]


def _prompt_texts(
    problems: "Sequence[Problem]", task: str, settings: object, tokenizer: "PreTrainedTokenizerFast"
) -> list[str]:
    from trm_repro.config_sections import EvaluationConfig
    from trm_repro.errors import InputError

    assert isinstance(settings, EvaluationConfig)
    if task == "chain_arithmetic":
        return [problem.prompt for problem in problems]
    texts = [problem.prompt + INSTRUCTION for problem in problems]
    if settings.prompt_template == "plain":
        return texts
    if tokenizer.chat_template is None:
        raise InputError("evaluation.prompt_template=chat, but the policy's tokenizer has no chat template; use plain")
    try:
        return [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            for text in texts
        ]
    except Exception as error:  # jinja's, or whatever the template raises
        raise InputError(
            f"evaluation.prompt_template=chat, but the tokenizer's chat template fails ({str(error)[:200]}); use plain"
        ) from error


def _check_context(length: int, context: int, max_response_tokens: int) -> None:
    from trm_repro.errors import InputError

    if length > context:
        raise InputError(
            f"the longest prompt with evaluation.max_response_tokens={max_response_tokens} takes {length} tokens, the "
            f"model's limit is {context}; lower evaluation.max_response_tokens"
        )


def _write_answers(folder: Path, scores: dict[str, float | int | str], answers: "Sequence[ScoredResponse]") -> None:
    import pyarrow as pa

    from pipelines.run_directory import write_atomically
    from trm_repro.shards import write_table

    write_table(folder / "answers.parquet", pa.Table.from_pylist([dataclasses.asdict(answer) for answer in answers]))
    write_atomically(folder / "scores.json", json.dumps(scores, indent=2) + "\n")
