"""Training on real rows of DAPO-Math-17k with Qwen3's own tokenizer, as far as drawing prompts goes."""

import json
from dataclasses import replace

import pytest

from trm_repro.config import load_config
from trm_repro.errors import InputError
from trm_repro.rollout.math_problems import math_probe_contexts, prompt_token_ids, read_math_problems
from trm_repro.rollout.sampler import RolloutSampler, encode_prompt
from trm_repro.tasks import load_problems
from trm_repro.tasks.catalog import evaluation_source
from trm_repro.tasks.templates import render_prompts


@pytest.fixture
def config(test_data):
    return load_config(
        [],
        [
            "task.name=math",
            f"task.file={test_data / 'dapo_math_17k_dup100.parquet'}",
            "task.prompt_template=dapo_chat",
            "policy.path=elsewhere",
            "evaluation.task=aime25",
            f"evaluation.file={test_data / 'aime25.jsonl'}",
            "evaluation.prompt_template=boxed",
            "evaluation.length_operands=[]",
            "rollout.max_prompt_tokens=1024",
            "rollout.num_prompts=8",
            "rollout.group_size=2",
        ],
    )


def with_prompts(config, **changes):
    return replace(config, rollout=replace(config.rollout, **changes))


def test_prompts_are_drawn_without_repeats_until_all_have_come(config, qwen3_tokenizer):
    sampler = RolloutSampler(config, engine=None, tokenizer=qwen3_tokenizer)
    ids = [problem.id for step in range(5) for problem in sampler.problems(step)]
    assert len(set(ids)) == len(ids) == 40  # all that are left of the 42 without the two with conflicting labels
    again = RolloutSampler(config, engine=None, tokenizer=qwen3_tokenizer)
    assert [problem.id for problem in again.problems(3)] == ids[24:32]
    other = RolloutSampler(replace(config, seed=7), engine=None, tokenizer=qwen3_tokenizer)
    assert [problem.id for problem in other.problems(3)] != ids[24:32]


def test_prompts_are_rendered_by_the_template_and_held_out_problems_by_theirs(config, qwen3_tokenizer):
    sampler = RolloutSampler(config, engine=None, tokenizer=qwen3_tokenizer)
    assert all(p.prompt.startswith("<|im_start|>user\nSolve the following") for p in sampler.problems(0))
    assert len(sampler.held_out) == 30
    assert all(problem.prompt.endswith("within \\boxed{}.") for problem in sampler.held_out)
    record = sampler.math.as_record()
    assert record["first_held_out_prompt"].startswith("Find the sum of all integer bases $b>9$")
    assert record["training"].endswith("4,600 rows, 42 different questions, 2 dropped for conflicting answers, 40 kept")


def test_the_probe_reads_beginnings_of_held_out_problems_in_the_template_of_training(config, qwen3_tokenizer):
    contexts = math_probe_contexts(with_prompts(config, probe_contexts=8, max_prompt_tokens=90), qwen3_tokenizer)
    held_out, _ = load_problems(evaluation_source(config.evaluation))
    rendered = render_prompts(held_out[:8], "dapo_chat", qwen3_tokenizer, "task.prompt_template")
    assert len(contexts) == 8
    assert len({len(context) for context in contexts}) > 1
    for context, problem in zip(contexts, rendered, strict=True):
        assert 22 < len(context) < 90  # more than a quarter of what fits
        assert problem.prompt.startswith(qwen3_tokenizer.decode(context))
    other_seed = replace(with_prompts(config, probe_contexts=8, max_prompt_tokens=90), seed=9)
    assert math_probe_contexts(other_seed, qwen3_tokenizer) == contexts


def test_prompts_over_the_limit_are_dropped_and_counted(config, qwen3_tokenizer):
    read = read_math_problems(with_prompts(config, max_prompt_tokens=150), qwen3_tokenizer)
    lengths = [len(qwen3_tokenizer(problem.prompt).input_ids) for problem in read.task.problems]
    assert max(lengths) <= 150
    everything = read_math_problems(config, qwen3_tokenizer).task.problems
    num_long = sum(len(qwen3_tokenizer(problem.prompt).input_ids) > 150 for problem in everything)
    assert read.report.num_over_length == num_long > 0
    assert read.report.num_kept == len(read.task.problems) == 40 - num_long


def test_a_limit_that_no_prompt_meets_is_refused_with_the_counts(config, qwen3_tokenizer):
    with pytest.raises(
        InputError, match=r"40 dropped for prompts over the limit, 0 kept.*rollout\.max_prompt_tokens=20"
    ):
        read_math_problems(with_prompts(config, max_prompt_tokens=20), qwen3_tokenizer)


def test_a_question_that_is_evaluated_on_is_not_trained_on(config, qwen3_tokenizer, tmp_path, test_data):
    held_out = json.loads((test_data / "aime25.jsonl").read_text().splitlines()[0])
    rows = [{"problem": f" {held_out['problem']}\n", "answer": 70}, {"problem": "1+1?", "answer": 2}]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    read = read_math_problems(replace(config, task=replace(config.task, file=str(file))), qwen3_tokenizer)
    assert [problem.answer for problem in read.task.problems] == ["2"]
    assert read.report.num_held_out == 1


def test_the_two_tasks_grade_by_their_own_rules(config, qwen3_tokenizer):
    config = replace(config, task=replace(config.task, grading="verl"))
    sampler = RolloutSampler(config, engine=None, tokenizer=qwen3_tokenizer)
    assert (sampler.task.grading, sampler.held_out_task.grading) == ("verl", "strict")


def test_training_on_chain_arithmetic_does_not_evaluate_on_a_data_set(qwen3_tokenizer):
    with pytest.raises(InputError, match=r"evaluation\.task=aime25 does not go with .*task\.name=math"):
        RolloutSampler(load_config([], ["evaluation.task=aime25"]), engine=None, tokenizer=qwen3_tokenizer)


def test_a_beginning_that_a_template_wrote_is_not_written_twice(qwen3_tokenizer, monkeypatch):
    from tests.unit.builders import TOKENIZER

    assert prompt_token_ids("<bos>4+8=", TOKENIZER) == prompt_token_ids("4+8=", TOKENIZER) == (1, 8, 14, 12, 15)
    assert encode_prompt("<|im_start|>user", qwen3_tokenizer, 2) == (151644, 872)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("policy.path=null", "policy.path must be a pretrained model where task.name is math"),
        ("evaluation.task=chain_arithmetic", "evaluation.task must be a data set such as aime25"),
        ("evaluation.length_operands=[8]", r"evaluation.length_operands must be \[\]"),
        ("task.file=''", "task.file must be not empty"),
        ("evaluation.split=' '", "evaluation.split must be not empty"),
        ("evaluation.problems_per_batch=0", "evaluation.problems_per_batch must be >= 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(override, said):
    overrides = ["task.name=math", "policy.path=x", "evaluation.task=aime25", "evaluation.length_operands=[]"]
    load_config([], overrides)
    with pytest.raises(InputError, match=said):
        load_config([], [*overrides, override])
