"""Transfer engine: moves batches of blocks between KV caches and a backend."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Self

from numpy.typing import ArrayLike

from kvxfer.runtime import run_aside
from kvxfer.storage.backend import Backend, Outcome
from kvxfer.storage.eviction.retention import Retention
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Operation
from kvxfer.transfer.job import Direction
from kvxfer.transfer.polled_engine import PolledEngine

logger = logging.getLogger(__name__)


class TransferEngine(PolledEngine[Backend]):
    """Engine that stores and loads batches of blocks, called from an event loop or a step loop.

    The asynchronous methods (`lookup`, `store`, `load`, `flush`) may be awaited on any event loop;
    the polled ones, those of `PolledEngine`, need none. Inside `async with engine` all work runs on
    the running loop. Arguments, guarantees and errors are those of `PolledEngine`.
    """

    kind = Backend

    async def lookup(
        self, keys: Sequence[BlockKey], *, timeout_s: float | None = None
    ) -> list[bool]:
        """Return for each key whether a load would find it now.

        After the deadline every key is a miss, and a warning is logged.

        Args:
            keys: The keys.
            timeout_s: Deadline from now, instead of the engine's.

        Raises:
            InvalidArgumentError: There are no keys, or one appears twice.
            ClosedError: The engine was closed.
            BackendUnavailableError: The backend is gone.
        """
        self._guard.check_batch(keys)
        return await self._loop.run(self._lookup(keys, self._timeout(timeout_s)))

    def submit_lookup(
        self, keys: Sequence[BlockKey], *, timeout_s: float | None = None
    ) -> Future[list[bool]]:
        """Begin what `lookup` does, and return at once; for engines with a step loop.

        Args:
            keys: The keys.
            timeout_s: Deadline from now, instead of the engine's.

        Returns:
            A future of one answer for each key, in order, or of an error of `lookup`. Closing the
            engine cancels it.

        Raises:
            ClosedError: The engine was closed.
        """
        return self.submit_call(self.lookup(keys, timeout_s=timeout_s))

    async def store(
        self,
        keys: Sequence[BlockKey],
        block_ids: Sequence[ArrayLike],
        *,
        first_block_indices: Sequence[int] | None = None,
        timeout_s: float | None = None,
        retention: Retention | None = None,
    ) -> list[Outcome]:
        """Copy blocks of the caches to the backend; arguments and errors as `submit_store`.

        The caller must not change the blocks until this returns, nor those whose outcome says
        that their memory is not safe until `drain` returns.

        Returns:
            One outcome per key, in order.

        Raises:
            asyncio.CancelledError: The caller was cancelled. Transfers that the backend had begun
                may go on: the memory is safe once `drain` returns.
        """
        job = self._job(Direction.STORE, keys, block_ids, first_block_indices, timeout_s, retention)
        return await self._loop.run(self._mover.move(job))

    async def load(
        self,
        keys: Sequence[BlockKey],
        block_ids: Sequence[ArrayLike],
        *,
        first_block_indices: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        """Copy blocks of the backend to the caches, as `submit_load`; all else as `store`."""
        job = self._job(Direction.LOAD, keys, block_ids, first_block_indices, timeout_s)
        return await self._loop.run(self._mover.move(job))

    async def flush(self, *, timeout_s: float | None = None) -> bool:
        """Wait until all blocks whose store is done are in every tier, and synced to disk.

        Blocks in files then survive the end of the process and a power cut; those in the memory of
        hosts and peers do not. Without a flush a store is done as soon as one tier has the block.

        Args:
            timeout_s: Deadline from now, instead of the engine's.

        Returns:
            Whether that happened before the deadline.

        Raises:
            ClosedError: The engine was closed.
            BackendUnavailableError: The backend is gone.
        """
        self._guard.check()
        return await self._loop.run(self._flush(self._timeout(timeout_s)))

    async def aclose(self) -> None:
        """Cancel waiting jobs, wait for moving ones, close the backend. May be called again.

        Ends within `close_timeout_s`; transfers that are abandoned then are logged.
        """
        self._guard.close()
        if not self._guard.released:
            await self._loop.run(self._guard.aclose(self._shut_down))
        if not self._loop.is_stopped:
            await run_aside("kvxfer-close", self._loop.stop)

    async def __aenter__(self) -> Self:
        self._guard.require_same_process()
        self._loop.use_running_loop()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def _lookup(self, keys: Sequence[BlockKey], timeout_s: float | None) -> list[bool]:
        try:
            return await self._calls.wait_for(timeout_s, self.backend.lookup(keys))
        except TimeoutError:
            logger.warning("lookup of %d blocks: no answer in %s s", len(keys), timeout_s)
            self._reports.late(Operation.LOOKUP, keys)
            return [False] * len(keys)

    async def _flush(self, timeout_s: float | None) -> bool:
        try:
            await self._calls.wait_for(timeout_s, self.backend.flush())
        except TimeoutError:
            return False
        return True
