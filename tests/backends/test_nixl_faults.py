"""Faults of a peer: no crash, no hang, no wrong byte, no late write, no leak."""

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from kvxfer.backends.nixl import NixlBackend
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.keys import BlockKey
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from tests.backends.nixl_holders import HolderProcess, OpenHolder, open_client
from tests.backends.test_nixl import WAYS

NUM_KEYS = 12
BATCH = 4
CANARY = 0x5A
NUM_WORKERS = 3


def traffic_memory() -> BlockMemory:
    """Caches whose blocks take long enough to move that faults hit them in the middle."""
    return BlockMemory([[384 << 10, 96 << 10]], num_blocks=32)


class Traffic:
    """Traffic that loads and stores blocks without end, and checks every byte of every outcome.

    Memory that an outcome calls safe is filled with canaries at once, which reveal later writes.
    """

    def __init__(self, backend: NixlBackend, memory: BlockMemory, rng: random.Random) -> None:
        self.backend = backend
        self.memory = memory
        self.keys = make_keys(NUM_KEYS)
        self.outcomes: list[Outcome] = []
        self.num_loaded = 0
        self._rng = rng
        self._free = set(range(32))
        self._unsafe: set[int] = set()
        self._size = memory.chunk_size_bytes(0)
        self._write_canaries(list(self._free))

    async def store(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Store the payloads of keys."""
        async with self._memory(len(keys)) as (ids, blocks):
            write_payloads(blocks, [make_payload(key, self._size) for key in keys])
            outcomes = await self.backend.store(list(keys), blocks)
            return self._settle(ids, outcomes)

    async def load(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Load keys, every other time as engines do, and compare the blocks that are `DONE`."""
        if self._rng.random() < 0.5:
            await self.backend.lookup(list(keys))
        async with self._memory(len(keys)) as (ids, blocks):
            outcomes = await self.backend.load(list(keys), blocks)
            read = read_payloads(blocks)
            for index, outcome in enumerate(outcomes):
                right = read[index] == make_payload(keys[index], self._size)
                assert right or not outcome.done, "a wrong byte"
                self.num_loaded += outcome.done
            return self._settle(ids, outcomes)

    async def go_on(self, stop: asyncio.Event) -> None:
        """Load and store at random, several batches at a time, until told to stop."""

        async def work() -> None:
            while not stop.is_set():
                keys = self._rng.sample(self.keys, self._rng.randint(1, BATCH))
                move = self.store if self._rng.random() < 0.3 else self.load
                self.outcomes += await move(keys)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_WORKERS):
                tasks.create_task(work())

    async def check(self) -> None:
        """Wait until no transfer touches memory, and check that there was no late write."""
        await self.backend.drain()
        assert self.backend.num_quarantined_bytes == 0
        safe = sorted(self._free - self._unsafe)
        assert len(safe) == 32 - len(self._unsafe), "memory was not given back"
        canary = bytes([CANARY]) * self._size
        for index, found in zip(safe, read_payloads(self._describe(safe)), strict=True):
            assert found == canary, f"a late write into block {index}"

    @contextlib.asynccontextmanager
    async def _memory(self, num_blocks: int) -> AsyncIterator[tuple[list[int], Descriptors]]:
        ids = self._rng.sample(sorted(self._free), num_blocks)
        self._free -= set(ids)
        yield ids, self._describe(ids)

    def _settle(self, ids: list[int], outcomes: list[Outcome]) -> list[Outcome]:
        """Fill safe memory with canaries; never use the rest again."""
        safe = [index for index, outcome in zip(ids, outcomes, strict=True) if outcome.memory_safe]
        if safe:
            self._write_canaries(safe)
        self._unsafe |= set(ids) - set(safe)
        self._free |= set(ids) - self._unsafe
        return outcomes

    def _write_canaries(self, ids: list[int]) -> None:
        write_payloads(self._describe(ids), [bytes([CANARY]) * self._size] * len(ids))

    def _describe(self, ids: Sequence[int]) -> Descriptors:
        return self.memory.describe(0, list(ids))


async def disturb(
    traffic: Traffic, fault: Callable[[], Awaitable[None]], *, after_s: float, settle_s: float
) -> None:
    """Run traffic, inject a fault, and run on for a while."""
    stop = asyncio.Event()
    flow = asyncio.create_task(traffic.go_on(stop))
    await asyncio.sleep(after_s)
    await fault()
    await asyncio.sleep(settle_s)
    stop.set()
    await flow


