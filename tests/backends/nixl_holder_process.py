"""Holder process for tests, controlled through a pipe."""

import asyncio
import contextlib
import logging
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.backends.nixl import Exchange, NixlBackend, NixlConfig
from kvxfer.backends.nixl.agents.nixl_module import import_nixl
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.units import ByteSize
from tests.backends.host_blocks import flip

import_nixl(otherwise="test with sockets only")  # processes are forked from one that has


class Holders:
    """Holders of this process, by number."""

    def __init__(self) -> None:
        self.backends: dict[int, NixlBackend] = {}
        self.hosts: dict[int, HostBackend] = {}
        self.num_opened = 0
        self.exchange: Exchange | None = None

    async def obey(self, order: dict[str, Any]) -> object:
        """Execute an order, and return its result."""
        do = getattr(self, f"do_{order.pop('do')}")
        return await do(**order)

    async def do_greet(self) -> object:
        """Answer, to show that this process runs."""
        return "hello"

    async def do_open(self, namespace: Any, config: dict[str, Any]) -> object:
        """Open a holder; return its number and its endpoint."""
        kept = HostConfig(capacity=ByteSize(config.pop("capacity")))
        served = msgspec.convert(namespace, Namespace)
        host = HostBackend(kept, served)
        backend = NixlBackend(
            msgspec.convert(config, NixlConfig, dec_hook=lambda kind, value: kind(value)),
            served,
            own=host,
        )
        await backend.start()
        assert backend.server is not None
        self.num_opened += 1
        self.backends[self.num_opened] = backend
        self.hosts[self.num_opened] = host
        return self.num_opened, str(backend.server.endpoint)

    async def do_close(self, holder: int) -> object:
        """Close a holder."""
        await self.backends.pop(holder).aclose()
        await self.hosts.pop(holder).aclose()
        return None

    async def do_corrupt(self, holder: int, key: str) -> object:
        """Change a byte of a stored block."""
        flip(self.hosts[holder], BlockKey(bytes.fromhex(key)))
        return None

    async def do_delete(self, holder: int, keys: list[str]) -> object:
        """Delete blocks, as eviction would."""
        return await self.hosts[holder].delete([BlockKey(bytes.fromhex(key)) for key in keys])

    async def do_look(self, holder: int) -> object:
        """Count the blocks, pins and peers of a holder."""
        own, serving = self.hosts[holder], self.backends[holder].server
        assert serving is not None
        return {
            "stored": [key.hex() for key in own._index.keys()],  # noqa: SIM118 - not a dict
            "evictable": own._index.num_evictable,
            "peers": len(serving.sessions),
            "pins": sum(peer.num_pins for peer in serving.sessions),
            "idle": all(peer.is_idle for peer in serving.sessions),
        }


def serve(orders: Connection) -> None:
    """Execute orders until the other end of the pipe is closed."""
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(_obey_all(orders))


async def _obey_all(orders: Connection) -> None:
    holders = Holders()
    loop = asyncio.get_running_loop()
    with contextlib.suppress(EOFError):
        while True:
            order = await loop.run_in_executor(None, orders.recv)
            orders.send(await holders.obey(order))
    for number in list(holders.backends):
        await holders.do_close(number)
