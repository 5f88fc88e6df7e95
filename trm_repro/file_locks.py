"""Locks between processes, held on files; they end with the process, however it ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trm_repro.errors import InputError


@contextmanager
def file_lock(path: Path, *, busy: str | None = None) -> Iterator[None]:
    """Hold a lock file.

    Args:
        path: the lock file, made where it is not there.
        busy: what to say when another process holds it; None waits for that process instead.

    Raises:
        InputError: with ``busy`` when another process holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if busy is None else fcntl.LOCK_NB))
        except BlockingIOError:
            raise InputError(f"{path.parent}: {busy}") from None
        yield
