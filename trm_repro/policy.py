"""The policy: a causal language model that scores response tokens, and its tokenizer.

One class serves the miniature (dense or mixture of experts) and Qwen3-8B: only the configuration differs.
Shape letters: B sequences, S prompt and response tokens, T response tokens, N response tokens without padding,
H hidden size, V vocabulary, L layers, K experts per token.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from trm_repro.batch import RolloutBatch
from trm_repro.certified import TopLogprobs
from trm_repro.config_sections import PolicyConfig
from trm_repro.errors import InputError
from trm_repro.packing import pack
from trm_repro.vocab import HiddenRollout, token_logprobs, token_statistics

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
VOCABULARY_FILES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json", "tokenizer.*.json")
"""What a tokenizer's directory has at least one of; without any, transformers makes a tokenizer up."""
EXPECTED_DIRECTORY = "expected config.json, model.safetensors and tokenizer.json, as save_pretrained writes them"


class PolicyOutput(NamedTuple):
    """Per-token results of one forward pass; entries are None where they were not asked for.

    Attributes:
        logprobs: ``[N]`` float32, nats; log pi_theta of the sampled tokens.
        entropy: ``[N]`` float32, nats.
        normalizers: ``[N]`` float32, nats; log of the sum of exponentials of the tempered logits.
        kl: ``[N]`` float32, nats; exact KL(pi_roll || pi_theta).
        total_variation: ``[N]`` float32 in [0, 1].
        kl_low: ``[N]`` float64, nats; certified lower end of KL.
        kl_high: ``[N]`` float64, nats; certified upper end of KL.
        rebuilt_logprobs: ``[N]`` float32, nats; log pi_roll of the sampled tokens, rebuilt from hidden states.
        rebuilt_tolerance: ``[N]`` float32, nats; how far rounding can put those from the engine's own.
        experts: ``[N, L, K]`` int64; experts each token's prediction was routed to.
        differentiable: ``logprobs`` once more, with gradient, from a pass that measures.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    normalizers: Tensor | None = None
    kl: Tensor | None = None
    total_variation: Tensor | None = None
    kl_low: Tensor | None = None
    kl_high: Tensor | None = None
    rebuilt_logprobs: Tensor | None = None
    rebuilt_tolerance: Tensor | None = None
    experts: Tensor | None = None
    differentiable: Tensor | None = None


class Policy(nn.Module):
    """Scores the response tokens of a batch under pi_theta."""

    model: Any  # a Hugging Face causal language model; its parts are not typed
    is_packing: bool = False
    """Whether a batch's sequences are laid one after another in one row instead of being padded."""

    def __init__(self, model: nn.Module) -> None:
        """Wrap a Hugging Face causal language model."""
        super().__init__()
        self.model = model
        self.model.config.use_cache = False

    def forward(
        self,
        batch: RolloutBatch,
        *,
        temperature: float = 1.0,
        measure: bool = False,
    ) -> PolicyOutput:
        """Score the response tokens.

        Args:
            batch: B sequences; right padding is harmless because attention is causal.
            temperature: logits are divided by it.
            measure: also compute entropy, exact divergences (where the batch carries the rollout distribution)
                and, in a mixture of experts, the routing; none of these has a gradient.

        Returns:
            Per-token results. ``logprobs`` carries gradient unless ``measure`` is given; then ``differentiable`` does,
            where gradients are enabled.
        """
        has_router = hasattr(self.model.config, "num_experts")
        routing = {"output_router_logits": True} if measure and has_router else {}
        inputs, predicting = self._inputs(batch)
        output = self.model.model(**inputs, use_cache=False, **routing)
        hidden = output.last_hidden_state.flatten(0, 1)[predicting]  # [N, H]
        token_ids = batch.response_ids[batch.response_mask]  # [N]
        head_weight = self.model.lm_head.weight  # [V, H]
        if not measure:
            normalizers = None
            # In half precision the same tokens have other hidden states in a batch of another shape: a log-prob made of
            # this pass's logit and that pass's normalizer would be off by hundredths of a nat.
            is_repeatable = hidden.dtype.itemsize >= 4 and not torch.is_autocast_enabled(hidden.device.type)
            if batch.policy_normalizers is not None and is_repeatable:
                normalizers = batch.policy_normalizers[batch.response_mask]  # [N]
            logprobs = token_logprobs(hidden, head_weight, token_ids, normalizers=normalizers, temperature=temperature)
            return PolicyOutput(logprobs)
        statistics = token_statistics(
            hidden,
            head_weight,
            token_ids,
            rollout=_rollout_distribution(batch, token_ids),
            temperature=temperature,
        )
        differentiable = None
        if torch.is_grad_enabled():
            differentiable = token_logprobs(
                hidden, head_weight, token_ids, normalizers=statistics.normalizers, temperature=temperature
            )
        experts = None
        if routing:
            top_k = self.model.config.num_experts_per_tok
            layers = [logits.view(-1, logits.shape[-1])[predicting] for logits in output.router_logits]
            experts = torch.stack([layer.topk(top_k, dim=-1).indices for layer in layers], dim=1)  # [N, L, K]
        return PolicyOutput(*statistics, experts, differentiable)

    def next_token_distribution(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Compute what follows each sequence.

        Args:
            input_ids: ``[B, S]`` int64, padded on the right.
            lengths: ``[B]`` int64; tokens of each sequence, at least one.

        Returns:
            ``[B, V]`` float32, nats.
        """
        output = self.model.model(input_ids=input_ids, use_cache=False)
        last = output.last_hidden_state[torch.arange(len(lengths), device=lengths.device), lengths - 1]  # [B, H]
        return torch.log_softmax(self.model.lm_head(last).float(), dim=-1)

    def _inputs(self, batch: RolloutBatch) -> tuple[dict[str, Tensor], Tensor]:
        """Return the model's inputs, and where in them, row after row, each response token is predicted: ``[N]``."""
        if self.is_packing:
            packed = pack(batch)
            return {"input_ids": packed.input_ids, "position_ids": packed.position_ids}, packed.predicting
        rows, columns = predicting_positions(batch)
        return {"input_ids": batch.input_ids}, rows * batch.input_ids.shape[1] + columns


def _rollout_distribution(batch: RolloutBatch, token_ids: Tensor) -> Tensor | HiddenRollout | TopLogprobs | None:
    if batch.rollout_log_distribution is not None:
        return batch.rollout_log_distribution
    if batch.rollout_hidden is not None:
        if batch.rollout_heads is None:
            raise ValueError("a batch with hidden states needs the output heads of their weight versions")
        versions = batch.weight_versions[:, None].expand_as(batch.response_mask)[batch.response_mask]  # [N]
        return HiddenRollout(hidden=batch.rollout_hidden, versions=versions, heads=batch.rollout_heads)
    if batch.rollout_top_ids is None or batch.rollout_top_logprobs is None:
        return None
    return TopLogprobs(
        ids=batch.rollout_top_ids.long(),
        logprobs=batch.rollout_top_logprobs,
        sampled_ids=token_ids,
        sampled_logprobs=batch.rollout_logprobs[batch.response_mask],
    )


def predicting_positions(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """Find where in ``input_ids`` each response token is predicted: one position before it stands.

    Args:
        batch: B sequences.

    Returns:
        Rows and columns, each ``[N]`` int64, in the order of ``response_mask``.
    """
    offsets = torch.arange(batch.response_mask.shape[1], device=batch.input_ids.device)  # [T]
    columns = batch.prompt_lengths[:, None] - 1 + offsets  # [B, T]
    rows = torch.arange(batch.num_sequences, device=batch.input_ids.device)[:, None].expand_as(columns)
    return rows[batch.response_mask], columns[batch.response_mask]


def build_policy(config: PolicyConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> Policy:
    """Build the policy in float32, from pretrained weights where a path is given, else with random weights.

    Args:
        config: the policy's section.
        tokenizer: gives the vocabulary size where the configuration leaves it open, and the special tokens.
        seed: seed of the random weights.

    Returns:
        The policy, ready to train.

    Raises:
        InputError: if the path holds no model that can be loaded, or the tokenizer has more tokens than the model.
    """
    if config.path is not None:
        model = load_model(config.path, prefix="policy.path=")
    else:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(
                model_config(config, tokenizer), dtype=torch.float32, attn_implementation="sdpa"
            )
    if tokenizer is not None:
        check_vocabulary(tokenizer, int(model.config.vocab_size), config.path or "policy.vocab_size")
    return Policy(model)


def load_model(path: str | Path, *, prefix: str = "") -> Any:  # noqa: ANN401
    """Load a saved causal language model in float32.

    Args:
        path: directory or hub name.
        prefix: what to put before the path in a message, such as the key it comes from.

    Returns:
        A Hugging Face model with a decoder under ``model`` and an output layer under ``lm_head``.

    Raises:
        InputError: if it cannot be loaded, lacks weights, or has other parts.
    """
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            path, trust_remote_code=False, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
        )
    except Exception as error:  # a damaged directory raises whatever the reader of the damaged part does
        raise InputError(
            f"{prefix}{path}: no model can be loaded ({first_line(error)}); {EXPECTED_DIRECTORY}"
        ) from error
    if missing := sorted(loading["missing_keys"]):
        raise InputError(
            f"{prefix}{path}: no model can be loaded ({len(missing)} of its tensors are not in the file, such as "
            f"{missing[0]}); {EXPECTED_DIRECTORY}"
        )
    head = getattr(model, "lm_head", None)
    if not hasattr(model, "model") or getattr(head, "weight", None) is None or getattr(head, "bias", None) is not None:
        raise InputError(
            f"{prefix}{path}: a {type(model).__name__} cannot be scored; expected a causal model with a decoder "
            "`model` and an `lm_head` without bias, such as Qwen3"
        )
    return model


def check_vocabulary(tokenizer: PreTrainedTokenizerFast, vocab_size: int, where: str | Path) -> None:
    """Check that a model has an embedding for every token of a tokenizer.

    Raises:
        InputError: if the tokenizer has more tokens; the message begins with ``where``.
    """
    if len(tokenizer) > vocab_size:
        raise InputError(
            f"{where}: the tokenizer has {len(tokenizer)} tokens, the model {vocab_size}; expected at most as many, so "
            "give the model its own tokenizer"
        )


def model_config(config: PolicyConfig, tokenizer: PreTrainedTokenizerFast | None = None) -> Any:  # noqa: ANN401
    """Translate the policy's sizes to a Hugging Face configuration.

    Args:
        config: the policy's section; its path must be None.
        tokenizer: gives vocabulary size and special tokens, where there is one.

    Returns:
        A ``Qwen3Config`` or ``Qwen3MoeConfig``.

    Raises:
        InputError: if neither configuration nor tokenizer gives the vocabulary size.
    """
    vocab_size = config.vocab_size or (len(tokenizer) if tokenizer is not None else None)
    if vocab_size is None:
        raise InputError("policy.vocab_size must be given where there is no tokenizer")
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
    }
    if tokenizer is not None:
        common |= {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    if config.architecture == "dense":
        return Qwen3Config(**common)
    return Qwen3MoeConfig(
        moe_intermediate_size=config.moe_intermediate_size,
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_token,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        **common,
    )


def build_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character, which begins every text with ``<bos>``.

    Args:
        characters: the alphabet, without repeats.

    Returns:
        A tokenizer with ``<pad>``, ``<bos>``, ``<eos>``, ``<unk>`` and one token per character, in that order.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token="<unk>"
    )


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """Load a tokenizer from a directory or the hub.

    Args:
        path: directory or hub name.

    Returns:
        The tokenizer.

    Raises:
        InputError: if there is none, or it has no end-of-sequence token.
    """
    folder = Path(path)
    if folder.is_dir() and not any(file for pattern in VOCABULARY_FILES for file in folder.glob(pattern)):
        raise InputError(f"{path}: no tokenizer can be loaded (no tokenizer.json); {EXPECTED_DIRECTORY}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # as in load_model
        raise InputError(f"{path}: no tokenizer can be loaded ({first_line(error)}); {EXPECTED_DIRECTORY}") from error
    if tokenizer.eos_token_id is None:
        raise InputError(f"{path}: the tokenizer has no end-of-sequence token")
    return tokenizer


def save_policy(
    policy: Policy, tokenizer: PreTrainedTokenizerFast, path: Path, weights: dict[str, Tensor] | None = None
) -> None:
    """Write weights (safetensors), configuration and tokenizer to a directory that transformers and vLLM load.

    Args:
        policy: its configuration and, without ``weights``, its weights are written.
        tokenizer: of the policy.
        path: the directory.
        weights: of the policy's model by name, where the policy itself has only a part of them.
    """
    policy.model.save_pretrained(path, state_dict=weights)
    tokenizer.save_pretrained(path)


def context_length(path: str | Path) -> int:
    """Read the longest sequence a saved model can represent, tokens.

    Raises:
        InputError: if the path has no configuration of a model, or one that does not say.
    """
    try:
        return int(AutoConfig.from_pretrained(path, trust_remote_code=False).max_position_embeddings)
    except Exception as error:  # as in load_model
        raise InputError(
            f"{path}: its config.json does not say how long a sequence may be ({first_line(error)}); "
            f"{EXPECTED_DIRECTORY}"
        ) from error


def first_line(error: Exception) -> str:
    """Say in one line why something could not be loaded; of a pydantic error, the message and not the heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if "validation error" in lines[0] and len(lines) > 1:
        lines = [line.partition(" [type=")[0] for line in lines[1:] if not line.isidentifier()] or lines
    return lines[0][:200]
