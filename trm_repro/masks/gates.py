"""The registry of gates: per-token statistics in, a mask of sequences or tokens out.

Shape letters: B sequences, T response tokens. What a gate is called, keeps and needs stands in
`trm_repro.gate_specs`, which loads without torch; its code in the modules of this package. `gate_mask` is the one way
to apply a gate: a sequence with a non-finite log-ratio is rejected under every gate, and padding is never kept.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor

from trm_repro.divergence import log_ratio as log_ratio_of
from trm_repro.divergence import masked_mean
from trm_repro.gate_specs import GATE_SPECS, GateSpec, Level, Statistic, fill_thresholds, find_spec
from trm_repro.masks.trust_region import check_tokens, finite_mask


@dataclass(frozen=True, kw_only=True)
class TokenStatistics:
    """What a gate may look at; no gradient. Whatever stands on padding is ignored.

    Example: two responses of 2 and 1 tokens, ``log_ratio=tensor([[0.1, -0.3], [0.0, 0.0]])``,
    ``response_mask=tensor([[True, True], [True, False]])``, ``advantages=tensor([1.0, -1.0])``.

    Attributes:
        log_ratio: ``[B, T]`` float, nats; log pi_theta - log pi_roll of the sampled tokens.
        response_mask: ``[B, T]`` bool, True on response tokens.
        rollout_logprobs: ``[B, T]`` float, nats; log pi_roll of the sampled tokens, or None.
        policy_logprobs: ``[B, T]`` float, nats; log pi_theta of the sampled tokens, or None.
        kl: ``[B, T]`` float, nats; exact KL(pi_roll || pi_theta), or None where only sampled tokens are known.
        total_variation: ``[B, T]`` float in [0, 1], or None.
        advantages: ``[B]`` float, or None.
        reference_mask: ``[B]`` bool; the decisions whose rate a control copies, or None.
    """

    log_ratio: Tensor
    response_mask: Tensor
    rollout_logprobs: Tensor | None = None
    policy_logprobs: Tensor | None = None
    kl: Tensor | None = None
    total_variation: Tensor | None = None
    advantages: Tensor | None = None
    reference_mask: Tensor | None = None

    def __post_init__(self) -> None:
        """Check that shapes agree."""
        for name in ("log_ratio", "rollout_logprobs", "policy_logprobs", "kl", "total_variation"):
            value = getattr(self, name)
            if value is not None:
                check_tokens(name, value, self.response_mask)
        for name in ("advantages", "reference_mask"):
            value = getattr(self, name)
            if value is not None and value.shape != self.response_mask.shape[:1]:
                raise ValueError(
                    f"{name} {tuple(value.shape)} must be [B] = {tuple(self.response_mask.shape[:1])}, one a sequence"
                )

    @classmethod
    def from_logprobs(
        cls,
        policy_logprobs: Tensor,
        rollout_logprobs: Tensor,
        response_mask: Tensor,
        *,
        advantages: Tensor | None = None,
        kl: Tensor | None = None,
    ) -> "TokenStatistics":
        """Gather what is known of sampled tokens.

        Args:
            policy_logprobs: ``[B, T]`` float, nats.
            rollout_logprobs: ``[B, T]`` float, nats.
            response_mask: ``[B, T]`` bool.
            advantages: ``[B]`` float, or None.
            kl: ``[B, T]`` float, nats, exact, or None.

        Returns:
            The statistics, detached.
        """
        policy_logprobs = policy_logprobs.detach()
        return cls(
            log_ratio=log_ratio_of(policy_logprobs, rollout_logprobs),
            response_mask=response_mask,
            rollout_logprobs=rollout_logprobs,
            policy_logprobs=policy_logprobs,
            kl=kl,
            advantages=advantages,
        )

    @property
    def available(self) -> frozenset[str]:
        """Names of the statistics that are given."""
        names = ("log_ratio", "rollout_logprobs", "policy_logprobs", "kl", "total_variation", "advantages")
        return frozenset(name for name in (*names, "reference_mask") if getattr(self, name) is not None)

    @cached_property
    def is_finite(self) -> Tensor:
        """``[B]`` bool: sequences all of whose response tokens have a finite log-ratio."""
        return finite_mask(self.log_ratio, self.response_mask)

    @cached_property
    def is_counted(self) -> Tensor:
        """``[B, T]`` bool: response tokens of finite sequences."""
        return self.response_mask & self.is_finite[:, None]

    @cached_property
    def mean_log_ratio(self) -> Tensor:
        """``[B]`` float, nats: mean over response tokens; 0 of an empty response."""
        return masked_mean(self.log_ratio, self.response_mask, dim=-1)

    @cached_property
    def probability_change(self) -> Tensor:
        """``[B, T]`` in [-1, 1]: pi_theta(y_t) - pi_roll(y_t) of the sampled tokens; needs both log-probs."""
        assert self.policy_logprobs is not None
        assert self.rollout_logprobs is not None
        return self.policy_logprobs.exp() - self.rollout_logprobs.exp()


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A gate with its code; the fields are those of `GateSpec`.

    Attributes:
        name: as in mask.criterion and --gate.
        level: "sequence" or "token".
        direction: what it keeps or weighs, and which way round its ratio is.
        source: paper or code it follows.
        thresholds: name to default.
        needs: statistics it cannot do without.
        apply: statistics and every threshold by keyword in, ``[B]`` bool, ``[B, T]`` bool or ``[B, T]`` weights out.
        is_weight: whether `apply` gives weights >= 0 of the surrogate rho_t A.
        is_batch_wide: whether a decision depends on the other sequences of the batch.
        note: what could not be confirmed, or where ours differs.
    """

    name: str
    level: Level
    direction: str
    source: str
    thresholds: Mapping[str, float]
    needs: frozenset[Statistic]
    apply: Callable[..., Tensor]
    is_weight: bool = False
    is_batch_wide: bool = False
    note: str = ""


