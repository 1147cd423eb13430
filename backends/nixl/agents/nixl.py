"""Transfer agent over NIXL: its thread, reads, peers and connections."""

import asyncio
import contextlib
import hashlib
import logging
import queue
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer import runtime
from kvxfer.backends.nixl.agents.base import Flight, Fragments, TransferAgent
from kvxfer.backends.nixl.agents.nixl_module import choose_ucx_settings, import_nixl, nixl_errors
from kvxfer.backends.nixl.wire.regions import AgentMetadata, Regions, Words
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
from kvxfer.runtime import outlive_caller, wait_despite_cancel

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_PIECES_OF_A_READ = 4
"""Maximum pieces of a read in flight; effectively one where posting a piece copies it (CMA)."""

SOON_S = 20e-3
"""Time without activity after which the pauses between polls become longer."""

SHORT_PAUSE_S = 50e-6
"""Pause between polls while reads are in flight. Without it, the polling thread would retake the
GIL before the event loop wakes up, and cost it milliseconds some hundred times a second."""

LONG_PAUSE_S = 1e-3
"""Pause while reads in flight make no progress, and for `SOON_S` after the last one has ended."""

IDLE_PAUSE_S = 5e-3
"""Pause of an idle agent: peers that connect or read by NIXL wait for its next poll."""

BEACON_BYTES = 32
"""Size of the beacon, random bytes whose address is in the metadata; see `AgentMetadata`."""

NUM_SLOTS = 64
"""Number of slots for beacons that are registered at a time."""

BACKEND = "UCX"
"""Plug-in of NIXL that moves bytes between processes and machines."""

POLL_WITHIN_S = 5e-3
"""Maximum time without a poll while pieces are posted: peers that connect wait for one. A poll lets
other threads take the GIL, and so may cost a millisecond between two pieces."""

MAX_KEPT = 1024
"""Maximum number of connections kept for peers that have left; beyond it, the oldest is closed."""

MAX_UNANSWERED = 512
"""Maximum number of peers whose beacon is still being read: each occupies a slot and metadata."""


def _kind(device: torch.device) -> str:
    return "DRAM" if device.type == HOST.type else "VRAM"


@dataclass(frozen=True, slots=True, eq=False)
class ReadPiece:
    """Piece of a read: fragments that NIXL moves in one transfer, from one device to one device."""

    fragments: Fragments
    local_device: torch.device = HOST
    remote_device: torch.device = HOST


