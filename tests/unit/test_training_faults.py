"""Faults injected into real training on a CPU, with transformers as the engine: what stops, what is kept, what is said.

The policy has a few thousand random weights; a response is graded by its characters, so that groups learn something.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipelines.run_directory import RunDirectory
from pipelines.session import Session, open_session
from pipelines.spool import SpoolEntry, read_spool
from pipelines.training import train_run
from tests.unit.builders import TOKENIZER, tiny_policy
from trm_repro import module as module_file
from trm_repro.config import RunConfig, derive_seed, load_arm
from trm_repro.errors import FaultError
from trm_repro.module import TRMModule
from trm_repro.policy import save_policy
from trm_repro.randomness import seed_record
from trm_repro.tasks import ChainArithmetic
from trm_repro.tasks.problems import Grade

SETTINGS = (
    "rollout.engine=transformers",
    "rollout.precision=float32",
    "rollout.num_prompts=4",
    "rollout.group_size=4",
    "rollout.max_response_tokens=6",
    "rollout.staleness_steps=0",
    "rollout.probe_contexts=4",
    "update.num_updates_per_rollout=1",
    "evaluation.num_problems=1",
    "evaluation.num_sampled_problems=1",
    "evaluation.num_samples=1",
    "evaluation.num_final_problems=0",
    "evaluation.max_response_tokens=2",
    "evaluation.every_steps=100",
    "task.min_operands=2",
    "task.max_operands=3",
    "num_steps=3",
    "health.max_nonfinite_steps=2",
    "health.patience=2",
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    save_policy(tiny_policy(), TOKENIZER, path)
    return path


@pytest.fixture
def config(tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    grades_by_characters(monkeypatch)
    return load_arm("trm_avg_0.001", overrides=[*SETTINGS, f"policy.path={model_path}", f"output.dir={tmp_path}"])


def grades_by_characters(monkeypatch: pytest.MonkeyPatch, scale: float = 1.0) -> None:
    def grade(task, problem, response):
        return Grade(reward=scale * (sum(map(ord, response.text)) % 2), answer=None, reason="by its characters")

    monkeypatch.setattr(ChainArithmetic, "grade", grade)


def with_keys(config: RunConfig, section: str, **values: object) -> RunConfig:
    return replace(config, **{section: replace(getattr(config, section), **values)})


def train(config: RunConfig, change: Callable[[Session], None] | None = None) -> list[SpoolEntry]:
    """Train a run to its end; returns the entries of its steps."""
    directory = RunDirectory(config)
    directory.prepare()
    session = open_session(config, Path(config.policy.path))
    if change is not None:
        change(session)
    train_run(config, session, Path(config.policy.path))
    return steps(config)


def steps(config: RunConfig) -> list[SpoolEntry]:
    spool = RunDirectory(config).spool_file
    return [entry for entry in read_spool(spool) if entry.kind == "train"] if spool.is_file() else []


def at_each_step(monkeypatch: pytest.MonkeyPatch, act: Callable[[TRMModule, int], None]) -> None:
    """Do something to the module when a step's rollouts are there and training on them begins."""
    begin = TRMModule.on_train_epoch_start

    def begin_and_act(module: TRMModule) -> None:
        begin(module)
        act(module, module.current_epoch)

    monkeypatch.setattr(TRMModule, "on_train_epoch_start", begin_and_act)


def spoil_logits(module: TRMModule) -> None:
    module.policy.model.model.norm.register_forward_hook(lambda norm, inputs, output: output * float("nan"))


def spoil_one_logit(module: TRMModule) -> None:
    """Make the logits of one sequence infinite where they are measured; the others go on."""

    def spoil(norm, inputs, output):
        if torch.is_grad_enabled():
            return output
        output = output.clone()
        output[0] = float("inf")
        return output

    module.policy.model.model.norm.register_forward_hook(spoil)


def spoil_loss(module: TRMModule) -> None:
    loss = module_file.surrogate_loss
    module_file.surrogate_loss = lambda *args, **settings: loss(*args, **settings) + float("inf")


def spoil_gradient(module: TRMModule) -> None:
    next(module.policy.parameters()).register_hook(lambda gradient: gradient * float("nan"))


def test_without_a_fault_every_step_learns_and_nothing_is_set_aside(config: RunConfig):
    trained = train(config)
    assert [entry.metrics["train/num_skipped_updates"] for entry in trained] == [0, 0, 0]
    assert not RunDirectory(config).faults.exists()


