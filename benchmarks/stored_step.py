"""A step of training without an engine: random rollouts, and the mask and update stages on them through Lightning.

Several benchmarks build on it. Shape letters: T response tokens, V vocabulary.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from pipelines.training import build_trainer
from trm_repro.batch import Rollout
from trm_repro.config import RunConfig
from trm_repro.datamodule import RolloutDataModule
from trm_repro.module import TRMModule
from trm_repro.policy import build_policy, build_tokenizer
from trm_repro.steps import ReferenceUpdate
from trm_repro.tasks.chain_arithmetic import ALPHABET


def draw_rollouts(
    lengths: Iterable[tuple[int, int]], group_size: int, vocab_size: int, *, with_distribution: bool
) -> list[Rollout]:
    """Draw random sequences; each has an advantage, so that the mask alone decides what is passed over.

    Args:
        lengths: of each prompt and response, tokens.
        group_size: consecutive sequences that share a group.
        vocab_size: V; tokens are drawn above the special ones.
        with_distribution: store log-probs of the whole vocabulary, ``[T, V]`` per sequence.
    """
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for index, (prompt_length, length) in enumerate(lengths):
        response = torch.randint(4, vocab_size, (length,), generator=generator)
        prompt = torch.randint(4, vocab_size, (prompt_length,), generator=generator)
        logprobs = torch.full((length,), -5.0)
        distribution = None
        if with_distribution:
            distribution = torch.log_softmax(torch.randn(length, vocab_size, generator=generator), dim=-1)
            logprobs = distribution.gather(-1, response[:, None])[:, 0]
        rollouts.append(
            Rollout(
                group=index // group_size,
                prompt_ids=tuple(prompt.tolist()),
                response_ids=tuple(response.tolist()),
                logprobs=logprobs,
                log_distribution=distribution,
                advantage=(-1.0) ** index,
            )
        )
    return rollouts


class StoredStep:
    """A policy with random weights, which can be trained on the same rollouts again and again."""

    def __init__(self, config: RunConfig) -> None:
        """Build the policy; the tokenizer is the miniature's, also where the vocabulary is larger."""
        self.config = config
        self.tokenizer = build_tokenizer(ALPHABET)
        self.policy = build_policy(config.policy, self.tokenizer, seed=0)

    @property
    def num_parameters(self) -> int:
        """Weights, tied ones once."""
        return sum(weight.numel() for weight in self.policy.parameters())

    def run(
        self, rollouts: Sequence[Rollout], reference: Mapping[int, Sequence[ReferenceUpdate]] | None = None
    ) -> tuple[dict[str, float], TRMModule]:
        """Train one step.

        Args:
            rollouts: of the step.
            reference: how many sequences a random mask keeps at each update.

        Returns:
            The seconds of each stage, and the module with the step's records.
        """
        module = TRMModule(self.config, self.tokenizer, reference)
        module.policy = self.policy
        data = RolloutDataModule(self.config, None, run_name="benchmark", stored=rollouts)
        build_trainer(1, []).fit(module, datamodule=data)
        seconds, _ = module.clock.take()
        return seconds, module
