"""What each trainer calls the fields of a dump, and how its format is told.

Names are those of the projects' own sources; docs/audit.md says which were tried on a real dump.
"""

from dataclasses import dataclass, field

from trm_repro.errors import InputError

FIELDS = (
    "rollout_logprobs",
    "policy_logprobs",
    "mask",
    "length",
    "reward",
    "advantage",
    "step",
    "prompt_id",
    "token_ids",
    "token_kl",
    "rollout_log_distribution",
    "policy_log_distribution",
    "rollout_top_ids",
    "rollout_top_logprobs",
    "policy_top_ids",
    "policy_top_logprobs",
)
"""The names on the left of --map: what the audit can use."""


@dataclass(frozen=True)
class Format:
    """Where a trainer keeps the fields; the first name that is there counts.

    Attributes:
        trainer: for messages.
        names: names of each field of `FIELDS`.
        is_shifted: whether policy log-probs may stand one position before the token they belong to.
    """

    trainer: str
    names: dict[str, tuple[str, ...]]
    is_shifted: bool = field(default=False, kw_only=True)


_COMMON = {
    "length": ("length", "response_length", "completion_length", "num_tokens"),
    "reward": ("reward", "rewards", "score", "scores"),
    "advantage": ("advantage", "advantages"),
    "step": ("step", "global_step", "rollout_id"),
    "prompt_id": ("prompt_id", "group", "group_id", "uid"),
    "token_kl": ("token_kl",),
    "rollout_top_ids": ("rollout_top_ids",),
    "rollout_top_logprobs": ("rollout_top_logprobs",),
    "policy_top_ids": ("policy_top_ids",),
    "policy_top_logprobs": ("policy_top_logprobs",),
}

FORMATS = {
    "generic": Format(
        "the generic schema",
        {
            "rollout_logprobs": ("rollout_logprobs",),
            "policy_logprobs": ("policy_logprobs",),
            "mask": ("mask", "response_mask"),
            "token_ids": ("token_ids", "response_ids"),
            "rollout_log_distribution": ("rollout_log_distribution",),
            "policy_log_distribution": ("policy_log_distribution",),
        },
    ),
    "verl": Format(
        "verl",
        {
            "rollout_logprobs": ("rollout_log_probs",),
            "policy_logprobs": ("old_log_probs",),
            "mask": ("response_mask", "loss_mask"),
            "reward": ("token_level_scores", "rm_scores", "token_level_rewards", "score", "acc"),
            "token_ids": ("responses",),
        },
    ),
    "trl": Format(
        "TRL",
        {
            "rollout_logprobs": ("sampling_per_token_logps",),
            "policy_logprobs": ("old_per_token_logps", "per_token_logps"),
            "mask": ("completion_mask", "tool_mask"),
            "token_ids": ("completion_ids",),
        },
    ),
    "prime-rl": Format(
        "prime-rl",
        {
            "rollout_logprobs": ("inference_logprobs",),
            "policy_logprobs": ("trainer_logprobs",),
            "mask": ("loss_mask", "completion_mask"),
            "token_ids": ("input_ids", "completion_ids"),
        },
    ),
    "slime": Format(
        "slime",
        {
            "rollout_logprobs": ("rollout_log_probs",),
            "policy_logprobs": ("log_probs",),
            "mask": ("loss_masks", "loss_mask"),
            "length": ("response_lengths", "response_length"),
            "token_ids": ("tokens",),
        },
    ),
    "skyrl": Format(
        "SkyRL",
        {
            "rollout_logprobs": ("rollout_logprobs",),
            "policy_logprobs": ("action_log_probs",),
            "mask": ("loss_mask", "loss_masks", "response_mask"),
            "token_ids": ("response_ids",),
        },
    ),
    "nemo-rl": Format(
        "NeMo-RL",
        {
            "rollout_logprobs": ("generation_logprobs",),
            "policy_logprobs": ("prev_logprobs",),
            "mask": ("token_mask", "token_loss_mask"),
            "reward": ("total_reward", "reward", "rewards"),
            "token_ids": ("input_ids", "token_ids"),
        },
    ),
    "areal": Format(
        "AReaL",
        {
            "rollout_logprobs": ("logprobs",),
            "policy_logprobs": ("prox_logp",),
            "mask": ("loss_mask",),
            "token_ids": ("input_ids",),
        },
        is_shifted=True,
    ),
    "openrlhf": Format(
        "OpenRLHF",
        {
            "rollout_logprobs": ("rollout_log_probs",),
            "policy_logprobs": ("action_log_probs",),
            "mask": ("action_mask",),
            "token_ids": ("sequences",),
        },
    ),
}
"""By the name that --format takes. Rollout and policy names together are of one format alone."""