@dataclass(slots=True, eq=False)
class PiecewiseRead:
    """Read and its remaining pieces; for the agent's thread only, except `done`."""

    peer: str
    pieces: deque[ReadPiece]
    landed: Callable[[], None] | None = None
    done: Future[None] = field(default_factory=Future)
    in_flight: int = 0
    error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Whether no piece is left or in flight."""
        return not (self.pieces or self.in_flight)

    def stop(self, error: TransferFailedError) -> None:
        """Drop the remaining pieces; the read ends with `error` once none is in flight."""
        self.pieces.clear()
        self.error = self.error or error

    def end(self) -> None:
        """Complete `done`, after `landed` if the read has succeeded."""
        if self.landed and not self.error:
            try:
                self.landed()
            except Exception as exc:  # noqa: BLE001 - raised by `done.result()`
                self.error = exc
        if self.error:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(None)


class Reads:
    """Reads of one NIXL agent; for the agent's thread only."""

    def __init__(self, nixl: Any, agent: Any) -> None:
        self._nixl = nixl
        self._errors = nixl_errors(nixl)
        self._agent = agent
        self._readings: dict[PiecewiseRead, None] = {}  # in the order in which they began
        self._turns: deque[PiecewiseRead] = deque()
        self._flights: list[tuple[Any, PiecewiseRead, ReadPiece]] = []

    @property
    def in_flight(self) -> bool:
        """Whether NIXL is moving a piece."""
        return bool(self._flights)

    @property
    def busy_peers(self) -> set[str]:
        """Peers with reads that have not ended."""
        return {reading.peer for reading in self._readings}

    def begin(self, reading: PiecewiseRead, *, is_next: bool = False) -> None:
        """Begin a read, which takes turns with the others, as the last of them or as the next."""
        self._readings[reading] = None
        if is_next:
            self._turns.appendleft(reading)
        else:
            self._turns.append(reading)

    def stop(self, peer: str) -> None:
        """Stop all reads from a peer."""
        for reading in self._readings:
            if reading.peer == peer:
                reading.stop(PeerLostError(peer, "it was removed"))

    def post(self) -> bool:
        """Post one piece of the read whose turn it is; return whether there was one."""
        for _ in range(len(self._turns)):
            reading = self._turns.popleft()
            if not reading.pieces:
                continue
            self._turns.append(reading)
            if reading.in_flight < MAX_PIECES_OF_A_READ:
                reading.in_flight += 1
                self._post_piece(reading, reading.pieces.popleft())
                return True
        return False

    def _post_piece(self, reading: PiecewiseRead, piece: ReadPiece) -> None:
        agent, fragments = self._agent, piece.fragments
        try:
            handle = agent.initialize_xfer(
                "READ",
                self._describe(piece.local_device, fragments.local, fragments.lengths),
                self._describe(piece.remote_device, fragments.remote, fragments.lengths),
                reading.peer,
            )
            self.end_finished()  # here, so that their callers run while `transfer` copies
            self._judge(handle, reading, piece, agent.transfer(handle))
        except self._errors as exc:
            self._fail(reading, piece, exc)

    def _describe(self, device: torch.device, addresses: Words, lengths: Words) -> Any:
        rows = np.zeros((len(addresses), 3), np.uint64)
        rows[:, 0] = addresses
        rows[:, 1] = lengths
        rows[:, 2] = device.index or 0
        return self._agent.get_xfer_descs(rows, _kind(device))

    def poll(self) -> bool:
        """Check the pieces in flight; this also lets NIXL make progress with the reads of peers."""
        flights, self._flights = self._flights, []
        for handle, reading, piece in flights:
            try:
                self._judge(handle, reading, piece, self._agent.check_xfer_state(handle))
            except self._errors as exc:
                self._fail(reading, piece, exc)
        with contextlib.suppress(*self._errors):  # of a lost peer: its reads report it
            self._agent.get_new_notifs()
        return len(self._flights) < len(flights)

    def _judge(self, handle: Any, reading: PiecewiseRead, piece: ReadPiece, state: str) -> None:
        if state == "PROC":
            self._flights.append((handle, reading, piece))
            return
        handle.release()
        reading.in_flight -= 1
        if state != "DONE":
            reading.stop(TransferFailedError(reading.peer, "NIXL reported a failure"))

    def end_finished(self) -> None:
        """End the reads that have no piece left or in flight."""
        over = [each for each in self._readings if each.is_over]
        for reading in over:
            del self._readings[reading]
            reading.end()

    def close(self) -> None:
        """Release the handles; `end_all` ends the reads, once the agent has been destroyed."""
        while self._flights:
            with contextlib.suppress(Exception):  # whatever it raises, the agent is destroyed next
                self._flights.pop()[0].release()
        del self._agent

    def end_all(self) -> None:
        """End all reads, because the agent was closed."""
        for reading in self._readings:
            reading.done.set_exception(TransferFailedError(reading.peer, "the agent was closed"))

    def _fail(self, reading: PiecewiseRead, piece: ReadPiece, exc: Exception) -> None:
        lost = isinstance(exc, self._nixl.nixlRemoteDisconnectError)
        reason = str(exc)
        if not piece.local_device == piece.remote_device == HOST:
            reason += f", reading memory of {piece.remote_device} into {piece.local_device}"
        reading.in_flight -= 1
        reading.stop((PeerLostError if lost else TransferFailedError)(reading.peer, reason))


@dataclass(slots=True, eq=False)
class _NixlRemote:
    """Peer that NIXL knows.

    Attributes:
        added: Future of the peer's name; completes once its beacon has been read.
        num_users: Number of calls of `add_peer` that have not been undone.
        removed: Set while the peer is being removed; completes once NIXL has forgotten it.
    """

    metadata: AgentMetadata
    added: "Future[str]" = field(default_factory=Future)
    num_users: int = 0
    removed: "Future[None] | None" = None


