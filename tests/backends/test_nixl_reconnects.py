"""Connections of NIXL: kept for peers that come back, and bounded where none answers."""

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from kvxfer.backends.nixl.agents import NixlAgent, NixlLimits
from kvxfer.backends.nixl.agents.nixl_module import import_nixl
from kvxfer.backends.nixl.wire.regions import AgentMetadata
from kvxfer.errors import PeerLostError
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys, store_generated
from tests.backends.agent_contract import LocalPeer, Pool, random_bytes, read, words
from tests.backends.agent_process import Nursery
from tests.backends.nixl_holders import HolderProcess, open_client

NUM_RECONNECTS = 20
NUM_SPARE = 4

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import NIXL beforehand: it would block an event loop for too long."""
    import_nixl(otherwise="skip these tests")


@pytest.fixture
async def agent() -> AsyncIterator[NixlAgent]:
    agent = NixlAgent()
    yield agent
    await agent.aclose()


@pytest.fixture
async def peers() -> AsyncIterator[list[LocalPeer]]:
    peers = [LocalPeer(NixlAgent()) for _ in range(4)]
    yield peers
    for peer in peers:
        await peer.agent.aclose()


async def require_read(agent: NixlAgent, peer: LocalPeer, pool: Pool, seed: int) -> None:
    """Add a peer, read its memory, and remove it."""
    await peer.fill(seed)
    name = await agent.add_peer(peer.metadata)
    await read(agent, name, words(pool.address), words(peer.address), words(1000))
    assert pool.bytes[:1000].tobytes() == random_bytes(seed)[:1000].tobytes()
    await agent.remove_peer(name)


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


@pytest.mark.parametrize("max_unanswered", [70, 71])
async def test_peers_that_never_answer_keep_so_much_and_no_more(
    peers: list[LocalPeer], max_unanswered: int
) -> None:
    nursery = Nursery()
    silent = await asyncio.to_thread(nursery.start)
    os.kill(silent.pid, signal.SIGSTOP)
    known = AgentMetadata.decode(silent.metadata)
    async with contextlib.aclosing(NixlAgent(NixlLimits(max_unanswered=max_unanswered))) as agent:
        adding = []
        for _ in range(70):  # more than there are slots at first
            name = f"kvxfer-{uuid.uuid4()}"
            opaque = known.opaque.replace(known.name.encode(), name.encode())
            forged = msgspec.structs.replace(known, name=name, opaque=opaque)
            adding.append(asyncio.create_task(agent.add_peer(forged.encode())))
        await asyncio.wait(adding, timeout=0.2)
        assert not any(each.done() for each in adding)
        for each in adding:  # as after the time that a peer has to answer
            each.cancel()
        await asyncio.wait(adding)
        if max_unanswered == 70:
            with pytest.raises(PeerLostError, match="too many peers do not answer"):
                await agent.add_peer(peers[0].metadata)
        else:
            pool = Pool()
            agent.register(pool.regions())
            await require_read(agent, peers[0], pool, seed=3)
        await asyncio.to_thread(silent.kill)
    nursery.close()
