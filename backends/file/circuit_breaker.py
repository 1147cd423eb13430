"""Circuit breaker for writes."""

import enum
import logging
import time
from collections.abc import Callable

MAX_ERRORS = 5
PAUSE_S = 30.0
"""Failures and seconds that tell a disk that is gone from one that stutters."""

logger = logging.getLogger(__name__)


class _State(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


class CircuitBreaker:
    """Circuit breaker: pauses calls after failures in a row, then lets one through as a probe.

    Logs once that it opens and once that it closes. Belongs to one event loop.

    Args:
        name: Name of the calls in the log.
        max_errors: Failures in a row that open it.
        pause_s: Seconds for which it stays open before the next probe.
        clock: Monotonic clock, in seconds.

    Source: M. Nygard, "Release It!", chapter 5, Circuit Breaker.
    """

    def __init__(
        self,
        name: str,
        *,
        max_errors: int = MAX_ERRORS,
        pause_s: float = PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._max_errors = max_errors
        self._pause_s = pause_s
        self._clock = clock
        self._state = _State.CLOSED
        self._num_errors = 0
        self._num_probes = 0
        self._opened_at = 0.0

    @property
    def probe(self) -> int:
        """Number of the probe that is under way, for `abandon`; 0 when there is none."""
        return self._num_probes if self._state is _State.HALF_OPEN else 0

    @property
    def closed(self) -> bool:
        """Whether calls are let through as if nothing had happened."""
        return self._state is _State.CLOSED

    def allows(self) -> bool:
        """Whether to make a call now; one that is allowed must be followed by `record`."""
        if self._state is _State.OPEN and self._clock() - self._opened_at >= self._pause_s:
            self._state = _State.HALF_OPEN
            self._num_probes += 1
            return True
        return self._state is _State.CLOSED

    def record(self, error: str) -> None:
        """Count the end of a call; the error is empty when it succeeded."""
        if not error:
            if self._state is not _State.CLOSED:
                logger.warning("%s: works again", self._name)
            self._state, self._num_errors = _State.CLOSED, 0
            return
        self._num_errors += 1
        if self._state is _State.HALF_OPEN or self._num_errors >= self._max_errors:
            self.trip(error)

    def trip(self, error: str) -> None:
        """Open at once, whatever was counted, and restart the pause."""
        if self._state is _State.CLOSED:
            pause = self._pause_s
            logger.warning("%s: stopped, tried again every %g s: %s", self._name, pause, error)
        self._state, self._opened_at = _State.OPEN, self._clock()

    def abandon(self, probe: int) -> None:
        """Uncount a call that showed neither success nor failure, such as a cancelled probe.

        Args:
            probe: `probe` right after the call was allowed. Another call's is not touched.
        """
        if probe and probe == self.probe:
            self._state = _State.OPEN
