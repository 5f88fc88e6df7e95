"""A second opinion on a grade from math-verify, which never decides a reward.

math-verify works expressions out: it finds 140/2 equal to 70, and a tower of powers keeps it busy without end. So it
runs in a child process of its own, which is killed and replaced when it takes too long; nothing of a response is
evaluated in this process. This file is also the child's program and imports the standard library only.
"""

import importlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from types import ModuleType, TracebackType
from typing import Any, Literal, Self

Opinion = Literal["agree", "disagree", "timed out", "not available"]

MAX_READ_CHARACTERS = 20_000
"""Only the end of a longer response is sent."""
START_LIMIT = 60.0
"""Seconds a child may take to import math-verify, which is not counted as grading; half a second is usual."""
CHILD_MEMORY = 4 * 1024**3
"""Bytes of address space a child may take."""


class SecondOpinion:
    r"""Children that grade with math-verify; several threads may ask at once.

    Children start when first asked and end with ``close``, or with this process; where one cannot be started, none is
    tried again in its place. Use as a context manager, and not across a fork.

    Example: ``with SecondOpinion() as second: second.ask("70", r"\boxed{140/2}", correct=False)`` gives "disagree".
    """

    def __init__(self, *, time_limit: float = 5.0, num_workers: int = 1) -> None:
        """Prepare to start children.

        Args:
            time_limit: seconds math-verify may take for one response, > 0.
            num_workers: children at work at once, >= 1; further threads wait for one.

        Raises:
            ValueError: if an argument is out of range.
        """
        if not 0 < time_limit < float("inf"):
            raise ValueError(f"time_limit must be > 0 and finite, got {time_limit}")
        if num_workers < 1:
            raise ValueError(f"num_workers must be >= 1, got {num_workers}")
        self._num_workers = num_workers
        self._closing = threading.Lock()
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for _ in range(num_workers):
            self._idle.put(_Worker(time_limit))

    def ask(self, answer: str, response: str, *, correct: bool) -> Opinion:
        """Compare a grade with math-verify's.

        Args:
            answer: the right answer, as text.
            response: a model's response.
            correct: whether it was graded right.

        Returns:
            "agree" or "disagree" with ``correct``; "timed out" where math-verify took longer than the limit; "not
            available" where it is not installed, cannot read ``answer``, or fails on the response.
        """
        worker = self._idle.get()
        try:
            verdict = worker.verdict(answer, response[-MAX_READ_CHARACTERS:])
        finally:
            self._idle.put(worker)
        if isinstance(verdict, bool):
            return "agree" if verdict == correct else "disagree"
        return verdict

    def close(self) -> None:
        """End the children, once the questions under way are answered; later ones are "not available"."""
        with self._closing:
            workers = [self._idle.get() for _ in range(self._num_workers)]
            for worker in workers:
                worker.close()
                self._idle.put(worker)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the children."""
        self.close()


class _Worker:
    """One child, started when needed; used by one thread at a time."""

    def __init__(self, time_limit: float) -> None:
        self._time_limit = time_limit
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._unread = b""
        self._is_closed = False

    def verdict(self, answer: str, response: str) -> bool | Literal["timed out", "not available"]:
        """Ask whether the response is right."""
        if self._is_closed or not (self._is_running() or self._start()):
            return "not available"
        try:
            reply = self._exchange({"answer": answer, "response": response}, self._time_limit)
        except TimeoutError:
            self._stop()
            return "timed out"
        except (OSError, ValueError):  # the child died
            self._stop()
            return "not available"
        except BaseException:  # an interrupt: the reply would be taken for that to the next question
            self._stop()
            raise
        return reply if isinstance(reply, bool) else "not available"

    def close(self) -> None:
        """End the child for good."""
        self._is_closed = True
        self._stop()

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self) -> bool:
        self._stop()
        try:
            self._connection, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", __file__],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                )
            is_ready = self._exchange({"time_limit": self._time_limit}, START_LIMIT) is True
        except (OSError, ValueError):
            is_ready = False
        except BaseException:
            self._stop()
            raise
        if not is_ready:
            self.close()
        return is_ready

    def _stop(self) -> None:
        process, connection = self._process, self._connection
        self._process, self._connection, self._unread = None, None, b""
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait()

    def _exchange(self, question: dict[str, Any], limit: float) -> object:
        """Send one line and wait for one; TimeoutError, or OSError or ValueError where the child has gone."""
        connection = self._connection
        assert connection is not None
        deadline = time.monotonic() + limit
        connection.settimeout(limit)
        connection.sendall(json.dumps(question).encode("ascii") + b"\n")
        while b"\n" not in self._unread:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            connection.settimeout(remaining)
            received = connection.recv(4096)
            if not received:
                raise ConnectionError("the child has gone")
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


def _serve() -> None:
    """Answer the parent's lines until it hangs up; the first one only asks whether math-verify is here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the parent's to handle
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    questions = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # what a library prints is no reply
    time_limit = json.loads(questions.readline())["time_limit"]
    _limit_memory()
    try:
        math_verify = importlib.import_module("math_verify")
    except ImportError:
        replies.write(b"false\n")
        return
    _is_right(math_verify, "70", r"\boxed{\frac{140}{2}}")  # the first question loads parsers
    replies.write(b"true\n")
    for line in questions:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, time_limit + 1)  # ends a child whose parent was killed
        verdict = _is_right(math_verify, question["answer"], question["response"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(verdict).encode("ascii") + b"\n")


def _is_right(math_verify: ModuleType, answer: str, response: str) -> bool | None:
    """Give math-verify's verdict; None where it has none. Its own alarms stay off: this process is killed instead."""
    try:
        gold = math_verify.parse(f"\\boxed{{{answer}}}", parsing_timeout=None, raise_on_error=True)
        if not gold:
            return None
        found = math_verify.parse(response, parsing_timeout=None, raise_on_error=True)
        return bool(math_verify.verify(gold, found, timeout_seconds=None, raise_on_error=True))
    except Exception:  # whatever a parser of any text raises: no opinion
        return None


def _limit_memory() -> None:
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = CHILD_MEMORY if most == resource.RLIM_INFINITY else min(CHILD_MEMORY, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))


if __name__ == "__main__":
    _serve()
