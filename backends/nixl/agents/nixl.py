"""Transfer agent over NIXL."""

import asyncio
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count

from kvxfer import runtime
from kvxfer.backends.nixl.agents.base import Flight, Fragments, TransferAgent
from kvxfer.backends.nixl.agents.nixl_limits import NixlLimits
from kvxfer.backends.nixl.agents.nixl_reads import PiecewiseRead
from kvxfer.backends.nixl.agents.nixl_thread import BACKEND, NixlThread
from kvxfer.backends.nixl.wire import (
    AgentMetadata,
)
from kvxfer.errors import ClosedError, TransferFailedError
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.runtime import outlive_caller, wait_despite_cancel


class NixlAgent(TransferAgent):
    """Transfer agent over NIXL; the constructor imports NIXL and blocks for up to a second.

    Several event loops may use one agent. Where UCX can reach a peer's memory over TCP only,
    `add_peer` raises `PeerLostError`.

    Args:
        limits: Limits of its reads, and of what peers may cost.

    Raises:
        BackendUnavailableError: NIXL or its UCX plug-in is missing, or does not work here.
    """

    def __init__(self, limits: NixlLimits = NixlLimits()) -> None:  # noqa: B008 - it is frozen
        self.name = f"kvxfer-{runtime.unique_id()}"
        self._thread = NixlThread(self.name, limits)
        # Also at the interpreter's exit, which a thread inside of NIXL would crash.
        self._finalizer = weakref.finalize(self, self._thread.stop)

    def __repr__(self) -> str:
        peers = sorted(self._thread.peers)
        return f"{type(self).__name__}(name={self.name!r}, backend={BACKEND!r}, peers={peers!r})"

    @property
    def plugins(self) -> list[str]:
        """Names of the plug-ins that NIXL finds."""
        return self._thread.call(self._thread.list_plugins)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """See `TransferAgent.register`."""
        self._thread.call(partial(self._thread.register, regions))

    @property
    def metadata(self) -> bytes:
        """See `TransferAgent.metadata`."""
        return self._thread.call(self._thread.describe)

    async def add_peer(self, metadata: bytes) -> str:
        """See `TransferAgent.add_peer`."""
        peer = AgentMetadata.decode(metadata)
        done: Future[str] = Future()
        self._thread.order(done, partial(self._thread.add_peer, peer, done))
        try:
            return await outlive_caller(done)
        except asyncio.CancelledError:
            self._thread.forget(peer.name, done)
            raise

    async def remove_peer(self, peer: str) -> None:
        """See `TransferAgent.remove_peer`."""
        done: Future[None] = Future()
        self._thread.order(done, partial(self._thread.remove_peer, peer, done))
        await wait_despite_cancel(done)

    def begin(
        self,
        peer: str,
        runs: Sequence[Fragments],
        landed: Callable[[int], None],
        *,
        last: Fragments | None = None,
    ) -> Flight:
        """See `TransferAgent.begin`."""
        readings = self._thread.prepare(peer, runs)
        final = None if last is None else self._thread.prepare(peer, [last])[0]
        for index, reading in enumerate(readings):
            reading.landed = partial(landed, index)
        over = _all_over([reading.done for reading in readings])
        self._thread.begin(readings)
        if final is None:
            return Flight(over, partial(self._thread.cancel, readings))
        over.add_done_callback(partial(self._begin_final, final))
        return Flight(final.done, partial(self._thread.cancel, [*readings, final]))

    def _begin_final(self, final: PiecewiseRead, over: "Future[None]") -> None:
        """Begin the read that follows others, unless one of them failed; on any thread."""
        error = over.exception()
        try:
            if error is None:
                self._thread.begin([final], is_next=True)  # its caller waits for nothing else
        except ClosedError:
            error = TransferFailedError(final.peer, "the agent was closed")
        if error is not None:
            final.done.set_exception(error)

    async def aclose(self) -> None:
        """See `TransferAgent.aclose`."""
        self._finalizer.detach()
        await wait_despite_cancel(self._thread.begin_stop())


def _all_over(futures: "Sequence[Future[None]]") -> "Future[None]":
    """Make a future that ends with the last of some, and with the first error of any."""
    if len(futures) == 1:
        return futures[0]
    over: Future[None] = Future()
    if not futures:
        over.set_result(None)
    ended = count(1)

    def end(_: "Future[None]") -> None:
        if next(ended) < len(futures):
            return
        errors = (future.exception() for future in futures)
        if error := next(filter(None, errors), None):
            over.set_exception(error)
        else:
            over.set_result(None)

    for future in futures:
        future.add_done_callback(end)
    return over