@pytest.mark.parametrize(
    ("spoil", "is_skipped"),
    [(spoil_logits, True), (spoil_one_logit, False), (spoil_loss, True), (spoil_gradient, True)],
)
def test_numbers_that_are_not_finite_are_saved_skipped_and_stop_the_run(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[TRMModule], None], is_skipped: bool
):
    monkeypatch.setattr(module_file, "surrogate_loss", module_file.surrogate_loss)  # given back afterwards
    weights = {}

    def act(module: TRMModule, step: int) -> None:
        weights[step] = [weight.detach().clone() for weight in module.policy.parameters()]
        if step == 1:
            spoil(module)

    at_each_step(monkeypatch, act)
    config = replace(config, num_steps=9)
    faults = RunDirectory(config).faults
    told = f"not finite in each of the last 2 steps; the batches are in {faults}"
    with pytest.raises(FaultError, match=told):
        train(config)
    assert [entry.metrics["train/num_nonfinite_updates"] for entry in steps(config)] == [0, 1, 1]
    assert [path.name for path in sorted(faults.iterdir())] == [
        "step_00001_update_0.safetensors",
        "step_00002_update_0.safetensors",
    ]
    saved = load_file(faults / "step_00001_update_0.safetensors")
    assert saved["sequence_mask"].shape == (16,)
    assert {"input_ids", "rollout_logprobs", "policy_logprobs", "rewards", "advantages"} <= set(saved)
    stays = [torch.equal(a, b) for a, b in zip(weights[1], weights[2], strict=True)]
    assert all(stays) == is_skipped
    assert all(bool(weight.isfinite().all()) for weight in weights[2])
    if spoil is spoil_logits:
        with pytest.raises(FaultError, match=told):
            train(config)  # the same command stops at once
        assert len(steps(config)) == 3


def test_one_bad_step_does_not_stop_a_run(config: RunConfig, monkeypatch: pytest.MonkeyPatch):
    hooks = []

    def act(module: TRMModule, step: int) -> None:
        if step == 1:
            weight = next(module.policy.parameters())
            hooks.append(weight.register_hook(lambda gradient: gradient * float("inf")))
        elif hooks:
            hooks.pop().remove()

    at_each_step(monkeypatch, act)
    trained = train(config)
    assert [entry.metrics["train/num_nonfinite_updates"] for entry in trained] == [0, 1, 0]
    assert [entry.metrics["train/num_skipped_updates"] for entry in trained] == [0, 1, 0]


def test_a_step_that_writes_infinite_weights_stops_the_run_at_once_and_leaves_its_batch(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
):
    def act(module: TRMModule, step: int) -> None:
        def overflow(optimizer, args, kwargs):
            optimizer.param_groups[0]["params"][0].data[0, 0] = float("inf")

        module.optimizers().optimizer.register_step_post_hook(overflow)

    at_each_step(monkeypatch, act)
    with pytest.raises(FaultError, match=r"weights are not finite after update 0 of step 0 \(its batch is in") as stop:
        train(config)
    path = RunDirectory(config).faults / "step_00000_update_0.safetensors"
    assert f"(its batch is in {path})" in str(stop.value)
    assert load_file(path)["rewards"].shape == (16,)
    assert steps(config) == []


def shift_logprobs(session: Session) -> None:
    """An engine whose log-probs are a nat off: every sequence looks far from the policy."""
    sample = session.engine.engine.sample

    def shifted(requests, settings):
        completions = sample(requests, settings)
        if settings.distribution == "full":  # the probe's
            return completions
        return [replace(completion, logprobs=completion.logprobs - 1.0) for completion in completions]

    session.engine.engine.sample = shifted


def test_acceptance_below_the_floor_stops_the_run(config: RunConfig):
    config = with_keys(with_keys(config, "health", acceptance_floor=0.5), "rollout", distribution="sampled")
    config = with_keys(config, "mask", avg_estimator="k3", max_estimator="k2")
    with pytest.raises(FaultError, match=r"less than 0.5 of the sequences was kept in each of the last 2 steps"):
        train(config, shift_logprobs)
    assert [entry.metrics["mask/kept_sequence_fraction"] for entry in steps(config)] == [0, 0]


def test_groups_without_variance_stop_the_run_where_asked_to(config: RunConfig, monkeypatch: pytest.MonkeyPatch):
    grades_by_characters(monkeypatch, scale=0.0)
    config = with_keys(config, "health", stop_without_variance=True)
    with pytest.raises(FaultError, match="no group had differing rewards in the last 2 steps"):
        train(config)
    assert len(steps(config)) == 2


