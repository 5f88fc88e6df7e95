"""What a reader of the terminal or of the page sees first, and what no table may suggest."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from evaluation.document import Table
from pipelines.audit.page import _lines, page_html
from pipelines.audit.terminal import LENGTH_ARMS, summary_text
from pipelines.cli import main
from tests.unit.audit_data import audited, sample, write_jsonl
from trm_repro import __version__

ROWS = sample(40, noise=0.3)


@pytest.fixture(scope="module")
def payload(tmp_path_factory):
    return audited(write_jsonl(tmp_path_factory.mktemp("audit") / "rollouts.jsonl", ROWS))


@pytest.fixture(scope="module")
def html(payload):
    return page_html(payload)


def cells(html, name):
    """Give the class and text of each cell in the row that ``name`` heads."""
    row = re.search(rf'<th scope="row">(?:<code>)?{re.escape(name)}(?:</code>)?</th>(.*?)</tr>', html, re.DOTALL)
    return re.findall(r'<td data-label="[^"]*" class="([^"]*)">(.*?)</td>', row[1])


def test_the_first_lines_tell_the_size_the_gap_what_is_kept_and_the_findings(payload):
    first, second, third, blank, *_ = summary_text(payload).splitlines()
    assert first.startswith(f"40 sequences, {payload['num_tokens']:,} tokens; format generic (1 file); ")
    assert second == (
        f"PPL gap {payload['ppl_gap']:.3g}; TRM-Max 0.05 keeps {payload['acceptance']['trm_max_0.05']:.1%} of "
        f"sequences, TRM-Avg 0.001 {payload['acceptance']['trm_avg_0.001']:.1%}"
    )
    assert (third, blank) == ("no findings", "")


def test_one_of_anything_is_singular(tmp_path):
    row = sample(1)[0] | {"rollout_logprobs": [-1.0], "policy_logprobs": [-30.0], "token_ids": [1], "other": 1}
    names = ("rollout_logprobs", "policy_logprobs", "other")
    text = summary_text(audited(write_jsonl(tmp_path / "a.jsonl", [row], names)))
    assert text.startswith("1 sequence, 1 token; format generic (1 file)")
    assert re.search(r"^- 1 log-ratio beyond \+-20 was clamped", text, re.MULTILINE)
    assert not re.search(r"\b1 (\w+ )?(sequences|tokens|files|notes|warnings|findings|log-ratios)\b", text)


def test_five_bad_rows_are_named_and_the_rest_counted(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    path.write_text(path.read_text() + "no json\n" * 7)
    text = summary_text(audited(path, skip_bad=True))
    assert "! 7 bad rows were left out\n" in text
    assert re.findall(r"a\.jsonl: line (\d+): ", text) == ["41", "42", "43", "44", "45"]
    assert "and 2 more; `bad_rows` of --json names the first 20\n" in text


def test_weighing_gates_show_a_weight_and_no_share_of_tokens(payload, html):
    weighing = [name for name, row in payload["gates"].items() if "weight_mean" in row]
    assert {"token_tis", "cispo", "minpro"} <= set(weighing)
    text = summary_text(payload)
    for name in weighing:
        share, tokens, weight = re.search(rf"^  {name} +(\S+) +(\S+) +(\S+)$", text, re.MULTILINE).groups()
        assert (tokens, weight) == ("-", f"{payload['gates'][name]['weight_mean']:.3g}")
        assert [content for _, content in cells(html, name)][:3] == [share, "-", weight]


def test_bounds_stand_beside_the_range_of_the_reward(payload, html):
    assert "bound if it held (reward range 1)" in summary_text(payload)
    assert "bound (reward range 1)" in html


def test_the_files_written_are_named(tmp_path, capsys):
    path, out, page = write_jsonl(tmp_path / "a.jsonl", ROWS), tmp_path / "out.json", tmp_path / "out.html"
    assert main(["audit", str(path), "--quick", "--json", str(out), "--html", str(page)]) == 0
    assert capsys.readouterr().out.endswith(f"wrote {out}\nwrote {page}\n")


def test_the_page_says_when_by_which_version_and_from_where(payload):
    html = page_html(payload | {"files": ["a.jsonl", "b", "c", "d", "e"]})
    assert f"{payload['created'][:10]} {payload['created'][11:19]} UTC, trm-repro {__version__}" in html
    assert f"Read: {Path('a.jsonl').resolve()}, " in html
    assert "and 2 more files" in html


def test_numbers_on_the_page_stand_to_the_right_where_some_are_missing(html):
    assert [kind for kind, _ in cells(html, "trm_avg_0.001")] == ["number", "number"]  # without a bound: "-"
    assert [kind for kind, _ in cells(html, "minpro")][:3] == ["number"] * 3


def test_page_and_terminal_break_the_same_few_arms_down_by_length(payload, monkeypatch):
    tables = []
    monkeypatch.setattr("pipelines.audit.page.Table", lambda **fields: tables.append(Table(**fields)) or tables[-1])
    page_html(payload)
    (columns,) = [table.columns for table in tables if list(table.columns[:2]) == ["tokens", "sequences"]]
    assert tuple(columns[2:]) == LENGTH_ARMS


def test_figures_have_readable_legends_whole_steps_and_a_named_line_at_70_percent(payload, monkeypatch):
    drawn = []

    def keep(drawing):
        drawing.draw_without_rendering()
        drawn.append(drawing.axes[0])
        return b"<svg", b"<svg"

    monkeypatch.setattr("pipelines.audit.page.light_and_dark", keep)
    page_html(payload)
    _, tails, sweep = drawn
    assert [text.get_text() for text in tails.get_legend().get_texts()] == ["k3 mean", "k2 largest"]
    assert all(float(tick).is_integer() for tick in tails.get_xticks())
    (line,) = [line for line in sweep.get_lines() if line.get_label().startswith("0.7, ")]
    assert set(line.get_ydata()) == {0.7}
    assert line.get_label() in [text.get_text() for text in sweep.get_legend().get_texts()]


def test_terminal_and_page_say_what_top_k_certifies_and_the_page_what_each_step_keeps(payload):
    ends = {"kl_low_mean": 0.01, "kl_low_max": 0.2, "kl_high_max": None, "tv_low_mean": 0.02, "tv_high_mean": 0.3}
    arms = {"trm_max_0.05": {"accepted": 0.0, "rejected": 0.25, "undecided": 0.75}}
    top_k = ends | {"tv_low_max": 0.4, "tv_high_max": 0.9, "num_contradictory_tokens": 2, "arms": arms}
    text, page = (make(payload | {"top_k": top_k}) for make in (summary_text, page_html))
    for written in (text, page):
        assert "KL at least 0.01 in the mean and 0.2 at a token, no upper end" in written
        assert "2 tokens whose top-K is that of no distribution" in written
    assert re.search(r"trm_max_0.05 +0.0% +25.0% +75.0%", text)
    first, second, *_ = re.findall(r'<th scope="row">1</th>(.*?)</tr>', page, re.DOTALL)
    assert f"{payload['steps'][1]['acceptance']['trm_avg_0.002']:.1%}" in first
    assert f"{payload['steps'][1]['gates']['geometric']:.1%}" in second
    assert page.count("Sequences kept at each step.") >= 2


@pytest.mark.filterwarnings("error")
def test_a_curve_that_is_flat_but_for_its_last_bit_is_drawn_without_a_warning():
    _lines([0, 1, 2], {"a": [0.1, 0.1 + 2e-17, math.nextafter(0.1, 1)]}, "step", "flat")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("value", "num_infinite"), [(-1e300, 1), (float(np.finfo(np.float32).min), 0)])
def test_a_log_prob_beyond_float32_stands_for_a_dropped_token(tmp_path, value, num_infinite):
    rows = [{"rollout_logprobs": [-1.0, last], "policy_logprobs": [-1.0, -2.0]} for last in (-2.0, value)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = audited(tmp_path / "a.jsonl")
    assert (found["num_sequences"], found["num_nonfinite_sequences"]) == (2, num_infinite)