SAMPLE_TEXT_DUMPS = {
    frozenset({"input", "output", "score"}): (
        "verl's rollout_data_dir holds texts and scores, not log-probs; save rollout_log_probs, old_log_probs and "
        "response_mask of the batch, such as torch.save({k: batch.batch[k] for k in names}, file)"
    ),
    frozenset({"prompt", "completion"}): (
        "TRL's completion logs hold texts, not log-probs; save sampling_per_token_logps, old_per_token_logps and "
        "completion_mask of the trainer's inputs"
    ),
}
"""Columns of files that people take for rollout dumps, and what to save instead."""


def parse_map(pairs: list[str]) -> dict[str, str]:
    """Read ``ours=theirs`` pairs.

    Raises:
        InputError: if a pair names no field of ours.
    """
    mapped = {}
    for pair in pairs:
        ours, equals, theirs = pair.partition("=")
        if not equals or not theirs or ours not in FIELDS:
            raise InputError(f"--map {pair!r}: expected ours=theirs, ours one of {', '.join(FIELDS)}")
        mapped[ours] = theirs
    return mapped


def find_fields(
    path: str, available: list[str], *, chosen: str | None, mapped: dict[str, str]
) -> tuple[str, dict[str, str]]:
    """Find which column holds which field.

    Args:
        path: the file, for messages.
        available: its columns.
        chosen: format that --format names; None to find it.
        mapped: fields that --map names.

    Returns:
        The format's name, and for each field that is there its column.

    Raises:
        InputError: if no format fits, or a named column is not there.
    """
    for ours, theirs in mapped.items():
        if theirs not in available:
            raise InputError(f"{path}: --map {ours}={theirs}: no such column; it has {_listed(available)}")
    names = [chosen] if chosen is not None else list(FORMATS)
    for name in names:
        found = {
            ours: next((theirs for theirs in candidates if theirs in available), "")
            for ours, candidates in (_COMMON | FORMATS[name].names).items()
        }
        found = {ours: theirs for ours, theirs in found.items() if theirs} | mapped
        if "rollout_logprobs" in found and "policy_logprobs" in found:
            return name, found
    raise InputError(f"{path}: {_missing(available, chosen)}")


def _missing(available: list[str], chosen: str | None) -> str:
    for columns, advice in SAMPLE_TEXT_DUMPS.items():
        if columns <= set(available):
            return f"has no log-probs ({advice})"
    if chosen is not None:
        wanted = FORMATS[chosen].names
        expected = " and ".join("/".join(wanted[name]) for name in ("rollout_logprobs", "policy_logprobs"))
        return f"is not a dump of {FORMATS[chosen].trainer}: expected columns {expected}, it has {_listed(available)}"
    return (
        "no known pair of rollout and policy log-probs among its columns "
        f"({_listed(available)}); name them, such as --map rollout_logprobs=X --map policy_logprobs=Y"
    )


def _listed(names: list[str]) -> str:
    return ", ".join(sorted(names)[:20]) + (", ..." if len(names) > 20 else "") if names else "no columns"
