"""Fixtures that several test files share: data from outside, and one small experiment run once."""

import contextlib
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from trm_repro.file_locks import file_lock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
SMOKE = ROOT / "conf" / "smoke.yaml"

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Folder of problem files that are not part of the project."""
    folder = os.environ.get("TRM_REPRO_TEST_DATA")
    if not folder:
        pytest.skip("TRM_REPRO_TEST_DATA is not set: it names a folder with AIME problems and grading cases")
    return Path(folder)


@pytest.fixture(scope="session")
def qwen3_tokenizer(test_data: Path) -> "PreTrainedTokenizerFast":
    """Qwen3's own tokenizer of 151,669 tokens."""
    from trm_repro.policy import load_tokenizer

    return load_tokenizer(test_data / "qwen3-tokenizer")


def run_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run trm-repro in this process, which has the libraries loaded already; what a user sees comes back as text."""
    from pipelines.cli import main

    output, errors = io.StringIO(), io.StringIO()
    words = [str(argument) for argument in arguments]
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(words)
    return subprocess.CompletedProcess(words, code, output.getvalue(), errors.getvalue())


def run_process(*arguments: object, timeout: float = 540) -> subprocess.CompletedProcess[str]:
    """Run trm-repro as a user does, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "pipelines.cli", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def cli():
    """The command line, as a function that returns the finished process."""
    return run_command


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Output folder of a finished `reproduce conf/smoke.yaml`; treat it as read-only: all test processes share it."""
    folder = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        folder = folder.parent  # of the base folders of all test processes
    folder /= "smoke"
    said = folder / "stdout.txt"
    with file_lock(folder.with_name("smoke.lock")):
        if not said.is_file():
            shutil.rmtree(folder, ignore_errors=True)
            done = run_process(
                "reproduce", SMOKE, f"output.dir={folder / 'runs'}", f"output.warm_start_dir={folder / 'warm_starts'}"
            )
            assert done.returncode == 0, done.stdout + done.stderr
            (folder / "stderr.txt").write_text(done.stderr)
            said.write_text(done.stdout)
    return folder


@pytest.fixture
def smoke_copy(smoke: Path, tmp_path: Path) -> Path:
    """A copy of the finished experiment that a test may change."""
    shutil.copytree(smoke, tmp_path / "smoke")
    return tmp_path / "smoke"
