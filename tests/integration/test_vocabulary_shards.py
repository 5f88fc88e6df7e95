"""Two processes that share a vocabulary compute what one process with all of it computes."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from trm_repro.vocab import HiddenRollout, VocabularyShard, token_logprobs, token_statistics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

NUM_TOKENS, VOCAB = 9, 13
SHARDS = [slice(0, 5), slice(5, 13)]  # of unequal size
SETTINGS = {"temperature": 0.8, "chunk_tokens": 4}


def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, 5, generator=generator, dtype=torch.float64)
    head_weight = torch.randn(VOCAB, 5, generator=generator, dtype=torch.float64)
    token_ids = torch.randint(VOCAB, (NUM_TOKENS,), generator=generator)
    rollout_hidden = torch.randn(NUM_TOKENS, 3, generator=generator, dtype=torch.float64)
    rollout_head = torch.randn(VOCAB, 3, generator=generator, dtype=torch.float64)
    return hidden, head_weight, token_ids, rollout_hidden, rollout_head


def compute(rows: slice, shard: VocabularyShard | None) -> dict[str, torch.Tensor]:
    """Run everything on some rows of the head; gradients of the head are those of the rows."""
    hidden, head_weight, token_ids, rollout_hidden, rollout_head = inputs()
    settings = {**SETTINGS, "shard": shard}
    rollout = HiddenRollout(
        hidden=rollout_hidden, versions=torch.zeros(NUM_TOKENS, dtype=torch.int64), heads={0: rollout_head[rows]}
    )
    statistics = token_statistics(hidden, head_weight[rows], token_ids, rollout=rollout, **settings)
    results = {name: value for name, value in statistics._asdict().items() if value is not None}
    for name in ("logprobs", "given"):
        normalizers = results["normalizers"] if name == "given" else None
        leaves = hidden.clone().requires_grad_(), head_weight[rows].clone().requires_grad_()
        value = token_logprobs(*leaves, token_ids, normalizers=normalizers, **settings)
        (value * torch.arange(1.0, NUM_TOKENS + 1)).sum().backward()
        results |= {name: value.detach(), f"{name}_hidden": leaves[0].grad, f"{name}_head": leaves[1].grad}
    return results


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    results = compute(SHARDS[rank], VocabularyShard(first_token=SHARDS[rank].start))
    torch.save(results, f"{folder}/rank_{rank}.pt")
    dist.destroy_process_group()


def test_two_shards_of_the_vocabulary_give_the_results_of_the_whole(tmp_path: Path):
    mp.spawn(run_rank, args=(str(tmp_path),), nprocs=2)
    whole = compute(slice(0, VOCAB), None)
    assert {"kl", "total_variation", "entropy", "rebuilt_logprobs", "given_hidden"} <= set(whole)
    for rank, rows in enumerate(SHARDS):
        found = torch.load(tmp_path / f"rank_{rank}.pt", weights_only=True)
        assert set(found) == set(whole)
        for name, expected in whole.items():
            expected = expected[rows] if name.endswith("_head") else expected
            torch.testing.assert_close(found[name], expected, atol=1e-12, rtol=1e-12)
