"""Look the locked packages up in public lists of vulnerabilities: `python -m tests.dependency_audit` (`make check`).

Says so where no list can be reached; that is no failure. A known vulnerability is one, unless
requirements/known_vulnerabilities.txt names it with a reason.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("cpu", "dev", "gpu", "mlflow")
PINS = ROOT / "requirements" / "audit.txt"
ACCEPTED = ROOT / "requirements" / "known_vulnerabilities.txt"
TOOL = ROOT / ".venv" / "audit"
SERVICES = ("osv", "pypi")
"""Of pip-audit, in the order tried."""
CONTROL = "jinja2==2.10"
"""Has been known to be vulnerable since 2019: a service that does not say so answers nothing else either."""
PROBE_SECONDS = 20.0
LONGEST_SECONDS = 600.0


@dataclass(frozen=True)
class Answer:
    """What a service said: vulnerabilities as (package and version, identifiers, versions with the mend)."""

    found: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]
    unknown: tuple[str, ...]
    num_known: int


def main() -> int:
    """Audit every lock; returns 1 for a vulnerability that is not accepted."""
    accepted = read_accepted(ACCEPTED)
    if not _install(TOOL):
        sys.stdout.write("dependency audit: NOT DONE, pip-audit cannot be installed here\n")
        return 0
    service = next((service for service in SERVICES if answers(service, TOOL)), None)
    if service is None:
        sys.stdout.write("dependency audit: NOT DONE, no list of vulnerabilities can be reached from here\n")
        return 0
    failures, audited = [], 0
    for lock in LOCKS:
        answer = ask(service, locked(ROOT / "requirements" / f"{lock}.txt"), TOOL, limit=LONGEST_SECONDS)
        if answer is None:
            sys.stdout.write(f"dependency audit: NOT DONE for {lock}.txt, the list of vulnerabilities went away\n")
            continue
        audited += answer.num_known
        if answer.unknown:
            sys.stdout.write(f"dependency audit: {lock}.txt: not on the list: {', '.join(answer.unknown)}\n")
        for package, names, mended in answer.found:
            if not accepted.keys() & set(names):
                failures.append(f"{lock}.txt: {package}: {', '.join(names)}; mended in {', '.join(mended) or 'none'}")
    sys.stdout.writelines(f"dependency audit: {line}\n" for line in failures)
    sys.stdout.write(f"dependency audit: {audited} locked packages by {service}, {len(failures)} vulnerabilities\n")
    return 1 if failures else 0


def read_accepted(path: Path) -> dict[str, str]:
    """Read the vulnerabilities that are passed over, and why.

    Raises:
        SystemExit: if one has no reason.
    """
    accepted = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, why = line.partition(" ")
        if line.strip() and not line.startswith("#"):
            if not why.strip():
                raise SystemExit(f"{path}: {name} has no reason; write one behind it")
            accepted[name] = why.strip()
    return accepted


def locked(path: Path) -> list[str]:
    """Read ``name==version`` lines, without what names a build, such as +cpu: lists know releases."""
    matches = (re.match(r"([A-Za-z0-9._-]+)==([^\s;+]+)", line) for line in path.read_text().splitlines())
    return [f"{match[1]}=={match[2]}" for match in matches if match]


def answers(service: str, tool: Path) -> bool:
    """Whether a service knows what has long been known."""
    answer = ask(service, [CONTROL], tool, limit=PROBE_SECONDS / len(SERVICES))
    return answer is not None and bool(answer.found)


def ask(service: str, requirements: list[str], tool: Path, *, limit: float) -> Answer | None:
    """Ask pip-audit about locked packages.

    Args:
        service: of pip-audit.
        requirements: ``name==version``.
        tool: folder in which pip-audit is installed.
        limit: seconds.

    Returns:
        The answer, or None where there was none.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lock.txt"
        file.write_text("\n".join(requirements) + "\n", encoding="utf-8")
        words = ["--requirement", str(file), "--no-deps", "--disable-pip", "--format", "json"]
        words += ["--progress-spinner", "off", "--vulnerability-service", service, "--timeout", "10"]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pip_audit", *words],
                env=os.environ | {"PYTHONPATH": str(tool)},
                capture_output=True,
                timeout=limit,
                check=False,
            )
            return _read(json.loads(done.stdout))
        except (subprocess.TimeoutExpired, ValueError, KeyError):
            return None


def _read(answer: dict[str, Any]) -> Answer:
    known = [package for package in answer["dependencies"] if "skip_reason" not in package]
    found = [
        (
            f"{package['name']} {package['version']}",
            (problem["id"], *problem["aliases"]),
            tuple(problem["fix_versions"]),
        )
        for package in known
        for problem in package["vulns"]
    ]
    unknown = [package["name"] for package in answer["dependencies"] if "skip_reason" in package]
    return Answer(tuple(found), tuple(unknown), len(known))


def _install(tool: Path) -> bool:
    """Install the pinned pip-audit in a folder of its own, unless it is there."""
    stamp, pins = tool / "pins.txt", PINS.read_text(encoding="utf-8")
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == pins:
        return True
    words = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--upgrade"]
    done = subprocess.run(
        [sys.executable, *words, "--target", str(tool), "--requirement", str(PINS)], capture_output=True, check=False
    )
    if done.returncode == 0:
        stamp.write_text(pins, encoding="utf-8")
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
