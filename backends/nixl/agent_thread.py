"""Agent thread: one NIXL agent, and the thread that makes all calls of it."""

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvxfer.backends.nixl.pace import Pace
from kvxfer.backends.nixl.pieces import Fragments, Words, join_in_regions, split
from kvxfer.backends.nixl.regions import AgentMetadata, Regions
from kvxfer.backends.nixl.transfer import Transfer
from kvxfer.backends.nixl.transfer_agent import Operation
from kvxfer.backends.nixl.transport import has_active_port
from kvxfer.backends.nixl_module import import_nixl, nixl_errors
from kvxfer.errors import (
    BackendUnavailableError,
    ClosedError,
    InvalidArgumentError,
    PeerLostError,
    TransferFailedError,
)
from kvxfer.kvcache.memory_region import MemoryRegion

T = TypeVar("T")

BACKEND = "UCX"

ENGINE_CONFIG = "PROTO_EMULATION_ENABLE=n"
"""Setting that keeps UCX from moving bytes through messages where it cannot reach a peer's memory:
over TCP, which is slower than a socket and has crashed processes."""

BEACON_BYTES = 32
"""Random bytes at an address in the metadata: a peer that reads them reaches this agent."""

NUM_SLOTS = 63
"""Most peers that can be added at the same time."""

PIECE_BYTES = 16 << 20
PIECE_FRAGMENTS = 4096
PIECES_IN_FLIGHT = 4
"""Most pieces in flight of a transfer; one where NIXL's caller copies, as on one machine."""

POLL_WITHIN_S = 5e-3
"""Seconds after which a poll interrupts the posting of pieces, because peers that connect wait for
it. Polling lets other threads take the GIL, and so may cost a millisecond between two pieces."""


