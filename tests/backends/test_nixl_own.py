"""Blocks that a process lends out of memory of its own, in several regions, without a pool."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import numpy as np
import pytest

from kvxfer.backends.nixl import NixlBackend, NixlConfig
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.canonical import memory_regions
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.storage.backend import DONE, MISSING, Outcome, Status
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.lending import (
    BlockParts,
    Generations,
    LendingBackend,
    LentBlocks,
    ReservedBlocks,
)
from kvxfer.testing import BlockMemory, FakeNixlAgent
from kvxfer.testing.conformance.suite import make_keys, statuses
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from kvxfer.units import ByteSize

KEYS = make_keys(3)
LISTEN = "127.0.0.1:0"


class EngineCache(LendingBackend):
    """KV cache of an engine, a tensor per layer, whose blocks 0, 1 and 2 are those of `KEYS`."""

    def __init__(self) -> None:
        self.memory = BlockMemory([[4096, 512]], num_blocks=8)
        self.blocks = dict(zip(KEYS, range(3), strict=True))
        size = self.memory.chunk_size_bytes(0)
        self.payloads = [make_payload(key, size) for key in KEYS]
        write_payloads(self.memory.describe(0, range(3)), self.payloads)
        self.generations = Generations(8)
        self.regions: Sequence[MemoryRegion] = [
            *memory_regions(self.memory.caches),
            self.generations.region,
        ]

    def overwrite(self, key: BlockKey) -> None:
        """Compute another block where this one was."""
        block = self.blocks.pop(key)
        self.generations.change([block])
        write_payloads(self.memory.describe(0, [block]), [bytes(len(self.payloads[0]))])
        self.generations.change([block])

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [key in self.blocks for key in keys]

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [False] * len(keys)

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        raise NotImplementedError

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        raise NotImplementedError

    async def aclose(self) -> None:
        raise NotImplementedError

    @asynccontextmanager
    async def lend(self, wanted: BlockParts, *, fenced: bool = False) -> AsyncIterator[LentBlocks]:
        assert fenced
        yield self._lend(wanted.keys)

    def peek(self, keys: Sequence[BlockKey], *, fenced: bool = False) -> LentBlocks | None:
        return self._lend(keys) if fenced else None

    def make_room(self, offered: BlockParts) -> AbstractAsyncContextManager[ReservedBlocks]:
        raise NotImplementedError

    def _lend(self, keys: Sequence[BlockKey]) -> LentBlocks:
        outcomes = [DONE if key in self.blocks else MISSING for key in keys]
        there = [self.blocks[key] for key in keys if key in self.blocks]
        if not there:
            return LentBlocks(outcomes, None, [])
        blocks = self.memory.describe(0, there)
        return LentBlocks(outcomes, blocks, [], self.generations.fences(there))


@pytest.mark.parametrize("transport", ["nixl", "socket"])
async def test_blocks_are_lent_out_of_the_cache_of_an_engine(transport: str) -> None:
    cache = EngineCache()
    namespace, target = cache.memory.namespace(), BlockMemory([[4096, 512]], num_blocks=4)
    holder = NixlBackend(NixlConfig(listen=LISTEN), namespace, own=cache, make_agent=FakeNixlAgent)
    async with holder:
        await holder.start()
        assert holder.server is not None
        config = NixlConfig(
            address=str(holder.server.endpoint),
            integrity="fenced",
            transport=transport,  # type: ignore[arg-type]
        )
        async with NixlBackend(config, namespace, make_agent=FakeNixlAgent) as client:
            client.attach(memory_regions(target.caches))
            blocks = target.describe(0, range(3))
            for _ in range(2):  # where they were found, and pinned
                assert statuses(await client.load(KEYS, blocks)) == [Status.DONE] * 3
                assert read_payloads(blocks) == cache.payloads
                write_payloads(blocks, [bytes(len(each)) for each in cache.payloads])
                assert await client.lookup(KEYS) == [True] * 3
            cache.overwrite(KEYS[1])
            outcomes = await client.load(KEYS, blocks)
            assert [each.done for each in outcomes] == [True, False, True]
            read = read_payloads(blocks)
            assert [read[0], read[2]] == [cache.payloads[0], cache.payloads[2]]
            assert await client.lookup(KEYS) == [True, False, True]
    assert np.array_equal(cache.memory.describe(0, [0]).block_sizes, [4608]), "still open"


@pytest.mark.parametrize(
    ("config", "has_own"),
    [
        (NixlConfig(listen=LISTEN), False),
        (NixlConfig(listen=LISTEN, capacity=ByteSize(1 << 20)), True),
        (NixlConfig(address="127.0.0.1:1"), True),
    ],
)
def test_what_is_served_is_a_pool_or_ones_own_and_only_where_one_listens(
    config: NixlConfig, *, has_own: bool
) -> None:
    cache = EngineCache()
    with pytest.raises(InvalidArgumentError, match="capacity"):
        NixlBackend(config, cache.memory.namespace(), own=cache if has_own else None)


def test_a_backend_that_knows_no_peers_and_holds_nothing_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="address is ''; expected peers, or listen"):
        NixlBackend(NixlConfig(), BlockMemory([[4096]], num_blocks=1).namespace())
