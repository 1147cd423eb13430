"""Blocks of an engine's own cache, lent under leases, and read by peers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvxfer.backends.nixl import Exchange, NixlBackend, NixlConfig
from kvxfer.kvcache.canonical import memory_regions
from kvxfer.storage.backend import Status
from kvxfer.testing import BlockMemory, FakeNixlAgent
from kvxfer.testing.conformance.suite import make_keys, make_memory, statuses
from kvxfer.testing.payloads import flip_bit, read_payloads
from tests.storage.lending_engine import LendingEngine

KEYS = [*make_keys(2), *make_keys(1, group=1)]
BLOCKS = [7, 3, 7]
GRADES = pytest.mark.parametrize("integrity", ["full", "fenced"])
DONE, MISSING, CORRUPT, FAILED = (
    Status.DONE,
    Status.MISSING,
    Status.CORRUPT,
    Status.FAILED,
)


@dataclass
class Reader:
    """Peer that reads blocks into caches of its own."""

    backend: NixlBackend
    agents: list[FakeNixlAgent]
    memory: BlockMemory = field(default_factory=make_memory)

    async def lookup(self) -> list[bool]:
        return await self.backend.lookup(KEYS)

    async def load(self) -> tuple[list[Status], list[bytes]]:
        """Load all blocks, those of each group into the first blocks; return what is there."""
        seen: list[Status] = []
        read: list[bytes] = []
        for keys, group in ((KEYS[:2], 0), (KEYS[2:], 1)):
            target = self.memory.describe(group, range(len(keys)))
            seen += statuses(await self.backend.load(keys, target))
            read += read_payloads(target)
        return seen, read


@dataclass
class Lent:
    """Engine whose blocks `KEYS` are lent by way of a server."""

    engine: LendingEngine
    address: str

    @contextlib.asynccontextmanager
    async def open_reader(self, **fields: Any) -> AsyncIterator[Reader]:
        agents: list[FakeNixlAgent] = []

        def make_agent() -> FakeNixlAgent:
            agents.append(FakeNixlAgent())
            return agents[-1]

        config = NixlConfig(address=self.address, **fields)
        backend = NixlBackend(config, self.engine.memory.namespace(), make_agent=make_agent)
        reader = Reader(backend, agents)
        backend.attach(memory_regions(reader.memory.caches))
        async with backend:
            yield reader

    @property
    def payloads(self) -> list[bytes]:
        return list(map(self.engine.payload, KEYS))


@pytest.fixture
async def lent() -> AsyncIterator[Lent]:
    engine = LendingEngine()
    config = NixlConfig(listen="127.0.0.1:0")
    namespace = engine.memory.namespace()
    largest = max(namespace.chunk_sizes)
    async with Exchange(
        config,
        namespace,
        own=engine.lender,
        largest_block_bytes=largest,
        make_agent=FakeNixlAgent,
    ) as holder:
        assert holder.server is not None
        engine.offer(KEYS, BLOCKS)
        yield Lent(engine, str(holder.server.endpoint))
    await engine.aclose()


@GRADES
@pytest.mark.parametrize("transport", ["nixl", "socket"])
async def test_a_reader_gets_the_bytes_that_the_engine_computed(
    lent: Lent, transport: str, integrity: str
) -> None:
    async with lent.open_reader(transport=transport, integrity=integrity) as reader:
        for _ in range(3):  # pinned; where they were found, once hashed; and that again
            assert await reader.load() == ([DONE] * 3, lent.payloads)
            reader.memory.fill(0)
            assert await reader.lookup() == [True] * 3
        lent.engine.lender.release(["t"])
        assert await reader.lookup() == [False] * 3
        seen, read = await reader.load()
        assert seen == [MISSING] * 3
        assert not any(map(any, read))
    assert lent.engine.threads.num_hashed == (3 if integrity == "full" else 0)
    assert lent.engine.lender.take_ended() == ["t"]


@pytest.mark.parametrize("transport", ["nixl", "socket"])
async def test_two_readers_have_each_block_hashed_once(lent: Lent, transport: str) -> None:
    async with (
        lent.open_reader(transport=transport) as one,
        lent.open_reader(transport=transport) as other,
        asyncio.TaskGroup() as group,
    ):
        reads = [group.create_task(reader.load()) for reader in (one, other)]
    assert [read.result() for read in reads] == [([DONE] * 3, lent.payloads)] * 2
    assert lent.engine.threads.num_hashed == 3


@GRADES
async def test_a_block_that_is_reused_while_it_is_read_is_not_loaded(
    lent: Lent, integrity: str
) -> None:
    async with lent.open_reader(transport="nixl", integrity=integrity) as reader:
        await reader.load()  # hashed
        assert await reader.lookup() == [True] * 3
        [agent] = reader.agents
        agent.hold()
        loading = asyncio.create_task(reader.load())
        await agent.until_held()
        lent.engine.lender.revoke("t")
        assert lent.engine.lender.take_ended() == ["t"], "read without a pin"
        lent.engine.compute(KEYS, BLOCKS, version=1)
        agent.release()
        seen, _ = await loading
        assert DONE not in seen
        assert set(seen) <= {MISSING, FAILED, CORRUPT}


@GRADES
async def test_a_block_that_is_revoked_while_it_is_read_stays_in_place_if_it_is_pinned(
    lent: Lent, integrity: str
) -> None:
    async with lent.open_reader(transport="nixl", integrity=integrity) as reader:
        await reader.backend.load(KEYS[2:], reader.memory.describe(1, [0]))
        [agent] = reader.agents
        agent.hold()
        target = reader.memory.describe(0, [0, 1])
        loading = asyncio.create_task(reader.backend.load(KEYS[:2], target))
        await agent.until_held()
        lent.engine.lender.release(["t"])
        assert lent.engine.lender.take_ended() == []
        agent.release()
        seen = statuses(await loading)
        if integrity == "full":
            assert seen == [DONE] * 2
            assert read_payloads(target) == lent.payloads[:2]
        assert set(seen) <= {DONE, FAILED}
        assert await reader.lookup() == [False] * 3  # after the pins have been let go
        assert lent.engine.lender.take_ended() == ["t"]


@pytest.mark.parametrize("transport", ["nixl", "socket"])
async def test_a_block_that_changed_after_it_was_hashed_is_corrupt_for_its_reader(
    lent: Lent, transport: str
) -> None:
    async with (
        lent.open_reader(transport=transport) as one,
        lent.open_reader(transport=transport) as other,
    ):
        await one.load()
        flip_bit(lent.engine.memory.describe(0, BLOCKS[:2]), 1, 999)
        for reader in (one, other):  # pinned, and found
            await reader.lookup()
            seen, read = await reader.load()
            assert seen == [DONE, CORRUPT, DONE]
            assert [read[0], read[2]] == [lent.payloads[0], lent.payloads[2]]


async def test_a_reader_that_has_gone_leaves_no_pin(lent: Lent) -> None:
    async with lent.open_reader(transport="nixl") as reader:
        await reader.backend.load(KEYS[2:], reader.memory.describe(1, [0]))
        [agent] = reader.agents
        agent.hold()
        target = reader.memory.describe(0, [0, 1])
        loading = asyncio.create_task(reader.backend.load(KEYS[:2], target))
        await agent.until_held()
        lent.engine.lender.revoke("t")
        assert lent.engine.lender.book.num_pinned == 2
        agent.release()
        loading.cancel()
        await asyncio.wait([loading])
    async with asyncio.timeout(10):
        while not lent.engine.lender.take_ended():  # noqa: ASYNC110 - as engines do
            await asyncio.sleep(0)
    assert lent.engine.lender.book.num_pinned == 0
