"""Runs: batches are read run by run, and verified while more arrives."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import numpy as np
import pytest

from kvxfer.backends.nixl import client, remote_memory
from kvxfer.backends.nixl import hashing as hasher_module
from kvxfer.backends.nixl.agents.base import Fragments, TransferAgent
from kvxfer.backends.nixl.agents.nixl import NixlAgent
from kvxfer.backends.nixl.hashing import BlockHasher
from kvxfer.backends.nixl_module import import_nixl
from kvxfer.errors import ClosedError, InvalidArgumentError, PeerLostError
from kvxfer.storage.backend import Status
from kvxfer.testing import BlockMemory, FakeNixlAgent
from kvxfer.testing.conformance.suite import make_keys, make_memory, statuses, store_generated
from kvxfer.testing.payloads import read_payloads
from tests.backends.agent_contract import POOL_BYTES, LocalPeer, Pool, random_bytes, words
from tests.backends.nixl_holders import HolderProcess, open_client
from tests.backends.test_nixl import WAYS

NUM_RUNS = 5
RUN_BYTES = POOL_BYTES // 16
KEYS = make_keys(6)


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import NIXL beforehand: it would block an event loop for too long."""
    import_nixl(otherwise="skip these tests")


@pytest.fixture(scope="module")
def process() -> Iterator[HolderProcess]:
    process = HolderProcess()
    yield process
    process.end()


@pytest.fixture(params=[FakeNixlAgent, NixlAgent])
async def agents(request: pytest.FixtureRequest) -> AsyncIterator[tuple[TransferAgent, LocalPeer]]:
    make: Callable[[], TransferAgent] = request.param
    agent, peer = make(), LocalPeer(make())
    yield agent, peer
    await agent.aclose()
    await peer.agent.aclose()


def runs_of(pool: Pool, peer: LocalPeer) -> list[Fragments]:
    """Make runs in no order of addresses, none touching the next."""
    starts = [index * 2 * RUN_BYTES for index in (3, 0, 4, 1, 2)]
    return [
        Fragments.of(words(pool.address + start), words(peer.address + start), words(RUN_BYTES))
        for start in starts
    ]


async def test_each_run_is_told_when_its_bytes_are_there(
    agents: tuple[TransferAgent, LocalPeer],
) -> None:
    agent, peer = agents
    pool = Pool()
    agent.register(pool.regions())
    await peer.fill(1)
    name = await agent.add_peer(peer.metadata)
    runs = runs_of(pool, peer)
    whole: list[tuple[int, bool]] = []

    def landed(index: int) -> None:
        start = int(runs[index].local[0]) - pool.address
        there = pool.bytes[start : start + RUN_BYTES]
        expected = random_bytes(1)[start : start + RUN_BYTES]
        whole.append((index, bool(np.array_equal(there, expected))))

    await agent.read(name, iter(runs), landed)
    assert sorted(whole) == [(index, True) for index in range(NUM_RUNS)]


async def test_a_run_that_cannot_be_ends_those_before_it_and_raises(
    agents: tuple[TransferAgent, LocalPeer],
) -> None:
    agent, peer = agents
    pool = Pool()
    agent.register(pool.regions())
    await peer.fill(2)
    name = await agent.add_peer(peer.metadata)
    runs = runs_of(pool, peer)
    outside = Fragments.of(words(pool.address), words(peer.address + POOL_BYTES), words(1))
    landed: list[int] = []
    with pytest.raises(InvalidArgumentError, match="remote"):
        await agent.read(name, [*runs[:2], outside, *runs[2:]], landed.append)
    pool.bytes[:] = 7  # whatever was begun is over
    await agent.read(name, runs[:1], lambda _: None)
    others = np.ones(POOL_BYTES, bool)
    start = int(runs[0].local[0]) - pool.address
    others[start : start + RUN_BYTES] = False
    assert np.all(pool.bytes[others] == 7)
    assert set(landed) <= {0, 1}


