"""Clock that a test sets, in place of the machine's."""

from kvxfer.runtime import OrdinaryRuntime


class Clock(OrdinaryRuntime):
    """Runtime whose monotonic clock stands still until a test moves it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now
