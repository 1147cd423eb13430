"""Tasks that a thread does itself, together with whichever threads of a pool come in time."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress

from kvxfer import runtime

Task = Callable[[], None]


class SharedTasks:
    """Tasks that several threads take one by one, and that one of them waits for.

    A thread that comes late, because another program or the engine's OpenMP threads have its core,
    finds nothing left and holds nobody up. With fixed shares the caller would wait for its share.

    Args:
        tasks: The tasks, which may run at the same time and in any order.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._left = deque(tasks)
        self._num_running = 0
        self._changed = runtime.condition()
        self._errors: list[BaseException] = []

    def run(self, pool: Executor, num_helpers: int) -> None:
        """Do the tasks on this thread and up to `num_helpers` of the pool.

        Returns when each has ended. An error of one is raised when none runs any more; those that
        had not begun are not done. Where no thread can be started, this one does all of them: a
        helper may be queued in the pool nevertheless, and must find nothing left.
        """
        try:
            with suppress(RuntimeError):
                for _ in range(min(num_helpers, len(self._left) - 1)):
                    pool.submit(self._help)
            while task := self._take(helps=False):
                task()
        finally:
            with self._changed:
                self._left.clear()
                self._changed.wait_for(lambda: not self._num_running)
        if self._errors:
            raise self._errors[0]

    def _help(self) -> None:
        while task := self._take(helps=True):
            try:
                task()
            except BaseException as exc:  # noqa: BLE001 - raised by `run`
                with self._changed:
                    self._errors.append(exc)
                    self._left.clear()
            finally:
                with self._changed:
                    self._num_running -= 1
                    self._changed.notify()

    def _take(self, *, helps: bool) -> Task | None:
        with self._changed:
            if not self._left:
                return None
            self._num_running += helps
            return self._left.popleft()
