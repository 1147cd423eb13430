"""Host pools for tests: servers on a thread of their own, and backends that end with them."""

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.backends.pool import PoolBackend, PoolConfig, PoolServer
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import Namespace
from kvxfer.units import ByteSize

LIMIT_S = 30.0

T = TypeVar("T")


class RunningPool:
    """Host pool that is served on a thread, as another process would.

    Attributes:
        path: Its socket.
        hosts: Its pools of slots, once there are any.
    """

    def __init__(self, path: Path, capacity: ByteSize) -> None:
        self.path = path
        self.hosts: list[HostBackend] = []
        self._config = HostConfig(capacity=capacity, shared=True)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = PoolServer(path, capacity, self._open)
        try:
            self.run(self.server.start())
        except BaseException:
            self.stop()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LIMIT_S)

    def stop(self) -> None:
        """End the server; may be called again."""
        if self._loop.is_running():
            self.run(self.server.aclose())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(LIMIT_S)
            self._loop.close()

    def _open(self, namespace: Namespace) -> Backend:
        host = HostBackend(self._config, namespace)
        self.hosts.append(host)
        return host


class OwnPoolBackend(PoolBackend):
    """Backend with a host pool of its own, which ends with it."""

    def __init__(self, namespace: Namespace, capacity: ByteSize) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "pool.sock"
        self.running = RunningPool(path, capacity)
        super().__init__(PoolConfig(path=str(path)), namespace)

    async def aclose(self) -> None:
        await super().aclose()
        await asyncio.to_thread(self.running.stop)
        self._folder.cleanup()


@contextlib.contextmanager
def running_pool(path: Path, *, capacity: str = "1MiB") -> Iterator[RunningPool]:
    """Serve a pool until the context ends."""
    pool = RunningPool(path, ByteSize.parse(capacity))
    try:
        yield pool
    finally:
        pool.stop()
