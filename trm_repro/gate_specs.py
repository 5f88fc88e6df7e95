"""What each gate is called, keeps and needs: the torch-free half of the registry in `trm_repro.masks.gates`.

A gate takes per-token statistics and says which sequences or tokens an update may learn from. To add one, write its
function (statistics and thresholds in, mask out) and a `GateSpec` here; configuration, arms, audit, re-gating and
documentation read this table.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

Level = Literal["sequence", "token"]
Statistic = Literal[
    "log_ratio", "rollout_logprobs", "policy_logprobs", "kl", "total_variation", "advantages", "reference_mask"
]


@dataclass(frozen=True, kw_only=True)
class GateSpec:
    """One gate, without its code.

    Example: ``GateSpec(name="ser", level="sequence", direction="keeps mean_t |rho_t - 1| <= ser_threshold; policy over
    rollout", source="TRM, SER criterion", thresholds={"ser_threshold": 0.05}, function="trust_region_gates:ser")``.

    Attributes:
        name: as in mask.criterion and --gate.
        level: "sequence" decides whole sequences, ``[B]``; "token" decides or weighs tokens, ``[B, T]``.
        direction: what it keeps or weighs, and which way round its ratio is.
        source: paper or code it follows.
        thresholds: name to default; all are keyword arguments of the function.
        needs: statistics it cannot do without; "log_ratio" always.
        function: where its code is, as module:name in `trm_repro.masks`.
        is_weight: whether it gives weights >= 0 of the surrogate rho_t A in place of True and False.
        is_batch_wide: whether a decision depends on the other sequences of the batch; cannot be streamed by chunks.
        note: what could not be confirmed, or where ours differs; empty if nothing.
    """

    name: str
    level: Level
    direction: str
    source: str
    function: str
    thresholds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    needs: frozenset[Statistic] = frozenset({"log_ratio"})
    is_weight: bool = False
    is_batch_wide: bool = False
    note: str = ""


WITH_ADVANTAGES: frozenset[Statistic] = frozenset({"log_ratio", "advantages"})
WITH_PROBABILITIES: frozenset[Statistic] = frozenset({"log_ratio", "advantages", "rollout_logprobs", "policy_logprobs"})

SPECS: tuple[GateSpec, ...] = (
    GateSpec(
        name="none",
        level="sequence",
        direction="keeps every sequence whose log-ratios are finite",
        source="",
        function="paper_gates:keep_all",
    ),
    GateSpec(
        name="trm_max",
        level="sequence",
        direction="keeps max_t KL(rollout, policy) <= max_threshold; k2 of policy over rollout without KL",
        source="TRM (arXiv 2512.23075v3), Algorithm 1, max criterion",
        function="paper_gates:trm_max",
        thresholds={"max_threshold": 0.05},
    ),
    GateSpec(
        name="trm_avg",
        level="sequence",
        direction="keeps mean_t KL(rollout, policy) <= avg_threshold; k3 of policy over rollout without KL",
        source="TRM (arXiv 2512.23075v3), Algorithm 1, average criterion",
        function="paper_gates:trm_avg",
        thresholds={"avg_threshold": 0.001},
    ),
    GateSpec(
        name="trm_max_avg",
        level="sequence",
        direction="keeps what both trm_max and trm_avg keep",
        source="TRM (arXiv 2512.23075v3), Algorithm 1, combined",
        function="paper_gates:trm_max_avg",
        thresholds={"max_threshold": 0.05, "avg_threshold": 0.001},
    ),
    GateSpec(
        name="ln_trm",
        level="sequence",
        direction="keeps W(y) / Z(T) <= ln_trm_threshold, a weighted mean of |rho_t - 1|; policy over rollout",
        source="TRM (arXiv 2512.23075v3), LN-TRM criterion",
        function="paper_gates:ln_trm",
        thresholds={"ln_trm_threshold": 0.05, "ln_trm_epsilon": 0.1, "ln_trm_delta": 0.05},
    ),
    GateSpec(
        name="ser",
        level="sequence",
        direction="keeps mean_t |rho_t - 1| <= ser_threshold; policy over rollout",
        source="TRM (arXiv 2512.23075v3), SER criterion",
        function="paper_gates:ser",
        thresholds={"ser_threshold": 0.05},
    ),
    GateSpec(
        name="sequence_mis",
        level="sequence",
        direction="keeps low <= prod_t rho_t <= high; policy over rollout",
        source="Liu, Li et al. 2025, When Speed Kills Stability, Seq-MIS; bounds as in verl's decoupled_seq_is_rs",
        function="sequence_gates:sequence_mis",
        thresholds={"low": 0.5, "high": 2.0},
        note="the mask alone: the sequence ratio is not also used as a weight. TRL's sequence_mask has no lower end "
        "and an upper one of 3; low = 0 and high = 3 give that",
    ),
    GateSpec(
        name="geometric",
        level="sequence",
        direction="keeps low <= (prod_t rho_t)^(1/T) <= high; policy over rollout",
        source="Li and Liu 2025, RL collapse part 3, Geo-Mask; bounds as in verl's decoupled_geo_rs",
        function="sequence_gates:geometric",
        thresholds={"low": 0.999, "high": 1.001},
    ),
    GateSpec(
        name="opsm",
        level="sequence",
        direction="rejects A < 0 with mean_t k1 > threshold, k1 = log(rollout / policy); keeps everything else",
        source="DeepSeek-V3.2 (arXiv 2512.02556), off-policy sequence masking",
        function="sequence_gates:opsm",
        thresholds={"threshold": 0.5},
        needs=WITH_ADVANTAGES,
        note="the report does not give its threshold; 0.5 is TRL's suggestion, other implementations take 1e-4 or 0.1",
    ),
    GateSpec(
        name="gspo",
        level="sequence",
        direction="rejects A > 0 with s > 1 + high and A < 0 with s < 1 - low, s = (prod_t rho_t)^(1/T); policy over "
        "rollout",
        source="GSPO (arXiv 2507.18071), clipped objective",
        function="sequence_gates:gspo",
        thresholds={"low": 3e-4, "high": 4e-4},
        needs=WITH_ADVANTAGES,
        note="the clipping rule as a mask; loss.name=gspo has the whole objective. The paper's s is over the trainer's "
        "old policy, ours over the rollout policy",
    ),
    GateSpec(
        name="token_tis",
        level="token",
        direction="weighs min(rho_t, cap) / rho_t, so that the gradient carries min(rho_t, cap); policy over rollout",
        source="Yao et al. 2025, Your efficient RL framework secretly brings you off-policy RL training, TIS",
        function="token_gates:token_tis",
        thresholds={"cap": 2.0},
        is_weight=True,
    ),
    GateSpec(
        name="icepop",
        level="token",
        direction="keeps low <= rho_t <= high; policy over rollout",
        source="IcePop (Ring-1T, arXiv 2510.18855), double-sided masking",
        function="token_gates:icepop",
        thresholds={"low": 0.5, "high": 5.0},
    ),
    GateSpec(
        name="ipo",
        level="token",
        direction="keeps |policy probability - rollout probability| <= threshold of the sampled token",
        source="prime-rl, INTELLECT Policy Optimization (its documentation)",
        function="token_gates:ipo",
        thresholds={"threshold": 0.3},
        needs=frozenset({"log_ratio", "rollout_logprobs", "policy_logprobs"}),
    ),
    GateSpec(
        name="dppo_binary_tv",
        level="token",
        direction="rejects A > 0 with p - q > high and A <= 0 with p - q < -low; p policy, q rollout probability of "
        "the sampled token",
        source="DPPO (arXiv 2602.04879), Binary-TV; as in verl's dppo_tv",
        function="token_gates:dppo_binary_tv",
        thresholds={"low": 0.2, "high": 0.2},
        needs=WITH_PROBABILITIES,
        note="the mask alone; verl also caps the ratio at 20, which only far outliers reach",
    ),
    GateSpec(
        name="dppo_binary_kl",
        level="token",
        direction="rejects KL of (q, 1 - q) to (p, 1 - p) above the threshold where the update would widen it: A > 0 "
        "with p > q, A <= 0 with p < q",
        source="DPPO (arXiv 2602.04879), Binary-KL; as in verl's dppo_kl",
        function="token_gates:dppo_binary_kl",
        thresholds={"low": 0.2, "high": 0.2},
        needs=WITH_PROBABILITIES,
        note="the default is verl's clip_ratio, which its recipes override",
    ),
    GateSpec(
        name="dppo_top_k_tv",
        level="token",
        direction="rejects TV(policy, rollout) > threshold where the update would widen it: A > 0 with rho > 1, A <= 0 "
        "with rho < 1",
        source="DPPO (arXiv 2602.04879), Top-K TV",
        function="token_gates:dppo_top_k_tv",
        thresholds={"threshold": 0.2},
        needs=frozenset({"log_ratio", "advantages", "total_variation"}),
        note="takes the divergence it is given: exact, or over the K likeliest tokens with the rest in one bucket; the "
        "CPPO paper runs it with K = 20 at 0.15 for dense and 0.2 for mixture-of-experts policies",
    ),
    GateSpec(
        name="dppo_top_k_kl",
        level="token",
        direction="rejects KL(rollout, policy) > threshold where the update would widen it: A > 0 with rho > 1, A <= 0 "
        "with rho < 1",
        source="DPPO (arXiv 2602.04879), Top-K KL",
        function="token_gates:dppo_top_k_kl",
        thresholds={"threshold": 0.2},
        needs=frozenset({"log_ratio", "advantages", "kl"}),
        note="as dppo_top_k_tv; the threshold is ours, the paper's was not found",
    ),
    GateSpec(
        name="cppo",
        level="token",
        direction="keeps w_t |p - q| <= min(threshold, threshold + budget W_(t-1) - S_(t-1)), and all updates towards "
        "the rollout policy, A (rho_t - 1) <= 0; w_t falls from 1 to weight_floor, W and S sum w and w |p - q| so far",
        source="CPPO (arXiv 2606.10968), equations 8 to 10, Binary-TV",
        function="token_gates:cppo",
        thresholds={
            "threshold": 0.15,
            "weight_floor": 0.8,
            "budget": 0.02,
            "budget_quantile": 0.9,
            "budget_scale": 1.0,
            "budget_ceiling": 2.0,
        },
        needs=WITH_PROBABILITIES,
        note="the budget is calibrated on each sequence, as for the paper's base models: budget_scale times a quantile "
        "of |p - q|, between budget and budget_ceiling times it; the paper's main runs take a Top-K TV for |p - q|",
    ),
    GateSpec(
        name="m2po",
        level="token",
        direction="of the batch's tokens that the update pushes further away (A > 0 with rho > 1, A < 0 with rho < 1), "
        "rejects those of largest (log rho_t)^2, as few as make the mean of the rest <= threshold; policy over rollout",
        source="M2PO (arXiv 2510.01161v2), Algorithm 1",
        function="batch_gates:m2po",
        thresholds={"threshold": 0.04},
        needs=WITH_ADVANTAGES,
        is_batch_wide=True,
        note="AReaL's version lets every token compete, those moving back too",
    ),
    GateSpec(
        name="cispo",
        level="token",
        direction="weighs clip(rho_t, 1 - low, 1 + high) / rho_t, so that the gradient carries the clipped ratio; "
        "policy over rollout",
        source="CISPO (MiniMax-M1, arXiv 2506.13585)",
        function="token_gates:cispo",
        thresholds={"low": 1.0, "high": 0.28},
        is_weight=True,
        note="low = 1 leaves the lower end open, as the paper does; the paper does not give its upper end: 0.28 is "
        "Trinity-RFT's default",
    ),
    GateSpec(
        name="minpro",
        level="token",
        direction="weighs clip(m_t rho_t, 1 - low, 1 + high) / rho_t, m_t the smallest ratio before t and 1 at the "
        "first token, so that the gradient carries the clipped product; policy over rollout",
        source="MinPRO (arXiv 2601.22718), objective",
        function="token_gates:minpro",
        thresholds={"low": 1.0, "high": 0.28},
        is_weight=True,
        note="read in a survey that quotes the objective, not in the paper; its clip range was not found, low and high "
        "are those of cispo",
    ),
    GateSpec(
        name="random",
        level="sequence",
        direction="keeps as many sequences as the reference mask keeps, chosen at random",
        source="control, ours",
        function="batch_gates:random_control",
        thresholds={"seed": 0},
        needs=frozenset({"log_ratio", "reference_mask"}),
        is_batch_wide=True,
    ),
    GateSpec(
        name="length_matched",
        level="sequence",
        direction="rejects as many sequences as the reference mask in each of num_length_bins bins of length, at "
        "random within the bin",
        source="control, ours",
        function="batch_gates:length_matched_control",
        thresholds={"num_length_bins": 4, "seed": 0},
        needs=frozenset({"log_ratio", "reference_mask"}),
        is_batch_wide=True,
    ),
)

GATE_SPECS: Mapping[str, GateSpec] = MappingProxyType({spec.name: spec for spec in SPECS})


def find_spec(name: str) -> GateSpec:
    """Look a gate up.

    Args:
        name: of a gate.

    Returns:
        Its spec.

    Raises:
        ValueError: if there is none; names the nearest.
    """
    if name not in GATE_SPECS:
        raise ValueError(f"no gate {name!r}{_nearest(name, list(GATE_SPECS))}; gates: {', '.join(GATE_SPECS)}")
    return GATE_SPECS[name]


def fill_thresholds(spec: GateSpec, given: Mapping[str, float]) -> dict[str, float]:
    """Complete a gate's thresholds by its defaults.

    Args:
        spec: the gate.
        given: thresholds that differ.

    Returns:
        Every threshold of the gate.

    Raises:
        ValueError: if a name is not one of the gate's, or a value is no number.
    """
    for name, value in given.items():
        if name not in spec.thresholds:
            known = ", ".join(spec.thresholds) or "none"
            raise ValueError(
                f"gate {spec.name} has no threshold {name!r}{_nearest(name, list(spec.thresholds))}; it has {known}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise ValueError(f"threshold {name} of gate {spec.name} must be a number, got {value!r}")
    return {**spec.thresholds, **given}


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def gate_table() -> str:
    """Lay the registry out as the Markdown of docs/masks.md: a table, then a line for each note."""
    heads = ["gate", "decides", "what it keeps or weighs", "thresholds", "needs besides log-ratios", "source"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for spec in SPECS:
        unit = f"{spec.level}s" + (", by weights" if spec.is_weight else "") + (", batch-wide" * spec.is_batch_wide)
        cells = [
            f"`{spec.name}`",
            unit,
            spec.direction,
            ", ".join(f"{name} {value:g}" for name, value in spec.thresholds.items()),
            ", ".join(sorted(spec.needs - {"log_ratio"})),
            spec.source,
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    notes = [f"- `{spec.name}`: {spec.note}." for spec in SPECS if spec.note]
    return "\n".join([*lines, "", *notes])
