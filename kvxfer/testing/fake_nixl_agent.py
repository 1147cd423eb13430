"""Fake NIXL agent: reads within one process that tests can hold, delay or fail."""

import asyncio
import contextlib
import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ClassVar
from weakref import WeakValueDictionary

import numpy as np
import torch

from kvxfer import runtime
from kvxfer.backends.nixl.agents import Flight, Fragments, TransferAgent
from kvxfer.backends.nixl.agents.nixl_module import Carrier
from kvxfer.backends.nixl.wire.messages import Hello
from kvxfer.backends.nixl.wire.regions import AgentMetadata, Regions
from kvxfer.copy_engine.devices import DeviceCopyEngine
from kvxfer.copy_engine.method_table import MethodTable
from kvxfer.errors import (
    InvalidArgumentError,
    KVXferError,
    PeerLostError,
    TransferFailedError,
)
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import HOST, MemoryRegion
from kvxfer.runtime import wait_despite_cancel
from kvxfer.testing.faulty_backend import until_set


@dataclass(slots=True, eq=False)
class _Flight:
    """Transfer in flight."""

    peer: str
    groups: list[tuple[torch.device, torch.device, Fragments]]
    done: Future[None] = field(default_factory=Future)
    error: KVXferError | None = None


class FakeNixlAgent(TransferAgent):
    """Fake agent for memory of this process; passes the same tests as `NixlAgent`.

    A read moves its bytes at its end, as late as hardware might, even if its caller was cancelled.
    GPU memory is copied by the driver, through host memory.

    Attributes:
        delay_s: Seconds that a read is in flight; may be changed at any time.
        failing: Whether new reads move only half of their fragments and then fail.
    """

    _agents: ClassVar["WeakValueDictionary[str, FakeNixlAgent]"] = WeakValueDictionary()

    def __init__(self) -> None:
        self.name = f"kvxfer-{runtime.unique_id()}"
        self.delay_s = 0.0
        self.failing = False
        self._copy_engine = DeviceCopyEngine(methods=MethodTable())
        self._memory: list[MemoryRegion] = []
        self._regions = Regions()
        self._peers: dict[str, Regions] = {}
        self._num_users: Counter[str] = Counter()
        self._flights: dict[_Flight, None] = {}
        self._holding = self._closed = False
        # Engines run backends on a loop of their own; tests release reads from another thread.
        self._lock = runtime.lock()
        self._someone_is_held = runtime.event()
        self._agents[self.name] = self

    @property
    def in_flight(self) -> int:
        """Number of reads in flight."""
        return len(self._flights)

    def hold(self) -> None:
        """Hold new reads in flight until `release`."""
        self._holding = True

    def release(self) -> None:
        """End held reads, and hold no further ones; thread-safe."""
        self._holding = False
        self._someone_is_held.clear()
        for flight in list(self._flights):
            self._land(flight)

    async def until_held(self) -> None:
        """Wait until a read is held on any event loop, for at most ten seconds."""
        await until_set(self._someone_is_held)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """See `TransferAgent.register`."""
        self.require_open()
        known = self._regions.extend(regions)
        self._copy_engine.attach([each for each in regions if each.device.type != HOST.type])
        self._regions = known
        self._memory.extend(regions)

    @property
    def metadata(self) -> bytes:
        """See `TransferAgent.metadata`."""
        self.require_open()
        return AgentMetadata(self.name, list(self._regions)).encode()

    def carrier(self, ours: Hello, theirs: Hello) -> Carrier:  # noqa: ARG002 - it copies itself
        """See `TransferAgent.carrier`."""
        return "cma"

    async def add_peer(self, metadata: bytes) -> str:
        """See `TransferAgent.add_peer`."""
        self.require_open()
        peer = AgentMetadata.decode(metadata)
        if peer.name == self.name:
            raise InvalidArgumentError("metadata", peer.name, "that of another agent")
        if peer.name not in self._agents:
            raise PeerLostError(peer.name, "it is gone")
        self._peers[peer.name] = Regions(peer.regions)
        self._num_users[peer.name] += 1
        return peer.name

    async def remove_peer(self, peer: str) -> None:
        """See `TransferAgent.remove_peer`."""
        self.require_open()
        self._num_users[peer] -= 1
        if self._num_users[peer] > 0:
            return
        del self._num_users[peer]
        self._peers.pop(peer, None)
        flights = [flight for flight in self._flights if flight.peer == peer]
        for flight in flights:
            flight.error = PeerLostError(peer, "it was removed")
        for flight in flights:
            with contextlib.suppress(TransferFailedError):  # the caller of `begin` gets it
                await wait_despite_cancel(flight.done)

    def begin(
        self,
        peer: str,
        runs: Sequence[Fragments],
        landed: Callable[[int], None],
        *,
        last: Fragments | None = None,
    ) -> Flight:
        """See `TransferAgent.begin`; when a read is cancelled, its run in flight still lands."""
        self.require_open()
        if peer not in self._peers:
            raise PeerLostError(peer, "it was not added, or is removed")
        cancelled = runtime.event()
        reading = asyncio.ensure_future(self._read_runs(peer, runs, landed, last, cancelled))
        return Flight(reading, cancelled.set)

    async def _read_runs(
        self,
        peer: str,
        runs: Sequence[Fragments],
        landed: Callable[[int], None],
        last: Fragments | None,
        cancelled: threading.Event,
    ) -> None:
        for index, run in enumerate([*runs, *([] if last is None else [last])]):
            await self._read_run(peer, run)
            if cancelled.is_set():
                raise TransferFailedError(peer, "cancelled")
            if index < len(runs):
                landed(index)

    async def _read_run(self, peer: str, fragments: Fragments) -> None:
        self.require_open()
        if peer not in self._peers:
            raise PeerLostError(peer, "it was not added, or is removed")
        theirs = self._peers[peer]
        self._regions.require("local", fragments.local, fragments.lengths)
        theirs.require("remote", fragments.remote, fragments.lengths)
        if self.failing:
            fragments = fragments.take(slice(len(fragments) // 2))
        flight = _Flight(peer, list(fragments.group(self._regions, theirs)))
        if self.failing:
            flight.error = TransferFailedError(peer, "injected failure")
        self._flights[flight] = None
        if peer not in self._agents:
            self._land(flight)
        elif self._holding:
            self._someone_is_held.set()
        elif self.delay_s:
            asyncio.get_running_loop().call_later(self.delay_s, self._land, flight)
        else:
            self._land(flight)
        await wait_despite_cancel(flight.done)

    async def aclose(self) -> None:
        """See `TransferAgent.aclose`."""
        with self._lock:
            self._closed = True
            flights, self._flights = self._flights, {}
        for flight in flights:
            flight.done.set_exception(TransferFailedError(flight.peer, "the agent was closed"))
        self._agents.pop(self.name, None)
        self._memory.clear()
        self._copy_engine.close()

    def _land(self, flight: _Flight) -> None:
        """Move the bytes of a read and end it, unless it has ended already."""
        with self._lock:
            if flight not in self._flights:
                return
            del self._flights[flight]
            if flight.peer not in self._agents:
                flight.error = PeerLostError(flight.peer, "it is gone")
            else:
                for local, remote, fragments in flight.groups:
                    self._copy(local, remote, fragments)
        if flight.error:
            flight.done.set_exception(flight.error)
        else:
            flight.done.set_result(None)

    def _copy(self, local: torch.device, remote: torch.device, fragments: Fragments) -> None:
        if local == remote == HOST:
            columns = fragments.local, fragments.remote, fragments.lengths
            for target, source, num_bytes in zip(*(each.tolist() for each in columns), strict=True):
                ctypes.memmove(target, source, num_bytes)
            return
        sizes = fragments.lengths
        staged = np.empty(int(sizes.sum()), np.uint8)
        starts = np.cumsum(sizes) - sizes + np.uint64(staged.ctypes.data)
        blocks = Descriptors.of_pieces(starts, sizes)
        theirs = Descriptors.of_pieces(fragments.remote, sizes, device=remote)
        self._copy_engine.copy(theirs, blocks)
        ours = Descriptors.of_pieces(fragments.local, sizes, device=local)
        self._copy_engine.copy(blocks, ours)
