"""Small real parts that several unit tests build on: rollouts, batches, and policies of a few thousand weights."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trm_repro.batch import Rollout, RolloutBatch
from trm_repro.config import PolicyConfig
from trm_repro.measurement import Measurement
from trm_repro.policy import Policy, build_policy, build_tokenizer
from trm_repro.tasks.chain_arithmetic import ALPHABET

TOKENIZER = build_tokenizer(ALPHABET)
VOCAB_SIZE = len(TOKENIZER)
NUM_LAYERS = 2
NUM_EXPERTS = 4
EXPERTS_PER_TOKEN = 2


def tiny_config(architecture: str = "dense", *, tie_word_embeddings: bool = True) -> PolicyConfig:
    """Describe a policy of two layers; wide initial weights keep its distributions far from uniform."""
    return PolicyConfig(
        architecture=architecture,
        hidden_size=32,
        num_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=NUM_EXPERTS,
        num_experts_per_token=EXPERTS_PER_TOKEN,
        max_position_embeddings=128,
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=0.2,
    )


def tiny_policy(architecture: str = "dense", *, seed: int = 0, tie_word_embeddings: bool = True) -> Policy:
    """Build a policy with random weights."""
    return build_policy(tiny_config(architecture, tie_word_embeddings=tie_word_embeddings), TOKENIZER, seed)


def make_rollout(
    response_length: int = 3,
    *,
    prompt_length: int = 2,
    group: int = 0,
    reward: float = 0.0,
    advantage: float = 0.0,
    seed: int = 0,
    experts: bool = False,
) -> Rollout:
    """Draw a rollout of random tokens from random distributions over the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    log_distribution = torch.log_softmax(torch.randn(response_length, VOCAB_SIZE, generator=generator), dim=-1)
    response = torch.randint(VOCAB_SIZE, (response_length,), generator=generator)
    prompt = torch.randint(VOCAB_SIZE, (prompt_length,), generator=generator)
    routed = torch.rand(response_length, NUM_LAYERS, NUM_EXPERTS, generator=generator).topk(EXPERTS_PER_TOKEN).indices
    return Rollout(
        group=group,
        prompt_ids=tuple(prompt.tolist()),
        response_ids=tuple(response.tolist()),
        logprobs=log_distribution[torch.arange(response_length), response],
        log_distribution=log_distribution,
        experts=routed.to(torch.uint8) if experts else None,
        reward=reward,
        advantage=advantage,
    )


def make_batch(lengths: Sequence[tuple[int, int]], *, seed: int = 0, experts: bool = False) -> RolloutBatch:
    """Make a batch of random rollouts with the given prompt and response lengths; advantages are of both signs."""
    return RolloutBatch.from_rollouts(
        [
            make_rollout(
                response_length,
                prompt_length=prompt_length,
                group=index // 2,
                reward=float(index % 2),
                advantage=0.5 * (index + 1) * (-1) ** index,
                seed=100 * seed + index,
                experts=experts,
            )
            for index, (prompt_length, response_length) in enumerate(lengths)
        ]
    )


def near_policy(batch: RolloutBatch, policy: Policy, scale: Tensor, *, temperature: float = 1.0) -> RolloutBatch:
    """Replace the batch's rollout distributions by the policy's, with noise on the logits of each sequence.

    Args:
        batch: B sequences.
        policy: the distributions to start from.
        scale: ``[B]``; deviation of the noise on each sequence's logits.
        temperature: logits are divided by it.
    """
    generator = torch.Generator().manual_seed(7)
    rows = []
    for sequence, (ids, prompt_length, length) in enumerate(
        zip(batch.input_ids, batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True)
    ):
        with torch.no_grad():
            logits = policy.model(input_ids=ids[None, : prompt_length + length]).logits[0, prompt_length - 1 : -1]
        noise = scale[sequence] * torch.randn(logits.shape, generator=generator)
        rows.append(torch.log_softmax(logits / temperature + noise, dim=-1))
    log_distribution = torch.cat(rows)  # [N, V]
    chosen = log_distribution.gather(-1, batch.response_ids[batch.response_mask][:, None])[:, 0]
    return replace(batch, rollout_log_distribution=log_distribution, rollout_logprobs=batch.dense(chosen))


def make_measurement(
    log_ratio: Sequence[Sequence[float]],
    *,
    kl: Sequence[Sequence[float]] | None = None,
    entropy: Sequence[Sequence[float]] | None = None,
    is_flipped: Sequence[Sequence[bool]] | None = None,
    rollout_logprobs: Tensor | None = None,
) -> Measurement:
    """Write a measurement down by hand; the total variation is a tenth of the KL."""
    ratio = torch.tensor(log_ratio)
    return Measurement(
        policy_logprobs=ratio if rollout_logprobs is None else ratio + rollout_logprobs,
        log_ratio=ratio,
        entropy=torch.zeros_like(ratio) if entropy is None else torch.tensor(entropy),
        normalizers=torch.zeros_like(ratio),
        kl=None if kl is None else torch.tensor(kl),
        total_variation=None if kl is None else torch.tensor(kl) / 10,
        is_flipped=None if is_flipped is None else torch.tensor(is_flipped),
    )
