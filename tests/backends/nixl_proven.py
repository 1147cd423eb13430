"""Peers that know the secret but send what no kvxfer peer would, and a recording desk."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.backends.nixl import Endpoint, Exchange, NixlBackend, NixlConfig
from kvxfer.backends.nixl.agents import NixlAgent, TransferAgent
from kvxfer.backends.nixl.wire import messages as wire
from kvxfer.backends.nixl.wire.frames import FrameChannel
from kvxfer.backends.nixl.wire.handshake import Greeting, greet_as_client
from kvxfer.errors import PeerError
from kvxfer.storage import BlockKey, Status
from kvxfer.storage.leases import CacheLender, Held
from kvxfer.storage.lending import BlockParts, LendingBackend, LentBlocks, ReservedBlocks
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys, statuses, store_generated
from kvxfer.testing.payloads import read_payloads
from kvxfer.units import ByteSize
from tests.backends.nixl_wire import HOST, SECRET, local_hello

LIMIT_S = 10.0
MEMORY = BlockMemory([[4096]], num_blocks=16)
NAMESPACE = MEMORY.namespace()
CAPACITY = ByteSize(1 << 20)
REGION = wire.Region(1 << 20, 1 << 16)
ANSWER: msgspec.msgpack.Decoder[wire.Answer] = msgspec.msgpack.Decoder(wire.Answer)
READY: msgspec.msgpack.Decoder[wire.Ready] = msgspec.msgpack.Decoder(wire.Ready)

MakeAgent = Callable[[], TransferAgent]


@dataclass(frozen=True, slots=True)
class ProvenPeer:
    """Connection of a peer that has authenticated."""

    greeting: Greeting
    channel: FrameChannel

    async def ask(self, request: wire.Message | dict[str, Any]) -> wire.Answer | None:
        """Send a request; return the answer, or None if the holder closed the connection."""
        try:
            async with asyncio.timeout(LIMIT_S):
                await self.channel.send(request)  # type: ignore[arg-type]
                return await self.channel.receive(ANSWER)
        except PeerError:
            return None


@contextlib.asynccontextmanager
async def proven(holder: Exchange, reach: wire.Reach) -> AsyncIterator[ProvenPeer | None]:
    """Shake hands with a holder as a peer of this machine; yield None if it refuses."""

    async def offer(_: wire.Hello) -> wire.Reach:
        return reach

    ours = local_hello(b"p" * 16, NAMESPACE)
    endpoint = endpoint_of(holder)
    channel = FrameChannel(*await asyncio.open_connection(endpoint.host, endpoint.port))
    peer: ProvenPeer | None = None
    try:
        with contextlib.suppress(PeerError):
            async with asyncio.timeout(LIMIT_S):
                greeting = await greet_as_client(channel, ours, secret=SECRET, reach=offer)
                await channel.receive(READY)
            peer = ProvenPeer(greeting, channel)
        yield peer
    finally:
        await channel.aclose()


class RecordingDesk(CacheLender):
    """Lender of a backend's blocks under known tickets, which never end by themselves.

    Attributes:
        tickets: Blocks of each ticket that was not released.
        held: Tickets that each present holder has asked for.
        dropped: Holders that were dropped, once for each time.
        num_holds: Number of tickets asked for so far.
    """

    def __init__(
        self, tickets: dict[str, Sequence[BlockKey]] | None = None, description: bytes = b"pages"
    ) -> None:
        self.description = description
        self.tickets = dict(tickets or {})
        self.held: dict[Hashable, list[str]] = {}
        self.dropped: list[Hashable] = []
        self.num_holds = 0

    def of(self, inner: LendingBackend) -> Self:
        self.inner, self.regions = inner, [*inner.regions]
        return self

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await self.inner.lookup(keys)

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await self.inner.delete(keys)

    @asynccontextmanager
    async def lend(self, wanted: BlockParts, *, fenced: bool = False) -> AsyncIterator[LentBlocks]:
        async with self.inner.lend(wanted, fenced=fenced) as lent:
            yield lent

    def peek(self, keys: Sequence[BlockKey], *, fenced: bool = False) -> LentBlocks | None:
        return self.inner.peek(keys, fenced=fenced)

    @asynccontextmanager
    async def make_room(self, offered: BlockParts) -> AsyncIterator[ReservedBlocks]:
        async with self.inner.make_room(offered) as room:
            yield room

    def hold(
        self, ticket: str, keys: Sequence[BlockKey], holder: Hashable, number: int = 0
    ) -> Held:
        self.num_holds += 1
        self.held.setdefault(holder, []).append(ticket)
        offered = {key for blocks in self.tickets.values() for key in blocks}
        is_known = ticket in self.tickets
        return Held(is_known, is_known, [key in offered for key in keys])

    def release(self, tickets: Sequence[str]) -> None:
        for ticket in tickets:
            self.tickets.pop(ticket, None)

    def drop(self, holder: Hashable, heard: float, numbers: Collection[int] | None = None) -> None:
        if numbers is not None:
            return
        self.held.pop(holder, None)
        self.dropped.append(holder)


@contextlib.asynccontextmanager
async def holding(
    tmp_path: Path, desk: RecordingDesk | None = None, **fields: Any
) -> AsyncIterator[Exchange]:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_bytes(SECRET)
    config = NixlConfig(listen=f"{HOST}:0", secret_file=str(secret), **fields)
    async with (
        HostBackend(HostConfig(capacity=CAPACITY), NAMESPACE) as blocks,
        Exchange(
            config,
            NAMESPACE,
            own=blocks if desk is None else desk.of(blocks),
            largest_block_bytes=4096,
        ) as holder,
    ):
        yield holder


def endpoint_of(holder: Exchange | NixlBackend) -> Endpoint:
    assert holder.server is not None
    return holder.server.endpoint


@contextlib.asynccontextmanager
async def asking(
    tmp_path: Path, holder: Exchange, *, make_agent: MakeAgent = NixlAgent, **fields: Any
) -> AsyncIterator[NixlBackend]:
    config = NixlConfig(
        address=str(endpoint_of(holder)), secret_file=str(tmp_path / "secret"), **fields
    )
    async with NixlBackend(config, NAMESPACE, make_agent=make_agent) as client:
        yield client


async def require_served(client: NixlBackend, first_key: int = 0) -> list[BlockKey]:
    """Check that a peer stores and loads blocks; return their keys."""
    keys = make_keys(4, first=first_key)
    async with asyncio.timeout(LIMIT_S):
        payloads = await store_generated(client, keys, MEMORY.describe(0, range(4)))
        target = MEMORY.describe(0, range(4, 8))
        assert statuses(await client.load(keys, target)) == [Status.DONE] * 4
    assert read_payloads(target) == payloads
    return keys


async def until_alone(holder: Exchange, num_peers: int = 0) -> None:
    server = holder.server
    assert server is not None
    async with asyncio.timeout(LIMIT_S):
        while len(server.sessions) > num_peers or server._listener.unproven:  # noqa: ASYNC110 - it notices
            await asyncio.sleep(0)


def require_quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    """Check that nothing failed unexpectedly, and that log lines are printable."""
    for record in caplog.records:
        assert record.levelno < logging.ERROR, record.getMessage()
        assert record.exc_info is None, record.getMessage()
        if record.name.startswith("kvxfer"):
            assert record.getMessage().isprintable()
            assert len(record.getMessage()) < 3000