async def test_runs_of_a_peer_that_is_removed_are_not_told(
    agents: tuple[TransferAgent, LocalPeer],
) -> None:
    agent, peer = agents
    pool = Pool()
    agent.register(pool.regions())
    name = await agent.add_peer(peer.metadata)
    await agent.remove_peer(name)
    landed: list[int] = []
    with pytest.raises(PeerLostError):
        await agent.read(name, runs_of(pool, peer), landed.append)
    assert not landed


@pytest.mark.parametrize("inline_bytes", [0, hasher_module.INLINE_BYTES])
async def test_what_has_landed_is_hashed_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, inline_bytes: int
) -> None:
    monkeypatch.setattr(hasher_module, "INLINE_BYTES", inline_bytes)
    hasher, blocks = BlockHasher(), make_memory().describe(0, range(12))
    expected = await hasher.checksums(blocks)
    bounds = [(0, 2), (2, 4), (4, 8), (8, 9), (9, 12)]
    hashing = hasher.hash_runs([blocks.select(*each) for each in bounds])
    for index in (4, 0, 2):
        await asyncio.to_thread(hashing.landed, index)
    await hashing.settle()
    landed = {9, 10, 11, 0, 1, 4, 5, 6, 7}
    assert hashing.checksums == {index: expected[index] for index in landed}
    await hasher.aclose()


async def test_a_hasher_that_is_closed_says_so_and_lets_nobody_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hasher_module, "INLINE_BYTES", 0)
    hasher, blocks = BlockHasher(), make_memory().describe(0, range(2))
    expected = await hasher.checksums(blocks)
    hashing = hasher.hash_runs([blocks])
    hashing.landed(0)
    await hasher.aclose()
    await hasher.aclose()
    assert hashing.checksums == dict(enumerate(expected)), "closed before all was hashed"
    for call in (hashing.settle(), hasher.checksums(blocks)):
        with pytest.raises(ClosedError):
            await call


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 20])
@pytest.mark.parametrize(
    "block_bytes", [100, client.LAST_RUN_BYTES // 2, client.LAST_RUN_BYTES * 3]
)
def test_runs_cover_every_block_and_the_last_is_short(num_blocks: int, block_bytes: int) -> None:
    memory = BlockMemory([[block_bytes]], num_blocks=num_blocks)
    bounds = remote_memory._runs(memory.describe(0, range(num_blocks)), client.LAST_RUN_BYTES)
    assert [index for start, stop in bounds for index in range(start, stop)] == [*range(num_blocks)]
    sizes = [(stop - start) * block_bytes for start, stop in bounds]
    assert all(size <= max(remote_memory.RUN_BYTES, block_bytes) for size in sizes)
    assert sizes[-1] <= max(client.LAST_RUN_BYTES, block_bytes)


@pytest.mark.timeout(60)  # two processes, each waiting for the other, in asyncio's debug mode
async def test_a_corrupt_block_in_one_of_several_runs_is_found(
    process: HolderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = make_memory()
    block_bytes = int(memory.describe(0, [0]).num_bytes)
    monkeypatch.setattr(client, "LAST_RUN_BYTES", block_bytes)
    holder = await asyncio.to_thread(process.open, memory.namespace())
    async with open_client(memory.namespace(), holder, **WAYS["nixl"]) as backend:
        payloads = await store_generated(backend, KEYS, memory.describe(0, range(6)))
        target = memory.describe(0, [20, 11, 17, 8, 14, 29])
        assert statuses(await backend.load(KEYS, target)) == [Status.DONE] * 6
        assert read_payloads(target) == payloads
        holder.corrupt(KEYS[3])
        loaded = statuses(await backend.load(KEYS, target))
        assert loaded == [Status.DONE] * 3 + [Status.CORRUPT] + [Status.DONE] * 2
        assert await backend.lookup(KEYS) == [True] * 3 + [False] + [True] * 2
