"""`trm-repro bounds`: Table 1 beside ours, a calculator, and exact verification on enumerable policies.

Answers from closed forms, without torch; matplotlib is imported under --plot alone, tqdm under --verify.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.bounds_plot import plot_bounds, refuse_target
from pipelines.progress import progress_bar
from trm_repro.bounds import (
    Constants,
    Divergences,
    FloatArray,
    KnownLimits,
    every_bound,
    largest_delta,
    largest_length,
    unified_bound,
)
from trm_repro.errors import InputError
from trm_repro.trees import (
    MAX_LENGTH,
    BoundCheck,
    PolicyPairs,
    check_bounds,
    draw_policy_pairs,
    gradient_reach,
    improvement,
    largest_response_kl,
    measure_divergences,
    prefix_probabilities,
    routing_flips,
    surrogate,
    worst_error,
)

HELP = "print bounds on the surrogate's error, find where they say something, verify them by enumeration"

TABLE_1 = {
    "kl_only": {"length": 4096, "delta": 1e-4, "kl_seq": 0.01},
    "kl_and_tv": {"length": 4096, "delta": 1e-4, "kl_seq": 0.01, "epsilon": 5e-3, "tv_seq": 0.05},
}
"""The two settings of Table 1; without epsilon and TV_seq they follow from Pinsker."""

TABLE_1_PRINTED = {
    "classical": ("1677", "839"),
    "coupling": ("113.8", "79.9"),
    "simplified_pinsker_marginal_kl": ("35.0", "35.0"),
    "simplified_pinsker_marginal_tv": ("35.0", "24.7"),
    "mixed_kl": ("8.2", "8.2"),
    "mixed_tv": ("8.2", "4.1"),
    "adaptive_hybrid": ("<= 35.0", "<= 24.7"),
    "unified": ("<= 8.2", "<= 4.1"),
}
"""Table 1 as published, for the settings in the order of `TABLE_1`; its Pinsker-Marginal rows are simplified forms."""

BATCH_SIZE = 32
"""Pairs enumerated together; each batch has its own vocabulary, length and kind of difference."""

TOKEN_DELTA, CLIP_RANGE = 0.05, 0.2
"""The thresholds at which --verify compares ways of masking."""

Payload = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--length", type=int, metavar="T", help="response-length limit, tokens")
    parser.add_argument("--delta", type=float, help="largest token KL(pi_roll || pi_theta), nats")
    parser.add_argument("--epsilon", type=float, help="largest token total variation, 0 to 1; default sqrt(delta/2)")
    parser.add_argument("--kl-seq", type=float, help="KL of the response distributions, nats; default T delta")
    parser.add_argument("--tv-seq", type=float, help="TV of the response distributions, 0 to 1; default sqrt(KL_seq/2)")
    parser.add_argument("--constants", choices=["paper", "sharp"], help="as published, or halved; default both")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the bounds against T and delta (png, svg, pdf)")
    parser.add_argument("--verify", type=int, metavar="N", help="check the bounds on N random enumerable policy pairs")
    parser.add_argument("--seed", type=int, default=0, help="seed of --verify; default 0")


def run(arguments: argparse.Namespace) -> int:
    """Print what was asked for.

    Args:
        arguments: as parsed with `configure`.

    Returns:
        0, or 1 when --verify found a violation.

    Raises:
        InputError: for a value out of its range, or values that contradict each other.
    """
    constants: list[Constants] = [arguments.constants] if arguments.constants else ["paper", "sharp"]
    given = {name: getattr(arguments, name) for name in ("length", "delta", "epsilon", "kl_seq", "tv_seq")}
    given = {name: value for name, value in given.items() if value is not None}
    _refuse_useless(arguments, given)
    try:
        with np.errstate(over="ignore"):  # a bound beyond the largest float is infinite, which is still a bound
            if arguments.verify is not None:
                payload = verify(arguments.verify, seed=arguments.seed, length=arguments.length, constants=constants)
                text = _verification_text(payload)
            elif given:
                payload = calculate(given, constants)
                text = _calculation_text(payload)
            else:
                payload = table_1(constants)
                text = _table_1_text(payload)
            if arguments.plot is not None:
                plot_bounds(arguments.plot, given or TABLE_1["kl_only"], constants)
    except (ValueError, OverflowError) as error:
        raise InputError(str(error)) from error
    sys.stdout.write((json.dumps(payload, indent=2, allow_nan=False) if arguments.json else text) + "\n")
    return int(any(check["num_violations"] for found in payload.get("checks", {}).values() for check in found.values()))


def _refuse_useless(arguments: argparse.Namespace, given: dict[str, float]) -> None:
    """Refuse combinations of arguments that would be ignored or say nothing."""
    if arguments.verify is not None:
        if arguments.plot is not None or not set(given) <= {"length"}:
            raise InputError("--verify goes with --length, --constants, --seed and --json alone")
    elif given and not set(given) & {"length", "delta", "epsilon"}:
        raise InputError("--kl-seq and --tv-seq need --length, --delta or --epsilon beside them")
    if arguments.seed < 0:
        raise InputError(f"--seed must be a whole number >= 0, got {arguments.seed}")
    if arguments.plot is None:
        return
    if given and not (set(given) >= {"length", "delta"} and np.isfinite(given["delta"])):
        raise InputError("--plot needs --length and a finite --delta, or none of the numbers")
    if given and given["delta"] == 0:
        raise InputError("--plot needs --delta above 0, got 0: its axis is logarithmic")
    refuse_target(arguments.plot)


def table_1(constants: list[Constants]) -> Payload:
    """Compute both settings of Table 1, beside the published figures."""
    payload: Payload = {}
    for column, (setting, numbers) in enumerate(TABLE_1.items()):
        divergences = Divergences.at_most(**numbers)
        payload[setting] = {
            "inputs": numbers,
            "published": {name: printed[column] for name, printed in TABLE_1_PRINTED.items()},
            "bounds": {name: _floats(every_bound(divergences, constants=name)) for name in constants},
        }
    return payload


def calculate(given: dict[str, float], constants: list[Constants]) -> Payload:
    """Compute every bound that the given numbers allow, and where the unified one falls below 1.

    Args:
        given: length, delta, epsilon, kl_seq, tv_seq, or some of them.
        constants: which constants to compute with.

    Returns:
        Inputs (as filled in), bounds when the length is given, and the largest delta and length.

    Raises:
        ValueError: for a value out of its range, or values that contradict each other.
    """
    known = _known_limits(given)
    payload: Payload = {"bounds": {}, "unified_below_1": {name: {} for name in constants}}
    payload["inputs"] = {name: _finite(value) for name, value in given.items()}
    if "length" in given:
        divergences = Divergences.at_most(**given)
        for name in ("delta", "epsilon", "kl_seq", "tv_seq"):
            payload["inputs"][name] = _finite(float(getattr(divergences, name)))
        for name in constants:
            bounds = _floats(every_bound(divergences, constants=name))
            payload["bounds"][name] = {
                bound: {"value": _finite(value), "is_above_1": value > 1, "is_above_trivial": value > bounds["trivial"]}
                for bound, value in bounds.items()
            }
            delta = largest_delta(int(given["length"]), known, constants=name)
            payload["unified_below_1"][name]["delta"] = _finite(delta)
    if "delta" in given or "epsilon" in given:
        for name in constants:
            length = largest_length(given.get("delta", np.inf), known, constants=name)
            payload["unified_below_1"][name]["length"] = _finite(length)
    return payload


def verify(num_pairs: int, *, seed: int, length: int | None, constants: list[Constants]) -> Payload:
    """Enumerate random pairs of policies and hold every bound against the exact error of the worst reward.

    Args:
        num_pairs: how many, >= 1.
        seed: of the draws.
        length: T of every pair; None draws 2 to 6.
        constants: which constants to check.

    Returns:
        Violations and worst error / bound for each bound; how ways of masking compare.

    Raises:
        ValueError: if num_pairs is below 1 or the length is too large to enumerate.
    """
    if num_pairs < 1:
        raise ValueError(f"--verify must be >= 1, got {num_pairs}")
    if length is not None and not 1 <= length <= MAX_LENGTH:
        raise ValueError(f"--length must be from 1 to {MAX_LENGTH} with --verify, got {length}")
    rng = np.random.default_rng(seed)
    checks: dict[Constants, dict[str, BoundCheck]] = {name: {} for name in constants}
    counts: Counter[str] = Counter()
    with progress_bar("verify", num_pairs, "pair") as progress:
        for start in range(0, num_pairs, BATCH_SIZE):
            pairs = draw_policy_pairs(rng, min(BATCH_SIZE, num_pairs - start), length=length)
            divergences, error = measure_divergences(pairs), worst_error(pairs)
            for name in constants:
                for bound, check in check_bounds(error, divergences, constants=name).items():
                    checks[name][bound] = check.merged(checks[name].get(bound, BoundCheck()))
            rewards = rng.integers(0, 2, size=largest_response_kl(pairs).shape).astype(np.float64)
            counts.update(_count_findings(pairs, divergences, rewards))
            progress.update(len(error))
    num_far, num_rejecting = counts["is_far"], counts["has_rejection"]
    flip = gradient_reach(*routing_flips(np.array([0.001])), clip_range=CLIP_RANGE, delta=TOKEN_DELTA)
    return {
        "num_pairs": num_pairs,
        "seed": seed,
        "length": length,
        "checks": {name: {bound: vars(check) for bound, check in found.items()} for name, found in checks.items()},
        "share_trivial_smallest": counts["trivial_is_smallest"] / num_pairs,
        "num_rejecting": num_rejecting,
        "share_masked_error_above": counts["masked_error_is_above"] / max(num_rejecting, 1),
        "num_far": num_far,
        "reach": {
            name: {
                "share_same_max_kl": counts[f"{name} same"] / max(num_far, 1),
                "share_max_kl_above": counts[f"{name} above"] / max(num_far, 1),
                "flip_max_kl": float(left.max_kl[0]),
                "flip_largest_opposed_ratio": float(left.largest_opposed_ratio[0]),
            }
            for name, left in flip.items()
        },
    }


def _count_findings(pairs: PolicyPairs, divergences: Divergences, rewards: FloatArray) -> dict[str, int]:
    """Count, for rewards ``[N, P, S]`` of 0 and 1, in how many pairs each finding of `verify` is so."""
    sharp = every_bound(divergences, constants="sharp")
    others = [value for name, value in sharp.items() if name not in ("trivial", "unified")]
    delta = divergences.delta / 2  # [N]; a threshold that some response usually fails
    probability = prefix_probabilities(pairs.prompt_weights, pairs.rollout)[-1]  # [N, P, S]
    is_kept = largest_response_kl(pairs) <= delta[:, None, None]  # [N, P, S]
    has_rejection = (probability * ~is_kept).sum(axis=(1, 2)) > 0  # [N]
    masked_error = np.abs(improvement(pairs, rewards) - surrogate(pairs, rewards, is_kept))  # [N]
    reach = gradient_reach(pairs, rewards, clip_range=CLIP_RANGE, delta=TOKEN_DELTA)
    unmasked_kl = reach["no_mask"].max_kl  # [N]
    is_far = unmasked_kl > TOKEN_DELTA  # [N]
    findings = {
        "trivial_is_smallest": sharp["trivial"] < np.min(others, axis=0),
        "has_rejection": has_rejection,
        "masked_error_is_above": has_rejection
        & (masked_error > unified_bound(Divergences.at_most(pairs.length, delta))),
        "is_far": is_far,
        **{f"{name} same": is_far & (left.max_kl == unmasked_kl) for name, left in reach.items()},
        **{f"{name} above": is_far & (left.max_kl > TOKEN_DELTA) for name, left in reach.items()},
    }
    return {name: int(is_so.sum()) for name, is_so in findings.items()}


def _known_limits(numbers: dict[str, float]) -> KnownLimits:
    return KnownLimits(**{name: value for name, value in numbers.items() if name not in ("length", "delta")})


def _floats(bounds: dict[str, FloatArray]) -> dict[str, float]:
    return {name: float(value) for name, value in bounds.items()}


def _finite(value: float) -> float | None:
    """Give None for infinity, which JSON cannot say."""
    return value if value != np.inf else None


def _figures(value: float) -> str:
    """Write a bound with two decimals from 1 on and three significant figures below."""
    return f"{value:,.2f}" if value >= 1 or value == 0 else f"{value:.3g}"


def _aligned(rows: list[list[str]]) -> str:
    """Lay rows out in columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *aligned]))
    return "\n".join(lines)


