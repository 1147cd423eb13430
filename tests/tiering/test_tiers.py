"""TieredBackend keeps every promise of `Backend`, over tiers of any kind."""

from typing import ClassVar

import pytest

from kvxfer.backends.host import HostBackend
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.testing import (
    BackendStateMachine,
    BackendTests,
    BlockMemory,
    DictBackend,
    FaultRates,
    FaultyBackend,
    WrapperTests,
)
from kvxfer.tiering.tiered_backend import TieredBackend
from tests.examples import examples
from tests.testing.test_dict_backend import Blocks, KeptBackend
from tests.tiering.opened_tiers import open_dict, open_host, open_tiers, settle


async def corrupt_everywhere(backend: Backend, key: BlockKey) -> None:
    """Change the bytes of a block in every tier, after it has arrived in every tier."""
    assert isinstance(backend, TieredBackend)
    await settle(backend)
    for tier in backend.tiers:
        if not sum(await tier.lookup([key])):
            continue
        if isinstance(tier, HostBackend):
            tier._pool.slots[tier._index.slot_of(key)][0, 0] ^= 1
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


class TieredStateMachine(BackendStateMachine):
    async def make_backend(self, namespace: Namespace) -> Backend:
        return open_tiers([open_host(namespace, 12), open_dict(namespace)], namespace)


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
    lower_blocks: ClassVar[int] = 5

    async def make_backend(self, namespace: Namespace) -> Backend:
        tiers = [open_host(namespace, 3), open_dict(namespace, self.lower_blocks)]
        return open_tiers(tiers, namespace, staging_bytes=1)


class SmallLowerStateMachine(BoundedStateMachine):
    lower_blocks = 2


TestTieredStateMachine = TieredStateMachine.TestCase
TestPersistentStateMachine = PersistentStateMachine.TestCase
TestBoundedStateMachine = BoundedStateMachine.TestCase
TestSmallLowerStateMachine = SmallLowerStateMachine.TestCase
# Every example opens a backend, with its threads and its shared memory.
TestTieredStateMachine.settings = examples(12, steps=30)
TestPersistentStateMachine.settings = examples(10, steps=30)
TestBoundedStateMachine.settings = examples(15, steps=30)
TestSmallLowerStateMachine.settings = examples(10, steps=30)


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
