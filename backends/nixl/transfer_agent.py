"""Transfer agent: the interface to move bytes between registered memory of two processes."""

import asyncio
import contextlib
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from kvxfer.backends.nixl.pieces import Words
from kvxfer.kvcache.memory_region import MemoryRegion

T = TypeVar("T")


class Operation(enum.Enum):
    """Direction of a transfer."""

    READ = "READ"
    """From the peer to this process."""
    WRITE = "WRITE"
    """From this process to the peer."""


class Run(NamedTuple):
    """Run of fragments that are moved together; fields as for `TransferAgent.transfer`."""

    local: Words
    remote: Words
    lengths: Words


class TransferAgent(ABC):
    """Agent that moves bytes between registered memory of this process and of peers.

    Constructing, `register` and `metadata` block; everything else is for event loops, of which
    several may use one agent. Transfers of several callers take turns, a piece each.

    Memory is quiet when no transfer can read or change a byte of it any more. Implementors must
    make sure that local memory is quiet once a transfer has ended, however it ended.

    Attributes:
        name: New for every incarnation: `kvxfer-<uuid4>`.
    """

    name: str

    @abstractmethod
    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register memory for transfers from and to it; blocks.

        The regions, and so their owners, are kept until `aclose` returns.

        Raises:
            InvalidArgumentError: A region is empty or overlaps another one.
            TransferFailedError: The memory cannot be registered.
            ClosedError: The agent is closed.
        """

    @property
    @abstractmethod
    def metadata(self) -> bytes:
        """Metadata for `add_peer` of a peer: a snapshot, so register first. Blocks.

        Any process that has it can read and write all registered memory: send it to authenticated
        peers only.
        """

    @abstractmethod
    async def add_peer(self, metadata: bytes) -> str:
        """Connect to a peer, and return its name.

        Altered metadata can crash the process: authenticate its sender first. This waits for a peer
        that stalls; no memory is at stake then, and cancelling ends it at once.

        Raises:
            InvalidArgumentError: It is not the metadata of an agent, or that of this agent, or of a
                peer that was added before and not removed yet.
            PeerLostError: The peer's memory cannot be reached.
            ClosedError: The agent is closed.
        """

    @abstractmethod
    async def remove_peer(self, peer: str) -> None:
        """End transfers from and to a peer, and forget it; does nothing if it is unknown.

        Returns when the memory of its transfers is quiet; they end with `PeerLostError`.
        """

    @abstractmethod
    async def transfer(
        self, operation: Operation, peer: str, local: Words, remote: Words, lengths: Words
    ) -> None:
        """Move bytes, fragment by fragment, in any order; returns when all have arrived.

        A `WRITE` has arrived when this returns; nothing tells the peer.

        Args:
            operation: Direction.
            peer: As `add_peer` returned it.
            local: Addresses of the fragments in this process, inside registered regions.
            remote: Addresses of the fragments in the peer, inside regions that it registered
                before it took its metadata.
            lengths: Bytes of the fragments.

        Raises:
            InvalidArgumentError: An address is outside of registered memory, or the arrays are not
                of one length; nothing was moved.
            TransferFailedError: It failed; some of the bytes may have been moved. The memory is
                quiet.
            PeerLostError: The same, and every later transfer with this peer will fail: remove it.
            ClosedError: The agent was closed before.
            asyncio.CancelledError: The caller was cancelled. Only pieces in flight have been moved,
                and the memory is quiet: this waits for it, for ever if the peer stalls.
        """

    async def transfer_each(
        self, operation: Operation, peer: str, runs: Iterable[Run], landed: Callable[[int], None]
    ) -> None:
        """Move runs of fragments, and report each that has arrived; otherwise as `transfer`.

        Args:
            operation: Direction.
            peer: As `add_peer` returned it.
            runs: Runs, in the order in which they are begun; may be made while earlier ones are
                moved.
            landed: Called with the index of each run that has arrived, on any thread; it holds up
                all other transfers meanwhile.
        """
        for index, run in enumerate(runs):
            await self.transfer(operation, peer, *run)
            landed(index)

    @abstractmethod
    async def aclose(self) -> None:
        """End every transfer with `TransferFailedError`, and release memory and peers.

        May be called again. When this returns, local memory is quiet.
        """


async def to_its_end(future: "Future[T]", cancel: Callable[[], None] | None = None) -> T:
    """Await a future of another thread; when cancelled, call `cancel`, and wait before raising.

    `asyncio.wrap_future` and `asyncio.shield` do the same in four turns of the event loop.
    """
    cancellation: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await _until_done(future)
        except asyncio.CancelledError as exc:
            if cancel and not cancellation:
                cancel()
            cancellation = exc
    if cancellation:
        raise cancellation
    return future.result()


async def _until_done(future: "Future[T]") -> None:
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def wake_soon(_: "Future[T]") -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed, so nothing waits
            loop.call_soon_threadsafe(wake)

    future.add_done_callback(wake_soon)
    await waiter
