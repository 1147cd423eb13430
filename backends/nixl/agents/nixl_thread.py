"""NIXL thread: one NIXL agent, and the thread that makes all calls of it."""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvxfer import runtime
from kvxfer.backends.nixl.agents.base import Fragments
from kvxfer.backends.nixl.agents.carrier import choose_ucx_settings
from kvxfer.backends.nixl.agents.nixl_connections import NixlConnections
from kvxfer.backends.nixl.agents.nixl_limits import NixlLimits
from kvxfer.backends.nixl.agents.nixl_memory import export_host_memory, register_memory
from kvxfer.backends.nixl.agents.nixl_module import import_nixl, nixl_errors
from kvxfer.backends.nixl.agents.nixl_peers import BEACON_BYTES, NixlPeers, attempt
from kvxfer.backends.nixl.agents.nixl_reads import (
    Pace,
    PiecewiseRead,
    ReadPiece,
    Reads,
)
from kvxfer.backends.nixl.wire import (
    AgentMetadata,
    Regions,
)
from kvxfer.errors import (
    BackendUnavailableError,
    ClosedError,
    DeviceUnavailableError,
    PeerLostError,
    TransferFailedError,
)
from kvxfer.kvcache.memory_region import HOST, MemoryRegion

T = TypeVar("T")

BACKEND = "UCX"
"""Plug-in of NIXL that moves bytes between processes and machines."""

POLL_WITHIN_S = 5e-3
"""Seconds after which a poll interrupts the posting of pieces, because peers that connect wait for
it. Polling lets other threads take the GIL, and so may cost a millisecond between two pieces."""


