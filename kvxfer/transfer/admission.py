"""Admission of transfers: a bound on the bytes in flight, loads before stores."""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from kvxfer.errors import InvalidArgumentError


class Admission:
    """Admission of transfers by priority and then in order, with a bound on the bytes in flight.

    The transfer at the head of the queue is never overtaken, so that a large one does not starve.
    Owned by one event loop.

    Args:
        max_bytes: Bound on the bytes in flight. A larger transfer is admitted when it is alone.

    Raises:
        InvalidArgumentError: The bound is not positive.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 1:
            raise InvalidArgumentError("max_bytes", max_bytes, "at least 1")
        self._max_bytes = max_bytes
        self._bytes_in_flight = 0
        self._order = count()
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of the transfers that were admitted and have not ended."""
        return self._bytes_in_flight

    @property
    def num_waiting(self) -> int:
        """Transfers that wait for their turn."""
        return len(self._waiting)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a transfer would be admitted now, if none waited."""
        return self._bytes_in_flight + min(num_bytes, self._max_bytes) <= self._max_bytes

    @asynccontextmanager
    async def admit(self, priority: int, num_bytes: int) -> AsyncIterator[None]:
        """Wait for room, hold it inside the context; the lowest priority goes first."""
        num_bytes = min(num_bytes, self._max_bytes)
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._order), num_bytes, turn))
        self._admit_waiting()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # admitted at the same moment: release its bytes
                self._bytes_in_flight -= num_bytes
            self._admit_waiting()
            raise
        try:
            yield
        finally:
            self._bytes_in_flight -= num_bytes
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting:
            _, _, num_bytes, turn = self._waiting[0]
            if not turn.cancelled():
                if self._bytes_in_flight + num_bytes > self._max_bytes:
                    return
                self._bytes_in_flight += num_bytes
                turn.set_result(None)
            heapq.heappop(self._waiting)
