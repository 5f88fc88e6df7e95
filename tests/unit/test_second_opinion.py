import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import ROOT
from trm_repro.tasks import second_opinion
from trm_repro.tasks.second_opinion import Opinion, SecondOpinion

TOWER = r"\boxed{9^{9^{9^{9^{9}}}}}"


@pytest.fixture(scope="module")
def second():
    pytest.importorskip("math_verify")
    with SecondOpinion(time_limit=2.0, num_workers=2) as opinion:
        yield opinion


@pytest.fixture
def fake_math_verify(tmp_path, monkeypatch):
    """Put a module in math-verify's place in the child."""

    def install(source: str) -> None:
        (tmp_path / "math_verify.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return install


FAKE = """
import os, sys, time
def parse(text, **_):
    if "crash" in text: os._exit(3)
    if "sleep" in text: time.sleep(60)
    if "raise" in text: raise RuntimeError
    if "hoard" in text: return [bytearray(8 * 1024**3)]
    print("a library prints", flush=True)
    return [] if text == "" or "unreadable" in text else [text.removeprefix("\\\\boxed{").removesuffix("}")]
def verify(gold, found, **_):
    return gold == found
"""


@pytest.mark.parametrize(
    ("response", "correct", "opinion"),
    [
        (r"\boxed{70}", True, "agree"),
        (r"\boxed{49}", False, "agree"),
        (r"\boxed{\frac{140}{2}}", False, "disagree"),
        (r"\boxed{49}", True, "disagree"),
        ("", False, "agree"),
        ("x" * 200_000 + r"\boxed{70}", True, "agree"),
    ],
)
def test_it_says_whether_math_verify_grades_alike(second, response, correct, opinion):
    assert second.ask("70", response, correct=correct) == opinion


@pytest.mark.parametrize(
    "response",
    [
        "Answer: " + "7" * 5000,
        "Answer: " + "9^" * 5000,
        r"\boxed{" + "{" * 3000 + "70" + "}" * 3000 + "}",
        "\0" * 50_000,
    ],
    ids=["digits", "powers", "braces", "nul"],
)
def test_degenerate_responses_get_an_opinion_in_time(second, response):
    second.ask("70", "70", correct=True)  # starts a child where the last one was killed
    began = time.monotonic()
    assert second.ask("70", response, correct=True) in get_args(Opinion)
    assert time.monotonic() - began < 5.0


def test_a_power_tower_times_out_and_the_next_question_is_answered(second):
    second.ask("70", "70", correct=True)  # starts a child where the last one was killed
    began = time.monotonic()
    assert second.ask("70", TOWER, correct=False) == "timed out"
    assert 2.0 <= time.monotonic() - began < 5.0
    assert second.ask("70", r"\boxed{70}", correct=True) == "agree"


def test_threads_may_ask_at_once_and_get_their_own_replies(second):
    def ask(number: int) -> str:
        return second.ask(str(number), rf"\boxed{{{number}}}", correct=number % 2 == 0)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(24))) == ["agree", "disagree"] * 12


def test_a_thread_beside_one_that_times_out_is_answered(second):
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(second.ask, "70", TOWER, correct=False)
        assert threads.submit(second.ask, "70", r"\boxed{70}", correct=True).result() == "agree"
        assert slow.result() == "timed out"


def test_nothing_of_math_verify_enters_this_process():
    code = (
        "import signal, sys; from trm_repro.tasks.second_opinion import SecondOpinion\n"
        "before = signal.getsignal(signal.SIGALRM)\n"
        "with SecondOpinion() as second: second.ask('7', 'Answer: 7', correct=True)\n"
        "sys.exit('sympy' in sys.modules or 'math_verify' in sys.modules"
        " or signal.getsignal(signal.SIGALRM) is not before)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


@settings(max_examples=40, deadline=None)
@given(response=st.text(alphabet=st.characters(exclude_categories=()), max_size=40))
def test_nuls_and_surrogates_and_any_script_get_an_opinion(second, response):
    for written in (f"Answer: {response}", f"\\boxed{{{response}}}"):
        assert second.ask("71", written, correct=False) in get_args(Opinion)


def test_without_math_verify_it_is_not_available(fake_math_verify):
    fake_math_verify("raise ImportError")
    with SecondOpinion() as second:
        assert second.ask("70", r"\boxed{70}", correct=True) == "not available"
        began = time.monotonic()
        assert second.ask("70", r"\boxed{70}", correct=True) == "not available"
        assert time.monotonic() - began < 0.05  # no child is tried again


def test_a_child_that_does_not_start_is_given_up(fake_math_verify, monkeypatch):
    fake_math_verify("import time; time.sleep(60)")
    monkeypatch.setattr(second_opinion, "START_LIMIT", 0.5)
    with SecondOpinion() as second:
        assert second.ask("70", r"\boxed{70}", correct=True) == "not available"


def test_a_child_that_cannot_be_run_is_given_up(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with SecondOpinion() as second:
        assert second.ask("70", r"\boxed{70}", correct=True) == "not available"


def test_a_child_that_dies_is_replaced(fake_math_verify):
    fake_math_verify(FAKE)
    with SecondOpinion(time_limit=0.5) as second:
        assert second.ask("70", "70", correct=True) == "agree"  # what the library printed is no reply
        for response, opinion in [("crash", "not available"), ("sleep", "timed out"), ("raise", "not available")]:
            assert second.ask("70", response, correct=True) == opinion
            assert second.ask("70", "49", correct=True) == "disagree"
        assert second.ask("unreadable", "70", correct=True) == "not available"


def test_a_child_killed_between_questions_is_replaced(fake_math_verify):
    fake_math_verify(FAKE)
    with SecondOpinion() as second:
        assert second.ask("70", "70", correct=True) == "agree"
        process = second._idle.queue[0]._process
        process.kill()
        process.wait()
        assert second.ask("70", "70", correct=True) == "agree"


def test_after_close_it_is_not_available_and_no_child_is_left(fake_math_verify):
    fake_math_verify(FAKE)
    second = SecondOpinion(num_workers=2)
    second.ask("70", "70", correct=True)
    process = next(worker._process for worker in second._idle.queue if worker._process is not None)
    closers = [threading.Thread(target=second.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(timeout=10)
        assert not closer.is_alive()
    assert process.returncode == -signal.SIGKILL
    assert second.ask("70", "70", correct=True) == "not available"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_a_busy_child_ends_when_its_parent_is_killed(fake_math_verify):
    fake_math_verify(FAKE.replace("time.sleep(60)", "9**9**9**9"))
    code = (
        "import threading, time; from trm_repro.tasks.second_opinion import SecondOpinion\n"
        "second = SecondOpinion(time_limit=1.0); second.ask('7', '7', correct=True)\n"
        "print(second._idle.queue[0]._process.pid, flush=True)\n"
        "second.ask('7', 'sleep', correct=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        child = Path("/proc") / parent.stdout.readline().strip()
        time.sleep(0.4)
        parent.kill()
    deadline = time.monotonic() + 8.0
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_alive(child)


def is_alive(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("limits", [{"time_limit": 0}, {"time_limit": float("nan")}, {"num_workers": 0}])
def test_limits_out_of_range_are_refused(limits):
    with pytest.raises(ValueError, match=f"{next(iter(limits))} must be"):
        SecondOpinion(**limits)


def test_a_response_that_takes_all_memory_gets_no_opinion(fake_math_verify):
    fake_math_verify(FAKE)
    with SecondOpinion() as second:
        assert second.ask("70", "hoard", correct=True) == "not available"
        assert second.ask("70", "70", correct=True) == "agree"
