"""Stand-alone peer, within the process of the test."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial

import pytest

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.backends.nixl import Connection, LocalNode, NixlBackend, NixlConfig, StandalonePeer
from kvxfer.backends.nixl.agents import NixlAgent
from kvxfer.backends.nixl.wire.messages import Pin, Pinned
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import BlockKey, Namespace, make_block_key
from kvxfer.testing import BlockMemory, DictBackend
from kvxfer.testing.conformance.suite import make_keys, store_generated
from kvxfer.units import ByteSize

LIMIT_S = 10.0
NUM_AT_ONCE = 300
CAPACITY = ByteSize(1 << 20)
CONFIG = NixlConfig(listen="127.0.0.1:0", capacity=CAPACITY, transport="socket")
MEMORY = BlockMemory([[4096]], num_blocks=1)
NAMESPACE, OTHER = MEMORY.namespace(), MEMORY.namespace(model="other")
KEYS = [make_block_key(b"hash", 0)]
OTHER_KEY = make_block_key(b"other", 0)


def open_host(namespace: Namespace) -> HostBackend:
    return HostBackend(HostConfig(capacity=CAPACITY), namespace)


async def store_at(address: str) -> None:
    """Act as a peer that stores a block."""
    async with NixlBackend(NixlConfig(address=address, transport="socket"), NAMESPACE) as backend:
        (outcome,) = await backend.store(KEYS, MEMORY.describe(0, [0]))
        assert outcome.done, outcome


@contextlib.asynccontextmanager
async def pinned(peer: StandalonePeer) -> AsyncIterator[None]:
    """Act as a peer that keeps a block pinned."""
    config = NixlConfig(address=str(peer.endpoint), transport="socket")
    node = LocalNode(config, NAMESPACE, make_agent=NixlAgent)
    connection = await Connection.open(node, peer.endpoint)
    async with contextlib.aclosing(node), contextlib.aclosing(connection):
        await connection.request(partial(Pin, keys=KEYS, starts=[0], sizes=[4096]), Pinned)
        yield


async def test_a_drain_ends_when_its_time_is_up(caplog: pytest.LogCaptureFixture) -> None:
    async with contextlib.aclosing(StandalonePeer(CONFIG, open_host)) as peer:
        await peer.start()
        config = NixlConfig(address=str(peer.endpoint), transport="socket")
        async with NixlBackend(config, NAMESPACE) as backend:
            await backend.store(KEYS, MEMORY.describe(0, [0]))
            async with pinned(peer):
                await peer.drain(0.1)
            assert "still in use after 0.1 s" in caplog.text
            caplog.clear()
            await peer.drain(LIMIT_S)
            assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert not peer.is_ready


async def test_a_peer_that_drains_offers_and_takes_no_blocks() -> None:
    async with contextlib.aclosing(StandalonePeer(CONFIG, open_host)) as peer:
        await peer.start()
        config = NixlConfig(address=str(peer.endpoint), transport="socket")
        async with NixlBackend(config, NAMESPACE) as backend:
            blocks = MEMORY.describe(0, [0])
            await backend.store(KEYS, blocks)
            assert await backend.lookup(KEYS) == [True]
            async with pinned(peer):
                draining = asyncio.create_task(peer.drain(LIMIT_S))
                await asyncio.sleep(0)
                assert await backend.lookup(KEYS) == [False]
                for call in (backend.load, backend.store):
                    (outcome,) = await call([OTHER_KEY], blocks)
                    assert "about to end" in outcome.reason
                assert not draining.done()
            await draining


async def test_a_port_that_is_taken_is_said_so_and_listened_at_when_it_is_free() -> None:
    async with contextlib.aclosing(StandalonePeer(CONFIG, open_host)) as peer:
        await peer.start()
        taken = NixlConfig(listen=str(peer.endpoint), capacity=CAPACITY, transport="socket")
        async with contextlib.aclosing(StandalonePeer(taken, open_host)) as another:
            with pytest.raises(BackendUnavailableError, match=f"cannot listen at {peer.endpoint}"):
                await another.start()
            assert not another.is_ready
            await peer.aclose()
            await another.start()
            await store_at(str(another.endpoint))


def test_a_peer_without_an_address_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="listen"):
        StandalonePeer(NixlConfig(address="127.0.0.1:1"), open_host)


class Unhurried(DictBackend):
    """Backend whose answers take several turns of the event loop, as those of a disk do."""

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        await turns(16)
        return await super().lookup(keys)

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        await turns(16)
        return await super().delete(keys)


async def turns(num: int) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


async def test_any_number_of_lookups_and_deletions_at_once_wait_for_their_turn() -> None:
    def opened(namespace: Namespace) -> Backend:
        return Unhurried(None, namespace)

    memory = BlockMemory([[4096]], num_blocks=NUM_AT_ONCE)
    keys = make_keys(NUM_AT_ONCE)
    async with contextlib.aclosing(StandalonePeer(CONFIG, opened)) as peer:
        await peer.start()
        config = NixlConfig(address=str(peer.endpoint), transport="socket")
        async with NixlBackend(config, memory.namespace()) as backend:
            await store_generated(backend, keys, memory.describe(0, range(NUM_AT_ONCE)))
            for _ in range(3):
                given_up = [asyncio.create_task(backend.lookup([key])) for key in keys]
                await turns(8)
                for each in given_up:  # the holder may be busy with them for some turns more
                    each.cancel()
            found = await asyncio.gather(*(backend.lookup([key]) for key in keys))
            assert found == [[True]] * NUM_AT_ONCE
            deleted = await asyncio.gather(*(backend.delete([key]) for key in keys))
            assert deleted == [[True]] * NUM_AT_ONCE
            assert await backend.lookup(keys) == [False] * NUM_AT_ONCE
