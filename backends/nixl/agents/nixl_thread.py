"""NIXL thread: one NIXL agent, and the thread that makes all calls of it."""

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvxfer.backends.nixl.agents.base import Fragments
from kvxfer.backends.nixl.agents.nixl_connections import NixlConnections
from kvxfer.backends.nixl.agents.nixl_memory import export_host_memory, register_memory
from kvxfer.backends.nixl.agents.nixl_reads import (
    PIECE_BYTES,
    PIECE_FRAGMENTS,
    Pace,
    Piece,
    Reading,
    Reads,
)
from kvxfer.backends.nixl.carrier import choose_ucx_settings
from kvxfer.backends.nixl.regions import AgentMetadata, Regions
from kvxfer.backends.nixl_module import import_nixl, nixl_errors
from kvxfer.errors import (
    BackendUnavailableError,
    ClosedError,
    DeviceUnavailableError,
    InvalidArgumentError,
    KVXferError,
    PeerLostError,
    TransferFailedError,
)
from kvxfer.kvcache.memory_region import HOST, MemoryRegion

T = TypeVar("T")

BACKEND = "UCX"

BEACON_BYTES = 32
"""Random bytes at an address in the metadata: a peer that reads them reaches this agent."""

NUM_SLOTS = 64
"""Slots for beacons that are registered at once."""

MAX_UNANSWERED = 512
"""Most peers that may leave their beacon's read unanswered: each keeps a slot and its metadata."""

POLL_WITHIN_S = 5e-3
"""Seconds after which a poll interrupts the posting of pieces, because peers that connect wait for
it. Polling lets other threads take the GIL, and so may cost a millisecond between two pieces."""


@dataclass(slots=True, eq=False)
class _Remote:
    """Peer that NIXL knows.

    Attributes:
        metadata: Its metadata.
        added: Ends with its name once its beacon was read.
        num_users: Calls of `add_peer` that were not undone.
        removed: Set while it is removed: ends once NIXL has forgotten it.
    """

    metadata: AgentMetadata
    added: "Future[str]" = field(default_factory=Future)
    num_users: int = 0
    removed: "Future[None] | None" = None