def _load(spec: GateSpec) -> Gate:
    module, _, function = spec.function.partition(":")

    def apply(statistics: TokenStatistics, **thresholds: float) -> Tensor:
        # The gates' modules import TokenStatistics from here: imported on first use.
        code: Callable[..., Tensor] = getattr(importlib.import_module(f"trm_repro.masks.{module}"), function)
        return code(statistics, **thresholds)

    return Gate(
        name=spec.name,
        level=spec.level,
        direction=spec.direction,
        source=spec.source,
        thresholds=spec.thresholds,
        needs=spec.needs,
        apply=apply,
        is_weight=spec.is_weight,
        is_batch_wide=spec.is_batch_wide,
        note=spec.note,
    )


GATES: Mapping[str, Gate] = MappingProxyType({name: _load(spec) for name, spec in GATE_SPECS.items()})


@torch.no_grad()
def gate_mask(name: str, statistics: TokenStatistics, **thresholds: float) -> Tensor:
    """Apply a gate.

    Args:
        name: a key of `GATES`.
        statistics: of B sequences; must hold what the gate needs.
        **thresholds: those that differ from the gate's defaults.

    Returns:
        ``[B]`` bool of a sequence gate. ``[B, T]`` bool of a token gate, False on padding. ``[B, T]`` float of a gate
        with ``is_weight``: factors >= 0 of the surrogate rho_t A_t, 0 on padding; the gradient that they leave is
        weight times rho_t A grad log pi_theta. A sequence with a non-finite log-ratio is rejected whole.

    Raises:
        ValueError: if there is no such gate or threshold, or a statistic it needs is missing.
    """
    filled = fill_thresholds(find_spec(name), thresholds)
    gate = GATES[name]
    missing = sorted(gate.needs - statistics.available)
    if missing:
        raise ValueError(f"gate {name} needs {', '.join(missing)}, which the data do not have")
    result = gate.apply(statistics, **filled)
    if gate.level == "sequence":
        return result & statistics.is_finite
    if result.dtype == torch.bool:
        return result & statistics.is_counted
    return torch.where(statistics.is_counted, result, 0.0)


@torch.no_grad()
def token_weights(mask: Tensor, response_mask: Tensor) -> Tensor:
    """Write any gate's result as factors of the per-token surrogate.

    Args:
        mask: what `gate_mask` returned: ``[B]`` bool, ``[B, T]`` bool or ``[B, T]`` float.
        response_mask: ``[B, T]`` bool.

    Returns:
        ``[B, T]`` float32, >= 0; 0 on padding.
    """
    dense = mask[:, None] if mask.dim() == 1 else mask
    return torch.where(response_mask, dense.float(), 0.0)


@torch.no_grad()
def kept_sequences(mask: Tensor) -> Tensor:
    """Say which sequences contribute anything: ``[B]`` bool from what `gate_mask` returned."""
    return mask if mask.dim() == 1 else (mask != 0).any(dim=-1)
