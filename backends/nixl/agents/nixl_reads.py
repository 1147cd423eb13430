"""Reads of a NIXL agent, which take turns, a piece each, and the pace of polling them."""

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from kvxfer import runtime
from kvxfer.backends.nixl.agents.base import Fragments
from kvxfer.backends.nixl.agents.nixl_memory import describe
from kvxfer.backends.nixl.agents.nixl_module import nixl_errors
from kvxfer.errors import PeerLostError, TransferFailedError
from kvxfer.kvcache.memory_region import HOST

MAX_PIECES_OF_A_READ = 4
"""Most pieces in flight of a read; one where NIXL's caller copies, as on one machine."""

SOON_S = 20e-3
"""Seconds of shorter pauses after a poll that found something."""

SHORT_PAUSE_S = 50e-6
"""Shortest pause. Without one, the polling thread would have the GIL again before the event loop
wakes up, and so take milliseconds from it, some hundred times a second."""

LONG_PAUSE_S = 1e-3
"""Pause while reads are in flight for longer, and soon after the last one has ended."""

IDLE_PAUSE_S = 5e-3
"""Pause of an idle agent: peers that connect or read by NIXL wait for its next poll."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadPiece:
    """Piece of a read: fragments that NIXL moves at one time, all from one device to one device."""

    fragments: Fragments
    local_device: torch.device = HOST
    remote_device: torch.device = HOST


@dataclass(slots=True, eq=False)
class PiecewiseRead:
    """Read with the pieces that are left of it; for the thread only, except `done`.

    Attributes:
        landed: Called when all pieces have arrived, before `done` ends.
        in_flight: Pieces that were taken out of `pieces` and have not ended.
    """

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
        """Drop the pieces that are left; end with `error` once none is in flight."""
        self.pieces.clear()
        self.error = self.error or error

    def end(self) -> None:
        """End `done`."""
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
    """Reads of one NIXL agent; for the agent's thread only.

    Args:
        nixl: NIXL's module.
        agent: The agent.
    """

    def __init__(self, nixl: Any, agent: Any) -> None:
        self._nixl = nixl
        self._errors = nixl_errors(nixl)
        self._agent = agent
        self._readings: dict[PiecewiseRead, None] = {}  # in the order of their beginning
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
        """Begin a read, which takes turns with others, as the last one of them or as the next."""
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
        """Post one piece of the read whose turn it is."""
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
                describe(agent, piece.local_device, fragments.local, fragments.lengths),
                describe(agent, piece.remote_device, fragments.remote, fragments.lengths),
                reading.peer,
            )
            self.end_finished()  # who waits for them goes on during the copy, not before it
            self._judge(handle, reading, piece, agent.transfer(handle))
        except self._errors as exc:
            self._fail(reading, piece, exc)

    def poll(self) -> bool:
        """Check the pieces in flight; lets NIXL make progress, also as the target of peers."""
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
            reading.stop(TransferFailedError(reading.peer, "NIXL says that it failed"))

    def end_finished(self) -> None:
        """End the reads of which no piece is left."""
        over = [each for each in self._readings if each.is_over]
        for reading in over:
            del self._readings[reading]
            reading.end()

    def close(self) -> None:
        """Release the handles; the reads end with `end_all`, once the agent was destroyed."""
        while self._flights:
            with contextlib.suppress(*self._errors):
                self._flights.pop()[0].release()
        del self._agent

    def end_all(self) -> None:
        """End all reads, because the agent was closed."""
        for reading in self._readings:
            reading.done.set_exception(TransferFailedError(reading.peer, "the agent was closed"))

    def _fail(self, reading: PiecewiseRead, piece: ReadPiece, exc: Exception) -> None:
        reading.in_flight -= 1
        reading.stop(self._translate(reading.peer, piece, exc))

    def _translate(self, peer: str, piece: ReadPiece, exc: Exception) -> TransferFailedError:
        lost = isinstance(exc, self._nixl.nixlRemoteDisconnectError)
        reason = str(exc)
        if not piece.local_device == piece.remote_device == HOST:
            reason += f", reading memory of {piece.remote_device} into {piece.local_device}"
        return (PeerLostError if lost else TransferFailedError)(peer, reason)


class Pace:
    """Pace of polling: longer pauses the longer polls have found nothing."""

    def __init__(self) -> None:
        self._active_at = runtime.monotonic()

    def pause_s(self, *, active: bool, waiting: bool) -> float:
        """Compute the seconds until the next poll.

        Args:
            active: The last poll found something.
            waiting: Reads are in flight.
        """
        now = runtime.monotonic()
        if active:
            self._active_at = now
        is_quiet = now - self._active_at > SOON_S
        if waiting:
            return LONG_PAUSE_S if is_quiet else SHORT_PAUSE_S
        return IDLE_PAUSE_S if is_quiet else LONG_PAUSE_S
