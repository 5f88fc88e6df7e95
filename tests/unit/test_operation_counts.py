"""What a step costs, counted: passes, tokens, matrix products, tables of logits, writes to disk and to MLflow.

Seconds depend on the machine; these do not, and a change that makes a step dearer fails here.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.stored_step import StoredStep, draw_rollouts
from pipelines.run_directory import RunDirectory
from pipelines.session import open_session
from pipelines.tracking.replay import MAX_BATCH, batches, send
from pipelines.tracking.traces import send_traces
from pipelines.training import train_run
from tests.tracked import train_entry
from trm_repro.config import RunConfig, load_arm
from trm_repro.module import TRMModule
from trm_repro.policy import save_policy
from trm_repro.steps import ReferenceUpdate

HIDDEN, INNER, LAYERS, HEADS, KEY_VALUE_HEADS, HEAD_DIM, VOCABULARY = 32, 48, 2, 2, 1, 16, 97
NUM_UPDATES, SEQUENCES, PROMPT, RESPONSE = 2, 8, 3, 5
LENGTH = PROMPT + RESPONSE
OF_UPDATE = SEQUENCES // NUM_UPDATES

POLICY = (
    "policy.architecture=dense",
    f"policy.hidden_size={HIDDEN}",
    f"policy.intermediate_size={INNER}",
    f"policy.num_layers={LAYERS}",
    f"policy.num_attention_heads={HEADS}",
    f"policy.num_key_value_heads={KEY_VALUE_HEADS}",
    f"policy.head_dim={HEAD_DIM}",
    f"policy.vocab_size={VOCABULARY}",
)

SHORT_RUN = (
    "rollout.engine=transformers",
    "rollout.staleness_steps=0",
    "rollout.max_response_tokens=4",
    "rollout.probe_contexts=2",
    "task.min_operands=2",
    "task.max_operands=3",
    "evaluation.num_problems=2",
    "evaluation.num_sampled_problems=1",
    "evaluation.num_samples=1",
    "evaluation.num_final_problems=0",
    "evaluation.max_response_tokens=4",
    "output.checkpoint_every_steps=1",
)


def step_config(*settings: str, criterion: str = "random") -> RunConfig:
    return load_arm(
        "token_is",
        overrides=[
            *POLICY,
            f"mask.criterion={criterion}",
            "mask.reference_arm=trm_avg_0.001",
            "rollout.num_prompts=4",
            "rollout.group_size=2",
            f"update.num_updates_per_rollout={NUM_UPDATES}",
            "num_steps=1",
            *settings,
        ],
    )


def run_step(config: RunConfig, num_kept: int, watch: Callable[[StoredStep], object] = lambda _: None) -> TRMModule:
    """Train one step on eight sequences of one length, keeping so many of each update's four."""
    step = StoredStep(config)
    rollouts = draw_rollouts([(PROMPT, RESPONSE)] * SEQUENCES, 2, VOCABULARY, with_distribution=True)
    watch(step)
    _, module = step.run(rollouts, {0: [ReferenceUpdate(num_kept=num_kept)] * NUM_UPDATES})
    return module


def passes_of(config: RunConfig, num_kept: int) -> tuple[int, int]:
    """Count passes through the decoder and the tokens in them, padding included."""
    shapes: list[tuple[int, ...]] = []

    def watch(step: StoredStep) -> None:
        step.policy.model.model.register_forward_pre_hook(
            lambda _, __, inputs: shapes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
        )

    run_step(config, num_kept, watch)
    return len(shapes), sum(rows * columns for rows, columns in shapes)


@pytest.mark.parametrize("num_kept", [4, 3, 1, 0])
def test_the_mask_passes_over_every_token_once_and_the_update_over_every_kept_one(num_kept: int):
    num_passes, num_tokens = passes_of(step_config(), num_kept)
    assert num_passes == NUM_UPDATES * (1 + (num_kept > 0))
    assert num_tokens == NUM_UPDATES * (OF_UPDATE + num_kept) * LENGTH


def test_kept_sequences_move_together_so_that_rejected_ones_cost_no_micro_batch():
    two_sequences = f"update.tokens_per_micro_batch={2 * LENGTH}"
    assert passes_of(step_config(two_sequences), 4)[0] == NUM_UPDATES * (2 + 2)
    assert passes_of(step_config(two_sequences), 2)[0] == NUM_UPDATES * (2 + 1)


