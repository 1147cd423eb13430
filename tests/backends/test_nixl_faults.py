"""Faults of a peer: no crash, no hang, no wrong byte, no late write, no leak."""

import asyncio
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvxfer.storage.backend import Status
from tests.backends.nixl_holders import HolderProcess, OpenHolder, open_client
from tests.backends.nixl_traffic import Relay, Traffic, disturb, traffic_memory
from tests.backends.test_nixl import WAYS

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


@rounds(quick=2)
async def test_frames_that_are_changed_end_the_connection_and_nothing_else(
    seed: int, new_process: NewProcess
) -> None:
    _, holder = await open_holder(new_process)
    async with Relay(holder.endpoint) as relay:
        traffic, rng = await start_traffic(seed, relay.endpoint)
        kind = seed // 3 % 5

        def edit(data: bytes) -> bytes:
            if rng.random() > 0.3:
                return data
            relay.edit = None
            changed = bytearray(data)
            at = rng.randrange(len(changed))
            if kind == 0:
                changed[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                del changed[at:]
            elif kind == 2:
                changed += data  # once more
            elif kind == 3:
                changed[:4] = b"\xff\xff\xff\xff"
            else:
                changed[at:at] = rng.randbytes(rng.randint(1, 64))
            return bytes(changed)

        async def change() -> None:
            relay.edit = edit

        async with asyncio.timeout(ROUND_S), traffic.backend:
            if seed % 2:  # otherwise the handshake, and with it the metadata of NIXL, is changed
                await until_done(traffic)
            else:
                await change()
            await disturb(traffic, change, after_s=rng.uniform(0, 0.1), settle_s=0.3)
            relay.edit = None
            relay.cut()  # what was cut short would be waited for
            await until_done(traffic)
            await traffic.check()
    await until_idle(holder)


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
