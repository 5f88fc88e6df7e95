"""The Docker files, as far as they can be checked without a Docker engine; `make docker-lint` runs hadolint."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from compose_spec import PyCompose

from tests.conftest import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
SAMPLE = {"BASE_DIGEST": "sha256:" + "0" * 64}


def interpolated() -> str:
    """compose.yaml with its variables replaced as Docker does: a sample where one is required, else the default."""

    def value(match: re.Match[str]) -> str:
        name, _, default = match.group(1).partition(":-")
        return default or SAMPLE[name.partition(":?")[0]]

    return re.sub(r"\$\{([^}]*)\}", value, (ROOT / "compose.yaml").read_text())


def test_compose_file_follows_the_compose_specification():
    compose = PyCompose.from_yaml(interpolated())
    compose.validate()
    assert set(compose.service_names()) == {"postgres", "mlflow", "trainer-cpu", "trainer-gpu"}


def test_compose_refuses_what_the_specification_does_not_know():
    with pytest.raises(Exception, match="services"):
        PyCompose.from_yaml("services: [1, 2]").validate()


def test_published_ports_are_this_machines_only():
    services = yaml.safe_load(interpolated())["services"]
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_password_is_a_secret_and_in_no_environment():
    text = (ROOT / "compose.yaml").read_text()
    services = yaml.safe_load(interpolated())["services"]
    assert services["postgres"]["environment"]["POSTGRES_PASSWORD_FILE"] == "/run/secrets/postgres_password"
    assert "POSTGRES_PASSWORD:" not in text
    assert "secrets" not in [line.strip("!\n") for line in (ROOT / ".dockerignore").read_text().splitlines()]


def test_gpu_trainer_reserves_every_gpu():
    trainer = yaml.safe_load(interpolated())["services"]["trainer-gpu"]
    device = trainer["deploy"]["resources"]["reservations"]["devices"][0]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", "all", ["gpu"])


def stages() -> dict[str, str]:
    parts = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    return {re.search(r" AS (\S+)", part.splitlines()[0]).group(1): part for part in parts}


def test_every_base_is_pinned_by_the_digest_argument_and_every_target_runs_without_root():
    assert re.findall(r"^FROM python\S*", DOCKERFILE, flags=re.MULTILINE) == [
        "FROM python:3.11-slim-bookworm@${BASE_DIGEST}"
    ]
    for target in ("cpu", "gpu", "mlflow"):
        assert re.findall(r"^USER (\S+)", stages()[target], flags=re.MULTILINE) == ["1000"]
        assert "HEALTHCHECK" in stages()[target]


def test_every_copied_file_is_there_and_sent_to_the_engine():
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    sent = [line[1:] for line in ignore if line.startswith("!")]
    for source in re.findall(r"^COPY (?!--from)(?:--\S+ )?(\S+)", DOCKERFILE, flags=re.MULTILINE):
        assert (ROOT / source).exists()
        assert source == "." or any(fnmatch(source, pattern) or source.startswith(f"{pattern}/") for pattern in sent)
    assert all((ROOT / path).exists() or path == ".git" for path in sent)


@pytest.mark.parametrize("name", ["cpu", "gpu", "mlflow"])
def test_locks_pin_every_package_once(name: str):
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+(\[[a-z,-]+\])?==[A-Za-z0-9.+!]+", pin) for pin in pins)
    names = [re.split(r"[\[=]", pin)[0].lower().replace("_", "-") for pin in pins]
    assert len(names) == len(set(names))


def test_gpu_lock_has_vllm_and_a_cuda_torch():
    lock = Path(ROOT / "requirements" / "gpu.txt").read_text()
    assert re.search(r"^vllm==", lock, flags=re.MULTILINE)
    assert re.search(r"^torch==[0-9.]+$", lock, flags=re.MULTILINE)
    assert "nvidia-nccl" in lock
