"""Quarantine of memory that a transfer may still touch after its deadline."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.calls import wait_despite_cancel


class Quarantine:
    """Quarantine of memory: keeps it alive until its late transfers have ended.

    Attributes:
        num_bytes: Bytes that transfers may still touch.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._held: dict[asyncio.Future[Any], Descriptors] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, transfer: "asyncio.Future[Any]", blocks: Descriptors) -> None:
        """Hold blocks until their transfer has ended, and so no longer touches their memory."""

        def release(_: "asyncio.Future[Any]") -> None:
            self.num_bytes -= self._held.pop(transfer).num_bytes
            if not transfer.cancelled():
                transfer.exception()  # fetched, else asyncio reports it as never retrieved

        self._held[transfer] = blocks  # with their owners
        self.num_bytes += blocks.num_bytes
        transfer.add_done_callback(release)

    async def drain(self) -> None:
        """Wait until the transfers of the blocks held now have ended."""
        if self._held:
            await asyncio.wait(list(self._held))


async def end_within(transfer: "asyncio.Future[Any]", *, timeout_s: float, grace_s: float) -> bool:
    """Wait for a transfer; at the deadline, or when cancelled, cancel it and wait `grace_s` more.

    Returns:
        Whether the transfer has ended.

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
    """Wait to the end, also when cancelled; the caller raises `CancelledError` itself."""
    with contextlib.suppress(asyncio.CancelledError):
        await wait_despite_cancel(asyncio.ensure_future(wait))
