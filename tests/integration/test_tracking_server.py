"""Tracking against a real MLflow server that comes late, is killed and comes back; and its pages in a real browser."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
from mlflow import MlflowClient

from pipelines.run_directory import RunDirectory
from pipelines.session import open_session
from pipelines.spool import MetricsSpool, read_spool
from pipelines.tracking import BackgroundTracker, ExperimentReplay, Tracker, background, read_state
from pipelines.training import train_run
from tests.browser import Browser
from tests.conftest import SMOKE, run_command
from tests.tracked import evaluate_entry, experiment_config, fill, run_directory, train_entry
from tests.unit.builders import TOKENIZER, tiny_policy
from trm_repro.config import load_config
from trm_repro.policy import save_policy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Server:
    """An `mlflow server` on SQLite that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder = folder
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        database = f"sqlite:///{self.folder / 'server.db'}"
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", database]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 120
        while True:
            try:
                with urlopen(f"{self.uri}/health", timeout=5):
                    return
            except (URLError, OSError):
                assert time.monotonic() < deadline, (self.folder / "server.log").read_text()
                time.sleep(0.2)

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.kill()


def wait_until(is_so, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "did not become so"
        time.sleep(0.1)


def test_no_point_is_lost_or_there_twice_and_arms_compare_in_the_browser(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(background, "REPLAY_SECONDS", 0.2)
    monkeypatch.setattr(background, "LONGEST_PAUSE_SECONDS", 0.5)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    arms = ("ppo_clip", "token_is")
    said = track_through_outages(server, tmp_path, arms)
    assert "training goes on" in said[0]
    assert not any("hunter2" in line for line in said)
    server.start()
    for _ in range(2):  # the second time there is nothing left to send
        done = run_command("sync", tmp_path / "runs", "--uri", server.uri)
        assert "Traceback" not in done.stderr, done.stderr
    client = MlflowClient(server.uri)
    experiment_id = client.get_experiment_by_name("trm-repro").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([experiment_id])}
    assert set(runs) == {"miniature", *arms, *(f"{arm}/seed_1" for arm in arms)}
    assert len(client.search_runs([experiment_id])) == len(runs)
    for name in ("ppo_clip", "ppo_clip/seed_1"):
        points = client.get_metric_history(runs[name].info.run_id, "family/quantity_0")
        expected = [train_entry(step) for step in (1, 2, 3, 4, 5, 6)]
        assert [(point.step, point.value, point.timestamp) for point in points] == [
            (entry.step, entry.metrics["family/quantity_0"], round(entry.time * 1000)) for entry in expected
        ]
    assert len(client.search_traces(locations=[experiment_id])) == 6 + 8
    assert not any("hunter2" in str(run.to_dictionary()) for run in runs.values())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if b"hunter2" in path.read_bytes()] == []
    compared = run_command("compare", *arms, "--uri", server.uri)
    assert compared.returncode == 0, compared.stderr
    assert "score/greedy, steps 0 to 8" in compared.stdout
    missing = run_command("compare", "no_such_arm", "--uri", server.uri)
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    curves_in_the_browser(server, experiment_id, arms, tmp_path)
    train_beside_a_slow_server(server, tmp_path / "slow", monkeypatch)


class SlowProxy:
    """Passes requests on to a server; while `is_slow`, an answer is held back until ``steps()`` has grown by two."""

    def __init__(self, server: Server, steps: Callable[[], int]) -> None:
        proxy, self.is_slow, self.waits = self, True, []

        class Handler(BaseHTTPRequestHandler):
            def pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0))) or None
                own = ("Host", "Content-Length", "Accept-Encoding", "Connection")
                headers = {name: value for name, value in self.headers.items() if name not in own}
                request = Request(server.uri + self.path, data=body, headers=headers, method=self.command)
                try:
                    with urlopen(request, timeout=30) as answer:
                        status, content = answer.status, answer.read()
                except HTTPError as error:
                    status, content = error.code, error.read()
                begin, before = time.monotonic(), steps()
                while proxy.is_slow and steps() < before + 2 and time.monotonic() < begin + 60:
                    time.sleep(0.01)
                proxy.waits.append((time.monotonic() - begin, steps() - before))
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = pass_on  # noqa: N815 - the names that http.server looks for

            def log_message(self, *arguments: object) -> None:
                """Say nothing."""

        self.listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self.listener.server_port}"
        threading.Thread(target=self.listener.serve_forever, daemon=True).start()


