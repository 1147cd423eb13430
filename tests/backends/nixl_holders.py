"""Holders for tests, any number of them in a process."""

from dataclasses import dataclass
from typing import Any

import msgspec

from kvxfer.backends.nixl import NixlBackend, NixlConfig
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.units import ByteSize
from tests.backends.nixl_holder_process import serve
from tests.backends.processes import ObedientProcess

CAPACITY = 4 << 20


class HolderProcess(ObedientProcess):
    """Process with any number of holders."""

    def __init__(self) -> None:
        super().__init__(serve)

    def open(self, namespace: Namespace, **fields: Any) -> "OpenHolder":
        """Open a holder."""
        config = {"listen": "127.0.0.1:0", "capacity": CAPACITY} | fields
        number, endpoint = self.tell(("open", msgspec.to_builtins(namespace), config))
        return OpenHolder(self, number, endpoint)


@dataclass(frozen=True, slots=True)
class OpenHolder:
    """One holder of a `HolderProcess`."""

    process: HolderProcess
    number: int
    endpoint: str

    def corrupt(self, key: BlockKey) -> None:
        self.process.tell(("corrupt", self.number, key))

    def stored(self) -> set[BlockKey]:
        keys: set[BlockKey] = self.process.tell(("list", self.number))
        return keys

    def close(self) -> None:
        self.process.tell(("close", self.number))


def open_client(namespace: Namespace, *holders: OpenHolder | str, **fields: Any) -> NixlBackend:
    """Open a backend that keeps its blocks at these holders."""
    address = ",".join(h if isinstance(h, str) else h.endpoint for h in holders)
    if "quarantine" in fields:
        fields["quarantine"] = ByteSize(fields["quarantine"])
    return NixlBackend(NixlConfig(address=address, **fields), namespace)
