"""A process that is killed takes those that it started along."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STARTS_ANOTHER = """
import subprocess, sys
from trm_repro.parent_death import ending_with_this_process
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], preexec_fn=ending_with_this_process())
print(child.pid, flush=True)
child.wait()
"""


def has_ended(process: int) -> bool:
    """Whether a process is gone, or dead and not collected yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_child_ends_when_its_parent_is_killed():
    with subprocess.Popen([sys.executable, "-c", STARTS_ANOTHER], stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        assert not has_ended(child)
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while not has_ended(child):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.01)


def test_a_child_whose_parent_had_gone_before_it_could_ask_ends_itself():
    wrong = (
        f"from trm_repro.parent_death import end_with_parent\nend_with_parent({2**22 + 1})"  # no process has this id
    )
    assert subprocess.run([sys.executable, "-c", wrong], check=False, timeout=20).returncode == -signal.SIGKILL


def test_a_child_whose_parent_is_there_goes_on():
    right = f"from trm_repro.parent_death import end_with_parent\nend_with_parent({os.getpid()})"
    assert subprocess.run([sys.executable, "-c", right], check=False, timeout=20).returncode == 0
