"""Stand-alone peer, within the process of the test."""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from functools import partial

import pytest

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.backends.nixl import Connection, LocalNode, NixlBackend, NixlConfig, StandalonePeer
from kvxfer.backends.nixl.agents import (
    NixlAgent,
)
from kvxfer.backends.nixl.wire.messages import Pin, Pinned
from kvxfer.endpoint import free_ports
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError, NamespaceMismatchError
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import BlockKey, Namespace, make_block_key
from kvxfer.testing import BlockMemory, DictBackend
from kvxfer.testing.conformance.suite import make_keys, store_generated
from kvxfer.tiering.tiered_backend import TieredBackend
from kvxfer.units import ByteSize
from tests.tiering.opened_tiers import Recorder

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


class SlowHost:
    """Function that opens a host backend once its gate is open."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.opened: list[Namespace] = []

    def __call__(self, namespace: Namespace) -> HostBackend:
        self.begun.set()
        self.may_end.wait(LIMIT_S)
        self.opened.append(namespace)
        return open_host(namespace)


async def test_memory_is_kept_for_a_peer_that_did_not_wait_for_it() -> None:
    host = SlowHost()
    async with contextlib.aclosing(StandalonePeer(CONFIG, host)) as peer:
        opening = asyncio.create_task(peer._open_store(NAMESPACE))
        await asyncio.to_thread(host.begun.wait, LIMIT_S)
        opening.cancel()
        host.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await opening
        with pytest.raises(NamespaceMismatchError, match="'other'"):
            await peer._open_store(OTHER)
        assert (await peer._open_store(NAMESPACE)).lender.regions[0].num_bytes < CAPACITY
    assert host.opened == [NAMESPACE]


async def test_while_memory_is_reserved_a_peer_of_another_model_is_greeted_and_refused() -> None:
    host = SlowHost()
    async with contextlib.aclosing(StandalonePeer(CONFIG, host)) as peer:
        await peer.start()
        config = NixlConfig(address=str(peer.endpoint), transport="socket")
        async with NixlBackend(config, NAMESPACE) as first, NixlBackend(config, OTHER) as second:
            lookup = asyncio.create_task(first.lookup(KEYS))
            await asyncio.to_thread(host.begun.wait, LIMIT_S)
            other = asyncio.create_task(second.lookup(KEYS))
            assert not lookup.done()
            host.may_end.set()
            assert await lookup == await other == [False]
            assert (first.statistics[config.address][0]) == "socket"
            assert (second.statistics[config.address][0]) == "not connected"


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


async def test_a_peer_whose_handshake_ends_after_the_drain_began_is_given_nothing() -> None:
    host = SlowHost()
    async with contextlib.aclosing(StandalonePeer(CONFIG, host)) as peer:
        await peer.start()
        config = NixlConfig(address=str(peer.endpoint), transport="socket")
        async with NixlBackend(config, NAMESPACE) as backend:
            storing = asyncio.create_task(backend.store(KEYS, MEMORY.describe(0, [0])))
            await asyncio.to_thread(host.begun.wait, LIMIT_S)
            await peer.drain(LIMIT_S)
            host.may_end.set()
            (outcome,) = await storing
            assert "about to end" in outcome.reason


async def test_a_peer_that_keeps_tiers_deletes_with_one_call_to_each() -> None:
    tiers = [Recorder(NAMESPACE) for _ in range(2)]
    keys = make_keys(4)
    async with contextlib.aclosing(
        StandalonePeer(CONFIG, lambda namespace: TieredBackend(tiers, namespace))
    ) as peer:
        await peer.start()
        config = NixlConfig(address=str(peer.endpoint), transport="socket")
        async with NixlBackend(config, NAMESPACE) as backend:
            await tiers[1].store(keys[:1], MEMORY.describe(0, [0]))
            for tier in tiers:
                tier.calls.clear()
            assert await backend.delete(keys) == [True, False, False, False]
            assert [tier.calls for tier in tiers] == [["delete"]] * 2


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


@pytest.mark.parametrize("first_of_peer", [0, 1])
async def test_by_a_name_with_two_addresses_blocks_arrive_through_either(
    monkeypatch: pytest.MonkeyPatch, first_of_peer: int
) -> None:
    addresses = ["127.0.0.1", "127.0.0.2"]

    def resolve(host: str, port: int, *_: object, **__: object) -> list[tuple[object, ...]]:
        kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        found = addresses if host == "localhost" else [host]
        return [(*kind, (address, port)) for address in found]

    port = free_ports()
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    config = NixlConfig(listen=f"localhost:{port}", capacity=CAPACITY, transport="socket")
    async with contextlib.aclosing(StandalonePeer(config, open_host)) as peer:
        await peer.start()
        addresses = [addresses[first_of_peer], addresses[1 - first_of_peer]]
        await store_at(str(peer.endpoint))


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
