"""Mover of pages: calls of an engine that end by a deadline, and slots that late ones may touch."""

import logging
from collections.abc import Sequence

from kvxfer import runtime
from kvxfer.errors import ClosedError
from kvxfer.storage.keys import BlockKey
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import Direction, FinishedJob, JobId

GRACE_S = 1.0
"""Seconds after a deadline in which the engine reports what it has ended."""

logger = logging.getLogger(__name__)


class Deadline:
    """Deadline of a call.

    Args:
        timeout_s: Seconds from now, None for no limit.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._end = None if timeout_s is None else runtime.monotonic() + timeout_s

    @property
    def left_s(self) -> float | None:
        """Seconds that are left, None for no limit."""
        return None if self._end is None else max(0.0, self._end - runtime.monotonic())

    @property
    def has_passed(self) -> bool:
        """Whether no time is left."""
        return self.left_s == 0


class PageMover:
    """Mover of pages between the slots of a pool and a backend; for one thread at a time.

    A slot that a late transfer may still touch is not given out again until that has ended.

    Args:
        engine: Engine of the pool.
        num_slots: Pages of the pool.
    """

    def __init__(self, engine: TransferEngine, num_slots: int) -> None:
        self._engine = engine
        self._num_slots = num_slots
        self._late: dict[JobId, Sequence[int]] = {}
        self._reported: set[JobId] = set()  # those of them that have ended

    def find(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[bool]:
        """Return for each key whether a load would find it; none where the backend fails."""
        if not keys or deadline.has_passed:
            return [False] * len(keys)
        left_s = deadline.left_s
        call = self._engine.submit_lookup(keys, timeout_s=left_s)
        try:
            return runtime.result(call, None if left_s is None else left_s + GRACE_S)
        except ClosedError:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever a backend does, the model can compute
            call.cancel()
            logger.warning("lookup of %d pages: %r", len(keys), exc)
            return [False] * len(keys)

    def free_slots(self) -> list[int]:
        """List the slots that no transfer touches, nor one that has not begun yet."""
        self._take_ended()
        for job_id in [each for each in self._reported if not self._engine.may_touch(each)]:
            del self._late[job_id]
            self._reported.discard(job_id)
        late = {slot for slots in self._late.values() for slot in slots}
        return [slot for slot in range(self._num_slots) if slot not in late]

    def move(
        self,
        direction: Direction,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        deadline: Deadline,
    ) -> list[bool]:
        """Store pages from slots, or load them; return for each whether that was done."""
        submit = (
            self._engine.submit_load if direction is Direction.LOAD else self._engine.submit_store
        )
        left_s = deadline.left_s
        job_id = submit(keys, [list(slots)], timeout_s=left_s)
        self._late[job_id] = slots  # until it has ended, also if this thread is interrupted
        self._engine.wait([job_id], timeout_s=None if left_s is None else left_s + GRACE_S)
        ended = self._take_ended()
        if job_id not in ended:
            self._engine.cancel(job_id)
            logger.warning("%d pages: no answer in %s s", len(keys), left_s)
            return [False] * len(keys)
        for outcome in ended[job_id].outcomes:
            if not outcome.done:
                text = "a page was not %s: %s %s"
                verb = "loaded" if direction is Direction.LOAD else "stored"
                logger.info(text, verb, outcome.status.value, outcome.reason)
        return [outcome.done for outcome in ended[job_id].outcomes]

    def _take_ended(self) -> dict[JobId, FinishedJob]:
        ended = {job.job_id: job for job in self._engine.get_finished()}
        self._reported |= ended.keys() & self._late.keys()
        return ended
