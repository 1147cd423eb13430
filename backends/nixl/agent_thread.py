"""One agent of NIXL, and the thread that makes every call of it."""

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvxfer.backends.nixl.pieces import Fragments, Words, join, pieces
from kvxfer.backends.nixl.regions import AgentMetadata, Regions
from kvxfer.backends.nixl.transfer_agent import Operation
from kvxfer.backends.nixl_module import import_nixl, nixl_errors
from kvxfer.errors import (
    BackendUnavailableError,
    ClosedError,
    DuplicateError,
    InvalidArgumentError,
    PeerLostError,
    TransferFailedError,
)
from kvxfer.kvcache.memory_region import MemoryRegion

T = TypeVar("T")

BACKEND = "UCX"

ENGINE_CONFIG = "PROTO_EMULATION_ENABLE=n"
"""Without it UCX moves bytes through messages where it cannot reach a peer's memory: over TCP,
which is slower than a socket and has crashed processes."""

PIECE_BYTES = 16 << 20
PIECE_FRAGMENTS = 4096
PIECES_IN_FLIGHT = 4
"""Of one transfer. Where the caller of NIXL copies, as on one machine, one is in flight."""

BUSY_S = 200e-6
SOON_S = 20e-3
SHORT_PAUSE_S = 50e-6
LONG_PAUSE_S = 1e-3
IDLE_PAUSE_S = 5e-3


@dataclass(slots=True, eq=False)
class Transfer:
    """What is left to do of a transfer; for the owner thread only, `done` aside."""

    operation: Operation
    peer: str
    done: Future[None] = field(default_factory=Future)
    pieces: deque[Fragments] = field(default_factory=deque)
    in_flight: int = 0
    error: TransferFailedError | None = None

    def stop(self, error: TransferFailedError) -> None:
        """Let it end with `error` once nothing is in flight."""
        self.pieces.clear()
        self.error = self.error or error


