"""A headless Chromium that opens pages of a folder, over its debugging protocol."""

import contextlib
import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
LIMIT_S = 60.0
HEIGHT = 900
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0")


class Browser:
    def __init__(self, connection: ClientConnection, base: str) -> None:
        self._connection = connection
        self._last_id = 0
        self._events: list[dict[str, Any]] = []
        self.base = base
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._connection.recv(LIMIT_S))
        if "method" in message:
            self._events.append(message)
        return message

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        self._last_id += 1
        request = {"id": self._last_id, "method": method, "params": parameters}
        self._connection.send(json.dumps(request))
        while (answer := self._receive()).get("id") != self._last_id:
            pass
        assert "error" not in answer, f"{method}: {answer}"
        result: dict[str, Any] = answer["result"]
        return result

    def evaluate(self, expression: str) -> Any:
        """Evaluate JavaScript, wait for its promise if it is one, and return the value."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def resize(self, width: int) -> None:
        size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def open(self, page: str) -> None:
        """Open a page of the folder, and wait until it is loaded."""
        self._events.clear()
        self.call("Page.navigate", url=urllib.parse.urljoin(self.base, page))
        while not self._happened("Page.loadEventFired"):
            self._receive()

    def _happened(self, method: str) -> list[dict[str, Any]]:
        return [each["params"] for each in self._events if each["method"] == method]

    def complaints(self) -> list[str]:
        """List what the console has as errors, and requests of other sites, since `open`."""
        logged = [each["entry"] for each in self._happened("Log.entryAdded")]
        sent = [each["request"]["url"] for each in self._happened("Network.requestWillBeSent")]
        called = self._happened("Runtime.consoleAPICalled")
        return [
            *(f"{each['text']} {each.get('url')}" for each in logged if each["level"] == "error"),
            *(str(each["args"]) for each in called if each["type"] == "error"),
            *(str(each["exceptionDetails"]) for each in self._happened("Runtime.exceptionThrown")),
            *(f"asks {url}" for url in sent if not url.startswith((self.base, "data:", "blob:"))),
        ]


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def _serving(folder: Path) -> Iterator[str]:
    handler = functools.partial(_Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def browsing(folder: Path, profile: Path) -> Iterator[Browser]:
    """Serve a folder, and open a browser for its pages."""
    assert PROGRAM is not None
    command = [PROGRAM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    with (
        _serving(folder) as base,
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stderr is not None
        drain = threading.Thread(target=process.stderr.read)
        try:
            address = next(filter(None, (re.search(r"ws://([^/]+)", e) for e in process.stderr)))
            drain.start()
            with urllib.request.urlopen(f"http://{address[1]}/json", timeout=LIMIT_S) as answer:
                tab = next(each for each in json.load(answer) if each["type"] == "page")
            with connect(tab["webSocketDebuggerUrl"], max_size=None) as connection:
                yield Browser(connection, base)
        finally:
            process.terminate()
            process.wait(LIMIT_S)
            if drain.ident is not None:
                drain.join()
