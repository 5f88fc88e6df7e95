"""Headless Chromium for tests, driven over its DevTools socket: open a page, read its errors, wait, take a picture.

`with Browser(tmp_path) as browser: browser.open("file:///...")`. Skips the test where no Chromium is installed.
"""

import base64
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # refuses to run as root otherwise; only pages of our own are opened
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)
WAIT_SECONDS = 30.0


def chromium() -> str:
    """Return the path of Chromium, or skip the test."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium here: apt-get install chromium (.ci/run does, as root)")
    return found


class Browser:
    """One Chromium with one page.

    Attributes:
        errors: what the page's console and its scripts complained about since `open`, in order.
    """

    def __init__(self, folder: Path, *, width: int = 1280, height: int = 900) -> None:
        """Choose the window; the browser starts on entering.

        Args:
            folder: for the browser's profile, which is removed at the end.
            width: of the window, CSS pixels.
            height: of the window, CSS pixels.
        """
        self.profile = folder / "chromium_profile"
        self.size = (width, height)
        self.errors: list[str] = []
        self.number = 0
        self.num_loads = 0

    def __enter__(self) -> "Browser":
        command = [
            chromium(),
            *FLAGS,
            f"--user-data-dir={self.profile}",
            f"--window-size={self.size[0]},{self.size[1]}",
        ]
        self.process = subprocess.Popen(
            [*command, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self.socket = connect(self._page_address(), max_size=None, open_timeout=WAIT_SECONDS)
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if hasattr(self, "socket"):
            self.socket.close()
        os.killpg(self.process.pid, signal.SIGKILL)  # a session of its own: the browser and its children, no others
        self.process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)

    def open(self, url: str) -> None:
        """Load a page and wait until it is complete; `errors` begins anew.

        Raises:
            RuntimeError: if there is no such page.
        """
        self.errors.clear()
        self.num_loads = 0
        answer = self.call("Page.navigate", url=url)
        if "errorText" in answer:
            raise RuntimeError(f"{url}: {answer['errorText']}")
        is_same_document = "loaderId" not in answer  # only what follows the # differs: nothing is loaded
        self._pump(lambda: is_same_document or self.num_loads > 0, f"{url} does not end loading")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited.

        Raises:
            RuntimeError: if it throws.
        """
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {_exception(answer['exceptionDetails'])}")
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = WAIT_SECONDS) -> None:
        """Wait until a JavaScript expression is true.

        Raises:
            TimeoutError: if it does not become so; says what the page shows instead.
        """
        self._pump(lambda: bool(self.evaluate(f"Boolean({condition})")), f"not true: {condition}", seconds)

    def screenshot(self, path: Path, *, whole_page: bool = False) -> Path:
        """Write what the window shows, or the whole page, as a PNG."""
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole_page)
        path.write_bytes(base64.b64decode(picture["data"]))
        return path

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Send a DevTools command, such as Emulation.setDeviceMetricsOverride, and return its result."""
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv(timeout=WAIT_SECONDS))
            if message.get("id") == self.number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return dict(message["result"])
            self._note(message)

    def _pump(self, is_done: Callable[[], bool], complaint: str, seconds: float = WAIT_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not is_done():
            text = self.evaluate("document.body ? document.body.innerText.slice(0, 2000) : ''")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{complaint}, after {seconds:g} s; errors {self.errors}; page: {text}")
            time.sleep(0.1)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Page.loadEventFired":
            self.num_loads += 1
        elif event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(_exception(params["exceptionDetails"]))
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(part.get("value", part.get("description"))) for part in params["args"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}".strip())

    def _page_address(self) -> str:
        port_file = self.profile / "DevToolsActivePort"
        deadline = time.monotonic() + WAIT_SECONDS
        while not (port_file.is_file() and port_file.read_text().count("\n") >= 1):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"Chromium did not start (exit status {self.process.poll()})")
            time.sleep(0.05)
        port = port_file.read_text().splitlines()[0]
        with urlopen(f"http://127.0.0.1:{port}/json/list", timeout=WAIT_SECONDS) as answer:
            pages = [target for target in json.load(answer) if target["type"] == "page"]
        return str(pages[0]["webSocketDebuggerUrl"])


def _exception(details: dict[str, Any]) -> str:
    return str(details.get("exception", {}).get("description") or details["text"])