def _table_1_text(payload: Payload) -> str:
    settings = list(payload.values())
    constants = list(settings[0]["bounds"])
    rows = [["T = 4096, delta = 1e-4, KL_seq = 0.01", *2 * ["published", *constants]]]
    for name in settings[0]["bounds"][constants[0]]:
        row = [name.replace("_", " ")]
        for setting in settings:
            row.append(setting["published"].get(name, "-"))
            row += [_figures(setting["bounds"][constant][name]) for constant in constants]
        rows.append(row)
    return (
        "Table 1 of TRM (arXiv 2512.23075v3) beside the same numbers computed here. On the left epsilon and TV_seq\n"
        "follow from KL; on the right epsilon = 5e-3 and TV_seq = 0.05. Sharp constants are half the published ones,\n"
        f"and the sharp Unified also minimises over Prefix-Adaptive and Trivial.\n\n{_aligned(rows)}"
    )


def _calculation_text(payload: Payload) -> str:
    inputs = {name: "inf" if value is None else f"{value:g}" for name, value in payload["inputs"].items()}
    blocks = [", ".join(f"{name} = {value}" for name, value in inputs.items())]
    for constant, bounds in payload["bounds"].items():
        rows = [[f"{constant} constants", "bound", "above 1", "above trivial"]]
        for name, found in bounds.items():
            verdicts = ["yes" if found[question] else "no" for question in ("is_above_1", "is_above_trivial")]
            rows.append(
                [name.replace("_", " "), _figures(np.inf if found["value"] is None else found["value"]), *verdicts]
            )
        blocks.append(_aligned(rows))
    lines = ["The unified bound is below 1"]
    for constant, found in payload["unified_below_1"].items():
        if "delta" in found:
            where = "every delta" if found["delta"] is None else f"delta < {found['delta']:.3g}"
            lines.append(f"  at this length for {where} ({constant} constants)")
        if "length" in found:
            where = "every length" if found["length"] is None else f"length <= {found['length']:,.0f}"
            lines.append(f"  at this delta and epsilon for {where} ({constant} constants)")
    return "\n\n".join([*blocks, "\n".join(lines)])


