"""The audit as text for a terminal: what to know first, then the numbers."""

from typing import Any

from pipelines.audit.wording import advice_lines, figure, headline, kept_shares, top_k_lines

Payload = dict[str, Any]

DRIFT_ROWS = (
    ("ppl_gap", "PPL gap, mean over sequences of |mean log-ratio|"),
    ("k1_mean", "k1 mean"),
    ("k2_mean", "k2 mean"),
    ("k3_mean", "k3 mean"),
    ("k2_p99", "k2 99%"),
    ("k2_p999", "k2 99.9%"),
    ("k2_max", "k2 largest"),
    ("kl_mean", "exact KL mean"),
    ("kl_max", "exact KL largest"),
    ("chi_square", "chi-square"),
    ("ess_token_fraction", "effective sample size, tokens"),
    ("ess_sequence_fraction", "effective sample size, sequences"),
    ("hill_index", "Hill index of |log-ratio|"),
)

LENGTH_ARMS = ("trm_max_0.05", "trm_avg_0.001", "ln_trm_0.05", "ser_0.05")

NUM_NAMED = 5
"""Bad rows named here; the JSON names more."""


def aligned(rows: list[list[str]]) -> str:
    """Lay rows out in columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  " + "  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))])
        for first, *rest in rows
    )


def summary_text(payload: Payload) -> str:
    """Write the whole summary."""
    blocks = [
        "\n".join(headline(payload)),
        _findings(payload),
        "drift (nats)\n"
        + aligned([[label, figure(payload[name])] for name, label in DRIFT_ROWS if payload.get(name) is not None]),
        _acceptance(payload),
        _top_k(payload),
        _lengths(payload),
        _gates(payload),
        _where(payload),
        _advice(payload),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _findings(payload: Payload) -> str:
    marks, lines = {"warning": "!", "note": "-"}, []
    for row in payload["findings"]:
        lines.append(f"{marks[row['level']]} {row['message']}")
        if row["code"] == "bad_rows":
            lines += [f"    {name}" for name in payload["bad_rows"][:NUM_NAMED]]
            rest = payload["num_bad_rows"] - NUM_NAMED
            lines.append(f"    {f'and {rest:,} more; ' if rest > 0 else ''}`bad_rows` of --json names the first 20")
    return "\n".join(lines)


def _acceptance(payload: Payload) -> str:
    held = payload["bound_if_threshold_held"]
    rows = [["the paper's gates", "accepted", "bound if it held (reward range 1)"]]
    rows += [[name, f"{kept:.1%}", figure(held.get(name))] for name, kept in payload["acceptance"].items()]
    return aligned(rows)


def _top_k(payload: Payload) -> str:
    if "top_k" not in payload:
        return ""
    rows = [["certified by top-K", "accepted", "rejected", "undecided"]]
    for name, row in payload["top_k"]["arms"].items():
        rows.append([name, *(f"{row[word]:.1%}" for word in ("accepted", "rejected", "undecided"))])
    return "\n".join([*top_k_lines(payload["top_k"]), aligned(rows)])


def _lengths(payload: Payload) -> str:
    rows = [["rejected by length", "sequences", *LENGTH_ARMS]]
    for row in payload["rejected_by_length"]:
        rejected = [f"{row['rejected'][arm]:.1%}" for arm in LENGTH_ARMS]
        rows.append([row["length"], f"{row['num_sequences']:,}", *rejected])
    return aligned(rows)


def _gates(payload: Payload) -> str:
    rows = [["other gates", "sequences kept", "tokens kept", "mean weight"]]
    for name, row in payload.get("gates", {}).items():
        if "not_applied" in row:
            rows.append([name, row["not_applied"], "", ""])
            continue
        rows.append([name, *kept_shares(row), figure(row.get("weight_mean"))])
    return aligned(rows) if len(rows) > 1 else ""


def _where(payload: Payload) -> str:
    blocks = []
    for name, slices in payload.get("where", {}).items():
        if name == "token_id":
            slices = slices[:5]
        rows = [[name.replace("_", " "), "tokens", "k1", "k3", "largest k2"]]
        rows += [
            [
                row["bin"],
                f"{row['num_tokens']:,}",
                figure(row["k1_mean"]),
                figure(row["k3_mean"]),
                figure(row["k2_max"]),
            ]
            for row in slices
        ]
        blocks.append(aligned(rows))
    return "\n\n".join(blocks)


def _advice(payload: Payload) -> str:
    lines = advice_lines(payload["advice"])
    bounds = payload.get("bounds")
    if bounds is not None:
        lines.append(f"bounds: {bounds['reason']}")
        if bounds["available"]:
            unified = [figure(bounds[constants]["unified"]) for constants in ("paper", "sharp")]
            lines[-1] += f"; unified {unified[0]} with the paper's constants, {unified[1]} with half of them"
    return "thresholds\n" + "\n".join(f"  {line}" for line in lines)
