"""Holders in processes of their own, for tests."""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import msgspec

from kvxfer.backends.nixl import NixlBackend, NixlConfig
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.units import ByteSize

CAPACITY = 4 << 20


class HolderProcess:
    """A process with any number of holders."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.backends.nixl_holder_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.tell(do="greet")

    def tell(self, **order: Any) -> Any:
        """Give an order and wait for the answer."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the holder process ended with {self.process.wait()}"
        return json.loads(answer)

    def open(self, namespace: Namespace, **fields: Any) -> "OpenHolder":
        """Open a holder."""
        config = {"listen": "127.0.0.1:0", "capacity": CAPACITY} | fields
        number, endpoint = self.tell(
            do="open", namespace=msgspec.to_builtins(namespace), config=config
        )
        return OpenHolder(self, number, endpoint)

    def close(self) -> int:
        """End the process; return its exit status."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        status = self.process.wait(20)
        self.process.stdout.close()
        return status


@dataclass(frozen=True, slots=True)
class OpenHolder:
    """One holder of such a process."""

    process: HolderProcess
    number: int
    endpoint: str

    def corrupt(self, key: BlockKey) -> None:
        self.process.tell(do="corrupt", holder=self.number, key=key.hex())

    def delete(self, keys: list[BlockKey]) -> int:
        hexes = [key.hex() for key in keys]
        return int(self.process.tell(do="delete", holder=self.number, keys=hexes))

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