class NixlThread:
    """Thread that makes all calls of NIXL; methods run on it unless they say otherwise.

    Args:
        name: Name of the agent.
        limits: Limits of the agent.

    Attributes:
        regions: Our registered memory; any thread may read it.
    """

    def __init__(self, name: str, limits: NixlLimits) -> None:
        self.regions = Regions()
        self._name = name
        self._limits = limits
        self._memory: list[MemoryRegion] = []
        self._gpu_was_refused = False
        self._beacon = np.frombuffer(runtime.token_bytes(BEACON_BYTES), np.uint8)
        self._commands: queue.SimpleQueue[Callable[[], None]] = runtime.queue()
        self._lock = runtime.lock()
        self._stopping = False
        self._stopped: Future[None] = Future()
        opened: Future[None] = Future()
        self._thread = runtime.start_thread(self._run, name=f"{name[:15]}-nixl", args=(opened,))
        runtime.result(opened)

    @property
    def peers(self) -> dict[str, Regions]:
        """Registered memory of each peer, by name; for any thread."""
        return self._peers.regions

    def order(self, done: "Future[T]", command: Callable[[], object]) -> None:
        """Put a command, which ends `done` now or later, into the queue; from any thread.

        Raises:
            ClosedError: The agent is closed.
        """
        with self._lock:
            if self._stopping:
                raise ClosedError(f"agent {self._name}")
            self._commands.put(partial(attempt, done, command))

    def call(self, func: Callable[[], T]) -> T:
        """Run a function on the thread and return its result; from any other thread.

        Raises:
            ClosedError: The agent is closed.
        """
        done: Future[T] = Future()
        self.order(done, lambda: done.set_result(func()))
        return runtime.result(done)

    def cancel(self, readings: Sequence[PiecewiseRead]) -> None:
        """Post no more pieces of some reads; from any thread."""
        with contextlib.suppress(ClosedError):
            for reading in readings:
                error = TransferFailedError(reading.peer, "cancelled")
                self.order(reading.done, partial(reading.stop, error))

    def forget(self, peer: str, adding: "Future[str]") -> None:
        """Remove a peer whose `add_peer` was cancelled; from any thread."""
        with contextlib.suppress(ClosedError):
            self.order(adding, partial(self._peers.forget, peer, adding))

    def begin_stop(self) -> "Future[None]":
        """Ask the thread to end all reads, and itself; from any thread."""
        with self._lock:
            if not self._stopping:
                self._stopping = True
                self._commands.put(lambda: None)
        return self._stopped

    def stop(self) -> None:
        """Do as `begin_stop`, and wait for the end."""
        stopped = self.begin_stop()
        if threading.current_thread() is not self._thread:  # where garbage may be collected
            runtime.result(stopped)
            self._thread.join()

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """See `TransferAgent.register`."""
        known = self.regions.extend(regions)
        try:
            register_memory(self._agent, regions, self._errors)
        except DeviceUnavailableError:
            self._gpu_was_refused = True
            raise
        self._memory.extend(regions)
        self.regions = known

    def list_plugins(self) -> list[str]:
        """See `NixlAgent.plugins`."""
        return sorted(self._agent.get_plugin_list())

    def describe(self) -> bytes:
        """See `TransferAgent.metadata`."""
        if self._gpu_was_refused and self.regions.devices == (HOST,):
            opaque = export_host_memory(self._agent, self._memory, BACKEND)
        else:
            opaque = self._agent.get_agent_metadata()
        return AgentMetadata(
            self._name,
            list(self.regions),
            opaque,
            self._beacon.ctypes.data,
            self._beacon.tobytes(),
        ).encode()

    def add_peer(self, peer: AgentMetadata, done: "Future[str]") -> None:
        """See `TransferAgent.add_peer`; ends `done` when the peer was added."""
        self._peers.add(peer, done)

    def remove_peer(self, peer: str, done: "Future[None]") -> None:
        """See `TransferAgent.remove_peer`; ends `done` when the call was undone."""
        self._peers.remove(peer, done)

    def prepare(self, peer: str, runs: Sequence[Fragments]) -> list[PiecewiseRead]:
        """Cut a read of each run into pieces; on any thread.

        Raises:
            InvalidArgumentError: An address is outside of registered memory.
            PeerLostError: There is no such peer.
        """
        theirs, ours = self.peers.get(peer), self.regions
        if theirs is None:
            raise PeerLostError(peer, "it was not added, or is removed")
        whole = Fragments.concatenate(runs)
        ours.require("local", whole.local, whole.lengths)
        theirs.require("remote", whole.remote, whole.lengths)
        return [
            PiecewiseRead(
                peer,
                deque(
                    ReadPiece(piece, *devices)
                    for *devices, group in run.group(ours, theirs)
                    for piece in group.split(self._limits.piece_bytes, self._limits.piece_fragments)
                ),
            )
            for run in Fragments.join(runs, ours.starts, theirs.starts)
        ]

    def begin(self, readings: Sequence[PiecewiseRead], *, is_next: bool = False) -> None:
        """Begin reads, which take turns with others, or whose turn is next; from any thread.

        Raises:
            ClosedError: The agent is closed.
        """

        def begin() -> None:
            for reading in readings:
                if reading.peer in self.peers:
                    self._reads.begin(reading, is_next=is_next)
                else:
                    reading.done.set_exception(PeerLostError(reading.peer, "it was removed"))

        if readings:
            self.order(readings[0].done, begin)

    def _run(self, opened: "Future[None]") -> None:
        """Be the thread."""
        attempt(opened, self._open)
        if opened.done():
            return
        opened.set_result(None)
        pace, pause_s, polled_at = Pace(), 0.0, 0.0
        try:
            while not self._stopping:
                acted = self._obey(pause_s)
                posted = self._reads.post()
                late = runtime.monotonic() - polled_at > POLL_WITHIN_S
                if self._reads.in_flight or not posted or late:
                    acted |= self._reads.poll()
                    polled_at = runtime.monotonic()
                self._reads.end_finished()
                self._peers.end_removed()
                acted |= posted
                pause_s = pace.pause_s(active=acted, waiting=self._reads.in_flight)
                if posted:  # and there may be more to post
                    pause_s = 0.0
        finally:
            with self._lock:  # whatever has ended it, nobody obeys what is ordered from now on
                self._stopping = True
            attempt(self._stopped, self._close)
            self._stopped.set_result(None)

    def _open(self) -> None:
        nixl = import_nixl(otherwise="use another backend")
        self._errors = nixl_errors(nixl)
        config = nixl.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        beacon = MemoryRegion(self._beacon.ctypes.data, self._beacon.nbytes, self._beacon)
        errors: tuple[type[Exception], ...] = (TransferFailedError, *self._errors)
        try:
            self._agent = nixl.nixl_agent(self._name, config)
            self._agent.create_backend(BACKEND, {"engine_config": choose_ucx_settings()})
            register_memory(self._agent, [beacon], self._errors)
            self._memory.append(beacon)
        except errors as exc:
            raise BackendUnavailableError(
                f"NIXL's {BACKEND} plug-in is missing or does not work here ({exc})"
            ) from exc
        self._reads = Reads(nixl, self._agent)
        connections = NixlConnections(nixl, self._agent, self._name, self._limits.max_kept)
        self._peers = NixlPeers(
            self._name, self._reads, connections, self._add_slots, self._limits.max_unanswered
        )

    def _add_slots(self, slots: NDArray[np.uint8]) -> None:
        region = MemoryRegion(slots.ctypes.data, slots.nbytes, slots)
        register_memory(self._agent, [region], self._errors)
        self._memory.append(region)

    def _obey(self, pause_s: float) -> bool:
        """Run the queued commands; wait up to `pause_s` for the first."""
        acted = False
        with contextlib.suppress(queue.Empty):
            command = self._commands.get(block=pause_s > 0, timeout=pause_s)
            while True:
                acted = True
                command()
                command = self._commands.get_nowait()
        return acted

    def _close(self) -> None:
        """Destroy the agent: only that stops reads in flight from touching memory."""
        self._obey(0.0)
        self._reads.close()
        self._peers.release()
        del self._agent
        self._memory.clear()
        self._reads.end_all()
        self._peers.close()
