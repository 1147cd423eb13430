"""Contract of transfer agents, as tests that the real agent and the fake one both pass."""

import asyncio
import functools
import gc
import mmap
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvxfer.backends.nixl.agents import Fragments, TransferAgent
from kvxfer.backends.nixl.wire.regions import Words
from kvxfer.errors import (
    ClosedError,
    DeviceUnavailableError,
    InvalidArgumentError,
    PeerLostError,
    TransferFailedError,
)
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.runtime import wait_despite_cancel

POOL_BYTES = 8 << 20
FRAGMENT_BYTES = 1 << 17
LATE_S = 0.02
"""Time in which a read that is still running would change memory."""


class Pool:
    """Memory in two regions that touch.

    Attributes:
        address: Address of the first byte.
        bytes: uint8, `(POOL_BYTES,)`.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, POOL_BYTES)
        self.bytes = np.frombuffer(self._memory, np.uint8)
        self.address = self.bytes.ctypes.data

    def regions(self) -> list[MemoryRegion]:
        half = POOL_BYTES // 2
        return [MemoryRegion(self.address + start, half, self) for start in (0, half)]


class Peer(Protocol):
    """Peer: an agent with the regions of a `Pool`, in this process or another one."""

    metadata: bytes
    address: int

    async def fill(self, seed: int) -> None:
        """Fill the peer's pool with the bytes of `random_bytes`."""

    async def content(self) -> bytes:
        """Read the bytes of the peer's pool."""


@functools.cache
def random_bytes(seed: int) -> NDArray[np.uint8]:
    return np.frombuffer(np.random.default_rng(seed).bytes(POOL_BYTES), np.uint8)


def words(*values: int) -> Words:
    return np.array(values, np.uint64)


