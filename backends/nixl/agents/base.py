"""Transfer agent: the interface for reading another process's registered memory."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.backends.nixl.agents.nixl_module import Carrier, choose_carrier
from kvxfer.backends.nixl.wire.messages import Hello
from kvxfer.backends.nixl.wire.regions import Regions, Words
from kvxfer.errors import ClosedError, InvalidArgumentError
from kvxfer.kvcache.fragments import cut_long, cut_runs, join, run_starts, touch
from kvxfer.kvcache.memory_region import MemoryRegion

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """Fragments to read: stretches of bytes, with their addresses on either side."""

    local: Words
    remote: Words
    lengths: Words

    @classmethod
    def of(cls, local: Words, remote: Words, lengths: Words) -> "Fragments":
        """Make fragments from arrays of equal length, leaving out empty fragments."""
        if not local.shape == remote.shape == lengths.shape == (len(lengths),):
            raise InvalidArgumentError(
                "lengths",
                lengths.shape,
                f"one for each of {local.shape} local and {remote.shape} remote addresses",
            )
        if lengths.all():
            return cls(local, remote, lengths)
        there = lengths > 0
        return cls(local[there], remote[there], lengths[there])

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, chosen: slice | NDArray[np.bool_ | np.intp]) -> "Fragments":
        """Take some of the fragments."""
        return Fragments(self.local[chosen], self.remote[chosen], self.lengths[chosen])

    def group(
        self, ours: Regions, theirs: Regions
    ) -> "Iterator[tuple[torch.device, torch.device, Fragments]]":
        """Group fragments by device; yields each local device, remote device and group."""
        if len(ours.devices) == len(theirs.devices) == 1:  # the usual case
            yield ours.devices[0], theirs.devices[0], self
            return
        local, remote = ours.find_devices(self.local), theirs.find_devices(self.remote)
        for here, there in sorted({*zip(local.tolist(), remote.tolist(), strict=True)}):
            chosen = (local == here) & (remote == there)
            yield ours.devices[here], theirs.devices[there], self.take(chosen)

    @classmethod
    def join(cls, runs: "Sequence[Fragments]", ours: Regions, theirs: Regions) -> "list[Fragments]":
        """Join fragments of each run that touch on both sides, in the order of remote addresses.

        None is joined across regions; one outside all regions raises `InvalidArgumentError`.
        """
        whole = cls.concatenate(runs)
        ours.require("local", whole.local, whole.lengths)
        theirs.require("remote", whole.remote, whole.lengths)
        if len(whole) < 2:
            return list(runs)
        of_run = np.repeat(np.arange(len(runs)), [len(run) for run in runs])
        if np.any((whole.remote[1:] < whole.remote[:-1]) & (of_run[1:] == of_run[:-1])):
            whole = whole.take(np.lexsort((whole.remote, of_run)))
        local, remote, lengths = whole.local, whole.remote, whole.lengths
        touching = touch(local, lengths) & touch(remote, lengths) & (of_run[1:] == of_run[:-1])
        if touching.any():
            touching &= np.diff(ours.starts.searchsorted(local, "right")) == 0
            touching &= np.diff(theirs.starts.searchsorted(remote, "right")) == 0
            firsts = run_starts(touching)
            of_run = of_run[firsts]
            whole = cls(*join(touching, local, remote, lengths))
        stops = of_run.searchsorted(np.arange(len(runs)), "right").tolist()
        return [whole.take(slice(*each)) for each in pairwise([0, *stops])]

    @classmethod
    def concatenate(cls, runs: "Sequence[Fragments]") -> "Fragments":
        """Concatenate runs of fragments."""
        if len(runs) == 1:
            return runs[0]
        columns = zip(*((run.local, run.remote, run.lengths) for run in runs), strict=True)
        return cls(*(np.concatenate(each) for each in columns))

    def split(self, num_bytes: int, num_fragments: int) -> "list[Fragments]":
        """Split into pieces, none of them empty, of at most `num_bytes` and `num_fragments`."""
        if len(self) <= num_fragments and int(self.lengths.sum()) <= num_bytes:
            return [self] if len(self) else []
        columns = cut_long(num_bytes, self.local, self.remote, self.lengths)
        runs = cut_runs(columns[-1], num_bytes, longest_run=num_fragments)
        return [Fragments(*(column[start:stop] for column in columns)) for start, stop in runs]


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """Read that an agent has begun.

    Attributes:
        done: Future that completes once the memory is quiet; a cancelled read may cancel it.
        cancel: Requests an early end; must be called on the event loop that began the read.
    """

    done: "asyncio.Future[None] | Future[None]"
    cancel: Callable[[], object]


class TransferAgent(ABC):
    """Agent that reads registered memory of peers into registered memory of this process.

    No agent ever writes into the memory of another process. The constructor, `register` and
    `metadata` block; all else is for an event loop. Concurrent reads take turns, a piece each.

    Memory is quiet when no read can change it any longer. Implementors must make sure that local
    memory is quiet once a read has ended, however it ended.

    Attributes:
        name: New for every incarnation: `kvxfer-<uuid4>`.
    """

    name: str
    _closed = False

    @property
    def is_closed(self) -> bool:
        """Whether the agent was closed or has failed, and no longer reads; for any thread."""
        return self._closed

    def require_open(self) -> None:
        """Raise `ClosedError` if the agent is closed."""
        if self.is_closed:
            raise ClosedError(f"agent {self.name}")

    @abstractmethod
    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register memory to read into, which peers may read, too; blocks.

        The regions, and so their owners, are kept until `aclose` returns. After an error, none of
        them is registered.

        Raises:
            InvalidArgumentError: A region is empty, overlaps another one, or is on a device whose
                memory the agent cannot reach.
            DeviceUnavailableError: The memory of a GPU cannot be registered.
            TransferFailedError: The memory cannot be registered.
            ClosedError: The agent is closed.
        """

    @property
    @abstractmethod
    def metadata(self) -> bytes:
        """Metadata for a peer's `add_peer`: a snapshot, so register memory first. Blocks.

        Any process that has it can read all registered memory, and with NIXL also write it: send
        it only to authenticated peers.
        """

    def carrier(self, ours: Hello, theirs: Hello) -> Carrier:
        """Choose the carrier for reads from a peer; see `choose_carrier`."""
        return choose_carrier(ours, theirs)

    @abstractmethod
    async def add_peer(self, metadata: bytes) -> str:
        """Connect to a peer, and return its name for `begin`.

        A peer may be added several times, and is forgotten once it was removed as often. Altered
        metadata can crash the process: authenticate its sender first. Waits for as long as the peer
        stalls; no memory is at stake, and cancelling ends the wait at once.

        Raises:
            InvalidArgumentError: It is not the metadata of an agent, or it is this agent's own.
            PeerLostError: The peer's memory cannot be reached.
            ClosedError: The agent is closed.
        """

    @abstractmethod
    async def remove_peer(self, peer: str) -> None:
        """Undo one `add_peer`; does nothing if the peer is unknown.

        The last removal ends reads from the peer with `PeerLostError`, and returns when their
        memory is quiet.
        """

    @abstractmethod
    def begin(
        self,
        peer: str,
        runs: Sequence[Fragments],
        landed: Callable[[int], None],
        *,
        last: Fragments | None = None,
    ) -> "Flight":
        """Begin to read runs of fragments, in any order within a run.

        Args:
            peer: As `add_peer` returned it.
            runs: Runs, at least one, in the order in which they are begun. Local fragments lie
                inside registered regions, remote ones inside regions that the peer registered
                before it took its metadata.
            landed: Called with the index of each run that has arrived, on any thread; other reads
                may have to wait until it returns.
            last: Fragments to read only after all bytes of all runs have arrived.

        Returns:
            The read. It ends without an error when everything has arrived, or with one of the
            errors below. Once it has ended, the memory is quiet.

            TransferFailedError: It failed, or was cancelled; some of the bytes may have been read.
            PeerLostError: The same, and every later read from this peer will fail: remove it.

        Raises:
            InvalidArgumentError: An address is outside of registered memory; nothing was begun.
            PeerLostError: There is no such peer.
            ClosedError: The agent was closed before.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """End every read with `TransferFailedError`, and release memory and peers.

        May be called again. When this returns, local memory is quiet.
        """
