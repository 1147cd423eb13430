"""Moves bytes between registered memory of two processes with NIXL."""

import asyncio
import uuid
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from kvxfer.backends.nixl.agent_thread import BACKEND, AgentThread, Transfer
from kvxfer.backends.nixl.pieces import Fragments, Words
from kvxfer.backends.nixl.regions import AgentMetadata
from kvxfer.backends.nixl.transfer_agent import Operation, TransferAgent, to_its_end
from kvxfer.errors import PeerLostError
from kvxfer.kvcache.memory_region import MemoryRegion


class NixlAgent(TransferAgent):
    """See `TransferAgent`; the constructor imports NIXL and blocks for up to a second.

    Where UCX can reach a peer's memory over TCP only, `add_peer` raises `PeerLostError`.

    Raises:
        BackendUnavailableError: NIXL or its UCX plug-in is missing, or does not work here.
    """

    def __init__(self) -> None:
        self.name = f"kvxfer-{uuid.uuid4()}"
        self._thread = AgentThread(self.name)
        # Also at the end of the interpreter: a thread that is inside of NIXL then would crash it.
        self._finalizer = weakref.finalize(self, self._thread.stop)

    def __repr__(self) -> str:
        peers = sorted(self._thread.peers)
        return f"{type(self).__name__}(name={self.name!r}, backend={BACKEND!r}, peers={peers!r})"

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
        waiter = asyncio.wrap_future(done)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            waiter.add_done_callback(asyncio.Future.exception)  # fetched, or asyncio complains
            self._thread.forget(peer.name, done)
            raise

    async def remove_peer(self, peer: str) -> None:
        """See `TransferAgent.remove_peer`."""
        done: Future[None] = Future()
        self._thread.order(done, partial(self._thread.remove_peer, peer, done))
        await to_its_end(done)

    async def transfer(
        self, operation: Operation, peer: str, local: Words, remote: Words, lengths: Words
    ) -> None:
        """See `TransferAgent.transfer`."""
        if peer not in self._thread.peers:
            raise PeerLostError(peer, "it was not added, or is removed")
        fragments = Fragments.of(local, remote, lengths)
        self._thread.regions.require("local", fragments.local, fragments.lengths)
        self._thread.peers[peer].require("remote", fragments.remote, fragments.lengths)
        transfer = Transfer(operation, peer)
        self._thread.order(transfer.done, partial(self._thread.begin, transfer, fragments))
        await to_its_end(transfer.done, partial(self._thread.cancel, transfer))

    async def aclose(self) -> None:
        """See `TransferAgent.aclose`."""
        self._finalizer.detach()
        await to_its_end(self._thread.begin_stop())