QUICK = {"timeout_s": 1.0, "lease_s": 1.0, "heartbeat_s": 0.2}
ROUND_S = 30.0
CAPACITY = 64 << 20
NUM_WAYS = len(WAYS)


def rounds(quick: int) -> pytest.MarkDecorator:
    """One round of a kind always, one of each other way with the slow tests, then up to fifty.

    The seed chooses the way. `make faults` runs all of them.
    """
    slow = (pytest.param(seed, marks=pytest.mark.slow) for seed in range(NUM_WAYS) if seed != quick)
    more = (pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(NUM_WAYS, 50))
    return pytest.mark.parametrize("seed", [quick, *slow, *more])


pytestmark = pytest.mark.timeout(60)

NewProcess = Callable[[], HolderProcess]


@pytest.fixture
def new_process() -> Iterator[NewProcess]:
    """Start processes that are ended with the test, stopped ones included."""
    with ExitStack() as stack:

        def start() -> HolderProcess:
            process = HolderProcess()
            stack.callback(process.end)
            return process

        yield start


async def open_holder(new_process: NewProcess, **fields: Any) -> tuple[HolderProcess, OpenHolder]:
    def start() -> tuple[HolderProcess, OpenHolder]:
        process = new_process()
        return process, process.open(traffic_memory().namespace(), capacity=CAPACITY, **fields)

    return await asyncio.to_thread(start)


def way_of(seed: int) -> dict[str, str]:
    return list(WAYS.values())[seed % len(WAYS)]


async def start_traffic(
    seed: int, holder: OpenHolder | str, **fields: float
) -> tuple[Traffic, random.Random]:
    rng, memory = random.Random(seed), traffic_memory()
    backend = open_client(memory.namespace(), holder, **way_of(seed), **(QUICK | fields))
    return Traffic(backend, memory, rng), rng


@rounds(quick=2)
async def test_a_holder_that_is_killed_costs_hits_and_nothing_else(
    seed: int, new_process: NewProcess
) -> None:
    process, holder = await open_holder(new_process)
    traffic, rng = await start_traffic(seed, holder)

    async def kill() -> None:
        process.signal(signal.SIGKILL)

    async with asyncio.timeout(ROUND_S), traffic.backend:
        if seed % 5:  # otherwise before the first transfer
            await until_done(traffic)
        await disturb(traffic, kill, after_s=rng.uniform(0, 0.1), settle_s=0.2)
        outcomes = await traffic.load(traffic.keys[:2])
        assert {outcome.status for outcome in outcomes} <= {Status.FAILED, Status.TIMED_OUT}
        assert await traffic.backend.lookup(traffic.keys) == [False] * len(traffic.keys)
        await traffic.check()


@rounds(quick=1)
async def test_a_holder_that_stops_and_goes_on_writes_nothing_late(
    seed: int, new_process: NewProcess
) -> None:
    process, holder = await open_holder(new_process, lease_s=3.0, heartbeat_s=0.2)
    traffic, rng = await start_traffic(seed, holder)

    async def stop() -> None:
        process.signal(signal.SIGSTOP)
        await asyncio.sleep(rng.uniform(0.5, 2.5))
        process.signal(signal.SIGCONT)

    async with asyncio.timeout(ROUND_S), traffic.backend:
        if seed % 5:
            await until_done(traffic)
        await disturb(traffic, stop, after_s=rng.uniform(0, 0.1), settle_s=0.2)
        await traffic.check()
        await until_done(traffic)
        await traffic.check()
    await until_idle(holder)


@rounds(quick=0)
async def test_a_holder_that_is_started_again_is_another_one(
    seed: int, new_process: NewProcess
) -> None:
    first, holder = await open_holder(new_process)
    traffic, rng = await start_traffic(seed, holder)

    async def restart() -> None:
        first.signal(signal.SIGKILL)
        await open_holder(new_process, listen=holder.endpoint)

    async with asyncio.timeout(ROUND_S), traffic.backend:
        await until_done(traffic)
        await disturb(traffic, restart, after_s=rng.uniform(0, 0.1), settle_s=0.1)
        await until_done(traffic)
        await traffic.check()


async def until_done(traffic: Traffic) -> None:
    """Wait until the peer serves again."""
    while not all(outcome.done for outcome in await traffic.store(traffic.keys)):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    while not all(outcome.done for outcome in await traffic.load(traffic.keys)):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def until_idle(holder: OpenHolder) -> None:
    """Wait until the holder pins no block; every block can be evicted again."""
    async with asyncio.timeout(10):
        while (seen := await asyncio.to_thread(holder.look))["peers"] or seen["pins"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert seen["evictable"] == len(seen["stored"])
