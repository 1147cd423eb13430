"""Tiers of host memory and files keep every promise of `Backend`."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.backends.host import HostBackend, HostConfig, MemoryIntegrity
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.testing import BackendStateMachine, BackendTests
from kvxfer.units import ByteSize
from tests.backends.file_store import flip_bit, open_store, path_of, places, temporary_folder
from tests.examples import examples
from tests.tiering.opened_tiers import open_tiers

MAX_LOOKUPS = 10_000


class TestHostOverFiles(BackendTests):
    """Suite in which chunks of the large batches do not all fit into the first tier.

    Tiers do not know how files are moved, so one file engine is enough; `test_file.py` has all.
    """

    persistent = True

    @pytest.fixture(autouse=True, params=places("posix-ext4"))
    def _place(self, request: pytest.FixtureRequest) -> Iterator[None]:
        self.engine, file_system = request.param.split("-")
        with temporary_folder(file_system) as folder:
            self.root = folder / "store"
            yield

    async def make_backend(self, namespace: Namespace) -> Backend:
        self.namespace = namespace
        config = HostConfig(capacity=ByteSize(4 << 20), integrity=MemoryIntegrity.FULL)
        self.host = HostBackend(config, namespace)
        self.file = open_store(self.root, namespace, engine=self.engine)
        return open_tiers([self.host, self.file], namespace)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        for _ in range(MAX_LOOKUPS):  # it cascades in the background
            if await self.file.lookup([key]) == [True]:
                break
        flip_bit(path_of(self.root, self.namespace, key), 8 * 4096)
        self.host._pool.slots[self.host._index.slot_of(key)][0, 0] ^= 1


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
        return open_tiers([host, open_store(self.root, namespace)], namespace)


TestHostOverFilesStateMachine = HostOverFilesStateMachine.TestCase
TestHostOverFilesStateMachine.settings = examples(6, steps=20)
