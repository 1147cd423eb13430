"""Holders for tests, any number of them in one process that is controlled through a pipe."""

import logging
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from kvxfer.backends.host import HostBackend
from kvxfer.backends.nixl import NixlBackend, NixlConfig
from kvxfer.backends.nixl.agents.nixl_module import import_nixl
from kvxfer.runtime import LoopThread
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.units import ByteSize
from tests.backends.host_blocks import flip
from tests.backends.processes import ObedientProcess, answer

import_nixl(otherwise="test with sockets only")  # processes are forked from one that has


class Holders:
    def __init__(self) -> None:
        self.open_ones: dict[int, NixlBackend] = {}
        self.num_opened = 0

    async def open(self, namespace: Namespace, config: NixlConfig) -> tuple[int, str]:
        """Open a holder; return its number and its endpoint."""
        backend = NixlBackend(config, namespace)
        await backend.start()
        assert backend.server is not None
        self.num_opened += 1
        self.open_ones[self.num_opened] = backend
        return self.num_opened, str(backend.server.endpoint)

    async def close(self, holder: int) -> None:
        await self.open_ones.pop(holder).aclose()

    async def corrupt(self, holder: int, key: BlockKey) -> None:
        flip(self.host(holder), key)

    async def list(self, holder: int) -> set[BlockKey]:
        return {*self.host(holder)._index.keys()}

    def host(self, holder: int) -> HostBackend:
        host = self.open_ones[holder]._own
        assert host is not None
        return host


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


class HolderProcess(ObedientProcess):
    def __init__(self) -> None:
        super().__init__(serve)

    def open(self, namespace: Namespace, *, capacity: int = 4 << 20, **fields: Any) -> "OpenHolder":
        config = NixlConfig(listen="127.0.0.1:0", capacity=ByteSize(capacity), **fields)
        return OpenHolder(self, *self.tell(("open", namespace, config)))


@dataclass(frozen=True, slots=True)
class OpenHolder:
    process: HolderProcess
    number: int
    endpoint: str

    def corrupt(self, key: BlockKey) -> None:
        """Change a byte of a stored block."""
        self.process.tell(("corrupt", self.number, key))

    def stored(self) -> set[BlockKey]:
        keys: set[BlockKey] = self.process.tell(("list", self.number))
        return keys

    def close(self) -> None:
        self.process.tell(("close", self.number))


def open_client(namespace: Namespace, *holders: OpenHolder, **fields: Any) -> NixlBackend:
    """Open a backend that keeps its blocks at these holders."""
    address = ",".join(holder.endpoint for holder in holders)
    return NixlBackend(NixlConfig(address=address, **fields), namespace)