class NixlThread:
    """Thread that makes all calls of NIXL; methods run on it unless they say otherwise.

    Attributes:
        peers: Registered memory of each peer, by name; any thread may read it.
        regions: Our registered memory; any thread may read it.
    """

    def __init__(self, name: str) -> None:
        self.peers: dict[str, Regions] = {}
        self.regions = Regions()
        self._name = name
        self._memory: list[MemoryRegion] = []
        self._gpu_was_refused = False
        self._remotes: dict[str, _Remote] = {}  # also while added or removed
        self._postponed: set[Future[str]] = set()  # of peers that are removed first
        self._beacon = np.frombuffer(os.urandom(BEACON_BYTES), np.uint8)
        self._free_slots: list[NDArray[np.uint8]] = []  # that peers' beacons are read into
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stopping = False
        self._stopped: Future[None] = Future()
        opened: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=[opened], name=f"{name[:15]}-nixl", daemon=True
        )
        self._thread.start()
        opened.result()

    def order(self, done: "Future[T]", command: Callable[[], object]) -> None:
        """Put a command, which ends `done` now or later, into the queue; from any thread.

        Raises:
            ClosedError: The agent is closed.
        """
        with self._lock:
            if self._stopping:
                raise ClosedError(f"agent {self._name}")
            self._commands.put(partial(_attempt, done, command))

    def call(self, func: Callable[[], T]) -> T:
        """Run a function on the thread and return its result; from any other thread.

        Raises:
            ClosedError: The agent is closed.
        """
        done: Future[T] = Future()
        self.order(done, lambda: done.set_result(func()))
        return done.result()

    def cancel(self, readings: Sequence[Reading]) -> None:
        """Post no more pieces of some reads; from any thread."""
        with contextlib.suppress(ClosedError):
            for reading in readings:
                error = TransferFailedError(reading.peer, "cancelled")
                self.order(reading.done, partial(reading.stop, error))

    def forget(self, peer: str, adding: "Future[str]") -> None:
        """Remove a peer whose `add_peer` was cancelled; from any thread."""

        def remove() -> None:
            if adding in self._postponed:
                self._postponed.remove(adding)
            elif not (adding.done() and adding.exception()):
                self.remove_peer(peer, Future())

        with contextlib.suppress(ClosedError):
            self.order(adding, remove)

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
            stopped.result()
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
        """See `TransferAgent.add_peer`; ends `done` when the peer was added.

        Reads the peer's beacon: a peer that cannot be reached, or hangs, shows here, where no
        memory is at stake.
        """
        remote = self._remotes.get(peer.name)
        if peer.name == self._name or (remote and not remote.metadata.is_same_agent(peer)):
            raise InvalidArgumentError("metadata", peer.name, "an agent not added before")
        if remote and remote.removed:  # once it is gone, it is added anew
            self._postponed.add(done)
            remote.removed.add_done_callback(lambda _: self._add_postponed(peer, done))
            return
        if not remote:
            remote = self._begin_adding(peer)
        remote.num_users += 1
        remote.added.add_done_callback(partial(_pass_on, to=done))

    def _add_postponed(self, peer: AgentMetadata, done: "Future[str]") -> None:
        if done in self._postponed:  # else it was cancelled
            self._postponed.remove(done)
            if self._stopping:
                done.set_exception(TransferFailedError(peer.name, "the agent was closed"))
            else:
                _attempt(done, partial(self.add_peer, peer, done))

    def _begin_adding(self, peer: AgentMetadata) -> _Remote:
        if sum(not each.added.done() for each in self._remotes.values()) >= MAX_UNANSWERED:
            raise PeerLostError(peer.name, "too many peers do not answer")
        if not self._free_slots:
            self._add_slots()
        regions = Regions(peer.regions)
        kept = self._connections.open(peer)
        remote = self._remotes[peer.name] = _Remote(peer)
        self._read_beacon(remote, regions, kept=kept)
        return remote

    def _read_beacon(self, remote: _Remote, regions: Regions, *, kept: bool) -> None:
        peer, slot = remote.metadata, self._free_slots.pop()

        def end(beacon: "Future[None]") -> None:
            self._free_slots.append(slot)
            error = beacon.exception()
            is_there = not error and slot.tobytes() == peer.beacon
            if is_there and not remote.removed:
                self.peers[peer.name] = regions
                remote.added.set_result(peer.name)
                return
            if error and kept and not remote.removed:  # its connection may be one that broke
                try:
                    self._connections.close(peer.name)
                    self._connections.open(peer)
                    self._read_beacon(remote, regions, kept=False)
                except KVXferError as exc:
                    error = exc
                else:
                    return
            remote.removed = remote.removed or Future()
            reason = error or "other memory is where its beacon should be"
            lost = PeerLostError(peer.name, f"it cannot be reached ({reason})")
            remote.added.set_exception(lost)

        words = slot.ctypes.data, peer.beacon_address, BEACON_BYTES
        beacon = Fragments(*(np.array([word], np.uint64) for word in words))
        reading = Reading(peer.name, deque([Piece(beacon)]))
        reading.done.add_done_callback(end)
        self._reads.begin(reading)

    def remove_peer(self, peer: str, done: "Future[None]") -> None:
        """See `TransferAgent.remove_peer`; ends `done` when the call was undone."""
        remote = self._remotes.get(peer)
        if remote and not remote.removed:
            remote.num_users -= 1
            if not remote.num_users:
                self.peers.pop(peer, None)
                remote.removed = Future()
                self._reads.stop(peer)
        if remote and remote.removed:
            remote.removed.add_done_callback(lambda _: done.set_result(None))
        else:
            done.set_result(None)

    def prepare(self, peer: str, runs: Sequence[Fragments]) -> list[Reading]:
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
            Reading(
                peer,
                deque(
                    Piece(piece, *devices)
                    for *devices, group in run.group(ours, theirs)
                    for piece in group.split(PIECE_BYTES, PIECE_FRAGMENTS)
                ),
            )
            for run in Fragments.join(runs, ours.starts, theirs.starts)
        ]

    def begin(self, readings: Sequence[Reading]) -> None:
        """Begin reads, which take turns with others; from any thread.

        Raises:
            ClosedError: The agent is closed.
        """

        def begin() -> None:
            for reading in readings:
                if reading.peer in self.peers:
                    self._reads.begin(reading)
                else:
                    reading.done.set_exception(PeerLostError(reading.peer, "it was removed"))

        if readings:
            self.order(readings[0].done, begin)

    def _run(self, opened: "Future[None]") -> None:
        """Be the thread."""
        _attempt(opened, self._open)
        if opened.done():
            return
        opened.set_result(None)
        pace, pause_s, polled_at = Pace(), 0.0, 0.0
        try:
            while not self._stopping:
                acted = self._obey(pause_s)
                posted = self._reads.post()
                late = time.monotonic() - polled_at > POLL_WITHIN_S
                if self._reads.in_flight or not posted or late:
                    acted |= self._reads.poll()
                    polled_at = time.monotonic()
                self._reads.end_finished()
                self._forget_removed()
                acted |= posted
                pause_s = pace.pause_s(active=acted, waiting=self._reads.in_flight)
                if posted:  # and there may be more to post
                    pause_s = 0.0
        finally:
            _attempt(self._stopped, self._close)
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
        self._connections = NixlConnections(nixl, self._agent, self._name)

    def _add_slots(self) -> None:
        slots = np.zeros((NUM_SLOTS, BEACON_BYTES), np.uint8)
        region = MemoryRegion(slots.ctypes.data, slots.nbytes, slots)
        register_memory(self._agent, [region], self._errors)
        self._memory.append(region)
        self._free_slots.extend(slots)

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

    def _forget_removed(self) -> None:
        removed = [(name, each) for name, each in self._remotes.items() if each.removed]
        if not removed:
            return
        busy = self._reads.busy_peers
        for name, remote in removed:
            if name not in busy and remote.removed:
                if remote.added.exception():
                    self._connections.close(name)
                else:
                    self._connections.keep(remote.metadata)
                del self._remotes[name]
                remote.removed.set_result(None)

    def _close(self) -> None:
        """Destroy the agent: only that stops reads in flight from touching memory."""
        self._obey(0.0)
        self._reads.close()
        del self._agent, self._connections
        self._memory.clear()
        self._reads.end_all()
        for remote in self._remotes.values():
            if remote.removed:
                remote.removed.set_result(None)


def _attempt(done: "Future[T]", command: Callable[[], object]) -> None:
    """Run a command; if it raises, end `done` with the error."""
    try:
        command()
    except Exception as exc:  # noqa: BLE001 - raised by `done.result()`
        done.set_exception(exc)


def _pass_on(ended: "Future[T]", *, to: "Future[T]") -> None:
    """End one future as another one has ended."""
    if error := ended.exception():
        to.set_exception(error)
    else:
        to.set_result(ended.result())
