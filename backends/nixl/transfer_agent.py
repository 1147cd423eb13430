"""What moves bytes between registered memory of this process and that of a peer."""

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
    """Which way bytes go."""

    READ = "READ"
    """From the peer."""
    WRITE = "WRITE"
    """To the peer."""


class Run(NamedTuple):
    """Fragments that are moved together; each as `TransferAgent.transfer` takes them."""

    local: Words
    remote: Words
    lengths: Words


class TransferAgent(ABC):
    """Moves bytes between registered memory here and registered memory of peers.

    Constructing, `register` and `metadata` block; everything else is for event loops, of which
    several may use one agent. Transfers of several callers take turns, a piece each.

    Implementors must see to it that no byte of local memory changes, and none is read, once a
    transfer has ended, however it did.

    Attributes:
        name: New for every incarnation: `kvxfer-<uuid4>`.
    """

    name: str

    @abstractmethod
    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Make memory known, so that it can be moved from and to; blocks.

        The regions, and so their owners, are kept until `aclose` returns.

        Raises:
            InvalidArgumentError: A region is empty or overlaps another one.
            TransferFailedError: The memory cannot be registered.
            ClosedError: The agent is closed.
        """

    @property
    @abstractmethod
    def metadata(self) -> bytes:
        """What a peer's `add_peer` takes: a snapshot, so register first. Blocks.

        Whoever has it can read and write all registered memory: send it to authenticated peers.
        """

    @abstractmethod
    async def add_peer(self, metadata: bytes) -> str:
        """Connect to a peer, and return its name.

        Altered metadata can crash the process: authenticate it before. This waits for a peer that
        stalls; no memory is at stake then, and cancelling it ends it at once.

        Raises:
            InvalidArgumentError: It is not the metadata of an agent, or that of this agent, or of
                a peer that was added before and is not gone yet.
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
            operation: Which way.
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
            PeerLostError: The same, and so will every transfer with this peer: remove it.
            ClosedError: The agent was closed before.
            asyncio.CancelledError: The caller was cancelled. Only what was under way has been
                moved, and the memory is quiet: this waits for it, for ever if the peer stalls.
        """

    async def transfer_each(
        self, operation: Operation, peer: str, runs: Iterable[Run], landed: Callable[[int], None]
    ) -> None:
        """Move runs of fragments, and say of each when it has arrived; otherwise as `transfer`.

        Args:
            operation: Which way.
            peer: As `add_peer` returned it.
            runs: What is moved together, in the order in which they are begun; may be made while
                those before are moved.
            landed: Called with the index of each run that has arrived, on any thread; what it
                does holds up all other transfers.
        """
        for index, run in enumerate(runs):
            await self.transfer(operation, peer, *run)
            landed(index)

    @abstractmethod
    async def aclose(self) -> None:
        """End every transfer with `TransferFailedError`, and release memory and peers.

        May be called again. When this returns no byte of local memory is touched any more.
        """


async def to_its_end(future: "Future[T]", cancel: Callable[[], None] | None = None) -> T:
    """Await what another thread does; when cancelled, tell it, and wait for it before raising.

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
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
            loop.call_soon_threadsafe(wake)

    future.add_done_callback(wake_soon)
    await waiter
