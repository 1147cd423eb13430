"""TieredBackend keeps every promise of `Backend`, over tiers of any kind."""

from pathlib import Path

import pytest

from kvxfer import Backend, BlockKey, Namespace, TieredBackend
from kvxfer.backends.host import HostBackend, HostConfig, MemoryIntegrity
from kvxfer.testing import (
    BackendStateMachine,
    BackendTests,
    BlockMemory,
    DictBackend,
    FaultRates,
    FaultyBackend,
    WrapperTests,
)
from kvxfer.units import ByteSize
from tests.backends.file_store import flip_bit, open_store, path_of
from tests.examples import examples
from tests.testing.test_backend_tests import Blocks, KeptBackend
from tests.tiering.opened_tiers import open_dict, open_host, open_tiers, settle

MAX_LOOKUPS = 10_000


async def corrupt_everywhere(backend: Backend, key: BlockKey) -> None:
    """Change the bytes of a block in every tier, after it has arrived in every tier."""
    assert isinstance(backend, TieredBackend)
    await settle(backend)
    for tier in backend.tiers:
        if not sum(await tier.lookup([key])):
            continue
        if isinstance(tier, HostBackend):
            tier.pool.slots[tier._index.slot_of(key)][0, 0] ^= 1
        else:
            assert isinstance(tier, DictBackend)
            tier.corrupt(key)


class TestHostOverDict(BackendTests):
    """Suite whose bounded backends store in the first tier only."""

    max_blocks = 5

    async def make_backend(self, namespace: Namespace) -> Backend:
        return open_tiers([open_host(namespace, 64), open_dict(namespace)], namespace)

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        return open_tiers([open_host(namespace, 5), open_dict(namespace, 0)], namespace)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        await corrupt_everywhere(backend, key)


class TestSmallHostOverShelf(TestHostOverDict):
    """Suite with most blocks only in the lower tier, by way of buffers of one or two blocks."""

    persistent = True

    @pytest.fixture(autouse=True)
    def _empty_shelf(self) -> None:
        self.shelf: dict[str, Blocks] = {}

    async def make_backend(self, namespace: Namespace) -> Backend:
        tiers = [open_host(namespace, 12), KeptBackend(self.shelf, namespace)]
        return open_tiers(tiers, namespace, staging_bytes=1)


class TestThreeTiers(TestHostOverDict):
    """Suite whose first tier stores nothing; the second is the bound."""

    async def make_backend(self, namespace: Namespace) -> Backend:
        tiers = [open_dict(namespace, 0), open_host(namespace, 64), open_dict(namespace)]
        return open_tiers(tiers, namespace)

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        tiers = [open_dict(namespace, 0), open_host(namespace, 5), open_dict(namespace, 0)]
        return open_tiers(tiers, namespace)


class TestTiersOverAWrappedTier(WrapperTests):
    """Blocks found in the second tier are loaded into staging memory, also of the third one."""

    moving = frozenset({"lookup", "load", "store"})

    def wrap(self, inner: Backend, namespace: Namespace) -> Backend:
        return open_tiers([open_dict(namespace, 0), inner, open_dict(namespace)], namespace)


class TestTiersOverAHost(WrapperTests):
    """Blocks that the host stores are carried down later."""

    moving = frozenset({"lookup", "load"})

    def wrap(self, inner: Backend, namespace: Namespace) -> Backend:
        return open_tiers([open_host(namespace, 1), inner], namespace, staging_bytes=1)


class TestHostOverFiles(BackendTests):
    """Suite in which chunks of the large batches do not all fit into the first tier.

    Tiers do not know how files are moved, so one file engine is enough; `test_file.py` has all.
    """

    persistent = True

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.root = tmp_path / "store"

    async def make_backend(self, namespace: Namespace) -> Backend:
        self.namespace = namespace
        config = HostConfig(capacity=ByteSize(4 << 20), integrity=MemoryIntegrity.FULL)
        self.host = HostBackend(config, namespace)
        self.file = open_store(self.root, namespace)
        return open_tiers([self.host, self.file], namespace)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        for _ in range(MAX_LOOKUPS):  # it cascades in the background
            if await self.file.lookup([key]) == [True]:
                break
        flip_bit(path_of(self.root, self.namespace, key), 8 * 4096)
        self.host.pool.slots[self.host._index.slot_of(key)][0, 0] ^= 1


class PersistentStateMachine(BackendStateMachine):
    persistent = True

    def __init__(self) -> None:
        self.shelf: dict[str, Blocks] = {}
        super().__init__()

    async def make_backend(self, namespace: Namespace) -> Backend:
        tiers = [open_host(namespace, 12), KeptBackend(self.shelf, namespace)]
        return open_tiers(tiers, namespace)


class BoundedStateMachine(BackendStateMachine):
    """Blocks are evicted from either tier while they are carried down and up."""

    bounded = True

    async def make_backend(self, namespace: Namespace) -> Backend:
        tiers = [open_host(namespace, 3), open_dict(namespace, 5)]
        return open_tiers(tiers, namespace, staging_bytes=1)


TestPersistentStateMachine = PersistentStateMachine.TestCase
TestBoundedStateMachine = BoundedStateMachine.TestCase
# Every example opens a backend, with its threads and its shared memory.
TestPersistentStateMachine.settings = examples(20, steps=30)
TestBoundedStateMachine.settings = examples(25, steps=30)


class StartedBackend(DictBackend):
    is_started = False

    async def start(self) -> None:
        self.is_started = True


async def test_every_tier_is_started_also_within_another_backend() -> None:
    namespace = BlockMemory([[64]], num_blocks=1).namespace()
    first, second = StartedBackend(None, namespace), StartedBackend(None, namespace)
    faulty = FaultyBackend(second, seed=0, rates=FaultRates())
    async with TieredBackend([first, faulty], namespace) as backend:
        await backend.start()
    assert first.is_started
    assert second.is_started
