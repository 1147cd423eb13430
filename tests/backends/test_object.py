"""The object storage backend keeps every promise of `Backend`, on two real servers of S3."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from kvxfer.backends.object import S3Backend
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.testing import BackendTests
from tests.backends.file_store import sealed
from tests.backends.object_servers import ObjectServer, open_bucket

_numbers = itertools.count()


class ObjectBackendTests(BackendTests):
    persistent = True
    server: ObjectServer

    @pytest.fixture(autouse=True)
    def _prefix(self, s3_credentials: None) -> None:
        self.prefix = f"/suite/{next(_numbers)}"
        self.own_fields: dict[str, Any] = {}

    async def make_backend(self, namespace: Namespace) -> Backend:
        return open_bucket(self.server, namespace, path=self.prefix, **self.own_fields)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        assert isinstance(backend, S3Backend)
        store, name = self.server.open_client(), backend._pages.name(key)
        page = bytearray(store.get(name).bytes())
        page[5000] ^= 1
        store.put(name, bytes(page))


@pytest.mark.processes
class TestOnSeaweedFS(ObjectBackendTests):
    @pytest.fixture(autouse=True)
    def _server(self, seaweedfs_server: ObjectServer) -> None:
        self.server = seaweedfs_server


@pytest.mark.processes
class TestSealedOnSeaweedFS(ObjectBackendTests):
    @pytest.fixture(autouse=True)
    def _server(self, seaweedfs_server: ObjectServer, tmp_path: Path, _prefix: None) -> None:
        self.server = seaweedfs_server
        self.own_fields = sealed(tmp_path / "bucket", "secret")


@pytest.mark.processes
class TestOnMoto(ObjectBackendTests):
    @pytest.fixture(autouse=True)
    def _server(self, moto_server: ObjectServer) -> None:
        self.server = moto_server
