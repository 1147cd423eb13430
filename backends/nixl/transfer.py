"""One transfer of an agent, on its way."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvxfer.backends.nixl.pieces import Fragments
from kvxfer.backends.nixl.transfer_agent import Operation
from kvxfer.errors import TransferFailedError


@dataclass(slots=True, eq=False)
class Transfer:
    """What is left to do of a transfer; for the owner thread only, `done` aside.

    Attributes:
        landed: Called when all has arrived, before `done` says so.
    """

    operation: Operation
    peer: str
    pieces: deque[Fragments]
    landed: Callable[[], None] | None = None
    done: Future[None] = field(default_factory=Future)
    in_flight: int = 0
    error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return not (self.pieces or self.in_flight)

    def stop(self, error: TransferFailedError) -> None:
        """Let it end with `error` once nothing is in flight."""
        self.pieces.clear()
        self.error = self.error or error

    def end(self) -> None:
        """Say that it is over."""
        if self.landed and not self.error:
            try:
                self.landed()
            except Exception as exc:  # noqa: BLE001 - whoever waits for `done` gets it
                self.error = exc
        if self.error:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(None)
