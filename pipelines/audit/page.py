"""The audit as one self-contained HTML page: the document of evaluation/document.py with figures."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from evaluation.document import Block, Bullets, Cell, Document, Heading, Note, Paragraph, Picture, Row, Table
from evaluation.html import to_html
from evaluation.themes import light_and_dark, styled
from pipelines.audit.advice import TARGET
from pipelines.audit.terminal import DRIFT_ROWS, LENGTH_ARMS
from pipelines.audit.wording import advice_lines, counted, figure, headline, kept_shares, top_k_lines

Payload = dict[str, Any]

NUM_FILES = 3
"""Files named at the top; the rest are counted."""

MAX_STEP_ROWS = 40
"""Steps in the table of acceptance; the JSON has all of them."""

SWEEP_TITLES = {"trm_max": "TRM-Max", "trm_avg": "TRM-Avg", "ln_trm": "LN-TRM", "ser": "SER"}


def page_html(payload: Payload) -> str:
    """Write the page.

    Args:
        payload: of the audit.

    Returns:
        HTML that asks for nothing from anywhere.
    """
    blocks: list[Block] = [
        Paragraph(text=f"Read: {_sources(payload['files'])}"),
        Bullets(items=headline(payload)),
        Paragraph(text="Log-ratios are policy over rollout, in nats."),
        *(
            Note(text=row["message"], kind="warning" if row["level"] == "warning" else "note")
            for row in payload["findings"]
        ),
        Heading(text="Drift"),
        Table(
            columns=["quantity", "value"],
            rows=[[label, figure(payload[name])] for name, label in DRIFT_ROWS if payload.get(name) is not None],
        ),
        *_steps(payload["steps"]),
        Heading(text="What the paper's gates keep"),
        *_acceptance(payload),
        *_top_k(payload),
        *_gates(payload.get("gates", {})),
        *_where(payload.get("where", {})),
        Heading(text="Thresholds and bounds"),
        *_advice(payload),
    ]
    if payload["bad_rows"]:
        blocks += [Heading(text="Bad rows"), Bullets(items=payload["bad_rows"])]
    subtitle = f"{payload['created'].replace('T', ' ').replace('+00:00', ' UTC')}, trm-repro {payload['version']}"
    return to_html(Document(title="Audit of rollouts", subtitle=subtitle, blocks=blocks))


def _sources(files: list[str]) -> str:
    named = ", ".join(str(Path(file).resolve()) for file in files[:NUM_FILES])
    return named if len(files) <= NUM_FILES else f"{named} and {counted(len(files) - NUM_FILES, 'more file')}"


def _steps(steps: list[Payload]) -> list[Block]:
    if len(steps) < 2:
        return []
    numbers = [row["step"] for row in steps]
    return [
        Row(
            pictures=[
                _lines(numbers, {"PPL gap": [row["ppl_gap"] for row in steps]}, "step", "PPL gap over steps"),
                _lines(
                    numbers,
                    {"k3 mean": [row["k3_mean"] for row in steps], "k2 largest": [row["k2_max"] for row in steps]},
                    "step",
                    "mean k3 and largest k2 over steps",
                ),
            ]
        ),
        *_step_acceptance(steps),
    ]


def _step_acceptance(steps: list[Payload]) -> list[Table]:
    """Tabulate what arms and gates keep at each step, at most `MAX_STEP_ROWS` of them evenly over the run."""
    stride = -(-len(steps) // MAX_STEP_ROWS)
    caption = "Sequences kept at each step" + ("." if stride == 1 else f"; every {stride}th is shown.")
    tables = []
    for kind in ("acceptance", "gates"):
        names = list(dict.fromkeys(name for row in steps for name in row.get(kind, {})))
        rows = [
            [str(row["step"]), *(f"{row[kind][name]:.1%}" if name in row.get(kind, {}) else "-" for name in names)]
            for row in steps[::stride]
        ]
        if names:
            tables.append(Table(columns=["step", *names], rows=rows, caption=caption))
    return tables


def _acceptance(payload: Payload) -> list[Block]:
    held = payload["bound_if_threshold_held"]
    rows = [[name, f"{kept:.1%}", figure(held.get(name))] for name, kept in payload["acceptance"].items()]
    sweeps = {title: payload["sweep"][name] for name, title in SWEEP_TITLES.items() if payload["sweep"][name]}
    blocks: list[Block] = [
        Table(
            columns=["arm", "accepted", "bound (reward range 1)"],
            rows=rows,
            caption="Bound: unified, sharp constants, if KL stayed at the thresholds in every context.",
        )
    ]
    if sweeps:
        blocks.append(_sweep_picture(sweeps))
    lengths = payload["rejected_by_length"]
    blocks += [
        Heading(text="Rejected by response length", level=3),
        Table(
            columns=["tokens", "sequences", *LENGTH_ARMS],
            rows=[
                [row["length"], f"{row['num_sequences']:,}", *(f"{row['rejected'][arm]:.1%}" for arm in LENGTH_ARMS)]
                for row in lengths
            ],
        ),
    ]
    return blocks


def _top_k(payload: Payload) -> list[Block]:
    if "top_k" not in payload:
        return []
    words = ("accepted", "rejected", "undecided")
    rows = [[name, *(f"{row[word]:.1%}" for word in words)] for name, row in payload["top_k"]["arms"].items()]
    return [
        Heading(text="What top-K log-probs certify"),
        Bullets(items=top_k_lines(payload["top_k"])),
        Table(columns=["arm", *words], rows=rows),
    ]


def _gates(gates: Payload) -> list[Block]:
    if not gates:
        return []
    rows: list[Sequence[str | Cell]] = []
    for name, row in gates.items():
        if "not_applied" in row:
            rows.append([Cell(text=name, is_code=True), "-", "-", "-", row["not_applied"]])
            continue
        rows.append([Cell(text=name, is_code=True), *kept_shares(row), figure(row.get("weight_mean")), row["keeps"]])
    return [
        Heading(text="What the gates of others keep at their defaults"),
        Table(columns=["gate", "sequences kept", "tokens kept", "mean weight", "rule"], rows=rows, is_stacked=True),
    ]


def _where(where: Payload) -> list[Block]:
    blocks: list[Block] = [Heading(text="Where it sits")] if where else []
    for name, rows in where.items():
        keys = ("k1_mean", "k2_mean", "k3_mean", "k2_max")
        cells = [[row["bin"], f"{row['num_tokens']:,}", *(figure(row[key]) for key in keys)] for row in rows]
        columns = [name.replace("_", " "), "tokens", "k1", "k2", "k3", "largest k2"]
        blocks.append(Table(columns=columns, rows=cells))
    return blocks


def _advice(payload: Payload) -> list[Block]:
    blocks: list[Block] = [Bullets(items=advice_lines(payload["advice"]))]
    bounds = payload.get("bounds")
    if bounds is not None:
        blocks.append(Paragraph(text=f"Bounds: {bounds['reason']}."))
        if bounds["available"]:
            rows = [[name, figure(bounds["paper"][name]), figure(bounds["sharp"][name])] for name in bounds["paper"]]
            blocks.append(Table(columns=["bound", "paper's constants", "half of them"], rows=rows))
    return blocks


def _lines(x: list[int], series: dict[str, list[float | None]], label: str, title: str) -> Picture:
    with styled():
        drawing = Figure(figsize=(5, 3), layout="constrained")
        axes = drawing.add_subplot()
        for name, values in series.items():
            # By six digits: matplotlib warns of an axis between values that differ in the last bit alone.
            axes.plot(x, [float(f"{v:.6g}") if v and v > 0 else math.nan for v in values], label=name)
        axes.set(xlabel=label, yscale="log", title=title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if len(series) > 1:
            axes.legend()
    light, dark = light_and_dark(drawing)
    return Picture(image=light, dark_image=dark, alt=title)


def _sweep_picture(sweeps: dict[str, list[Any]]) -> Picture:
    with styled():
        drawing = Figure(figsize=(7, 3.5), layout="constrained")
        axes = drawing.add_subplot()
        for name, points in sweeps.items():
            axes.plot([point[0] for point in points], [point[1] for point in points], label=name)
        axes.axhline(TARGET, linestyle="--", color="#000000", linewidth=0.8, label=f"{TARGET:g}, recommended minimum")
        axes.set(xscale="log", xlabel="threshold", ylabel="accepted fraction", ylim=(0, 1.02))
        axes.legend()
        axes.grid(alpha=0.3)
    light, dark = light_and_dark(drawing)
    return Picture(image=light, dark_image=dark, alt="accepted fraction of sequences against each gate's threshold")
