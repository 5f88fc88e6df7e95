"""Trust Region Masking inside TRL: a GRPOTrainer that lets a gate decide which responses an update learns from.

    pip install trl accelerate
    python examples/trl_trm.py

trains a tiny random model on a CPU for a few seconds; with your own model, take `TRMTrainer` and the four settings of
`algorithm_1`. Run against TRL 1.16, of which it overrides `_compute_loss`.
"""

from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trm_repro.masks import TokenStatistics, gate_mask, kept_sequences, token_weights


class TRMTrainer(GRPOTrainer):
    """GRPO in which a gate of `trm_repro.masks.GATES` says what each update may learn from.

    A rejected response keeps its place in the mean over the batch and adds exactly zero to the gradient. The rollout
    policy is the one that sampled: vLLM's log-probs where TRL has them, else those of the model before the first update
    on the batch. TRL keeps no distributions, so TRM-Max sees k2 and TRM-Avg k3: detectors, no guarantee.
    """

    def __init__(
        self, *args: Any, gate: str = "trm_avg", thresholds: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Set up.

        Args:
            *args: as for GRPOTrainer.
            gate: a key of `trm_repro.masks.GATES`.
            thresholds: those that differ from the gate's defaults.
            **kwargs: as for GRPOTrainer.
        """
        super().__init__(*args, **kwargs)
        self.gate, self.thresholds = gate, thresholds or {}
        self.num_kept = 0
        self.add_callback(SkipEmptyUpdates(self))

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        rollout = inputs.get("sampling_per_token_logps", inputs.get("old_per_token_logps"))
        with torch.no_grad():
            policy = self.policy_logprobs(model, inputs)  # [B, T]; the one forward pass that the gate costs
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        statistics = TokenStatistics.from_logprobs(
            policy, policy if rollout is None else rollout, mask.bool(), advantages=inputs["advantages"]
        )
        decision = gate_mask(self.gate, statistics, **self.thresholds)
        weights = token_weights(decision, statistics.response_mask)  # [B, T]
        # An advantage of 0 takes a token out of the sum and leaves the denominator, which counts it, as it is.
        inputs = {**inputs, "advantages": inputs["advantages"][:, None] * weights}
        if rollout is not None:  # the ratio is policy over rollout, and so needs no second correction
            inputs["old_per_token_logps"] = torch.where(weights > 0, rollout, policy)
            if "importance_sampling_ratio" in inputs:
                inputs["importance_sampling_ratio"] = torch.ones_like(inputs["importance_sampling_ratio"])
        kept = kept_sequences(decision)
        if model.training:
            self.num_kept += int(kept.sum())
        self._metrics["train" if model.training else "eval"]["trm/kept_fraction"].append(float(kept.float().mean()))
        return super()._compute_loss(model, inputs)

    def policy_logprobs(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Score the responses with the current policy: ``[B, T]``, nats."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        return self._get_per_token_logps_and_entropies(model, ids, attention, inputs["completion_ids"].shape[1])[0]


class SkipEmptyUpdates(TrainerCallback):
    """Leaves the weights alone when nothing was kept: with a zero gradient Adam would still move them."""

    def __init__(self, trainer: TRMTrainer) -> None:
        """Watch a trainer."""
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the gradients away; an optimizer passes over parameters without one."""
        if self.trainer.num_kept == 0:
            self.trainer.model.zero_grad(set_to_none=True)
        self.trainer.num_kept = 0


def algorithm_1(**settings: Any) -> GRPOConfig:
    """Make a TRL configuration whose loss is that of Algorithm 1, but for the constant length limit it divides by."""
    return GRPOConfig(
        loss_type="dr_grpo",  # sums tokens, divides by all sequences, rejected ones too
        epsilon=1e6,  # no clipping: the gate is the trust region
        beta=0.0,
        use_cpu=not torch.cuda.is_available(),
        **settings,
    )


def tiny_trainer(output_dir: str, *, trainer: type[GRPOTrainer] = TRMTrainer, **options: Any) -> GRPOTrainer:
    """Build a trainer of a random Qwen3 of two layers that is rewarded for digits.

    Args:
        output_dir: where TRL writes.
        trainer: TRMTrainer, or GRPOTrainer to compare with.
        **options: of the trainer.

    Returns:
        The trainer; one generation feeds four updates, so that the later ones are off-policy.
    """
    from trm_repro.policy import build_tokenizer
    from trm_repro.tasks.chain_arithmetic import ALPHABET

    tokenizer = build_tokenizer(ALPHABET)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2}
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes, **heads)
    )

    def share_of_digits(completions: list[str], **_: Any) -> list[float]:
        return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]

    config = algorithm_1(
        output_dir=output_dir,
        per_device_train_batch_size=8,
        num_generations=4,
        steps_per_generation=4,
        max_completion_length=12,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=7,
    )
    prompts = Dataset.from_dict({"prompt": [f"{first}+{second}=" for first in range(8) for second in range(8)]})
    return trainer(
        model=model,
        reward_funcs=share_of_digits,
        args=config,
        train_dataset=prompts,
        processing_class=tokenizer,
        **options,
    )


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        trained = tiny_trainer(folder, gate="trm_avg", thresholds={"avg_threshold": 0.02})
        trained.train()
    for entry in trained.state.log_history:
        if "trm/kept_fraction" in entry:
            print(f"update {entry['step']}: kept {entry['trm/kept_fraction']:.2f} of the responses")
