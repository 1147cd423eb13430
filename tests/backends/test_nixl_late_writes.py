"""Late writes: none comes into memory that a timed out load was for, once `drain` has returned."""

import asyncio
import random
import signal
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer.kvcache.canonical import memory_regions
from kvxfer.kvcache.descriptors import view_memory
from kvxfer.storage.backend import Outcome, Status
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys, store_generated
from tests.backends.nixl_holders import HolderProcess, open_client
from tests.backends.nixl_relay import CANARY, Relay
from tests.backends.test_nixl import WAYS

WATCH_S = 10.0
NUM_BLOCKS = 12
BLOCK_BYTES = 4 << 20
NUM_TIMED_OUT = 600
MAX_LOADS = 1000
KEYS = make_keys(NUM_BLOCKS)
QUICK: dict[str, Any] = {"timeout_s": 5.0, "lease_s": 2.0, "heartbeat_s": 0.5}


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", ["cuts", "stalls"])
async def test_after_drain_nothing_changes_the_memory_of_loads_that_were_late(
    way: str, fault: str
) -> None:
    rng, memory = random.Random(8), BlockMemory([[BLOCK_BYTES]], num_blocks=NUM_BLOCKS)
    target = memory.describe(0, range(NUM_BLOCKS))
    process = await asyncio.to_thread(HolderProcess)
    try:
        holder = await asyncio.to_thread(
            process.open, memory.namespace(), capacity=2 * NUM_BLOCKS * BLOCK_BYTES
        )
        async with (
            Relay(holder.endpoint) as relay,
            open_client(memory.namespace(), relay.endpoint, **WAYS[way], **QUICK) as client,
        ):
            client.attach(memory_regions(memory.caches))
            await store_generated(client, KEYS, target)
            [one] = client._exchange.clients.values()
            seen: list[Outcome] = []
            pieces = view_memory(target.addresses, target.lengths)
            views = [np.frombuffer(piece, np.uint8) for piece in pieces]
            for nth in range(MAX_LOADS):
                await client.lookup(KEYS)
                one._timeout_s = rng.uniform(1e-3, 30e-3)
                load = asyncio.create_task(client.load(KEYS, target))
                await asyncio.sleep(rng.uniform(0, 10e-3))
                if fault == "cuts":
                    relay.cut()
                else:
                    process.signal(signal.SIGSTOP)
                seen += await load
                if nth % 4 == 0:
                    await client.drain()
                    fill(views)
                late = sum(outcome.status is Status.TIMED_OUT for outcome in seen)
                if late >= NUM_TIMED_OUT:
                    break
                process.signal(signal.SIGCONT)
                one._timeout_s = QUICK["timeout_s"]
                if nth % 4 == 0:
                    await client.lookup(KEYS)
                    require_filled(views)
            assert late >= NUM_TIMED_OUT
            async with asyncio.timeout(20):
                await client.drain()
            assert client.num_quarantined_bytes == 0
            fill(views)
            process.signal(signal.SIGCONT)
            stop = time.monotonic() + WATCH_S
            while time.monotonic() < stop:
                require_filled(views)
                await asyncio.sleep(0.05)
    finally:
        await asyncio.to_thread(process.end)


def fill(views: list[NDArray[np.uint8]]) -> None:
    for each in views:
        each[:] = CANARY


def require_filled(views: list[NDArray[np.uint8]]) -> None:
    assert all((each == CANARY).all() for each in views), "a late write"
