"""The worked example for other trainers, run against the real TRL on a CPU."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "trl_trm.py"


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("trl", reason="TRL is not installed: pip install --no-deps -r requirements/dev.txt")
    spec = importlib.util.spec_from_file_location("trl_trm", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(example, folder, **options):
    """Train four updates on one generation; returns the trainer and its weights after each update."""
    trainer = example.tiny_trainer(str(folder), **options)
    weights = []

    class Recorder(example.TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            weights.append(torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()]))

    trainer.add_callback(Recorder())
    trainer.train()
    return trainer, weights


def kept_fractions(trainer):
    return [entry["trm/kept_fraction"] for entry in trainer.state.log_history if "trm/kept_fraction" in entry]


def test_a_gate_that_keeps_all_trains_as_trl_itself_does(example, tmp_path):
    _, plain = train(example, tmp_path / "plain", trainer=example.GRPOTrainer)
    gated, weights = train(example, tmp_path / "gated", gate="none")
    assert kept_fractions(gated) == [1.0] * 4
    assert torch.equal(plain[0], weights[0])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(plain, weights, strict=True))
    assert not torch.allclose(plain[0], plain[3], atol=1e-4)


def test_off_policy_updates_are_rejected_and_leave_the_weights_as_they_are(example, tmp_path):
    trainer, weights = train(example, tmp_path, gate="trm_avg", thresholds={"avg_threshold": 1e-6})
    assert kept_fractions(trainer) == [1.0, 0.0, 0.0, 0.0]  # the first update is on-policy
    assert all(torch.equal(weights[0], later) for later in weights[1:])


def test_a_gate_of_tokens_weighs_trls_own_loss(example, tmp_path):
    trainer, weights = train(example, tmp_path, gate="icepop", thresholds={"low": 0.9, "high": 1.1})
    assert kept_fractions(trainer)[0] == 1.0
    assert not torch.equal(weights[0], weights[1])


def test_the_loss_is_that_of_algorithm_1_with_rejected_responses_in_the_denominator(example, tmp_path):
    trainer = example.tiny_trainer(str(tmp_path), gate="trm_max", thresholds={"max_threshold": 0.1})
    model = trainer.model.train()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 18, (3, 9), generator=generator)
    inputs = {
        "prompt_ids": ids[:, :4],
        "prompt_mask": torch.ones(3, 4, dtype=torch.long),
        "completion_ids": ids[:, 4:],
        "completion_mask": torch.tensor([[1] * 5, [1] * 4 + [0], [1] * 2 + [0] * 3]),
        "advantages": torch.tensor([1.0, -0.5, 2.0]),
    }
    trainer.current_gradient_accumulation_steps = 1
    mask = inputs["completion_mask"].bool()
    logprobs = trainer.policy_logprobs(model, inputs)
    shift = torch.zeros(3, 5)
    shift[0], shift[1, 2], shift[2] = 0.1, 0.5, -0.2  # k2: .005, .125, .02
    inputs["old_per_token_logps"] = (logprobs - shift).detach()
    inputs["old_per_token_logps"][~mask] = math.nan
    loss = trainer.compute_loss(model, inputs)
    kept = torch.tensor([True, False, True])
    terms = torch.where(mask & kept[:, None], shift.exp() * inputs["advantages"][:, None], 0.0)
    assert loss.item() == pytest.approx(-terms.sum().item() / (3 * trainer.max_completion_length), rel=1e-5)
    loss.backward()
    ours = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    expected = -(terms.detach() * torch.where(mask, trainer.policy_logprobs(model, inputs), 0.0)).sum()
    (expected / (3 * trainer.max_completion_length)).backward()
    assert torch.allclose(ours, torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), atol=1e-6)
