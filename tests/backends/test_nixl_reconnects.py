"""Connections of NIXL: kept for peers that come back, and bounded where none answers."""

import asyncio
import os
from pathlib import Path

import pytest

from kvxfer.backends.nixl.agents.nixl_module import import_nixl
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys, store_generated
from tests.backends.nixl_holders import HolderProcess, open_client

NUM_RECONNECTS = 20
NUM_SPARE = 4

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import NIXL beforehand: it would block an event loop for too long."""
    import_nixl(otherwise="skip these tests")


async def test_a_peer_that_reconnects_costs_no_descriptor_on_either_side() -> None:
    memory, keys = BlockMemory([[4096]], num_blocks=4), make_keys(4)
    process = await asyncio.to_thread(HolderProcess)
    folders = [Path(f"/proc/{pid}/fd") for pid in (os.getpid(), process.process.pid)]

    def count() -> list[int]:
        return [len(list(folder.iterdir())) for folder in folders]

    try:
        holder = await asyncio.to_thread(process.open, memory.namespace())
        async with open_client(memory.namespace(), holder, transport="nixl") as client:
            await store_generated(client, keys, memory.describe(0, range(4)))
            [one] = client._exchange.clients.values()
            before = count()
            for _ in range(NUM_RECONNECTS):
                one.disconnect()
                assert await client.lookup(keys) == [True] * 4
            assert one.carrier == "cma"
            for now, then in zip(count(), before, strict=True):
                assert now - then <= NUM_SPARE
    finally:
        await asyncio.to_thread(process.end)
