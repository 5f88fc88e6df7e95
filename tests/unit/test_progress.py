"""What a long command says of its progress: a few whole lines in a log, a bar drawn over itself in a terminal."""

import io
import sys

import pytest

from pipelines.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, **settings: object) -> str:
    """Draw a bar of 200 steps that says what it is doing at each, and return all that was written."""
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("reproduce", 200, "step", **settings) as bar:
        for step in range(200):
            bar.set_postfix_str(f"train arm/seed_{step}", refresh=False)
            bar.update(1)
    return stream.getvalue()


def test_a_log_has_a_line_at_the_start_and_one_at_the_end_when_the_work_is_short(monkeypatch: pytest.MonkeyPatch):
    text = shown(monkeypatch, io.StringIO())
    assert "\r" not in text
    first, last = text.splitlines()
    assert first.startswith("reproduce:   0% 0/200 [")
    assert last.startswith("reproduce: 100% 200/200 [")
    assert last.endswith("train arm/seed_199]")


def test_a_log_has_a_line_whenever_its_time_has_come(monkeypatch: pytest.MonkeyPatch):
    lines = shown(monkeypatch, io.StringIO(), seconds=0.0).splitlines()
    assert len(lines) == 202
    assert lines[7].startswith("reproduce:   4% 7/200 [")


def test_a_changed_note_alone_is_shown_when_it_is_time_to(monkeypatch: pytest.MonkeyPatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("reproduce", 3, "step", seconds=0.0) as bar:
        bar.set_postfix_str("warm start", refresh=False)
        bar.update(0)
    assert "warm start" in stream.getvalue().splitlines()[1]


def test_where_the_total_is_not_known_what_is_done_is_counted(monkeypatch: pytest.MonkeyPatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("warm start, seed 1", None, " steps") as bar:
        bar.update(40)
    assert stream.getvalue().splitlines()[1].startswith("warm start, seed 1: 40 steps [")


def test_a_terminal_gets_a_bar_drawn_over_itself(monkeypatch: pytest.MonkeyPatch):
    text = shown(monkeypatch, Terminal())
    assert text.count("\r") > 1
    assert text.count("\n") == 1


def test_a_hidden_bar_says_nothing(monkeypatch: pytest.MonkeyPatch):
    for stream in (io.StringIO(), Terminal()):
        assert shown(monkeypatch, stream, is_hidden=True) == ""
