"""Runs: batches are read run by run, and hashed as they land."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import numpy as np
import pytest

from kvxfer.backends.nixl import reads
from kvxfer.backends.nixl.agents import (
    Fragments,
    NixlAgent,
    TransferAgent,
)
from kvxfer.backends.nixl.agents.nixl_module import import_nixl
from kvxfer.backends.nixl.reads import BlockHasher
from kvxfer.backends.nixl.wire.regions import Regions
from kvxfer.errors import ClosedError, InvalidArgumentError, PeerLostError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Status
from kvxfer.testing import FakeNixlAgent
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

    await agent.read(name, runs, landed)
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


async def test_runs_are_hashed_as_they_land_in_any_order() -> None:
    hasher, blocks = BlockHasher(), make_memory().describe(0, range(12))
    expected = await hasher.checksums(blocks)
    bounds = [(0, 2), (2, 4), (4, 8), (8, 9), (9, 12)]
    hashing = hasher.hash_runs(blocks, bounds)
    for index in (4, 0, 2, 1, 3):
        await asyncio.to_thread(hashing.landed, index)
    assert hashing.checksums() == expected
    await hasher.aclose()


async def test_a_run_that_cannot_be_hashed_is_an_error_of_the_read(
    agents: tuple[TransferAgent, LocalPeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, peer = agents
    pool = Pool()
    agent.register(pool.regions())
    name = await agent.add_peer(peer.metadata)
    regions = Regions([(peer.address, POOL_BYTES)])
    memory = reads.RemoteMemory(agent, name, "cma", regions, hash_run=1 << 20)
    ours, theirs = (
        Descriptors.of_pieces(words(address), [POOL_BYTES // 2])
        for address in (pool.address, peer.address)
    )
    hasher = BlockHasher()

    def fail(*_: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(reads, "checksum_blocks", fail)
    with pytest.raises(OSError, match="no memory"):
        await memory.read(theirs, ours, hasher)
    await hasher.aclose()


async def test_a_hasher_that_is_closed_says_so_and_lets_nobody_wait() -> None:
    hasher, blocks = BlockHasher(inline_bytes=0), make_memory().describe(0, range(2))
    await hasher.aclose()
    await hasher.aclose()
    with pytest.raises(ClosedError):
        await hasher.checksums(blocks)


@pytest.mark.parametrize("num_bytes", [13, 50, 64, 4096])
@pytest.mark.parametrize("is_contiguous", [False, True])
def test_runs_are_whole_blocks_with_all_of_their_bytes(
    num_bytes: int, *, is_contiguous: bool
) -> None:
    sizes = np.array([30, 20, 7, 43, 50, 1, 12], np.uint64)
    order = np.arange(7) if is_contiguous else np.array([3, 0, 6, 2, 5, 1, 4])
    there = sizes[order]
    ours = Descriptors.of_pieces(words(1000)[0] + (np.cumsum(sizes) - sizes)[order], there)
    theirs = Descriptors.of_pieces(words(5000)[0] + np.cumsum(there) - there, there)
    bounds = list(ours.cut(num_bytes))
    runs = reads._cut(reads._pair(ours, theirs), ours, bounds)
    for run, (start, stop) in zip(runs, bounds, strict=True):
        alone = reads._pair(ours.select(start, stop), theirs.select(start, stop))
        for name in ("local", "remote", "lengths"):
            assert getattr(run, name).tolist() == getattr(alone, name).tolist()


@pytest.mark.timeout(60)  # two processes, each waiting for the other, in asyncio's debug mode
async def test_a_corrupt_block_in_one_of_several_runs_is_found(
    process: HolderProcess,
) -> None:
    memory = make_memory()
    block_bytes = int(memory.describe(0, [0]).num_bytes)
    holder = await asyncio.to_thread(process.open, memory.namespace())
    async with open_client(
        memory.namespace(), holder, hash_run=block_bytes, **WAYS["nixl"]
    ) as backend:
        payloads = await store_generated(backend, KEYS, memory.describe(0, range(6)))
        target = memory.describe(0, [20, 11, 17, 8, 14, 29])
        assert statuses(await backend.load(KEYS, target)) == [Status.DONE] * 6
        assert read_payloads(target) == payloads
        holder.corrupt(KEYS[3])
        loaded = statuses(await backend.load(KEYS, target))
        assert loaded == [Status.DONE] * 3 + [Status.CORRUPT] + [Status.DONE] * 2
        assert await backend.lookup(KEYS) == [True] * 3 + [False] + [True] * 2