def test_a_collapsed_policy_stops_the_run_where_asked_to(config: RunConfig, tmp_path: Path):
    policy = tiny_policy()
    with torch.no_grad():
        policy.model.model.norm.weight *= 300.0  # logits of hundreds: every next token is certain
    save_policy(policy, TOKENIZER, tmp_path / "certain")
    config = with_keys(with_keys(config, "policy", path=str(tmp_path / "certain")), "health", entropy_floor=0.05)
    with pytest.raises(FaultError, match=r"entropy was below 0.05 nats in each of the last 2 steps; it has collapsed"):
        train(config)
    assert len(steps(config)) == 2


def test_a_reward_outside_its_range_stops_the_run(config: RunConfig, monkeypatch: pytest.MonkeyPatch):
    grades_by_characters(monkeypatch, scale=1.5)
    monkeypatch.setattr("pipelines.recorder.StepRecorder.on_train_start", lambda *arguments: None)  # it grades, too
    with pytest.raises(FaultError, match=r"the reward of problem .* is 1\.5, not in \[0, 1\]"):
        train(config)
    assert steps(config) == []


def test_an_engine_that_returns_other_tokens_stops_the_run(config: RunConfig):
    def spoil(session: Session) -> None:
        sample = session.engine.engine.sample

        def spoiled(requests, settings):
            completions = sample(requests, settings)
            if len(requests) == 16:  # not the probe's
                last = (completions[3].token_ids[-1] + 1) % session.engine.vocab_size
                other = (*completions[3].token_ids[:-1], last)
                completions[3] = replace(completions[3], token_ids=other)
            return completions

        session.engine.engine.sample = spoiled

    with pytest.raises(
        FaultError, match=r"response 3 has sampled log-probs that are not those of its own distribution"
    ):
        train(config, spoil)
    assert steps(config) == []


def test_a_sync_that_does_not_reach_the_engine_stops_the_run_before_it_trains_on_it(config: RunConfig):
    def deafen(session: Session) -> None:
        session.engine.engine.load_weights = lambda weights: None

    with pytest.raises(FaultError, match=r"stale weights: .* weight version 1 .*the sync did not reach it"):
        train(with_keys(config, "update", learning_rate=0.5, warmup_updates=1), deafen)
    assert [entry.step for entry in steps(config)] == [1]


@pytest.mark.parametrize(
    ("stage", "key"),
    [
        ("mask", r"lower update\.tokens_per_micro_batch"),
        ("update", r"lower update\.tokens_per_micro_batch, set trainer\.activation_checkpointing=true"),
    ],
)
def test_running_out_of_memory_in_training_names_the_key(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, stage: str, key: str
):
    def act(module: TRMModule, step: int) -> None:
        def ask_for_too_much(norm, inputs, output):
            if torch.is_grad_enabled() == (stage == "update"):
                torch.empty(2**58)

        module.policy.model.model.norm.register_forward_hook(ask_for_too_much)

    at_each_step(monkeypatch, act)
    with pytest.raises(FaultError, match=rf"the {stage} stage ran out of memory \(.*\); {key}"):
        train(config)


def test_chance_of_elsewhere_does_not_reach_a_run_and_its_seeds_are_those_on_record(config: RunConfig, tmp_path: Path):
    """The global generators are set differently; the engine is asked with the seeds that are on record."""
    outcomes, asked = [], []

    def listen(session: Session) -> None:
        sample = session.engine.engine.sample

        def heard(requests, settings):
            if len(requests) == 16:
                asked.append([request.seed for request in requests])
            return sample(requests, settings)

        session.engine.engine.sample = heard

    for number in (1, 2):
        torch.manual_seed(number)
        here = with_keys(config, "output", dir=str(tmp_path / str(number)))
        metrics = [
            {name: value for name, value in entry.metrics.items() if not name.startswith(("time/", "throughput/"))}
            for entry in train(here, listen)
        ]
        outcomes.append((metrics, (RunDirectory(here).policy / "model.safetensors").read_bytes()))
    assert outcomes[0] == outcomes[1]
    recorded = seed_record(config)["sources"]["rollout"]["seeds"]
    assert [seeds[0] for seeds in asked] == 2 * recorded
    assert asked[1][5] == derive_seed(config.seed, "rollout", 1, 1, 1)
