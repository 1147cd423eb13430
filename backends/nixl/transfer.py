"""Transfer of an agent, with the pieces that are left to move."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvxfer.backends.nixl.pieces import Fragments
from kvxfer.backends.nixl.transfer_agent import Operation
from kvxfer.errors import TransferFailedError


@dataclass(slots=True, eq=False)
class Transfer:
    """State of a transfer; for the agent's thread only, except `done`.

    Attributes:
        landed: Called when all pieces have arrived, before `done` ends.
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
