"""Memory that something may still write to although its transfer was given up."""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.calls import finish

logger = logging.getLogger(__name__)

_NEVER_FREED: list[Descriptors] = []


class Quarantine:
    """Keeps memory alive, and its owners informed, until transfers that linger are over.

    Attributes:
        num_bytes: Bytes that may still be touched.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._held: dict[asyncio.Future[Any], Descriptors] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, transfer: "asyncio.Future[Any]", blocks: Descriptors) -> None:
        """Hold blocks until a transfer, which ends only when their memory is quiet, has ended."""

        def release(_: "asyncio.Future[Any]") -> None:
            self.num_bytes -= self._held.pop(transfer).num_bytes
            if not transfer.cancelled():
                transfer.exception()  # fetched, or asyncio reports it as never retrieved

        self._held[transfer] = blocks  # with their owners
        self.num_bytes += blocks.num_bytes
        transfer.add_done_callback(release)

    def keep_for_ever(self) -> None:
        """Never free what is held now: nobody will learn when it is quiet."""
        if self._held:
            logger.warning("%d bytes may still be written to; they are not freed", self.num_bytes)
        _NEVER_FREED.extend(self._held.values())

    async def drain(self) -> None:
        """Wait until what is held now is quiet."""
        if self._held:
            await asyncio.wait(list(self._held))


async def end_within(transfer: "asyncio.Future[Any]", *, timeout_s: float, grace_s: float) -> bool:
    """Wait for a transfer; when time is up, or when cancelled, cancel it and wait some more.

    Returns:
        Whether it has ended.

    Raises:
        asyncio.CancelledError: The caller was cancelled; the transfer may go on.
    """
    try:
        await asyncio.wait([transfer], timeout=timeout_s)
    except asyncio.CancelledError:
        transfer.cancel()
        await shielded(asyncio.wait([transfer], timeout=grace_s))
        raise
    if not transfer.done():
        transfer.cancel()
        await asyncio.wait([transfer], timeout=grace_s)
    return transfer.done()


async def shielded(wait: Coroutine[Any, Any, object]) -> None:
    """Wait to the end, also when cancelled; whoever calls this raises what has to be raised."""
    with contextlib.suppress(asyncio.CancelledError):
        await finish(asyncio.ensure_future(wait))
