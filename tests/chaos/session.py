"""Session of a chaos worker: one engine from opening to closing, and what it draws."""

import faulthandler
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass

from kvxfer.storage.keys import BlockKey
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import Direction
from tests.chaos.checked_memory import Batch, CheckedMemory
from tests.chaos.contents import Shape
from tests.chaos.faults import report_counts

HANG_S = 30.0
"""Seconds that a call may take beyond its deadline. Processes are stopped for a few seconds at
most, and the machine may be busy."""

DEFAULT_TIMEOUT_S = 10.0
COUNTS_EVERY_S = 1.0
CANCEL, SHORT_TIMEOUT = "cancel", "short-timeout"


@dataclass
class Session:
    """Session: an engine, the caches of its blocks, and its deadline.

    Attributes:
        without: Disturbances that are left out.
    """

    engine: TransferEngine
    memory: CheckedMemory
    shape: Shape
    rng: random.Random
    counts: Counter[str]
    stopping: threading.Event
    until: float
    without: frozenset[str]
    _reported: float = 0.0

    @property
    def goes_on(self) -> bool:
        """Whether the session goes on; tells the conductor that this process is alive."""
        now = time.monotonic()
        if now > self._reported + COUNTS_EVERY_S:
            self._reported = now
            report_counts(self.counts)
        faulthandler.dump_traceback_later(3 * HANG_S, exit=True)
        return now < self.until and not self.stopping.is_set()

    def draw_operation(self) -> str:
        """Draw the next operation."""
        names, weights = ("store", "load", "lookup", "delete"), (40, 45, 10, 2)
        return self.rng.choices(names, weights)[0]

    def draw_batch(self, operation: str) -> Batch | None:
        """Lend the blocks for a store or load."""
        return self.memory.lend(Direction[operation.upper()])

    def draw_some_keys(self) -> list[BlockKey]:
        """Draw keys of any group."""
        group = self.rng.choice(self.shape.groups)
        return self.memory.draw_keys(group, self.rng.randint(1, 8))

    def draw_timeout(self) -> float | None:
        """Draw a deadline, sometimes one that is too short."""
        if SHORT_TIMEOUT not in self.without and self.rng.random() < 0.1:
            self.counts[SHORT_TIMEOUT] += 1
            return self.rng.uniform(0, 0.02)
        return self.rng.choice((None, 5.0))

    def draw_cancellation(self) -> float | None:
        """Draw the seconds after which a call is cancelled, None for never."""
        if CANCEL in self.without or self.rng.random() > 0.1:
            return None
        self.counts[CANCEL] += 1
        return self.rng.choice((0.0, self.rng.uniform(0, 0.01), self.rng.uniform(0, 0.3)))
