"""The backend over Mooncake Store keeps every promise of `Backend`, on a real master."""

import pytest

from kvxfer.backends.mooncake import MooncakeBackend
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.testing import BackendTests
from tests import needs
from tests.backends.mooncake_servers import Cluster, open_mooncake

pytestmark = needs.mooncake


@pytest.mark.processes
class TestMooncakeBackend(BackendTests):
    persistent = True

    @pytest.fixture(autouse=True)
    def _cluster(self, mooncake: Cluster, shared_client: None) -> None:
        self.cluster = mooncake
        mooncake.client.remove_all(True)

    async def make_backend(self, namespace: Namespace) -> Backend:
        return open_mooncake(self.cluster, namespace)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        assert isinstance(backend, MooncakeBackend)
        name = backend._pages.name(key)
        page = bytearray(self.cluster.client.get(name))
        page[5000] ^= 1
        assert self.cluster.client.upsert(name, bytes(page)) == 0
