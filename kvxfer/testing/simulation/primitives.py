"""Locks, conditions, events and queues of simulated threads, as in `threading` and `queue`."""

# ruff: noqa: D102 - the methods are those of `threading` and `queue`

import queue
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from kvxfer.testing.simulation.scheduler import Scheduler, SimulatedThread


class SimulatedLock:
    """Lock at which the scheduler may switch threads; see `threading.Lock`."""

    def __init__(self, scheduler: Scheduler, *, is_reentrant: bool = False) -> None:
        self._scheduler = scheduler
        self._is_reentrant = is_reentrant
        self._owner: SimulatedThread | None = None
        self._num_holds = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002 - as in `threading`
        scheduler = self._scheduler
        scheduler.point()
        limit_s = None if timeout < 0 else timeout
        if not self._is_mine_or_free() and (
            not blocking or not scheduler.wait_until(self._is_mine_or_free, self, limit_s)
        ):
            return scheduler.is_over
        self._owner = scheduler.current
        self._num_holds += 1
        return True

    def release(self) -> None:
        if self._owner is None:
            raise RuntimeError("release unlocked lock")
        self._num_holds -= 1
        if not self._num_holds:
            self._owner = None
            self._scheduler.wake(self)
            self._scheduler.point()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.release()

    def _is_mine_or_free(self) -> bool:
        is_mine = self._is_reentrant and self._owner is self._scheduler.current
        return self._owner is None or is_mine


class SimulatedCondition(SimulatedLock):
    """Condition with a lock of its own; see `threading.Condition`."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler, is_reentrant=True)
        self._waiting: list[list[bool]] = []

    def wait(self, timeout: float | None = None) -> bool:
        is_notified = [False]
        self._waiting.append(is_notified)
        num_holds, self._num_holds = self._num_holds, 1
        self.release()
        try:
            return self._scheduler.wait_until(lambda: is_notified[0], is_notified, timeout)
        finally:
            self._waiting = [each for each in self._waiting if each is not is_notified]
            self.acquire()
            self._num_holds = num_holds

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        due = None if timeout is None else self._scheduler.now + timeout
        while not predicate():
            left = None if due is None else due - self._scheduler.now
            if (left is not None and left <= 0) or self._scheduler.is_over:
                return predicate()
            self.wait(left)
        return True

    def notify(self, n: int = 1) -> None:
        for is_notified in self._waiting[:n]:
            is_notified[0] = True
            self._scheduler.wake(is_notified)
        del self._waiting[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class SimulatedEvent:
    """Event; see `threading.Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._scheduler.wake(self)
        self._scheduler.point()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._scheduler.wait_until(self.is_set, self, timeout)


class SimulatedQueue:
    """Queue without a bound; see `queue.SimpleQueue`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: deque[Any] = deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:  # noqa: ARG002, FBT001, FBT002 - as in `queue`
        self._items.append(item)
        self._scheduler.wake(self)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:  # noqa: FBT001, FBT002 - as in `queue`
        limit_s = timeout if block else 0.0
        if not self._scheduler.wait_until(lambda: bool(self._items), self, limit_s):
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)
