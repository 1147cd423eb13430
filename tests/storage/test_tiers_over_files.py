"""The tiers that people use keep every promise of `Backend`."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.tiers import TieredBackend
from kvxfer.testing import BackendStateMachine, BackendTests
from kvxfer.units import ByteSize
from tests.backends.file_store import ENGINES, flip_bit, open_store, path_of, temporary_folder

MAX_LOOKUPS = 10_000


class TestHostOverFiles(BackendTests):
    """Chunks of the large batches do not all fit into the first tier."""

    persistent = True

    @pytest.fixture(autouse=True, params=["ext4", "tmpfs"])
    def _place(self, request: pytest.FixtureRequest) -> Iterator[None]:
        with temporary_folder(request.param) as folder:
            self.root = folder / "store"
            yield

    @pytest.fixture(autouse=True, params=ENGINES)
    def _engine(self, request: pytest.FixtureRequest) -> None:
        self.engine = request.param

    async def make_backend(self, namespace: Namespace) -> Backend:
        self.namespace = namespace
        self.host = HostBackend(HostConfig(capacity=ByteSize(4 << 20)), namespace)
        self.file = open_store(self.root, namespace, engine=self.engine)
        return TieredBackend([self.host, self.file], namespace)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        for _ in range(MAX_LOOKUPS):  # it cascades in the background
            if await self.file.lookup([key]) == [True]:
                break
        flip_bit(path_of(self.root, self.namespace, key), 8 * 4096)
        self.host._pool.slot_bytes(self.host._index.slot_of(key))[0, 0] ^= 1


class HostOverFilesStateMachine(BackendStateMachine):
    persistent = True

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="kvxfer-test-"))
        super().__init__()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            shutil.rmtree(self.root)

    async def make_backend(self, namespace: Namespace) -> Backend:
        host = HostBackend(HostConfig(capacity=ByteSize(1 << 20)), namespace)
        return TieredBackend([host, open_store(self.root, namespace)], namespace)


TestHostOverFilesStateMachine = HostOverFilesStateMachine.TestCase
TestHostOverFilesStateMachine.settings = settings(max_examples=10, stateful_step_count=20)
