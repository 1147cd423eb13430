"""How often to look for what nothing announces."""

import time

SOON_S = 20e-3
"""For how long to make shorter pauses after something happened."""

SHORT_PAUSE_S = 50e-6
"""Never without a pause: whoever looks again at once has the interpreter lock again before the
event loop wakes up, and so takes milliseconds from it, some hundred times a second."""

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
        is_quiet = now - self._active_at > SOON_S
        if waiting:
            return LONG_PAUSE_S if is_quiet else SHORT_PAUSE_S
        return IDLE_PAUSE_S if is_quiet else LONG_PAUSE_S
