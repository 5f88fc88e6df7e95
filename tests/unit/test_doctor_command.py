"""`trm-repro doctor`: one line for each thing it looks at, and a mend for each that is wrong."""

import contextlib
import socket
from pathlib import Path

import pytest

from pipelines import doctor, environment
from pipelines.cli import main
from pipelines.training import starting_policy
from trm_repro.config import RunConfig, load_config
from trm_repro.errors import InputError


def findings(check, *overrides: str) -> list[doctor.Finding]:
    return list(check(load_config([], overrides)))


def test_it_prints_a_line_for_each_finding_and_fails_only_on_fail(capsys: pytest.CaptureFixture[str]):
    code = main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert all(line[:4].strip() in ("ok", "warn", "fail") and ": " in line for line in lines)
    assert code == (1 if any(line.startswith("fail") for line in lines) else 0)
    assert {"python", "torch", "disk", "tracking"} <= {line[6:].split(":")[0] for line in lines}


def test_a_version_that_is_not_the_locks_is_named_with_the_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    lock = tmp_path / "lock.txt"
    lock.write_text("# pins\ntorch==9.9\nvllm-cpu==0.1\n")
    monkeypatch.setattr(doctor, "lock_file", lambda: lock)
    by_name = {finding.name: finding for finding in doctor.check_versions(RunConfig())}
    assert by_name["torch"].status == "warn"
    assert "the lock has 9.9" in by_name["torch"].mend


def test_a_missing_engine_fails_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    lock = tmp_path / "lock.txt"
    lock.write_text("vllm==0.1\n")
    monkeypatch.setattr(doctor, "lock_file", lambda: lock)
    real = doctor.metadata.version

    def version(package: str) -> str:
        if package == "vllm":
            raise doctor.metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(doctor.metadata, "version", version)
    assert {f.status for f in findings(doctor.check_versions) if f.name == "vllm"} == {"fail"}
    other = findings(doctor.check_versions, "rollout.engine=transformers")
    assert {f.status for f in other if f.name == "vllm"} == {"warn"}


def test_a_tracking_server_that_does_not_answer_is_a_warning_without_its_password():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]  # bound and not listening: refused
        found = findings(doctor.check_tracking, f"tracking.uri=http://user:hunter2@127.0.0.1:{port}")
        taken.listen()
        answering = findings(doctor.check_tracking, f"tracking.uri=http://127.0.0.1:{port}")
    assert [finding.status for finding in found] == ["warn"]
    assert "hunter2" not in found[0].detail + found[0].mend
    assert [finding.status for finding in answering] == ["ok"]


def test_the_hub_matters_only_to_a_run_that_needs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(doctor, "connection_problem", lambda host, port: "no route")
    assert [f.status for f in findings(doctor.check_hub)] == ["ok"]
    assert [f.status for f in findings(doctor.check_hub, "policy.path=Some/Model")] == ["fail"]
    assert [f.status for f in findings(doctor.check_hub, f"policy.path={tmp_path}")] == ["ok"]


def test_flash_attention_fails_where_its_package_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    flash = [
        *("trainer.attention=flash_attention_2", "trainer.accelerator=gpu", "trainer.compute_dtype=bfloat16"),
        "rollout.engine=transformers",
    ]
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    found = findings(doctor.check_attention, *flash)
    assert [(f.status, f.detail) for f in findings(doctor.check_attention)] == [("ok", "sdpa")]
    assert [f.status for f in found] == ["fail"]
    assert found[0].mend == "install it or set trainer.attention=sdpa trainer.packing=false"
    with pytest.raises(InputError, match=r"trainer\.attention=flash_attention_2: the flash-attn package"):
        starting_policy(load_config([], [*flash, "policy.path=/nowhere"]))
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: name)
    assert [f.status for f in findings(doctor.check_attention, *flash)] == ["ok"]


def test_too_little_memory_and_disk_come_with_a_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(doctor, "available_memory", lambda: 3 * 10**9)
    assert [(f.status, f.mend) for f in findings(doctor.check_memory)] == [("warn", "reproduce.num_workers=1")]
    monkeypatch.setattr(doctor, "FREE_DISK", 1e18)
    assert [f.status for f in findings(doctor.check_disk, f"output.dir={tmp_path}/a/b")] == ["warn"]


def test_a_taken_port_is_told():
    with socket.socket() as taken:
        with contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", 5000))
        assert [finding.status for finding in doctor.check_ports(RunConfig())] == ["warn"]


ADDRESSES = ["http://h:99999", "http://hunter2:x@h:y", "http://[::1", "http://", "http://h:0", "http://h:-1"]


@pytest.mark.parametrize("uri", ADDRESSES)
def test_an_address_that_is_none_fails_with_a_mend(monkeypatch: pytest.MonkeyPatch, uri: str):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", uri)
    found = [
        *findings(doctor.check_tracking, f"tracking.uri={uri}"),
        *findings(doctor.check_hub, "policy.path=Qwen/Qwen3-8B-Base"),
    ]
    assert [finding.status for finding in found] == ["fail", "fail"]
    assert all("http(s)://HOST[:PORT]" in finding.mend and "hunter2" not in finding.detail for finding in found)


@pytest.mark.parametrize("host", ["..", "a" * 300])
def test_a_host_that_no_name_server_can_be_asked_for_is_told(host: str):
    assert doctor.connection_problem(host, 80) == "is no host name"


def test_an_output_folder_below_a_file_is_told():
    assert [(f.status, f.detail) for f in findings(doctor.check_disk, "output.dir=/dev/null/x")] == [
        ("fail", "/dev/null is no folder")
    ]
