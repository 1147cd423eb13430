"""Clock that a test sets, and a wait for a condition by the machine's clock."""

import time
from collections.abc import Callable

from kvxfer.runtime import Runtime

LIMIT_S = 15.0


class Clock(Runtime):
    """Runtime whose monotonic clock moves only when a test moves it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now


def pause() -> None:
    time.sleep(0.01)


def until(holds: Callable[[], object], *, meanwhile: Callable[[], object] = pause) -> None:
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end
        meanwhile()
