"""`trm-repro evaluate`: score a policy on held-out problems, or on a data set such as AIME25.

Every answer is saved when its problem is done: after an interruption the same command goes on from there, and
``--regrade`` grades the saved answers again without sampling.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from pipelines.arguments import add_config_arguments, config_from
from pipelines.progress import progress_bar
from trm_repro.config_sections import EvaluationTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from evaluation.generations import Generation, Question
    from pipelines.evaluation_folder import EvaluationFolder
    from trm_repro.config import RunConfig
    from trm_repro.config_sections import EvaluationConfig
    from trm_repro.tasks import DatasetReport, Problem, Task

HELP = "score a policy on held-out problems or on a data set such as AIME25; goes on where it was"
MANY_CUT_OFF = 0.5  # share of answers above which the length limit decides the score
MAX_ROWS_SHOWN = 60


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config_arguments(parser)
    parser.add_argument("--in", dest="policy", type=Path, help="directory of a policy; default: the starting policy")
    parser.add_argument("--task", choices=get_args(EvaluationTask), help="problems to answer; default: evaluation.task")
    parser.add_argument(
        "--data", type=Path, help="problems with integer answers, .jsonl or .parquet, in the place of the hub's"
    )
    parser.add_argument("--limit", type=int, help="answer only the first so many problems")
    parser.add_argument(
        "--out", type=Path, help="folder for answers and scores; default: one in output.dir/evaluations"
    )
    parser.add_argument(
        "--regrade",
        type=Path,
        metavar="DIR",
        help="grade the answers saved in DIR again, by evaluation.grading; samples nothing",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from pipelines.evaluation_folder import EvaluationFolder, policy_fingerprint
    from pipelines.session import set_threads
    from pipelines.training import starting_policy
    from trm_repro.config import config_hash
    from trm_repro.policy import load_tokenizer

    config = config_from(arguments)
    if arguments.regrade is not None:
        return regrade(arguments, config)
    _check_arguments(arguments)
    if arguments.task is not None:
        config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, task=arguments.task))
    set_threads(config.num_threads)
    problems, report = _problems(arguments, config)
    policy = arguments.policy or starting_policy(config, show_progress=True)
    tokenizer = load_tokenizer(policy)
    problems = _render(problems, config.evaluation, tokenizer)
    questions = _encode(problems, config.evaluation, tokenizer, policy)
    settings = answer_settings(config, policy_fingerprint(policy))
    about = {"policy": str(policy), "data": None if report is None else str(report), "prompt": problems[0].prompt}
    default = Path(config.output.dir) / "evaluations" / f"{config.evaluation.task}_{config_hash(settings)}"
    folder = EvaluationFolder(arguments.out or default)
    with folder.locked():
        folder.prepare(settings, about)
        if report is not None:
            template = f"evaluation.prompt_template={config.evaluation.prompt_template}"
            sys.stderr.write(f"{report}\nfirst prompt, {template}:\n{problems[0].prompt}\n")
        _finish(folder, config, *_answer(folder, config, policy, tokenizer, questions))
    return 0


def regrade(arguments: argparse.Namespace, config: "RunConfig") -> int:
    """Grade saved answers again.

    Args:
        arguments: with ``regrade`` and, if the grades belong elsewhere, ``out``.
        config: gives evaluation.grading.

    Returns:
        0.

    Raises:
        InputError: if the folder holds no answers, or fewer to one problem than to another.
    """
    from pipelines.evaluation_folder import NOT_A_FOLDER, EvaluationFolder
    from trm_repro.errors import InputError
    from trm_repro.tasks.catalog import DATASETS

    given = ("policy", "task", "data", "limit")
    if unwanted := [name for name in given if getattr(arguments, name) is not None]:
        raise InputError(f"--regrade samples nothing, so it takes no --{unwanted[0].replace('policy', 'in')}")
    folder = EvaluationFolder(arguments.regrade)
    settings = folder.read_settings()
    task = settings.get("task")
    if task not in (*DATASETS, "chain_arithmetic"):
        raise InputError(f"{folder.settings_file}: has no task of ours; {NOT_A_FOLDER}")
    generations = folder.all_answers(folder.generations)
    if not generations:
        raise InputError(f"{folder.path}: has no finished problem to grade")
    config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, task=task))
    _finish(folder, config, generations, folder.all_answers(folder.greedy), arguments.out)
    return 0


def answer_settings(config: "RunConfig", policy: str) -> dict[str, object]:
    """Collect what the answers depend on beside the question itself, which is kept with them.

    The number of problems, their order, where they were read and how answers are graded are not among it.

    Args:
        config: the run.
        policy: fingerprint of the policy.

    Returns:
        Plain values under the configuration's own names.
    """
    evaluation, rollout = config.evaluation, config.rollout
    sampled = ("task", "prompt_template", "num_samples", "temperature", "top_p", "max_response_tokens")
    settings: dict[str, object] = {"policy": policy, "seed": config.seed}
    settings |= {name: getattr(evaluation, name) for name in sampled}
    settings |= {"engine": rollout.engine, "precision": rollout.precision}
    if evaluation.task == "chain_arithmetic":
        settings |= {"min_operands": config.task.min_operands, "max_operands": config.task.max_operands}
    return settings


def _check_arguments(arguments: argparse.Namespace) -> None:
    from trm_repro.errors import InputError
    from trm_repro.parquet_files import check_folder

    if arguments.limit is not None and arguments.limit < 1:
        raise InputError(f"--limit must be >= 1, got {arguments.limit}")
    if arguments.out is not None:
        check_folder(arguments.out)


def _task(config: "RunConfig") -> "Task":
    from trm_repro.tasks import ChainArithmetic, DatasetTask

    if config.evaluation.task == "chain_arithmetic":
        return ChainArithmetic(config.task.min_operands, config.task.max_operands)
    return DatasetTask(config.evaluation.grading)


def _problems(arguments: argparse.Namespace, config: "RunConfig") -> "tuple[list[Problem], DatasetReport | None]":
    from trm_repro.errors import InputError
    from trm_repro.rollout.sampler import held_out_problems
    from trm_repro.tasks import load_problems
    from trm_repro.tasks.catalog import evaluation_source

    if config.evaluation.task == "chain_arithmetic":
        if arguments.data is not None:
            raise InputError("--data goes with --task aime24, aime25 or dapo; chain_arithmetic draws its own problems")
        return held_out_problems(config)[: arguments.limit], None
    problems, report = load_problems(evaluation_source(config.evaluation, arguments.data), show_progress=True)
    return problems[: arguments.limit], report


def _render(
    problems: "list[Problem]", settings: "EvaluationConfig", tokenizer: "PreTrainedTokenizerFast"
) -> "list[Problem]":
    from trm_repro.tasks.templates import render_prompts

    if settings.task == "chain_arithmetic":
        return problems
    return render_prompts(problems, settings.prompt_template, tokenizer, "evaluation.prompt_template")


def _encode(
    problems: "Sequence[Problem]", settings: "EvaluationConfig", tokenizer: "PreTrainedTokenizerFast", policy: Path
) -> "list[Question]":
    """Tokenize the prompts and check that each leaves room for an answer."""
    from trm_repro.errors import InputError
    from trm_repro.policy import context_length
    from trm_repro.rollout.sampler import encode_prompt

    context = context_length(policy)
    questions = [
        (problem, encode_prompt(problem.prompt, tokenizer, context, "the model's context length"))
        for problem in problems
    ]
    length = max(len(prompt) for _, prompt in questions) + settings.max_response_tokens
    if length > context:
        raise InputError(
            f"the longest prompt with evaluation.max_response_tokens={settings.max_response_tokens} takes {length} "
            f"tokens, the model's limit is {context}; lower evaluation.max_response_tokens"
        )
    return questions


def _answer(
    folder: "EvaluationFolder",
    config: "RunConfig",
    policy: Path,
    tokenizer: "PreTrainedTokenizerFast",
    questions: "list[Question]",
) -> "tuple[list[Generation], list[Generation]]":
    """Sample what the folder does not hold yet; returns all sampled answers and, of chain arithmetic, greedy ones."""
    from evaluation.generations import sample_answers, write_generations
    from trm_repro.policy import check_vocabulary
    from trm_repro.rollout import SamplingSettings, start_engine

    evaluation = config.evaluation
    is_chain = evaluation.task == "chain_arithmetic"
    batch_size = evaluation.problems_per_batch or (len(questions) if is_chain else 1)
    sampling = SamplingSettings(
        max_tokens=evaluation.max_response_tokens, temperature=evaluation.temperature, top_p=evaluation.top_p
    )
    passes = [(folder.generations, sampling, evaluation.num_samples)]
    if is_chain:
        passes.append((folder.greedy, dataclasses.replace(sampling, temperature=0.0, top_p=1.0), 1))
    engine = None
    answers = []
    for place, settings, num_samples in passes:
        missing = [one for one in questions if folder.answers_to(place, one[0], num_samples) is None]
        if missing and engine is None:  # where nothing is missing no engine is needed
            length = max(len(prompt) for _, prompt in questions) + evaluation.max_response_tokens
            engine = start_engine(config.rollout, policy, length)
            check_vocabulary(tokenizer, engine.vocab_size, policy)
        num_done = len(questions) - len(missing)
        with progress_bar(place.name, len(questions), "problem", initial=num_done) as bar:
            for first in range(0, len(missing), batch_size):
                assert engine is not None
                batch = missing[first : first + batch_size]
                write_generations(
                    place,
                    sample_answers(
                        engine, tokenizer, batch, num_samples=num_samples, settings=settings, seed=config.seed
                    ),
                )
                bar.update(len(batch))
        found = [folder.answers_to(place, problem, num_samples) for problem, _ in questions]
        answers.append([answer for group in found if group is not None for answer in group])
    return answers[0], answers[1] if is_chain else []


def _finish(
    folder: "EvaluationFolder",
    config: "RunConfig",
    generations: "Sequence[Generation]",
    greedy: "Sequence[Generation]",
    out: Path | None = None,
) -> None:
    """Grade, sum up, write everything to files and the scores to standard output."""
    from evaluation.scores import average_at_k, grade_answers
    from evaluation.summary import headline, problem_table, summarize
    from trm_repro.errors import InputError

    task = _task(config)
    scored = grade_answers(task, generations)
    try:
        summary = summarize(scored)
    except ValueError as error:
        raise InputError(f"{folder.path}: {error}") from None
    settings = folder.read_settings()
    about = settings.pop("about", {})
    if not isinstance(about, dict):
        raise InputError(f"{folder.settings_file}: about is no mapping; the file is damaged")
    scores: dict[str, object] = {
        "task": config.evaluation.task,
        "policy": about.get("policy"),
        "data": about.get("data"),
        "grading": config.evaluation.grading,
        "settings": settings,
        **summary.as_dict(),
    }
    said = [headline(summary)]
    if greedy:
        score = scores["greedy"] = average_at_k(grade_answers(task, greedy))
        said.append(f"{'greedy':<12}{score:.3f}")
    if summary.truncated_fraction.mean > MANY_CUT_OFF:
        sys.stderr.write(
            f"trm-repro: {summary.truncated_fraction.mean:.0%} of the answers were cut off and so count as wrong; "
            f"raise evaluation.max_response_tokens, now {config.evaluation.max_response_tokens}\n"
        )
    file = folder.write_scores(scores, scored, config.evaluation.grading, out or folder.path)
    if config.evaluation.task != "chain_arithmetic":
        sys.stderr.write(f"{problem_table(summary.problems[:MAX_ROWS_SHOWN])}\n")
    sys.stdout.write("\n".join([*said, f"scores: {file}", ""]))
