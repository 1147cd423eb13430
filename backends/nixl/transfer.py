"""One transfer of an agent, on its way."""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvxfer.backends.nixl.pieces import Fragments
from kvxfer.backends.nixl.transfer_agent import Operation
from kvxfer.errors import TransferFailedError


@dataclass(slots=True, eq=False)
class Transfer:
    """What is left to do of a transfer; for the owner thread only, `done` aside."""

    operation: Operation
    peer: str
    pieces: deque[Fragments]
    done: Future[None] = field(default_factory=Future)
    in_flight: int = 0
    error: TransferFailedError | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return not (self.pieces or self.in_flight)

    def stop(self, error: TransferFailedError) -> None:
        """Let it end with `error` once nothing is in flight."""
        self.pieces.clear()
        self.error = self.error or error
