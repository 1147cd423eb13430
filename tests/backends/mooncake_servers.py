"""Mooncake Store for tests: its real master, and processes that provide the memory."""

import contextlib
import functools
import socket
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvxfer.backends.mooncake import MooncakeBackend, MooncakeConfig
from kvxfer.storage.keys import Namespace
from tests.backends.outages import PATIENT, Program
from tests.ports import free_ports

SEGMENT_BYTES = 256 << 20
CLIENT_TTL_S = 3
"""Time after which the master forgets a process that has ended."""


def start(program: str, flags: dict[str, Any], folder: Path) -> Program:
    import mooncake

    (folder / program).mkdir()
    command = [str(Path(mooncake.__path__[0]) / program)]
    command += [f"-{name}={value}" for name, value in flags.items()]
    return Program(command, folder / program)


class Cluster:
    """Cluster of one master and one process that provides the memory."""

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self.port = free_ports(3)
        self._metrics_port = self.port + 1
        self.address = f"127.0.0.1:{self.port}"
        self.master = start(
            "mooncake_master",
            {
                "rpc_port": self.port,
                "rpc_address": "127.0.0.1",
                "rpc_thread_num": 2,
                "metrics_host": "127.0.0.1",
                "metrics_port": self._metrics_port,
                "client_ttl": CLIENT_TTL_S,
            },
            folder,
        )
        self.await_master()
        self.holder = start(
            "mooncake_client",
            {
                "master_server_address": self.address,
                "metadata_server": "P2PHANDSHAKE",
                "host": "127.0.0.1",
                "port": self.port + 2,
                "global_segment_size": f"{segment_bytes >> 20} MB",
            },
            folder,
        )
        self.await_memory()

    def await_master(self) -> None:
        def listens() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return True
            return False

        self.master.wait_until(listens)

    def await_memory(self) -> None:
        url = f"http://127.0.0.1:{self._metrics_port}/metrics"

        def has_room() -> bool:
            with contextlib.suppress(OSError), urllib.request.urlopen(url) as answer:
                lines = answer.read().decode().splitlines()
                room = [line for line in lines if line.startswith("master_total_capacity_bytes ")]
                return bool(room and float(room[0].split()[-1]))
            return False

        self.holder.wait_until(has_room)

    @functools.cached_property
    def client(self) -> Any:
        """Plain client, which knows nothing of kvxfer's pages."""
        from mooncake.store import MooncakeDistributedStore

        store = MooncakeDistributedStore()
        code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", self.address)
        assert code == 0
        return store

    def close(self) -> None:
        if "client" in self.__dict__:
            self.client.close()
        self.holder.kill()
        self.master.kill()


@contextlib.contextmanager
def mooncake_cluster(segment_bytes: int = SEGMENT_BYTES) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="kvxfer-mooncake-") as name:
        cluster = Cluster(Path(name), segment_bytes)
        try:
            yield cluster
        finally:
            cluster.close()


def open_mooncake(cluster: Cluster, namespace: Namespace, **fields: Any) -> MooncakeBackend:
    config = msgspec.convert(
        {"address": cluster.address} | PATIENT | fields, MooncakeConfig, dec_hook=None
    )
    return MooncakeBackend(config, namespace)


class SharedClient:
    """Client of Mooncake that all backends of a test process share: closing one takes a second."""

    def __init__(self, cluster: Cluster) -> None:
        self._store = cluster.client
        self._address = 0

    def register_buffer(self, address: int, num_bytes: int) -> int:
        self._address = address
        code: int = self._store.register_buffer(address, num_bytes)
        return code

    def close(self) -> int:
        """Undo what this backend did."""
        code: int = self._store.unregister_buffer(self._address)
        return code

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
