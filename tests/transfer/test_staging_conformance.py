"""Staging keeps every promise of `Backend`, over any backend and with few buffers."""

from pathlib import Path
from typing import ClassVar

import pytest

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.testing import BackendStateMachine, BackendTests, DictBackend, DictConfig, WrapperTests
from kvxfer.units import ByteSize
from tests.backends.file_store import capacity_of, flip_bit, open_store, path_of
from tests.examples import examples
from tests.tiering.opened_tiers import open_tiers
from tests.transfer.pretended_device import StagedFromDevice

FEW_BYTES = 1  # two buffers of the largest block
MANY_BYTES = 1 << 20


class TestStagedDictBackend(BackendTests):
    max_blocks: ClassVar[int | None] = 5
    staging_bytes: ClassVar[int] = MANY_BYTES

    async def make_backend(self, namespace: Namespace) -> Backend:
        return self.stage(DictConfig(), namespace)

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        return self.stage(DictConfig(max_blocks=self.max_blocks), namespace)

    def stage(self, config: DictConfig, namespace: Namespace) -> Backend:
        inner = DictBackend(config, namespace)
        return StagedFromDevice(inner, namespace, staging_bytes=self.staging_bytes)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        assert isinstance(backend, StagedFromDevice)
        assert isinstance(backend.inner, DictBackend)
        backend.inner.corrupt(key)


class TestStagedDictBackendThroughFewBuffers(TestStagedDictBackend):
    """Suite in which a large batch is several to the backend, which may evict one for the next."""

    max_blocks = None
    staging_bytes = FEW_BYTES


class TestStagedFileBackend(BackendTests):
    persistent = True
    max_blocks = 5

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.root = tmp_path / "store"

    async def make_backend(self, namespace: Namespace) -> Backend:
        self.namespace = namespace
        inner = open_store(self.root, namespace)
        return StagedFromDevice(inner, namespace, staging_bytes=MANY_BYTES)

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        inner = open_store(self.root, namespace, capacity=capacity_of(namespace, self.max_blocks))
        return StagedFromDevice(inner, namespace, staging_bytes=MANY_BYTES)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        flip_bit(path_of(self.root, self.namespace, key), 8 * 4096)


class TestStagedTiers(BackendTests):
    """Suite over host memory and files, whose tiers have staging memory of their own."""

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.root = tmp_path / "store"

    async def make_backend(self, namespace: Namespace) -> Backend:
        # Room for every block of a test: what is evicted before it was written back is lost.
        first = HostBackend(HostConfig(capacity=ByteSize(40 << 20)), namespace)
        tiers = open_tiers([first, open_store(self.root, namespace)], namespace)
        return StagedFromDevice(tiers, namespace, staging_bytes=FEW_BYTES)


class TestStagingAroundABackend(WrapperTests):
    def wrap(self, inner: Backend, namespace: Namespace) -> Backend:
        return StagedFromDevice(inner, namespace, staging_bytes=FEW_BYTES)


class StagedStateMachine(BackendStateMachine):
    async def make_backend(self, namespace: Namespace) -> Backend:
        inner = DictBackend(DictConfig(), namespace)
        return StagedFromDevice(inner, namespace, staging_bytes=FEW_BYTES)


TestStagedStateMachine = StagedStateMachine.TestCase
TestStagedStateMachine.settings = examples(10, steps=20)