def train_beside_a_slow_server(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train for real while every answer of the server takes longer than two steps; no step waits for one."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    folder.mkdir()
    save_policy(tiny_policy(), TOKENIZER, folder / "policy")
    settings = ["conf/smoke.yaml", "rollout.engine=transformers", "rollout.precision=float32", "num_steps=12"]
    overrides = [f"policy.path={folder / 'policy'}", f"output.dir={folder / 'runs'}", *settings[1:]]
    plain = load_config([SMOKE], overrides)
    spool = RunDirectory(plain).spool_file

    def steps() -> int:
        return spool.read_bytes().count(b'"kind": "train"') if spool.is_file() else 0

    proxy = SlowProxy(server, steps)
    config = load_config([SMOKE], [*overrides, f"tracking.uri={proxy.uri}", "tracking.experiment=slow"])
    directory, said = RunDirectory(config), []
    directory.prepare()
    session = open_session(config, folder / "policy")
    with BackgroundTracker(ExperimentReplay(config, is_experiment=False), said.append) as tracking:
        tracking.track(directory)
        train_run(config, session, folder / "policy")  # deadlocks for a minute an answer if a step waits for one
        assert steps() == 12
        held_back = [num_steps for _, num_steps in proxy.waits]
        proxy.is_slow = False
        tracking.track(directory, "FINISHED")
        assert tracking.finish() is None
    assert said == []
    assert len(held_back) >= 3
    assert min(held_back) >= 2
    client = MlflowClient(server.uri)
    run_id = read_state(directory.path / "mlflow.json").run_id
    for name in ("rollout/reward_mean", "score/greedy"):
        points = [(p.step, p.value, p.timestamp) for p in client.get_metric_history(run_id, name)]
        entries = [entry for entry in read_spool(spool) if name in entry.metrics]
        assert points == [(entry.step, entry.metrics[name], round(entry.time * 1000)) for entry in entries]
    proxy.listener.shutdown()


def track_through_outages(server: Server, folder: Path, arms: tuple[str, str]) -> list[str]:
    """Track two runs on a server that comes late and is killed; returns what the tracker said.

    The first run is at work meanwhile, and ends while the server is away.
    """
    uri = server.uri.replace("://", "://someone:hunter2@")
    config = experiment_config(folder, arms, [1], f"tracking.uri={uri}")
    working, finished = (run_directory(folder, arm, 1, f"tracking.uri={uri}") for arm in arms)
    fill(finished, 8, offset=0.3)
    finished.finish()
    spool = MetricsSpool(working.spool_file)
    spool.append(evaluate_entry(0, 0.5))
    replay, said = ExperimentReplay(config, is_experiment=True, seeds=[1]), []
    with BackgroundTracker(replay, said.append) as tracking:
        tracking.track(working)
        tracking.track(finished, "FINISHED")
        wait_until(lambda: said)  # the server is not there yet
        for step in (1, 2, 3):
            spool.append(train_entry(step))
        server.start()
        wait_until(lambda: tracking.failure is None and replay.sent.get(working.name) == 4)
        for step in (4, 5, 6):
            spool.append(train_entry(step))
            if step == 5:
                server.kill()
        wait_until(lambda: tracking.failure is not None)
        tracking.track(working, "FINISHED")
        assert tracking.finish() is not None
    spool.append(evaluate_entry(8, 0.75))
    working.finish()
    return said


def curves_in_the_browser(server: Server, experiment_id: str, arms: tuple[str, ...], folder: Path) -> None:
    """Open the experiment, unfold its parent run, and read the curves off the charts that MLflow draws."""
    with Browser(folder, width=1500, height=1000) as browser:
        query = "compareRunsMode=CHART&workflowType=machine_learning"
        browser.open(f"{server.uri}/#/experiments/{experiment_id}/runs?{query}")
        unfold = "document.querySelector('[data-component-id*=runnamecellrenderer]')"
        browser.wait_for(f"document.body.innerText.includes('miniature') && {unfold}", 60)
        browser.evaluate(f"{unfold}.click()")
        charts = "[...document.querySelectorAll('.js-plotly-plot')].map(plot => plot.data || [])"
        browser.wait_for(f"{charts}.some(chart => new Set(chart.map(line => line.name)).size >= {len(arms)})", 60)
        lines = browser.evaluate(f"{charts}.map(chart => chart.map(line => [line.name, (line.y || []).length]))")
        assert any({name for name, _ in chart} == set(arms) for chart in lines)
        assert {("ppo_clip", 6), ("token_is", 8)} <= {tuple(line) for chart in lines for line in chart}
        picture = browser.screenshot(folder / "mlflow_ui.png")
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert not [error for error in browser.errors if "TypeError" in error or "ReferenceError" in error]


def test_reproduce_ends_well_without_mlflow_and_says_how_to_catch_up(smoke_copy: Path):
    (smoke_copy / "runs" / "report.md").unlink()
    done = run_command("reproduce", SMOKE, f"output.dir={smoke_copy / 'runs'}", "tracking.uri=http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    assert f"When MLflow is back: trm-repro sync {smoke_copy / 'runs'}" in done.stdout
    assert "training goes on" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (smoke_copy / "runs" / "report.md").exists()
    stopped = run_command("sync", smoke_copy / "runs")
    assert stopped.returncode == 1
    assert "MLflow cannot be reached" in stopped.stderr
    back = run_command("sync", smoke_copy / "runs", "--uri", f"sqlite:///{smoke_copy / 'runs' / 'mlflow.db'}")
    assert back.returncode == 0, back.stderr
    assert (smoke_copy / "runs" / "report.md").is_file()


def test_a_store_left_half_made_by_a_killed_process_is_made_anew(tmp_path: Path):
    config = load_config(overrides=[f"output.dir={tmp_path}"])
    (tmp_path / "mlflow.db.partial").write_bytes(b"half")
    (tmp_path / "mlflow.db").write_bytes(b"")
    assert Tracker(config).open_parent(config)
    assert not (tmp_path / "mlflow.db.partial").exists()