def test_packing_passes_over_no_more_tokens():
    assert passes_of(step_config("trainer.packing=true"), 3) == (4, NUM_UPDATES * (OF_UPDATE + 3) * LENGTH)


def flops_of_products(config: RunConfig, num_kept: int) -> int:
    with FlopCounterMode(display=False) as counter:
        run_step(config, num_kept)
    found = counter.get_flop_counts()["Global"]
    return sum(found.get(operator, 0) for operator in (torch.ops.aten.mm, torch.ops.aten.addmm))


# Multiply-adds of a token: queries, keys and values, output, and the three matrices of the feed-forward block.
ATTENTION = HIDDEN * HEAD_DIM * (HEADS + 2 * KEY_VALUE_HEADS) + HEADS * HEAD_DIM * HIDDEN
FLOPS_OF_BODY = 2 * LENGTH * LAYERS * (ATTENTION + 3 * HIDDEN * INNER)
FLOPS_OF_HEAD = 2 * RESPONSE * HIDDEN * VOCABULARY
"""Of a sequence, forward."""


@pytest.mark.parametrize("num_kept", [4, 2])
def test_a_steps_matrix_products_are_one_forward_for_the_mask_and_three_for_the_kept(num_kept: int):
    # Backward costs two products for each of forward; the update's logits are the forward product of the head.
    expected = NUM_UPDATES * (OF_UPDATE + 3 * num_kept) * (FLOPS_OF_BODY + FLOPS_OF_HEAD)
    assert flops_of_products(step_config(), num_kept) == expected


def test_in_one_pass_the_mask_has_no_product_of_its_own_but_its_logits():
    config = step_config("mask.reference_arm=null", criterion="none")
    assert passes_of(config, 4) == (NUM_UPDATES, SEQUENCES * LENGTH)
    assert flops_of_products(config, 4) == SEQUENCES * (3 * FLOPS_OF_BODY + 4 * FLOPS_OF_HEAD)


class LogitsProducts(TorchDispatchMode):
    """Counts matrix products that give logits of the whole vocabulary."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_product = func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        self.count += is_product and result.shape[-1] == VOCABULARY
        return result


def test_logits_are_computed_once_for_the_mask_and_once_for_the_update():
    with LogitsProducts() as products:
        run_step(step_config(), num_kept=4)
    assert products.count == 2 * NUM_UPDATES


@contextmanager
def counted_fsyncs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    found: list[str] = []
    fsync = os.fsync

    def count(descriptor: int) -> None:
        found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", count)
        yield found


class Calls:
    """Stands for a client of MLflow: notes what is called, and answers nothing."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: self.names.append(name)


def test_mlflow_gets_one_request_for_a_steps_metrics_and_two_for_its_trace():
    metrics, traces = Calls(), Calls()
    entry = train_entry(1, num_metrics=70)
    for _, points in batches([entry]):
        send(metrics, "run", points)
    send_traces(traces, [entry], experiment_id="0", run_id="run", tags={})
    assert metrics.names == ["log_batch"]
    assert traces.names == ["start_trace", "log_spans"]


def test_steps_that_waited_share_requests():
    metrics, traces = Calls(), Calls()
    entries = [train_entry(step, num_metrics=70) for step in range(1, 29)]  # 14 steps fill a request
    for _, points in batches(entries):
        send(metrics, "run", points)
    send_traces(traces, entries, experiment_id="0", run_id="run", tags={})
    assert MAX_BATCH // 70 == 14
    assert metrics.names == ["log_batch"] * 2
    assert traces.names == ["start_trace"] * 28 + ["log_spans"]


def test_a_steps_record_is_forced_to_disk_once_and_its_checkpoint_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    num_steps = 3
    config = step_config(
        *SHORT_RUN, f"num_steps={num_steps}", f"output.dir={tmp_path}", f"policy.path={tmp_path / 'start'}"
    )
    config = dataclasses.replace(config, mask=load_arm("token_is").mask)
    step = StoredStep(step_config())
    save_policy(step.policy, step.tokenizer, tmp_path / "start")
    directory = RunDirectory(config)
    directory.prepare()
    session = open_session(config, tmp_path / "start")
    with counted_fsyncs(monkeypatch) as files:
        train_run(config, session, tmp_path / "start")
    names = [Path(name).name for name in files]
    assert names.count("metrics.jsonl") == num_steps + 2  # every step, and the evaluations before and after
    assert len(names) - names.count("metrics.jsonl") == 2 * num_steps, names  # a checkpoint and its folder
