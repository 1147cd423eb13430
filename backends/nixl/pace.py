"""How often to look for what nothing announces."""

import time

BUSY_S = 200e-6
SOON_S = 20e-3
"""After something happened: for how long to look without a pause, and then with a short one."""

SHORT_PAUSE_S = 50e-6
LONG_PAUSE_S = 1e-3
IDLE_PAUSE_S = 5e-3


class Pace:
    """Decides how long to pause between two looks: the less happens, the longer."""

    def __init__(self) -> None:
        self._active_at = time.perf_counter()

    def pause_s(self, *, active: bool, waiting: bool) -> float:
        """Seconds until the next look.

        Args:
            active: Something happened at the last one.
            waiting: Something is under way.
        """
        now = time.perf_counter()
        if active:
            self._active_at = now
        quiet_s = now - self._active_at
        if quiet_s < BUSY_S:
            return 0.0
        if quiet_s < SOON_S:
            return SHORT_PAUSE_S
        return LONG_PAUSE_S if waiting else IDLE_PAUSE_S
