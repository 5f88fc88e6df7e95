"""Rollouts for the audit's tests: sampled from real softmax distributions, so that identities of sampling hold."""

import json
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 12


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def sample(
    num_sequences: int = 40, *, seed: int = 0, noise: float = 0.1, rollout_temperature: float = 1.0, top_p: float = 1.0
) -> list[dict[str, Any]]:
    """Draw sequences of 1 to 60 tokens from pi_roll; pi_theta has noise on its logits."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(num_sequences):
        length = int(rng.integers(1, 61))
        logits = 2 * rng.standard_normal((length, VOCABULARY))
        rollout = log_softmax(logits / rollout_temperature)
        if top_p < 1:
            rollout = _cut(rollout, top_p)
        policy = log_softmax(logits + noise * rng.standard_normal(logits.shape))
        gumbel = rng.gumbel(size=rollout.shape)
        tokens = (rollout + gumbel).argmax(axis=-1)
        at = np.arange(length), tokens
        rows.append(
            {
                "step": index // 10,
                "prompt_id": index // 4,
                "reward": float(rng.integers(0, 2)),
                "advantage": float(rng.standard_normal()),
                "rollout_logprobs": rollout[at].astype(np.float32),
                "policy_logprobs": policy[at].astype(np.float32),
                "token_ids": tokens,
                "rollout_log_distribution": rollout,
                "policy_log_distribution": policy,
            }
        )
    return rows


def _cut(logprobs: np.ndarray, top_p: float) -> np.ndarray:
    """Keep the likeliest tokens whose mass reaches top_p, renormalised."""
    order = np.argsort(-logprobs, axis=-1)
    mass = np.take_along_axis(np.exp(logprobs), order, axis=-1).cumsum(axis=-1)
    kept = np.concatenate((np.ones((len(mass), 1), dtype=bool), mass[:, :-1] < top_p), axis=-1)
    keep = np.zeros_like(kept)
    np.put_along_axis(keep, order, kept, axis=-1)
    cut = np.where(keep, logprobs, -np.inf)
    return cut - np.log(np.exp(cut).sum(axis=-1, keepdims=True))


GENERIC = ("step", "prompt_id", "reward", "advantage", "rollout_logprobs", "policy_logprobs", "token_ids")


def write_jsonl(path: Path, rows: list[dict[str, Any]], names: tuple[str, ...] = GENERIC) -> Path:
    lines = []
    for row in rows:
        values = {name: row[name] for name in names}
        lines.append(json.dumps({k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}))
    path.write_text("\n".join(lines) + "\n")
    return path


def padded(rows: list[dict[str, Any]], name: str, *, left: int = 0, fill: float = 0.0) -> np.ndarray:
    """Lay a token field out as ``[B, left + T]``, the responses after ``left`` positions of prompt."""
    width = left + max(len(row[name]) for row in rows)
    array = np.full((len(rows), width), fill, dtype=rows[0][name].dtype)
    for values, row in zip(array, rows, strict=True):
        values[left : left + len(row[name])] = row[name]
    return array


def response_mask(rows: list[dict[str, Any]], *, left: int = 0) -> np.ndarray:
    return padded([{"mask": np.ones(len(row["token_ids"]), dtype=np.int64)} for row in rows], "mask", left=left)


def audited(*paths: Path, **options: Any) -> dict[str, Any]:
    from pipelines.audit.measure import Request, audit

    return audit(Request(files=list(paths), **options))
