"""Answers to LMCache's controllers, which wait on an event file descriptor."""

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from kvxfer import runtime
from kvxfer.integrations.lmcache.interface import create_event_notifier

T = TypeVar("T")

logger = logging.getLogger(__name__)

GRACE_S = 0.25
"""How long after its deadline a task may still end by itself, before `Deadlines` ends it."""


class Answers:
    """Answers to the tasks of one kind, each taken once; thread-safe.

    An answer is kept before the file descriptor is signalled, so that the woken thread finds it.
    """

    def __init__(self) -> None:
        self._notifier: Any = create_event_notifier()
        self._given: dict[int, Any] = {}
        self._lock = runtime.lock()
        self._closed = False

    @property
    def fd(self) -> int:
        """The event file descriptor."""
        return int(self._notifier.fileno())

    def give(self, task_id: int, make: Callable[[], object]) -> None:
        """Make the answer to a task, and give it; if that fails, nothing is given."""
        with self._lock:
            if self._closed:
                return
            self._given[task_id] = make()
            self._notifier.notify()

    def take(self, task_id: int) -> Any:
        """Take the answer to a task; None while there is none."""
        with self._lock:
            return self._given.pop(task_id, None)

    def take_all(self) -> dict[int, Any]:
        """Take the answers to all tasks that have one."""
        with self._lock:
            given, self._given = self._given, {}
        return given

    def close(self) -> None:
        """Close the file descriptor."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._notifier.close()


class Task:
    """Task of a controller; it is answered once, whatever happens.

    Attributes:
        done: Whether each of the keys is done.
        num_bytes: Bytes that were stored.
        num_asked: Calls of the backend that have not ended.
        answered: When the backend last answered, or was asked while it owed no answer.
    """

    def __init__(self, num_keys: int, deadline: float, answer: "Callable[[Task], object]") -> None:
        self.deadline = deadline
        self.done = [False] * num_keys
        self.num_bytes = 0
        self.num_asked = 0
        self.answered = runtime.monotonic()
        self.ended = False
        self._answer = answer
        self._lock = runtime.lock()

    async def ask(self, call: Awaitable[T]) -> T:
        """Await a call of the backend, which owes an answer until the call ends."""
        if not self.num_asked:
            self.answered = runtime.monotonic()
        self.num_asked += 1
        result = await call
        self.num_asked -= 1
        self.answered = runtime.monotonic()
        return result

    def touch(self, func: Callable[[], object]) -> bool:
        """Call a function that touches LMCache's memory; return False if the task has ended.

        LMCache reuses the memory once it has the answer, so `end` waits for the function.
        """
        with self._lock:
            if not self.ended:
                func()
            return not self.ended

    def end(self) -> None:
        """Answer with what is done so far, unless that was done; `Deadlines` repeats a failure."""
        with self._lock:
            if self.ended:
                return
            try:
                self._answer(self)
                self.ended = True
            except Exception:
                self.deadline = runtime.monotonic()  # to be repeated `GRACE_S` later
                logger.exception("LMCache's controller cannot be answered yet")


class Deadlines:
    """Thread that ends tasks at their deadline, even if an event loop is blocked."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._changed = runtime.condition()
        self._closed = False
        runtime.start_thread(self._run, name="kvxfer-lmcache-deadlines")

    def watch(self, task: Task) -> None:
        """Watch a task, whose deadline must not be before those of earlier tasks."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()

    def close(self) -> None:
        """End all tasks now, and the thread."""
        with self._changed:
            self._closed = True
            left = list(self._tasks)
            self._changed.notify()
        for task in left:
            task.end()

    def _run(self) -> None:
        while not self._closed:
            try:
                self._end_next()
            except Exception:
                logger.exception("the deadline of a task of LMCache's cannot be kept yet")

    def _end_next(self) -> None:
        """End the first task, unless its deadline has to be waited for first, or another task."""
        with self._changed:
            while self._tasks and self._tasks[0].ended:
                self._tasks.popleft()
            if self._closed:
                return
            if not self._tasks:
                self._changed.wait()
                return
            task = self._tasks[0]
            left = task.deadline + GRACE_S - runtime.monotonic()
            if left > 0:
                self._changed.wait(left)
                return
        task.end()