def _verification_text(payload: Payload) -> str:
    constants = list(payload["checks"])
    rows = [["", *(f"{name} {what}" for name in constants for what in ("violations", "worst ratio"))]]
    for bound in payload["checks"][constants[0]]:
        found = [payload["checks"][name][bound] for name in constants]
        cells = [(str(check["num_violations"]), f"{check['worst_ratio']:.4f}") for check in found]
        rows.append([bound.replace("_", " "), *(cell for pair in cells for cell in pair)])
    reach = [["tokens kept by", "max KL same", "max KL above", "flip: max KL", "flip: ratio, A < 0"]]
    for name, left in payload["reach"].items():
        shares = [f"{left['share_same_max_kl']:.1%}", f"{left['share_max_kl_above']:.1%}"]
        reach.append([name, *shares, f"{left['flip_max_kl']:.4f}", f"{left['flip_largest_opposed_ratio']:.4g}"])
    num_pairs, num_rejecting, num_far = (f"{payload[name]:,}" for name in ("num_pairs", "num_rejecting", "num_far"))
    return "\n".join(
        [
            f"{num_pairs} random pairs of policies, every response enumerated. Ratio: error of the worst reward over",
            f"the bound. Trivial is the smallest sharp bound in {payload['share_trivial_smallest']:.1%} of the pairs.",
            "",
            _aligned(rows),
            "",
            f"Random 0/1 rewards, TRM-Max at half the largest KL of each pair: {num_rejecting} pairs with a rejection;",
            f"in {payload['share_masked_error_above']:.1%} of them |J difference - masked surrogate| is above the",
            "paper's unified bound at that threshold.",
            "",
            f"Largest KL in the responses that keep a gradient: in {num_far} pairs where it is above {TOKEN_DELTA}",
            f"without a mask (clip range {CLIP_RANGE}), and for one token with pi_theta 0.9 and pi_roll 0.001.",
            "",
            _aligned(reach),
        ]
    )