class NixlPeers:
    """Peers of one NIXL agent, and its connections; for its thread only, except `regions`.

    NIXL closes a connection on this side only: UCX keeps its socket until the other process exits.
    So a peer that reconnects gets its old connection; otherwise, each reconnection would cost both
    sides a file descriptor.

    Attributes:
        regions: Registered memory of each peer, by name; any thread may read it.
    """

    def __init__(
        self,
        nixl: Any,
        agent: Any,
        name: str,
        reads: Reads,
        register: Callable[[Sequence[MemoryRegion]], None],
    ) -> None:
        self.regions: dict[str, Regions] = {}
        self._name = name
        self._reads = reads
        self._register = register
        self._nixl = nixl
        self._errors = nixl_errors(nixl)
        self._agent = agent
        self._kept: dict[str, bytes] = {}  # digests of metadata
        # All names of agents have the same length, so all metadata begins alike.
        self._metadata_start = agent.get_agent_metadata().partition(name.encode())[0]
        self._remotes: dict[str, _NixlRemote] = {}  # also those being added or removed
        self._free_slots: list[NDArray[np.uint8]] = []  # memory to read peers' beacons into
        self._closed = False

    def add(self, peer: AgentMetadata, done: "Future[str]") -> None:
        """Add a peer, see `TransferAgent.add_peer`; completes `done` once the peer is added.

        Reads the peer's beacon, so that a peer that cannot be reached, or hangs, is noticed here,
        where no memory is at stake.
        """
        if done.cancelled():
            return
        if self._closed:
            raise TransferFailedError(peer.name, "the agent was closed")
        remote = self._remotes.get(peer.name)
        if peer.name == self._name or (remote and not remote.metadata.is_same_agent(peer)):
            raise InvalidArgumentError("metadata", peer.name, "an agent with a name of its own")
        if remote and remote.removed:  # add it again once the removal is complete
            remote.removed.add_done_callback(lambda _: attempt(done, partial(self.add, peer, done)))
            return
        if not remote:
            remote = self._begin_adding(peer)
        remote.num_users += 1
        remote.added.add_done_callback(
            lambda added: attempt(done, lambda: done.set_result(added.result()))
        )

    def _begin_adding(self, peer: AgentMetadata) -> _NixlRemote:
        num_unanswered = sum(not each.added.done() for each in self._remotes.values())
        if num_unanswered >= MAX_UNANSWERED:
            raise PeerLostError(peer.name, "too many peers do not answer")
        if not self._free_slots:
            slots = np.zeros((NUM_SLOTS, BEACON_BYTES), np.uint8)
            self._register([MemoryRegion(slots.ctypes.data, slots.nbytes, slots)])
            self._free_slots.extend(slots)
        regions = Regions(peer.regions)
        kept = self._connect(peer)
        remote = self._remotes[peer.name] = _NixlRemote(peer)
        self._read_beacon(remote, regions, kept=kept)
        return remote

    def _read_beacon(self, remote: _NixlRemote, regions: Regions, *, kept: bool) -> None:
        peer, slot = remote.metadata, self._free_slots.pop()

        def end(beacon: "Future[None]") -> None:
            self._free_slots.append(slot)
            error = beacon.exception()
            is_there = not error and slot.tobytes() == peer.beacon
            if is_there and not remote.removed:
                self.regions[peer.name] = regions
                remote.added.set_result(peer.name)
                return
            is_wanted = not (remote.removed or self._closed)
            if error and kept and is_wanted:  # the kept connection may have broken
                try:
                    self._disconnect(peer.name)
                    self._connect(peer)
                    self._read_beacon(remote, regions, kept=False)
                except KVXferError as exc:
                    error = exc
                else:
                    return
            remote.removed = remote.removed or Future()
            reason = error or "its beacon is not where its metadata says"
            lost = PeerLostError(peer.name, f"it cannot be reached ({reason})")
            remote.added.set_exception(lost)

        words = slot.ctypes.data, peer.beacon_address, BEACON_BYTES
        beacon = Fragments(*(np.array([word], np.uint64) for word in words))
        reading = PiecewiseRead(peer.name, deque([ReadPiece(beacon)]))
        reading.done.add_done_callback(end)
        self._reads.begin(reading)

    def remove(self, peer: str, done: "Future[None]") -> None:
        """Undo one `add`, see `TransferAgent.remove_peer`; completes `done` when it is undone."""
        remote = self._remotes.get(peer)
        if remote and not remote.removed:
            remote.num_users -= 1
            if not remote.num_users:
                self.regions.pop(peer, None)
                remote.removed = Future()
                self._reads.stop(peer)
        if remote and remote.removed:
            remote.removed.add_done_callback(lambda _: done.set_result(None))
        else:
            done.set_result(None)

    def forget(self, peer: str, adding: "Future[str]") -> None:
        """Undo an `add` whose caller was cancelled."""
        remote = self._remotes.get(peer)
        if remote and remote.removed and not adding.done():  # the `add` waits for the removal
            adding.cancel()
        elif not (adding.done() and adding.exception()):
            self.remove(peer, Future())

    def end_removed(self) -> None:
        """Complete the removal of peers from which nothing is read any longer."""
        removed = [(name, each) for name, each in self._remotes.items() if each.removed]
        if not removed:
            return
        busy = self._reads.busy_peers
        for name, remote in removed:
            if name not in busy and remote.removed:
                if remote.added.exception():
                    self._disconnect(name)
                else:
                    self._keep(remote.metadata)
                del self._remotes[name]
                remote.removed.set_result(None)

    def release(self) -> None:
        """Drop the reference to the agent, which is destroyed with the last reference."""
        self._closed = True
        del self._agent

    def close(self) -> None:
        """Complete all removals, because the agent was closed."""
        for remote in self._remotes.values():
            if remote.removed:
                remote.removed.set_result(None)

    def _connect(self, peer: AgentMetadata) -> bool:
        """Connect to a peer, or reuse its kept connection; return whether it was reused."""
        kept = self._kept.pop(peer.name, None)
        if kept == hashlib.sha256(peer.encode()).digest():
            return True
        if kept:
            self._disconnect(peer.name)
        if not peer.opaque.startswith(self._metadata_start + peer.name.encode()):
            wanted = f"that of agent {peer.name!r}"
            raise InvalidArgumentError("metadata", peer.opaque[:64], wanted)
        try:
            self._agent.add_remote_agent(peer.opaque)
        except self._nixl.nixlBackendError as exc:
            raise PeerLostError(peer.name, f"it cannot be reached ({exc})") from exc
        except self._errors as exc:
            raise InvalidArgumentError(
                "metadata", peer.opaque[:16], f"metadata that NIXL can read ({exc})"
            ) from exc
        return False

    def _keep(self, peer: AgentMetadata) -> None:
        """Keep the connection to a peer that has left: it may come back."""
        self._kept[peer.name] = hashlib.sha256(peer.encode()).digest()
        if len(self._kept) > MAX_KEPT:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._disconnect(oldest)

    def _disconnect(self, name: str) -> None:
        with contextlib.suppress(*self._errors):  # the peer may be gone already
            self._agent.remove_remote_agent(name)


