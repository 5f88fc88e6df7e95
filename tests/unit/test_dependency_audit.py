"""The audit of the locks, against a stand-in for pip-audit that answers as the real one does."""

import pytest

from tests import dependency_audit
from tests.dependency_audit import LOCKS, ROOT, answers, ask, locked, read_accepted

STAND_IN = """
import json, sys
from pathlib import Path
words = sys.argv[1:]
lines = Path(words[words.index("--requirement") + 1]).read_text().split()
service = words[words.index("--vulnerability-service") + 1]
if service == "gone":
    sys.exit("requests.exceptions.ConnectionError: no such host")
if service == "hangs":
    import time
    time.sleep(60)
packages = []
for line in lines:
    name, version = line.split("==")
    if service == "empty" or name == "private":
        packages.append({"name": name, "skip_reason": "not found"})
        continue
    bad = name in ("jinja2", "torch")
    vulns = [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["9"], "description": ""}] if bad else []
    packages.append({"name": name, "version": version, "vulns": vulns})
print(json.dumps({"dependencies": packages, "fixes": []}))
sys.exit(any(package.get("vulns") for package in packages))
"""


@pytest.fixture
def tool(tmp_path):
    (tmp_path / "pip_audit").mkdir()
    (tmp_path / "pip_audit" / "__main__.py").write_text(STAND_IN)
    return tmp_path


@pytest.fixture
def locks(tmp_path, monkeypatch, tool):
    folder = tmp_path / "requirements"
    folder.mkdir()
    for lock in LOCKS:
        (folder / f"{lock}.txt").write_text("# a lock\nnumpy==2.0\nprivate==1.0\n")
    (folder / "cpu.txt").write_text("torch==2.13.0+cpu\nnumpy==2.0\n")
    accepted = folder / "known.txt"
    accepted.write_text("# none\n")
    monkeypatch.setattr(dependency_audit, "ROOT", tmp_path)
    monkeypatch.setattr(dependency_audit, "TOOL", tool)
    monkeypatch.setattr(dependency_audit, "ACCEPTED", accepted)
    monkeypatch.setattr(dependency_audit, "_install", lambda tool: True)
    return folder


def test_every_pin_of_every_lock_is_asked_about_by_its_release():
    for lock in LOCKS:
        path = ROOT / "requirements" / f"{lock}.txt"
        num_pins = sum("==" in line for line in path.read_text().splitlines() if not line.startswith("#"))
        found = locked(path)
        assert len(found) == num_pins > 3
        assert not any("+" in one or ";" in one for one in found)


def test_a_service_that_is_gone_slow_or_knows_nothing_does_not_count_as_an_answer(tool, monkeypatch):
    assert answers("osv", tool)
    assert not answers("gone", tool)
    assert not answers("empty", tool)
    assert ask("hangs", ["numpy==2.0"], tool, limit=0.5) is None


def test_a_vulnerability_fails_the_check_and_names_package_lock_and_mend(locks, capsys):
    assert dependency_audit.main() == 1
    said = capsys.readouterr().out
    assert "cpu.txt: torch 2.13.0: PYSEC-1, CVE-1; mended in 9" in said
    assert "dev.txt: not on the list: private" in said


def test_an_accepted_vulnerability_passes_only_with_a_reason(locks, capsys):
    (locks / "known.txt").write_text("CVE-1 torch.load is called with weights_only alone\n")
    assert dependency_audit.main() == 0
    assert "0 vulnerabilities" in capsys.readouterr().out
    (locks / "known.txt").write_text("CVE-1\n")
    with pytest.raises(SystemExit, match="CVE-1 has no reason"):
        dependency_audit.main()


def test_without_a_service_it_says_so_and_passes(locks, capsys, monkeypatch):
    monkeypatch.setattr(dependency_audit, "SERVICES", ("gone", "empty"))
    assert dependency_audit.main() == 0
    assert "NOT DONE" in capsys.readouterr().out


def test_the_file_of_accepted_vulnerabilities_gives_a_reason_for_each():
    assert all(read_accepted(dependency_audit.ACCEPTED).values())
