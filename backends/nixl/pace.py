"""Pace of polling: the pause between two polls of NIXL's transfers."""

import time

SOON_S = 20e-3
"""Seconds of shorter pauses after a poll that found something."""

SHORT_PAUSE_S = 50e-6
"""Shortest pause. Without one, the polling thread would have the GIL again before the event loop
wakes up, and so take milliseconds from it, some hundred times a second."""

LONG_PAUSE_S = 1e-3
IDLE_PAUSE_S = 5e-3


class Pace:
    """Pace of polling: longer pauses the longer polls have found nothing."""

    def __init__(self) -> None:
        self._active_at = time.perf_counter()

    def pause_s(self, *, active: bool, waiting: bool) -> float:
        """Compute the seconds until the next poll.

        Args:
            active: The last poll found something.
            waiting: Transfers are in flight.
        """
        now = time.perf_counter()
        if active:
            self._active_at = now
        is_quiet = now - self._active_at > SOON_S
        if waiting:
            return LONG_PAUSE_S if is_quiet else SHORT_PAUSE_S
        return IDLE_PAUSE_S if is_quiet else LONG_PAUSE_S
