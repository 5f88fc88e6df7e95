"""Processes that end when the one that started them does, however that one ends."""

import ctypes
import os
import signal
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # of Linux's prctl
_LIBC = ctypes.CDLL(None)  # opened here: between fork and exec another thread's lock may be held for ever


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel end this process when its parent's thread that started it ends.

    Args:
        parent: process id of the parent; if it has gone already, this process ends here.
        number: the signal.
    """
    _LIBC.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # given to init or another reaper before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def ending_with_this_process(number: int = signal.SIGKILL) -> Callable[[], None]:
    """Return a ``preexec_fn`` for `subprocess` that ends the child with this process."""
    parent = os.getpid()
    return lambda: end_with_parent(parent, number)