class AgentThread:
    """The thread that makes every call of NIXL; methods without a note are run on it.

    Attributes:
        peers: Their registered memory; any thread may look.
        regions: Our own; any thread may look.
    """

    def __init__(self, name: str) -> None:
        self.peers: dict[str, Regions] = {}
        self.regions = Regions()
        self._name = name
        self._memory: list[MemoryRegion] = []
        self._transfers: set[Transfer] = set()
        self._turns: deque[Transfer] = deque()
        self._flights: list[tuple[Any, Transfer]] = []
        self._leaving: dict[str, Future[None]] = {}
        self._active_at = 0.0
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

    def call(self, func: Callable[[], T]) -> "Future[T]":
        """Run `func` on the thread, soon; from any thread.

        Raises:
            ClosedError: The agent is closed.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._stopping:
                raise ClosedError(f"agent {self._name}")
            self._commands.put(partial(_fulfil, future, func))
        return future

    def cancel(self, transfer: Transfer) -> None:
        """Post no more of a transfer; from any thread."""
        with contextlib.suppress(ClosedError):
            self.call(partial(transfer.stop, TransferFailedError(transfer.peer, "cancelled")))

    def begin_stop(self) -> "Future[None]":
        """Let the thread end everything, and itself; from any thread."""
        with self._lock:
            if not self._stopping:
                self._stopping = True
                self._commands.put(lambda: None)
        return self._stopped

    def stop(self) -> None:
        """The same, and wait for it."""
        stopped = self.begin_stop()
        if threading.current_thread() is not self._thread:  # where garbage is found by chance
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
        return AgentMetadata(self._name, list(self.regions), opaque).encode()

    def add_peer(self, peer: AgentMetadata) -> str:
        """See `TransferAgent.add_peer`."""
        if peer.name in {self._name, *self.peers, *self._leaving}:
            raise DuplicateError("metadata", peer.name)
        regions = Regions(peer.regions)
        try:
            name = self._agent.add_remote_agent(peer.opaque).decode()
        except self._errors as exc:
            raise InvalidArgumentError(
                "metadata", peer.opaque[:16], f"what NIXL can read and reach ({exc})"
            ) from exc
        if name != peer.name:
            self._agent.remove_remote_agent(name)
            raise InvalidArgumentError("metadata", peer.name, f"the name {name!r}")
        self.peers[name] = regions
        return peer.name

    def remove_peer(self, peer: str, done: "Future[None]") -> None:
        """See `TransferAgent.remove_peer`; `done` says when."""
        if peer in self._leaving:
            self._leaving[peer].add_done_callback(lambda _: done.set_result(None))
        elif peer not in self.peers:
            done.set_result(None)
        else:
            del self.peers[peer]
            self._leaving[peer] = done
            for transfer in self._transfers:
                if transfer.peer == peer:
                    transfer.stop(PeerLostError(peer, "it was removed"))

    def begin(self, transfer: Transfer, fragments: Fragments) -> None:
        """Let a transfer take turns with others."""
        if transfer.peer not in self.peers:
            transfer.done.set_exception(PeerLostError(transfer.peer, "it was removed"))
            return
        fragments = join(fragments, self.regions.starts, self.peers[transfer.peer].starts)
        transfer.pieces.extend(pieces(fragments, PIECE_BYTES, PIECE_FRAGMENTS))
        self._transfers.add(transfer)
        self._turns.append(transfer)

    def _run(self, opened: "Future[None]") -> None:
        """Be the thread."""
        _fulfil(opened, self._open)
        if opened.exception():
            return
        pause_s = 0.0
        try:
            while not self._stopping:
                acted = self._obey(pause_s)
                acted |= self._post()
                acted |= self._poll()
                self._end_what_is_over()
                pause_s = self._pause_s(acted=acted)
        finally:
            _fulfil(self._stopped, self._close)

    def _open(self) -> None:
        nixl = import_nixl(otherwise="use another backend")
        self._errors = nixl_errors(nixl)
        config = nixl.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        try:
            self._agent = nixl.nixl_agent(self._name, config)
            self._agent.create_backend(BACKEND, {"engine_config": ENGINE_CONFIG})
        except self._errors as exc:
            raise BackendUnavailableError(
                f"NIXL's {BACKEND} plug-in is missing or does not work here ({exc})"
            ) from exc

    def _obey(self, pause_s: float) -> bool:
        """Do what others ask for; wait up to `pause_s` for someone who does."""
        if not pause_s:
            time.sleep(0)  # lets other threads of Python run
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
        """Look how what is in flight is doing; lets NIXL make progress, also as a target."""
        flights, self._flights = self._flights, []
        for handle, transfer in flights:
            transfer.in_flight -= 1
            try:
                self._judge(handle, transfer, self._agent.check_xfer_state(handle))
            except self._errors as exc:
                transfer.stop(self._translate(transfer.peer, exc))
        with contextlib.suppress(*self._errors):  # of a peer that is lost: its transfers tell
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
        over = [each for each in self._transfers if not each.pieces and not each.in_flight]
        for transfer in over:
            self._transfers.remove(transfer)
            _end(transfer.done, transfer.error)
        if not self._leaving:
            return
        busy = {transfer.peer for transfer in self._transfers}
        for peer in [peer for peer in self._leaving if peer not in busy]:
            with contextlib.suppress(*self._errors):  # it is gone in any case
                self._agent.remove_remote_agent(peer)
            _end(self._leaving.pop(peer))

    def _pause_s(self, *, acted: bool) -> float:
        """How long to wait for a command: the shorter, the more is likely to happen soon."""
        now = time.perf_counter()
        if acted:
            self._active_at = now
        quiet_s = now - self._active_at
        if quiet_s < BUSY_S:
            return 0.0
        if quiet_s < SOON_S:
            return SHORT_PAUSE_S
        return LONG_PAUSE_S if self._flights else IDLE_PAUSE_S

    def _translate(self, peer: str, exc: Exception) -> TransferFailedError:
        lost = type(exc).__name__ == "nixlRemoteDisconnectError"
        return (PeerLostError if lost else TransferFailedError)(peer, str(exc))

    def _close(self) -> None:
        """Destroy the agent: nothing else makes memory quiet that is in flight."""
        self._obey(0.0)
        while self._flights:
            with contextlib.suppress(*self._errors):
                self._flights.pop()[0].release()
        del self._agent
        self._memory.clear()
        self.peers.clear()
        for transfer in self._transfers:
            _end(transfer.done, TransferFailedError(transfer.peer, "the agent was closed"))
        for done in self._leaving.values():
            _end(done)


def _rows(addresses: Words, lengths: Words) -> Words:
    """Describe memory as NIXL wants it: address, length, device."""
    return np.column_stack([addresses, lengths, np.zeros_like(lengths)])


def _fulfil(future: "Future[T]", func: Callable[[], T]) -> None:
    """Let a future have what a function returns, or raises."""
    try:
        future.set_result(func())
    except Exception as exc:  # noqa: BLE001 - it is the caller's
        future.set_exception(exc)


def _end(done: "Future[None]", error: Exception | None = None) -> None:
    if error:
        done.set_exception(error)
    else:
        done.set_result(None)
