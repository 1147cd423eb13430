"""Host pools for tests: servers on a thread of their own, and backends that end with them."""

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.backends.pool import PoolBackend, PoolConfig, PoolServer
from kvxfer.runtime import LoopThread
from kvxfer.storage import Backend, Namespace
from kvxfer.units import ByteSize

LIMIT_S = 30.0


@contextlib.contextmanager
def running_pool(path: Path, *, capacity: str = "1MiB") -> Iterator[list[HostBackend]]:
    """Serve a pool on a thread, as another process would; yield its pools of slots as they open."""
    config = HostConfig(capacity=ByteSize.parse(capacity), shared=True)
    hosts: list[HostBackend] = []

    def open_host(namespace: Namespace) -> Backend:
        hosts.append(HostBackend(config, namespace))
        return hosts[-1]

    thread, server = LoopThread("test-pool"), PoolServer(path, config.capacity, open_host)
    try:
        thread.run(server.start(), LIMIT_S)
        yield hosts
    finally:
        thread.run(server.aclose(), LIMIT_S)
        thread.stop()


class OwnPoolBackend(PoolBackend):
    """Backend with a host pool of its own, which ends with it."""

    def __init__(self, namespace: Namespace, capacity: ByteSize) -> None:
        self._own = contextlib.ExitStack()
        path = Path(self._own.enter_context(tempfile.TemporaryDirectory())) / "pool.sock"
        self.hosts = self._own.enter_context(running_pool(path, capacity=f"{int(capacity)}"))
        super().__init__(PoolConfig(path=str(path)), namespace)

    async def aclose(self) -> None:
        await super().aclose()
        await asyncio.to_thread(self._own.close)
