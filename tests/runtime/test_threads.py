"""Event loop on a thread of its own, and the threads of calls that block."""

import asyncio
import threading
import time

import pytest

from kvxfer.runtime import LoopThread, threads


def begin_and_give_up(thread: LoopThread, ended: threading.Event) -> threading.Thread:
    """Begin a call that blocks until `ended`, cancel its task, and return the thread it blocks."""
    blocked: list[threading.Thread] = []
    begun = threading.Event()

    def block() -> None:
        blocked.append(threading.current_thread())
        begun.set()
        ended.wait(30)

    task = asyncio.run_coroutine_threadsafe(asyncio.to_thread(block), thread.loop)
    assert begun.wait(10)
    task.cancel()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), thread.loop).result(10)
    return blocked[0]


def test_stop_waits_for_the_thread_of_a_call_that_was_given_up() -> None:
    thread, ended = LoopThread("loop"), threading.Event()
    blocked = begin_and_give_up(thread, ended)
    threading.Timer(0.2, ended.set).start()
    thread.stop()
    assert not blocked.is_alive()
    assert thread.loop.is_closed()


def test_stop_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "END_OF_THREADS_S", 0.1)
    thread, ended = LoopThread("loop"), threading.Event()
    blocked = begin_and_give_up(thread, ended)
    begun = time.monotonic()
    thread.stop()
    assert time.monotonic() - begun < 5
    assert thread.loop.is_closed()
    assert blocked.is_alive()
    ended.set()
    blocked.join(10)
    assert not blocked.is_alive()


def test_a_coroutine_runs_on_the_loop_and_its_caller_waits_no_longer_than_told() -> None:
    thread = LoopThread("loop")

    async def wait_for(ended: asyncio.Event) -> str:
        await ended.wait()
        return "through"

    ended = asyncio.Event()
    with pytest.raises(TimeoutError):
        thread.run(wait_for(ended), 0.01)
    going_on = thread.submit(wait_for(ended))
    thread.loop.call_soon_threadsafe(ended.set)
    assert going_on.result(10) == thread.run(wait_for(ended)) == "through"
    thread.stop()


def test_stop_cancels_what_is_left_and_lets_it_end() -> None:
    thread, begun, ended = LoopThread("loop"), threading.Event(), threading.Event()

    async def wait_and_tidy_up() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    left = thread.submit(wait_and_tidy_up())
    assert begun.wait(10)
    thread.stop()
    assert ended.is_set()
    assert left.cancelled()


def test_a_task_that_ignores_its_cancellation_does_not_hold_up_the_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "END_OF_TASKS_S", 0.05)
    thread, begun, may_end = LoopThread("loop"), threading.Event(), asyncio.Event()

    async def go_on() -> None:
        asyncio.current_task()._log_destroy_pending = False  # type: ignore[union-attr]
        begun.set()
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue

    left = thread.submit(go_on())
    assert begun.wait(10)
    thread.stop()
    assert thread.loop.is_closed()
    assert not left.done()