def shuffled(num_fragments: int, fragment_bytes: int, seed: int) -> Words:
    """Make offsets of fragments at odd places that neither overlap nor span two regions."""
    places = np.random.default_rng(seed).permutation(POOL_BYTES // 2 // fragment_bytes - 1)
    offsets = 2 * places * fragment_bytes + 3
    boundary = POOL_BYTES // 2
    inside = (offsets >= boundary) | (offsets + fragment_bytes <= boundary)
    chosen: Words = offsets[inside][:num_fragments].astype(np.uint64)
    return chosen


async def read_runs(
    agent: TransferAgent, name: str, runs: Sequence[Fragments], landed: Callable[[int], None]
) -> None:
    """Read runs of fragments; when cancelled, wait until the memory is quiet."""
    flight = agent.begin(name, runs, landed)
    await wait_despite_cancel(flight.done, flight.cancel)


async def read(
    agent: TransferAgent, name: str, local: Words, remote: Words, lengths: Words
) -> None:
    """Read fragments as one run, which lands once, unless the read fails."""
    landed: list[int] = []
    await read_runs(agent, name, [Fragments.of(local, remote, lengths)], landed.append)
    assert landed == [0]


class AgentContract(ABC):
    """Contract of a transfer agent; subclasses `TestMyAgent` open the two sides."""

    @abstractmethod
    def make_agent(self) -> TransferAgent:
        """Open an agent."""

    @abstractmethod
    def peers(self) -> AsyncIterator[Peer]:
        """Open a peer, and close it at the end."""

    @pytest.fixture
    async def peer(self) -> AsyncIterator[Peer]:
        async for peer in self.peers():
            yield peer

    @pytest.fixture
    def pool(self) -> Pool:
        return Pool()

    @pytest.fixture
    async def agent(self, pool: Pool) -> AsyncIterator[TransferAgent]:
        agent = self.make_agent()
        agent.register(pool.regions())
        yield agent
        await agent.aclose()

    @pytest.mark.parametrize(
        ("num_fragments", "fragment_bytes"), [(1, 13), (7, 4099), (5000, 97), (3, 1 << 20)]
    )
    async def test_fragments_arrive_whole_and_nothing_else_changes(
        self, agent: TransferAgent, peer: Peer, pool: Pool, num_fragments: int, fragment_bytes: int
    ) -> None:
        await peer.fill(1)
        pool.bytes[:] = random_bytes(2)
        name = await agent.add_peer(peer.metadata)
        local, remote = (shuffled(num_fragments, fragment_bytes, seed) for seed in (3, 4))
        lengths = np.full(num_fragments, fragment_bytes, np.uint64)
        base = words(pool.address), words(peer.address)
        await read(agent, name, local + base[0], remote + base[1], lengths)
        ours, theirs = random_bytes(2).copy(), random_bytes(1)
        for here, there in zip(local.astype(int), remote.astype(int), strict=True):
            spans = slice(here, here + fragment_bytes), slice(there, there + fragment_bytes)
            ours[spans[0]] = theirs[spans[1]]
        assert pool.bytes.tobytes() == ours.tobytes()
        assert await peer.content() == theirs.tobytes()

    async def test_the_last_fragments_are_read_when_all_others_have_arrived(
        self, agent: TransferAgent, peer: Peer, pool: Pool
    ) -> None:
        await peer.fill(1)
        pool.bytes[:] = random_bytes(2)
        name = await agent.add_peer(peer.metadata)
        step, last_bytes = POOL_BYTES // 8, 4096
        starts = [words(step * nth) for nth in range(7)]
        runs = [
            Fragments.of(
                start + words(pool.address), start + words(peer.address), words(step - last_bytes)
            )
            for start in starts
        ]
        at = POOL_BYTES - last_bytes
        last = Fragments.of(words(pool.address + at), words(peer.address + at), words(last_bytes))
        before, after = random_bytes(2)[at:].tobytes(), random_bytes(1)[at:].tobytes()
        seen: list[bytes] = []
        flight = agent.begin(
            name, runs, lambda _: seen.append(pool.bytes[at:].tobytes()), last=last
        )
        await wait_despite_cancel(flight.done)
        assert seen == [before] * len(runs)
        assert pool.bytes[at:].tobytes() == after

    async def test_last_fragments_that_cannot_be_end_what_was_begun(
        self, agent: TransferAgent, peer: Peer, pool: Pool
    ) -> None:
        name = await agent.add_peer(peer.metadata)
        run = Fragments.of(words(pool.address), words(peer.address), words(POOL_BYTES // 2))
        last = Fragments.of(words(pool.address), words(peer.address + POOL_BYTES), words(8))
        with pytest.raises(InvalidArgumentError, match="remote"):
            await wait_despite_cancel(agent.begin(name, [run], lambda _: None, last=last).done)
        pool.bytes[:] = 7
        await asyncio.sleep(LATE_S)
        assert np.all(pool.bytes == 7), "a late read"

    async def test_fragments_that_touch_where_a_region_ends_are_not_one(
        self, agent: TransferAgent, peer: Peer, pool: Pool
    ) -> None:
        await peer.fill(1)
        pool.bytes[:] = 0
        name = await agent.add_peer(peer.metadata)
        half = POOL_BYTES // 2
        for here, there in [(half, half), (8, half), (half, 8)]:
            starts, lengths = words(here, here - 3), words(5, 3)
            others = words(there, there - 3)
            await read(
                agent, name, starts + words(pool.address), others + words(peer.address), lengths
            )
            found = pool.bytes[here - 3 : here + 5]
            assert found.tobytes() == random_bytes(1)[there - 3 : there + 5].tobytes()

    async def test_nothing_to_move_is_moved_at_once(
        self, agent: TransferAgent, peer: Peer, pool: Pool
    ) -> None:
        name = await agent.add_peer(peer.metadata)
        await read(agent, name, words(), words(), words())
        await read(agent, name, words(pool.address), words(peer.address), words(0))

    async def test_memory_that_is_not_registered_is_refused(
        self, agent: TransferAgent, peer: Peer, pool: Pool
    ) -> None:
        name = await agent.add_peer(peer.metadata)
        good, one = words(pool.address, pool.address), words(1, 1)
        for wrong, length in [
            (pool.address - 1, 1),
            (pool.address + POOL_BYTES - 1, 2),
            (pool.address + POOL_BYTES, 1),
            (pool.address + POOL_BYTES // 2 - 1, 2),
            (pool.address, POOL_BYTES + 1),
            (pool.address + 1, 2**64 - 1),
            (0, 1),
        ]:
            local, lengths = words(pool.address, wrong), words(1, length)
            with pytest.raises(InvalidArgumentError, match=rf"^local.1. is '{wrong:#x}'"):
                await read(agent, name, local, words(peer.address, 0), lengths)
            remote = words(peer.address, (wrong - pool.address + peer.address) % 2**64)
            if length < POOL_BYTES:
                with pytest.raises(InvalidArgumentError, match=r"^remote.1. is "):
                    await read(agent, name, good, remote, one * words(1, length))
        with pytest.raises(InvalidArgumentError, match="lengths"):
            await read(agent, name, good, good, words(1))

    async def test_regions_are_not_empty_and_do_not_overlap(
        self, agent: TransferAgent, pool: Pool
    ) -> None:
        for address, num_bytes in [(pool.address, 1), (pool.address - 1, 2), (1 << 40, 0)]:
            with pytest.raises(InvalidArgumentError, match="regions"):
                agent.register([MemoryRegion(address, num_bytes, None)])
        agent.register([])

    async def test_a_gpu_that_cannot_be_used_is_refused_by_name_and_nothing_is_registered(
        self, agent: TransferAgent, peer: Peer, pool: Pool
    ) -> None:
        name = await agent.add_peer(peer.metadata)
        other, no_gpu = Pool(), Pool()
        wrong = MemoryRegion(no_gpu.address, POOL_BYTES, no_gpu, torch.device("cuda", 7))
        for regions in ([*other.regions(), wrong], [wrong, *other.regions()]):
            with pytest.raises((DeviceUnavailableError, InvalidArgumentError), match="cuda:7"):
                await asyncio.to_thread(agent.register, regions)
            for half in other.regions():
                assert half.address.to_bytes(8, "little") not in agent.metadata  # as NIXL has it
                assert half.address.to_bytes(8, "big") not in agent.metadata
            fragment = words(other.address), words(peer.address), words(1)
            with pytest.raises(InvalidArgumentError, match="local"):
                await read(agent, name, *fragment)
        agent.register(other.regions())
        await read(agent, name, *fragment)

    async def test_a_peer_is_removed_as_often_as_it_was_added(
        self, agent: TransferAgent, peer: Peer, pool: Pool
    ) -> None:
        fragment = words(pool.address), words(peer.address), words(1)
        for _ in range(2):
            names = await asyncio.gather(*(agent.add_peer(peer.metadata) for _ in range(3)))
            assert len({*names}) == 1
            for _ in range(2):
                await agent.remove_peer(names[0])
                await read(agent, names[0], *fragment)
            await agent.remove_peer(names[0])
            await agent.remove_peer(names[0])
            with pytest.raises(PeerLostError) as caught:
                await read(agent, names[0], *fragment)
            assert caught.value.peer == names[0]
        await agent.remove_peer("nobody")
        with pytest.raises(PeerLostError):
            await read(agent, "nobody", *fragment)

    async def test_what_is_not_metadata_of_another_agent_is_refused(
        self, agent: TransferAgent
    ) -> None:
        for metadata in (b"", b"hello", bytes(100), agent.metadata):
            with pytest.raises(InvalidArgumentError, match="metadata"):
                await agent.add_peer(metadata)

    async def test_after_a_cancelled_transfer_its_memory_is_quiet(
        self, agent: TransferAgent, peer: Peer, pool: Pool
    ) -> None:
        name = await agent.add_peer(peer.metadata)
        await peer.fill(1)
        num_cancelled = 0
        for turns in range(6):
            pool.bytes[:] = 0
            task = asyncio.create_task(self._read_all(agent, name, peer, pool))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            num_cancelled += task.cancelled()
            pool.bytes[:] = 9
            await asyncio.sleep(LATE_S)
            assert np.all(pool.bytes == 9)
        assert num_cancelled

    async def test_closing_ends_what_is_under_way_and_lets_memory_go(
        self, agent: TransferAgent, peer: Peer, pool: Pool
    ) -> None:
        name = await agent.add_peer(peer.metadata)
        other_pool = Pool()
        reference = weakref.ref(other_pool)
        agent.register(other_pool.regions())
        del other_pool
        gc.collect()
        assert reference(), "kept while the agent is open"
        tasks = [asyncio.create_task(self._read_all(agent, name, peer, pool)) for _ in range(20)]
        await asyncio.sleep(0)
        await asyncio.gather(agent.aclose(), agent.aclose())
        pool.bytes[:] = 9
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(error) for error in errors} <= {type(None), TransferFailedError, ClosedError}
        assert np.all(pool.bytes == 9)
        await agent.aclose()
        with pytest.raises(ClosedError):
            agent.register([])
        with pytest.raises(ClosedError):
            _ = agent.metadata
        for call in (
            agent.add_peer(peer.metadata),
            agent.remove_peer(name),
            self._read_all(agent, name, peer, pool),
        ):
            with pytest.raises(ClosedError):
                await call
        gc.collect()
        assert not reference()

    async def _read_all(self, agent: TransferAgent, name: str, peer: Peer, pool: Pool) -> None:
        starts = np.arange(0, POOL_BYTES, FRAGMENT_BYTES, dtype=np.uint64)
        here, there = starts + words(pool.address), starts + words(peer.address)
        lengths = np.full(len(starts), FRAGMENT_BYTES, np.uint64)
        await read(agent, name, here, there[::-1].copy(), lengths)


class SharedAgentContract(AgentContract):
    async def test_several_event_loops_use_one_agent(
        self, agent: TransferAgent, peer: Peer, pool: Pool
    ) -> None:
        await peer.fill(1)
        name = await agent.add_peer(peer.metadata)
        read = self._read_all(agent, name, peer, pool)
        await asyncio.gather(
            asyncio.to_thread(asyncio.run, read), self._read_all(agent, name, peer, pool)
        )
        fragments = random_bytes(1).reshape(-1, FRAGMENT_BYTES)
        assert pool.bytes.tobytes() == fragments[::-1].tobytes()


class LocalPeer:
    def __init__(self, agent: TransferAgent) -> None:
        self.agent = agent
        self._pool = Pool()
        agent.register(self._pool.regions())
        self.metadata, self.address = agent.metadata, self._pool.address

    async def fill(self, seed: int) -> None:
        self._pool.bytes[:] = random_bytes(seed)

    async def content(self) -> bytes:
        return self._pool.bytes.tobytes()
