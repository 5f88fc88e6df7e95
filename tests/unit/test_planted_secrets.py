"""Tokens and passwords of the environment and of the configuration are in no file, message or log line."""

import logging
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipelines.tracking import BackgroundTracker, ExperimentReplay
from tests.conftest import ROOT
from tests.tracked import experiment_config, fill, run_directory

SECRET = "hunter2"
ENVIRONMENT = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_URI", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY",
)  # fmt: skip


@pytest.fixture
def refusing_server():
    """A server that answers everything with an error that repeats what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(403)
            self.end_headers()
            self.wfile.write(f"no {self.path} for {self.headers.get('Authorization')}".encode())

        do_GET = do_POST  # noqa: N815

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


@pytest.fixture(autouse=True)
def planted(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, f"planted-{SECRET}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # no pauses between attempts


def files_with_secret(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    "address", ["http://user:{}@127.0.0.1:{}", "http://{}@127.0.0.1:{}", "http://127.0.0.1:9/{}@127.0.0.1:{}"]
)
def test_a_tracking_server_that_refuses_gets_no_password_shown(address, refusing_server, tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    uri = address.format(SECRET, refusing_server)
    settings = (f"tracking.uri={uri}", f"output.warm_start_dir={tmp_path}")
    config = experiment_config(tmp_path, ["ppo_clip"], [1], *settings)
    directory = run_directory(tmp_path, "ppo_clip", 1, *settings)
    fill(directory, 2)
    said: list[str] = []
    replay = ExperimentReplay(config, is_experiment=True, seeds=[1])
    with BackgroundTracker(replay, say=said.append) as tracking:
        tracking.track(directory, "FINISHED")
    out, err = capfd.readouterr()
    assert tracking.failure
    assert said
    ours = [
        record.getMessage() for record in caplog.records if record.name.partition(".")[0] in ("pipelines", "mlflow")
    ]
    assert [text for text in (*said, tracking.failure, out, err, *ours) if SECRET in text] == []
    assert (directory.path / "config.yaml").is_file()
    assert (tmp_path / "runs" / "experiment.yaml").is_file()
    assert files_with_secret(tmp_path) == []


def test_commands_that_print_say_no_secret():
    """`config` prints a whole configuration, `doctor` the environment."""
    uri = f"tracking.uri=https://user:{SECRET}@127.0.0.1:9/x?token={SECRET}"
    for command in ("config", "doctor"):
        done = subprocess.run(
            [sys.executable, "-m", "pipelines.cli", command, uri], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert "127.0.0.1:9" in done.stdout, done.stderr
        assert SECRET not in done.stdout + done.stderr
