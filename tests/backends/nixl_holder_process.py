"""Process of holders for tests, controlled through a pipe."""

import logging
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.backends.nixl import NixlBackend, NixlConfig
from kvxfer.backends.nixl.agents.nixl_module import import_nixl
from kvxfer.runtime import LoopThread
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.units import ByteSize
from tests.backends.host_blocks import flip
from tests.backends.processes import answer

import_nixl(otherwise="test with sockets only")  # processes are forked from one that has


class Holders:
    """Holders of this process, by number."""

    def __init__(self) -> None:
        self.open_ones: dict[int, tuple[HostBackend, NixlBackend]] = {}
        self.num_opened = 0

    async def open(self, namespace: Any, config: dict[str, Any]) -> tuple[int, str]:
        """Open a holder; return its number and its endpoint."""
        kept = HostConfig(capacity=ByteSize(config.pop("capacity")))
        served = msgspec.convert(namespace, Namespace)
        host = HostBackend(kept, served)
        made = msgspec.convert(config, NixlConfig, dec_hook=lambda kind, value: kind(value))
        backend = NixlBackend(made, served, own=host)
        await backend.start()
        assert backend.server is not None
        self.num_opened += 1
        self.open_ones[self.num_opened] = host, backend
        return self.num_opened, str(backend.server.endpoint)

    async def close(self, holder: int) -> None:
        """Close a holder."""
        host, backend = self.open_ones.pop(holder)
        await backend.aclose()
        await host.aclose()

    async def corrupt(self, holder: int, key: BlockKey) -> None:
        """Change a byte of a stored block."""
        flip(self.open_ones[holder][0], key)

    async def list(self, holder: int) -> set[BlockKey]:
        """List the stored blocks."""
        return {*self.open_ones[holder][0]._index.keys()}


def serve(orders: Connection) -> None:
    """Execute orders, each the name of a method and its arguments, until the pipe is closed."""
    logging.basicConfig(level=logging.WARNING)
    holders, loop = Holders(), LoopThread("holders")

    def obey(order: Any) -> Any:
        verb, *arguments = order
        return loop.run(getattr(holders, verb)(*arguments))

    answer(orders, "hello", obey)
    for number in list(holders.open_ones):
        loop.run(holders.close(number))
    loop.stop()
