"""Scrubber: looks for bytes that changed in the slots of a host pool, in the background."""

import logging
import threading
from collections.abc import Callable, Sequence
from weakref import WeakMethod, ref

import numpy as np

from kvxfer import runtime
from kvxfer.backends.host.pool import HostPool
from kvxfer.runtime import Threads

BATCH_S = 0.25
"""Pause between two batches, each of as many bytes as the rate allows in that time."""

ROUND_S = 10.0
"""Pause between two rounds: to list the slots of a large pool takes milliseconds."""

YIELD_BLOCKS = 16
"""Blocks to hash before other threads get the GIL: small blocks are hashed without releasing it."""

logger = logging.getLogger(__name__)


class Scrubber:
    """Thread that reads the blocks of a pool, round after round, to find bytes that changed.

    If the tag of a block has no checksum, the first round makes one, and later rounds compare it,
    as long as the slot's generation is the same. No lock is held, so a slot may be overwritten
    while it is read: the bound method `changed`, called on the thread with a slot and its
    generation, has to check that the slot still has that generation. The scrubber keeps neither the
    pool nor the method's object alive; close it before the pool. A rate of 0 starts no thread.

    Attributes:
        num_bytes: Bytes read so far.
    """

    def __init__(
        self, pool: HostPool, mib_per_s: float, changed: Callable[[int, int], object]
    ) -> None:
        self.num_bytes = 0
        self._pool = ref(pool)
        self._batch_bytes = mib_per_s * (1 << 20) * BATCH_S
        self._changed = WeakMethod(changed)
        shape = pool.shape
        self._sums = np.zeros((shape.num_slots, shape.num_parts), np.uint64)
        self._seen = pool.generations.before()
        self._threads = Threads("kvxfer-scrub", 1)
        self._stop = runtime.event()
        self._is_started = not mib_per_s

    def start(self) -> None:
        """Start the thread, once there is something to read; has no effect when called again."""
        if not self._is_started:
            self._threads.start(self._run, threading.get_ident())
            self._is_started = True

    async def aclose(self) -> bool:
        """Stop the thread; return whether it has ended within `CLOSE_TIMEOUT_S`."""
        self._stop.set()
        return not await self._threads.aclose()

    def scrub(self, pool: HostPool, slot: int) -> int:
        """Check one slot; return the number of bytes read."""
        generation = pool.generations.of(slot)
        sums, tagged, num_bytes = pool.sums_of(slot)
        is_known = int(self._seen[slot]) == generation
        expected = [
            (is_known and seen) or tag
            for seen, tag in zip(self._sums[slot].tolist(), tagged, strict=False)
        ]
        differs = any(one not in (0, made) for one, made in zip(expected, sums, strict=True))
        if differs and (changed := self._changed()) is not None:
            changed(slot, generation)
        if sums:
            self._sums[slot], self._seen[slot] = sums, generation
        self.num_bytes += num_bytes
        return num_bytes

    def _run(self, starter: int) -> None:
        if threading.get_ident() == starter:  # no thread could be started; this would never return
            logger.warning("host memory is not scrubbed: no thread could be started")
            return
        slots: Sequence[int] = ()
        while not self._stop.wait(BATCH_S if slots else ROUND_S):
            pool = self._pool()
            if pool is None:
                return
            try:
                slots = self._scrub(pool, slots or pool.occupied())
            except Exception:
                logger.exception("host memory is no longer scrubbed: the scrubber failed")
                return
            del pool

    def _scrub(self, pool: HostPool, slots: Sequence[int]) -> Sequence[int]:
        """Check a batch of slots; return those that are left of the round."""
        num_bytes = 0
        for done, slot in enumerate(slots, 1):
            num_bytes += self.scrub(pool, slot)
            if num_bytes >= self._batch_bytes or self._stop.is_set():
                return slots[done:]
            if not done % YIELD_BLOCKS:
                runtime.sleep(0)
        return ()