def attempt(done: "Future[T]", command: Callable[[], object]) -> None:
    """Run a command; if it raises, complete `done` with the error."""
    try:
        command()
    except Exception as exc:  # noqa: BLE001 - raised by `done.result()`
        done.set_exception(exc)


class NixlThread:
    """Thread that makes all calls to NIXL; methods run on it unless they say otherwise."""

    peers: NixlPeers

    def __init__(self, name: str, piece: tuple[int, int]) -> None:
        self.regions = Regions()
        self._name = name
        self._piece = piece
        self._memory: list[MemoryRegion] = []
        self._beacon = np.frombuffer(runtime.token_bytes(BEACON_BYTES), np.uint8)
        self._commands: queue.SimpleQueue[Callable[[], None]] = runtime.queue()
        self._lock = runtime.lock()
        self.is_stopping = False
        self._stopped: Future[None] = Future()
        opened: Future[None] = Future()
        self._thread = runtime.start_thread(self._run, name=f"{name[:15]}-nixl", args=(opened,))
        runtime.result(opened)

    def order(self, done: "Future[T]", command: Callable[[], object]) -> None:
        """Queue a command, which completes `done` now or later; from any thread."""
        with self._lock:
            if self.is_stopping:
                raise ClosedError(f"agent {self._name}")
            self._commands.put(partial(attempt, done, command))

    def call(self, func: Callable[[], T]) -> T:
        """Run a function on the thread and return its result; from any other thread."""
        done: Future[T] = Future()
        self.order(done, lambda: done.set_result(func()))
        return runtime.result(done)

    def cancel(self, readings: Sequence[PiecewiseRead]) -> None:
        """Post no more pieces of some reads; from any thread."""
        with contextlib.suppress(ClosedError):
            for reading in readings:
                error = TransferFailedError(reading.peer, "cancelled")
                self.order(reading.done, partial(reading.stop, error))

    def begin_stop(self) -> "Future[None]":
        """Ask the thread to end all reads, and itself; from any thread."""
        with self._lock:
            if not self.is_stopping:
                self.is_stopping = True
                self._commands.put(lambda: None)
        return self._stopped

    def stop(self) -> None:
        """Do as `begin_stop`, and wait for the end; does nothing in a forked child."""
        if not self._thread.is_alive():
            return
        stopped = self.begin_stop()
        if threading.current_thread() is not self._thread:  # where a finalizer may run
            runtime.result(stopped)
            self._thread.join()

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """See `TransferAgent.register`."""
        known = self.regions.extend(regions)
        self._register(regions)
        self.regions = known

    def _register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register memory with NIXL, all of it or none, and keep its owners alive."""
        with contextlib.ExitStack() as undo:
            for device in dict.fromkeys(region.device for region in regions):
                on_device = [region for region in regions if region.device == device]
                rows = [(at.address, at.num_bytes, device.index or 0, "") for at in on_device]
                try:
                    registered = self._agent.register_memory(rows, _kind(device))
                except self._errors as exc:
                    raise self._refuse(device, exc) from exc
                undo.callback(self._deregister, registered)
            undo.pop_all()
        self._memory.extend(regions)

    def _refuse(
        self, device: torch.device, exc: Exception
    ) -> DeviceUnavailableError | TransferFailedError:
        if device.type == HOST.type:
            return TransferFailedError(self._name, f"cannot register host memory: {exc}")
        return DeviceUnavailableError(
            device.index,
            f"NIXL cannot register its memory ({exc}); install the GPU's driver, and a NIXL whose "
            f"UCX supports CUDA, as in its wheels, or let blocks pass through host memory",
        )

    def _deregister(self, registered: Any) -> None:
        with contextlib.suppress(*self._errors):  # the error that led here says more
            self._agent.deregister_memory(registered)

    def list_plugins(self) -> list[str]:
        """See `NixlAgent.plugins`."""
        return sorted(self._agent.get_plugin_list())

    def describe(self) -> bytes:
        """See `TransferAgent.metadata`."""
        opaque = self._agent.get_agent_metadata()
        return AgentMetadata(
            self._name, list(self.regions), opaque, self._beacon.ctypes.data, self._beacon.tobytes()
        ).encode()

    def prepare(self, peer: str, runs: Sequence[Fragments]) -> list[PiecewiseRead]:
        """Split a read of each run into pieces; on any thread."""
        theirs, ours = self.peers.regions.get(peer), self.regions
        if theirs is None:
            raise PeerLostError(peer, "it was not added, or is removed")
        return [
            PiecewiseRead(
                peer,
                deque(
                    ReadPiece(piece, *devices)
                    for *devices, group in run.group(ours, theirs)
                    for piece in group.split(*self._piece)
                ),
            )
            for run in Fragments.join(runs, ours, theirs)
        ]

    def begin(self, readings: Sequence[PiecewiseRead], *, is_next: bool = False) -> None:
        """Begin reads, which take turns with others or have the next turn; from any thread."""

        def begin() -> None:
            for reading in readings:
                if reading.peer in self.peers.regions:
                    self._reads.begin(reading, is_next=is_next)
                else:
                    reading.done.set_exception(PeerLostError(reading.peer, "it was removed"))

        self.order(readings[0].done, begin)

    def _run(self, opened: "Future[None]") -> None:
        attempt(opened, self._open)
        if opened.done():
            return
        opened.set_result(None)
        pause_s, polled_at, active_at = 0.0, 0.0, runtime.monotonic()
        try:
            while not self.is_stopping:
                acted = self._run_commands(pause_s)
                posted = self._reads.post()
                late = runtime.monotonic() - polled_at > POLL_WITHIN_S
                if self._reads.in_flight or not posted or late:
                    acted |= self._reads.poll()
                    polled_at = runtime.monotonic()
                self._reads.end_finished()
                self.peers.end_removed()
                now = runtime.monotonic()
                active_at = now if acted or posted else active_at
                pause_s = self._pause_s(is_quiet=now - active_at > SOON_S)
                if posted:  # and there may be more to post
                    pause_s = 0.0
        except Exception as exc:  # NIXL's bindings may raise anything
            logger.exception("the thread of agent %s has failed", self._name)
            chain: list[BaseException | None] = [exc]
            for each in chain:  # their frames would keep the agent alive, and it would read on
                if each is not None:
                    traceback.clear_frames(each.__traceback__)
                    chain += (each.__cause__, each.__context__)
        finally:
            with self._lock:  # whatever ended the loop, no command runs from now on
                self.is_stopping = True
            attempt(self._stopped, self._close)
            if not self._stopped.done():
                self._stopped.set_result(None)

    def _open(self) -> None:
        nixl = import_nixl(otherwise="use another backend")
        self._errors = nixl_errors(nixl)
        config = nixl.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        beacon = MemoryRegion(self._beacon.ctypes.data, BEACON_BYTES, self._beacon)
        errors: tuple[type[Exception], ...] = (TransferFailedError, *self._errors)
        try:
            self._agent = nixl.nixl_agent(self._name, config)
            self._agent.create_backend(BACKEND, {"engine_config": choose_ucx_settings()})
            self._register([beacon])
        except errors as exc:
            raise BackendUnavailableError(
                f"NIXL's {BACKEND} plug-in is missing or does not work here ({exc})"
            ) from exc
        self._reads = Reads(nixl, self._agent)
        self.peers = NixlPeers(nixl, self._agent, self._name, self._reads, self._register)

    def _pause_s(self, *, is_quiet: bool) -> float:
        """Choose the pause before the next poll: a longer one if nothing happened for a while."""
        if self._reads.in_flight:
            return LONG_PAUSE_S if is_quiet else SHORT_PAUSE_S
        return IDLE_PAUSE_S if is_quiet else LONG_PAUSE_S

    def _run_commands(self, pause_s: float) -> bool:
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
        self._run_commands(0.0)
        self._reads.close()
        self.peers.release()
        del self._agent
        self._memory.clear()
        self._reads.end_all()
        self.peers.close()


class NixlAgent(TransferAgent):
    """Transfer agent over NIXL; the constructor imports NIXL and blocks for up to a second.

    Several event loops may use one agent. If UCX can reach a peer's memory over TCP only,
    `add_peer` raises `PeerLostError`.

    Args:
        piece_bytes: Maximum size of a piece of a read. The pieces of several reads take turns, and
            a cancelled read ends with its pieces in flight.
        piece_fragments: Maximum number of fragments in a piece: NIXL describes them in one call.
    """

    def __init__(self, *, piece_bytes: int = 64 << 20, piece_fragments: int = 4096) -> None:
        self.name = f"kvxfer-{runtime.unique_id()}"
        self._thread = NixlThread(self.name, (piece_bytes, piece_fragments))
        # Also runs when the interpreter exits, where a thread inside NIXL would crash the process.
        self._finalizer = weakref.finalize(self, self._thread.stop)

    @property
    def is_closed(self) -> bool:
        """See `TransferAgent.is_closed`."""
        return self._thread.is_stopping

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
        self._thread.order(done, partial(self._thread.peers.add, peer, done))
        try:
            return await outlive_caller(done)
        except asyncio.CancelledError:
            with contextlib.suppress(ClosedError):
                self._thread.order(done, partial(self._thread.peers.forget, peer.name, done))
            raise

    async def remove_peer(self, peer: str) -> None:
        """See `TransferAgent.remove_peer`."""
        done: Future[None] = Future()
        self._thread.order(done, partial(self._thread.peers.remove, peer, done))
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
        """Begin the read that follows the others, unless one of them failed; on any thread."""
        error = over.exception()
        try:
            if error is None:
                self._thread.begin([final], is_next=True)  # its caller waits only for this one
        except ClosedError:
            error = TransferFailedError(final.peer, "the agent was closed")
        if error is not None:
            final.done.set_exception(error)

    async def aclose(self) -> None:
        """See `TransferAgent.aclose`."""
        self._finalizer.detach()
        await wait_despite_cancel(self._thread.begin_stop())


def _all_over(futures: "Sequence[Future[None]]") -> "Future[None]":
    """Make a future that completes with the last of `futures`, and with the first error of any."""
    if len(futures) == 1:
        return futures[0]
    over: Future[None] = Future()
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
