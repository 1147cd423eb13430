"""Holders for tests, each in a process of its own."""

import multiprocessing
import os
import signal
from dataclasses import dataclass
from typing import Any

import msgspec

from kvxfer.backends.nixl import NixlBackend, NixlConfig
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.units import ByteSize
from tests.backends.nixl_holder_process import serve

CAPACITY = 4 << 20


# Forked from a process that has imported everything and started no thread: that takes no time.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.backends.nixl_holder_process"])


class HolderProcess:
    """Process with any number of holders."""

    def __init__(self) -> None:
        self._orders, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=serve, args=(theirs,))
        self.process.start()
        theirs.close()
        self.tell(do="greet")

    def tell(self, **order: Any) -> Any:
        """Give an order and wait for the answer."""
        self._orders.send(order)
        return self._orders.recv()

    def open(self, namespace: Namespace, **fields: Any) -> "OpenHolder":
        """Open a holder."""
        config = {"listen": "127.0.0.1:0", "capacity": CAPACITY} | fields
        number, endpoint = self.tell(
            do="open", namespace=msgspec.to_builtins(namespace), config=config
        )
        return OpenHolder(self, number, endpoint)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        """Kill the process, also when it is stopped or has ended."""
        self._orders.close()
        self.process.kill()
        self.process.join(20)
        self.process.close()

    def close(self) -> int | None:
        """End the process, if it has not ended; return its exit status."""
        self._orders.close()
        self.process.join(20)
        status = self.process.exitcode
        self.process.close()
        return status


@dataclass(frozen=True, slots=True)
class OpenHolder:
    """One holder of a `HolderProcess`."""

    process: HolderProcess
    number: int
    endpoint: str

    def corrupt(self, key: BlockKey) -> None:
        self.process.tell(do="corrupt", holder=self.number, key=key.hex())

    def delete(self, keys: list[BlockKey]) -> None:
        hexes = [key.hex() for key in keys]
        self.process.tell(do="delete", holder=self.number, keys=hexes)

    def look(self) -> dict[str, Any]:
        seen: dict[str, Any] = self.process.tell(do="look", holder=self.number)
        return seen

    def close(self) -> None:
        self.process.tell(do="close", holder=self.number)


def open_client(namespace: Namespace, *holders: OpenHolder | str, **fields: Any) -> NixlBackend:
    """Open a backend that keeps its blocks at these holders."""
    address = ",".join(h if isinstance(h, str) else h.endpoint for h in holders)
    if "quarantine" in fields:
        fields["quarantine"] = ByteSize(fields["quarantine"])
    return NixlBackend(NixlConfig(address=address, **fields), namespace)
