"""Stand-alone peer within the process of the test: what it serves, settles for, and drains."""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.backends.nixl import (
    Connection,
    LocalNode,
    NixlBackend,
    NixlConfig,
    StandalonePeer,
    probe_peer,
)
from kvxfer.backends.nixl.agents import NixlAgent
from kvxfer.backends.nixl.agents.nixl_module import import_nixl
from kvxfer.backends.nixl.wire.messages import Pin, Pinned
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.backend import Backend, Status
from kvxfer.storage.keys import Namespace
from kvxfer.testing import BlockMemory, DictBackend
from kvxfer.testing.conformance.suite import make_keys, statuses, store_generated
from kvxfer.testing.payloads import read_payloads
from kvxfer.units import ByteSize

LIMIT_S = 10.0
CAPACITY = ByteSize(1 << 20)
MEMORY = BlockMemory([[4096]], num_blocks=8)
NAMESPACE = MEMORY.namespace()
KEYS = make_keys(4)


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import NIXL beforehand: it would block an event loop for too long."""
    import_nixl(otherwise="skip these tests")


def open_host(namespace: Namespace) -> HostBackend:
    return HostBackend(HostConfig(capacity=CAPACITY), namespace)


@contextlib.asynccontextmanager
async def standing(
    open_store: Callable[[Namespace], Backend] = open_host,
) -> AsyncIterator[StandalonePeer]:
    """Run a stand-alone peer."""
    config = NixlConfig(listen="127.0.0.1:0", capacity=CAPACITY, transport="socket")
    async with contextlib.aclosing(StandalonePeer(config, open_store)) as peer:
        await peer.start()
        yield peer


def engine(peer: StandalonePeer, namespace: Namespace = NAMESPACE) -> NixlBackend:
    config = NixlConfig(address=str(peer.endpoint), transport="socket")
    return NixlBackend(config, namespace)


@contextlib.asynccontextmanager
async def pinned(peer: StandalonePeer) -> AsyncIterator[None]:
    """Act as a peer that keeps a block pinned."""
    config = NixlConfig(address=str(peer.endpoint), transport="socket")
    node = LocalNode(config, NAMESPACE, make_agent=NixlAgent)
    connection = await Connection.open(node, peer.endpoint)
    async with contextlib.aclosing(node), contextlib.aclosing(connection):
        await connection.request(partial(Pin, keys=KEYS[:1], starts=[0], sizes=[4096]), Pinned)
        yield


async def test_a_drain_ends_when_its_time_is_up(caplog: pytest.LogCaptureFixture) -> None:
    async with standing() as peer:
        async with engine(peer) as backend:
            await backend.store(KEYS, MEMORY.describe(0, range(4)))
            async with pinned(peer):
                await peer.drain(0.1)
            assert "still in use after 0.1 s" in caplog.text
            caplog.clear()
            await peer.drain(LIMIT_S)
            assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert not peer.is_ready


def test_a_peer_without_an_address_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="listen"):
        StandalonePeer(NixlConfig(address="127.0.0.1:1"), open_host)


async def test_a_store_that_lends_no_memory_is_served_through_memory_of_the_peer() -> None:
    async with (
        standing(lambda namespace: DictBackend(None, namespace)) as peer,
        engine(peer) as backend,
    ):
        payloads = await store_generated(backend, KEYS, MEMORY.describe(0, range(4)))
        target = MEMORY.describe(0, range(4, 8))
        assert statuses(await backend.load(KEYS, target)) == [Status.DONE] * 4
        assert read_payloads(target) == payloads
        assert await backend.delete(KEYS[:1]) == [True]
        assert await backend.lookup(KEYS) == [False, True, True, True]


async def test_a_holder_that_is_only_asked_for_its_namespace_is_left_without_one() -> None:
    other = MEMORY.namespace(model="example/other")
    config = NixlConfig(transport="socket")
    async with standing() as peer:
        for _ in range(2):
            probe = await probe_peer(config, peer.endpoint)
            assert (probe.namespace, probe.carrier) == (None, None)
        async with engine(peer, other) as backend:
            assert await backend.lookup(KEYS[:1]) == [False]
            assert (await probe_peer(config, peer.endpoint)).namespace == other
