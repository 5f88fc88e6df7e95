"""What the terminal and the page say alike: counts with their nouns, and the lines to read first."""

from typing import Any

Payload = dict[str, Any]


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Write a count with its noun, such as "1 sequence" and "2,000 sequences"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def figure(value: float | None) -> str:
    """Write a number with three significant figures."""
    return "-" if value is None else f"{value:.3g}"


def headline(payload: Payload) -> list[str]:
    """Write what to know first: how much was read, the gap with what the paper's gates keep, and the findings."""
    formats = ", ".join(f"{name} ({counted(count, 'file')})" for name, count in payload["formats"].items())
    kept = payload["acceptance"]
    return [
        f"{counted(payload['num_sequences'], 'sequence')}, {counted(payload['num_tokens'], 'token')}; "
        f"format {formats}; {payload['estimator']} divergences",
        f"PPL gap {figure(payload['ppl_gap'])}; TRM-Max 0.05 keeps {kept['trm_max_0.05']:.1%} of sequences, "
        f"TRM-Avg 0.001 {kept['trm_avg_0.001']:.1%}",
        _findings_line(payload),
    ]


def _findings_line(payload: Payload) -> str:
    levels = [row["level"] for row in payload["findings"]]
    parts = [counted(levels.count(level), level) for level in ("warning", "note") if level in levels]
    line = f"{counted(len(levels), 'finding')}: {', '.join(parts)}" if levels else "no findings"
    tested, total = payload["num_signature_tokens"], payload["num_tokens"]
    return line if tested == total else f"{line}; {tested:,} of {counted(total, 'token')} tested for signatures"


def kept_shares(row: Payload) -> list[str]:
    """Write the shares of sequences and of tokens that a gate keeps; a gate that weighs tokens keeps none or all."""
    shares = [row.get("sequence_fraction"), None if "weight_mean" in row else row.get("token_fraction")]
    return ["-" if share is None else f"{share:.1%}" for share in shares]


def advice_lines(advice: Payload) -> list[str]:
    """Write what is advised for each criterion and why, or the one reason why nothing is."""
    if "withheld" in advice:
        return [advice["withheld"]]
    lines = []
    for name in ("trm_max", "trm_avg", "trm_max_avg"):
        row = advice[name]
        values = [figure(row[key]) for key in ("advised", "max", "avg") if row.get(key) is not None]
        lines.append(f"{name} {' and '.join(values) or 'none'}: {row['reason']}")
    return lines


def top_k_lines(top_k: Payload) -> list[str]:
    """Write what top-K log-probs certify of KL and TV, and how many tokens contradict themselves."""
    high = "no upper end" if top_k["kl_high_max"] is None else f"at most {figure(top_k['kl_high_max'])} at any token"
    lines = [
        f"from top-K log-probs: KL at least {figure(top_k['kl_low_mean'])} in the mean and "
        f"{figure(top_k['kl_low_max'])} at a token, {high}; TV in the mean {figure(top_k['tv_low_mean'])} to "
        f"{figure(top_k['tv_high_mean'])}, largest {figure(top_k['tv_low_max'])} to {figure(top_k['tv_high_max'])}"
    ]
    if top_k["num_contradictory_tokens"]:
        number = counted(top_k["num_contradictory_tokens"], "token")
        lines.append(f"{number} whose top-K is that of no distribution (mass above 1, or an id twice): not certified")
    return lines
