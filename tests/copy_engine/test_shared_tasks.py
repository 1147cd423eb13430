"""Tasks are shared with the threads that come in time; late ones hold nobody up."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from kvxfer.copy_engine.cpu import SharedTasks

TIMEOUT_S = 10


class StarvedPool(ThreadPoolExecutor):
    """Pool that queues what it is given, and cannot start the thread for it, as `EAGAIN` says."""

    starved = True

    def _adjust_thread_count(self) -> None:
        if self.starved:
            raise RuntimeError("can't start new thread")
        super()._adjust_thread_count()


def test_tasks_are_done_alone_where_no_thread_starts_and_not_once_more_later() -> None:
    done: list[int] = []
    with StarvedPool(3) as pool:
        SharedTasks([partial(done.append, nth) for nth in range(8)]).run(pool, 3)
        assert sorted(done) == list(range(8))
        pool.starved = False
        pool.submit(int).result(TIMEOUT_S)
    assert sorted(done) == list(range(8))


@pytest.mark.parametrize("failing", ["caller", "helper"])
def test_an_error_is_raised_when_no_task_runs_any_more(failing: str) -> None:
    caller, both_are_here = threading.get_ident(), threading.Barrier(2, timeout=TIMEOUT_S)
    begun: list[bool] = []
    running: list[bool] = []

    def task() -> None:
        begun.append(True)
        both_are_here.wait()
        if (threading.get_ident() == caller) == (failing == "caller"):
            raise KeyboardInterrupt
        running.append(True)
        failed.wait(0.1)
        running.remove(True)

    failed = threading.Event()
    with ThreadPoolExecutor(3) as pool, pytest.raises(KeyboardInterrupt):
        SharedTasks([task] * 10).run(pool, 1)
    assert not running
    assert len(begun) == 2, "a task was begun after the error"