class AgentThread:
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
        self._transfers: set[Transfer] = set()
        self._turns: deque[Transfer] = deque()
        self._flights: list[tuple[Any, Transfer]] = []
        self._remotes: set[str] = set()  # peers that NIXL knows, also while added or removed
        self._leaving: dict[str, Future[None]] = {}
        # Our beacon, then the slots that peers' beacons are read into.
        beacon = np.frombuffer(os.urandom(BEACON_BYTES), np.uint8)
        self._page = np.tile(beacon, (1 + NUM_SLOTS, 1))
        self._free_slots = list(range(1, 1 + NUM_SLOTS))
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

    def cancel(self, transfers: Sequence[Transfer]) -> None:
        """Post no more pieces of some transfers; from any thread."""
        with contextlib.suppress(ClosedError):
            for transfer in transfers:
                error = TransferFailedError(transfer.peer, "cancelled")
                self.order(transfer.done, partial(transfer.stop, error))

    def forget(self, peer: str, adding: "Future[str]") -> None:
        """Remove a peer whose `add_peer` was cancelled; from any thread."""

        def remove() -> None:
            if not (adding.done() and adding.exception()):
                self.remove_peer(peer, Future())

        with contextlib.suppress(ClosedError):
            self.order(adding, remove)

    def begin_stop(self) -> "Future[None]":
        """Ask the thread to end all transfers, and itself; from any thread."""
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
        added = [(region.address, region.num_bytes) for region in regions]
        known = Regions([*self.regions, *added])
        if not added:
            return
        try:
            self._agent.register_memory([(*region, 0, "") for region in added], "DRAM")
        except self._errors as exc:
            raise TransferFailedError(self._name, f"cannot register {added}: {exc}") from exc
        self._memory.extend(regions)
        self.regions = known

    def describe(self) -> bytes:
        """See `TransferAgent.metadata`."""
        opaque = self._agent.get_agent_metadata()
        return AgentMetadata(
            self._name,
            list(self.regions),
            opaque,
            self._page.ctypes.data,
            self._page[0].tobytes(),
        ).encode()

    def add_peer(self, peer: AgentMetadata, done: "Future[str]") -> None:
        """See `TransferAgent.add_peer`; ends `done` when the peer was added.

        Reads the peer's beacon: a peer that cannot be reached, or hangs, shows here, where no
        memory is at stake.
        """
        if peer.name in {self._name, *self._remotes}:
            raise InvalidArgumentError("metadata", peer.name, "an agent not added before")
        if not self._free_slots:
            raise PeerLostError(peer.name, f"{NUM_SLOTS} other new peers do not answer")
        regions = Regions(peer.regions)
        try:
            name = self._agent.add_remote_agent(peer.opaque).decode()
        except self._nixl.nixlBackendError as exc:
            raise PeerLostError(peer.name, f"it cannot be reached ({exc})") from exc
        except self._errors as exc:
            raise InvalidArgumentError(
                "metadata", peer.opaque[:16], f"metadata that NIXL can read ({exc})"
            ) from exc
        self._remotes.add(name)
        slot = self._free_slots.pop()

        def end(reading: "Future[None]") -> None:
            self._free_slots.append(slot)
            error = reading.exception()
            found = self._page[slot].tobytes()
            if not error and (name, found) == (peer.name, peer.beacon):
                self.peers[name] = regions
                done.set_result(name)
                return
            self._leaving.setdefault(name, Future())
            reason = error or "other memory is where its beacon should be"
            done.set_exception(PeerLostError(peer.name, f"it cannot be reached ({reason})"))

        words = self._page[slot].ctypes.data, peer.beacon_address, BEACON_BYTES
        beacon = Fragments(*(np.array([word], np.uint64) for word in words))
        reading = Transfer(Operation.READ, name, deque([beacon]))
        reading.done.add_done_callback(end)
        self._enqueue(reading)

    def remove_peer(self, peer: str, done: "Future[None]") -> None:
        """See `TransferAgent.remove_peer`; ends `done` when the peer was removed."""
        if peer in self._leaving:
            self._leaving[peer].add_done_callback(lambda _: done.set_result(None))
        elif peer not in self._remotes:
            done.set_result(None)
        else:
            self.peers.pop(peer, None)
            self._leaving[peer] = done
            for transfer in self._transfers:
                if transfer.peer == peer:
                    transfer.stop(PeerLostError(peer, "it was removed"))

    def prepare(
        self, operation: Operation, peer: str, fragments: Fragments, landed: Callable[[], None]
    ) -> Transfer:
        """Cut a transfer into pieces, while other transfers run; on any thread.

        Raises:
            InvalidArgumentError: An address is outside of registered memory.
            PeerLostError: There is no such peer.
        """
        theirs = self.peers.get(peer)
        if theirs is None:
            raise PeerLostError(peer, "it was not added, or is removed")
        self.regions.require("local", fragments.local, fragments.lengths)
        theirs.require("remote", fragments.remote, fragments.lengths)
        joined = join_in_regions(fragments, self.regions.starts, theirs.starts)
        pieces = deque(split(joined, PIECE_BYTES, PIECE_FRAGMENTS))
        return Transfer(operation, peer, pieces, landed)

    def begin(self, transfer: Transfer) -> None:
        """Queue a transfer, which takes turns with others."""
        if transfer.peer in self.peers:
            self._enqueue(transfer)
        else:
            transfer.done.set_exception(PeerLostError(transfer.peer, "it was removed"))

    def _enqueue(self, transfer: Transfer) -> None:
        self._transfers.add(transfer)
        self._turns.append(transfer)

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
                posted = self._post()
                if self._flights or not posted or time.monotonic() - polled_at > POLL_WITHIN_S:
                    acted |= self._poll()
                    polled_at = time.monotonic()
                self._end_what_is_over()
                acted |= posted
                pause_s = pace.pause_s(active=acted, waiting=bool(self._flights))
                if posted:  # and there may be more to post
                    pause_s = 0.0
        finally:
            _attempt(self._stopped, self._close)
            self._stopped.set_result(None)

    def _open(self) -> None:
        self._nixl = nixl = import_nixl(otherwise="use another backend")
        self._errors = nixl_errors(nixl)
        config = nixl.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        try:
            self._agent = nixl.nixl_agent(self._name, config)
            self._agent.create_backend(BACKEND, {"engine_config": _engine_config()})
            self._agent.register_memory(
                [(self._page.ctypes.data, self._page.nbytes, 0, "")], "DRAM"
            )
        except self._errors as exc:
            raise BackendUnavailableError(
                f"NIXL's {BACKEND} plug-in is missing or does not work here ({exc})"
            ) from exc

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

    def _post(self) -> bool:
        """Post one piece of the transfer whose turn it is."""
        for _ in range(len(self._turns)):
            transfer = self._turns.popleft()
            if not transfer.pieces:
                continue
            self._turns.append(transfer)
            if transfer.in_flight < PIECES_IN_FLIGHT:
                self._post_piece(transfer, transfer.pieces.popleft())
                return True
        return False

    def _post_piece(self, transfer: Transfer, piece: Fragments) -> None:
        agent = self._agent
        try:
            handle = agent.initialize_xfer(
                transfer.operation.value,
                agent.get_xfer_descs(_rows(piece.local, piece.lengths), "DRAM"),
                agent.get_xfer_descs(_rows(piece.remote, piece.lengths), "DRAM"),
                transfer.peer,
            )
            self._judge(handle, transfer, agent.transfer(handle))
        except self._errors as exc:
            transfer.stop(self._translate(transfer.peer, exc))

    def _poll(self) -> bool:
        """Check the pieces in flight; lets NIXL make progress, also as the target of peers."""
        flights, self._flights = self._flights, []
        for handle, transfer in flights:
            transfer.in_flight -= 1
            try:
                self._judge(handle, transfer, self._agent.check_xfer_state(handle))
            except self._errors as exc:
                transfer.stop(self._translate(transfer.peer, exc))
        with contextlib.suppress(*self._errors):  # of a lost peer: its transfers report it
            self._agent.get_new_notifs()
        return len(self._flights) < len(flights)

    def _judge(self, handle: Any, transfer: Transfer, state: str) -> None:
        if state == "PROC":
            self._flights.append((handle, transfer))
            transfer.in_flight += 1
            return
        handle.release()
        if state != "DONE":
            transfer.stop(TransferFailedError(transfer.peer, "NIXL says that it failed"))

    def _end_what_is_over(self) -> None:
        over = [each for each in self._transfers if each.is_over]
        for transfer in over:
            self._transfers.remove(transfer)
            transfer.end()
        if not self._leaving:
            return
        busy = {transfer.peer for transfer in self._transfers}
        for peer in [peer for peer in self._leaving if peer not in busy]:
            with contextlib.suppress(*self._errors):  # the peer may be gone already
                self._agent.remove_remote_agent(peer)
            self._remotes.remove(peer)
            self._leaving.pop(peer).set_result(None)

    def _translate(self, peer: str, exc: Exception) -> TransferFailedError:
        lost = isinstance(exc, self._nixl.nixlRemoteDisconnectError)
        return (PeerLostError if lost else TransferFailedError)(peer, str(exc))

    def _close(self) -> None:
        """Destroy the agent: only that stops transfers in flight from touching memory."""
        self._obey(0.0)
        while self._flights:
            with contextlib.suppress(*self._errors):
                self._flights.pop()[0].release()
        del self._agent
        self._memory.clear()
        for transfer in self._transfers:
            transfer.done.set_exception(TransferFailedError(transfer.peer, "the agent was closed"))
        for done in self._leaving.values():
            done.set_result(None)


def _rows(addresses: Words, lengths: Words) -> Words:
    """Describe memory as NIXL wants it: address, length, device."""
    rows = np.zeros((len(addresses), 3), np.uint64)
    rows[:, 0] = addresses
    rows[:, 1] = lengths
    return rows


def _engine_config() -> str:
    """Keep UCX off the network where no card can do RDMA: it listens there, and trusts anyone."""
    if "UCX_NET_DEVICES" in os.environ or has_active_port():
        return ENGINE_CONFIG
    return f"{ENGINE_CONFIG},NET_DEVICES=lo"


def _attempt(done: "Future[T]", command: Callable[[], object]) -> None:
    """Run a command; if it raises, end `done` with the error."""
    try:
        command()
    except Exception as exc:  # noqa: BLE001 - raised by `done.result()`
        done.set_exception(exc)
