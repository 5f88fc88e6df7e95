"""Rules of the repository that a linter does not hold."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path
    for folder in ("trm_repro", "pipelines", "evaluation", "benchmarks", "tests")
    for path in (ROOT / folder).rglob("*.py")
]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_files_stay_under_400_lines(path: Path):
    assert len(path.read_text().splitlines()) <= 400


def test_locks_pin_every_package_once():
    names = []
    for lock in ("cpu.txt", "dev.txt"):
        for line in (ROOT / "requirements" / lock).read_text().splitlines():
            if not line.startswith("#"):
                assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+]+", line), line
                names.append(line.partition("==")[0].lower().replace("_", "-"))
    assert len(names) == len(set(names))


def test_torch_is_pinned_to_a_cpu_build():
    assert re.search(r"^torch==[0-9.]+\+cpu$", (ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE)


def test_package_imports_only_what_its_extras_name_beside_the_standard_library():
    """No install of an optional tool is needed for the library's own import."""
    code = (
        "import trm_repro.masks, trm_repro.divergence, trm_repro.losses, sys; sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
