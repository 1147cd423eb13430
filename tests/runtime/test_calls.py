"""Calls that end although their caller was cancelled; threads, which keep no process alive."""

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import BackendUnavailableError, ClosedError
from kvxfer.runtime import LoopThread, Threads, outlive_caller, threads, wait_despite_cancel
from kvxfer.testing.conformance.suite import yield_to_loop
from tests.interpreter import run_python

LIMIT_S = 10.0
NUM_TICKS = 8
"""Turns of the event loop after which all that can run has run."""

Wait = Callable[[Any], Awaitable[str]]


STEPS = st.lists(st.sampled_from(["cancel the caller", "cancel all", "turn"]), max_size=6)
ENDS = st.sampled_from(["returns", "raises", "is cancelled"])
KINDS = st.sampled_from(["coroutine", "future", "future of a thread"])


class Caller:
    """Caller of work that the test ends, and what happened to both, in order."""

    def __init__(self, wait: Wait, kind: str) -> None:
        self.happened: list[str] = []
        is_thread = kind == "future of a thread"
        self.future: Any = Future() if is_thread else asyncio.get_running_loop().create_future()
        self.begun = asyncio.ensure_future(self.work()) if kind == "coroutine" else self.future
        self.task = asyncio.ensure_future(self.call(wait, self.begun))

    async def work(self) -> str:
        return str(await self.future)

    async def call(self, wait: Wait, work: Any) -> None:
        try:
            self.happened.append(await wait(work))
        except (asyncio.CancelledError, KeyError, BackendUnavailableError) as exc:
            self.happened.append(type(exc).__name__)

    async def take(self, steps: list[str]) -> None:
        for step in steps:
            others = asyncio.all_tasks() - {asyncio.current_task(), self.begun}
            chosen = {"cancel the caller": {self.task}, "cancel all": others}.get(step, set())
            if self.task in {each for each in chosen if each.cancel()}:
                self.happened.append("cancelled")
            await yield_to_loop(1)

    def end(self, end: str) -> None:
        self.happened.append(end)
        if end == "returns":
            self.future.set_result("result")
        elif end == "raises":
            self.future.set_exception(KeyError(0))
        else:
            self.future.cancel()
            if isinstance(self.future, Future):
                self.future.set_running_or_notify_cancel()


async def order(wait: Wait, kind: str, before: list[str], end: str, after: list[str]) -> list[str]:
    """End work at one point among cancellations of its caller; return what happened, in order."""
    complaints: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context["message"]))
    caller = Caller(wait, kind)
    await yield_to_loop(1)
    await caller.take(before)
    caller.end(end)
    await caller.take(after)
    async with asyncio.timeout(LIMIT_S):
        await asyncio.wait([caller.task])
    await yield_to_loop(NUM_TICKS)
    happened = caller.happened
    del caller
    gc.collect(0)
    assert complaints == []
    return happened


@given(kind=KINDS, before=STEPS, end=ENDS, after=STEPS)
def test_a_cancelled_caller_waits_for_the_end_and_is_cancelled_after_it(
    kind: str, before: list[str], end: str, after: list[str]
) -> None:
    num_told: list[int] = []
    wait = lambda work: wait_despite_cancel(work, lambda: num_told.append(1))  # noqa: E731
    happened = asyncio.run(order(wait, kind, before, end, after))
    ends = {"CancelledError", "result", "KeyError", "BackendUnavailableError"}
    [(at, ended_by)] = [(n, each) for n, each in enumerate(happened) if each in ends]
    assert at > happened.index(end)
    is_cancelled = "cancelled" in happened[:at]
    assert len(num_told) == is_cancelled
    of_work = {"returns": "result", "raises": "KeyError", "is cancelled": "BackendUnavailableError"}
    assert ended_by == ("CancelledError" if is_cancelled else of_work[end])


@given(kind=KINDS, before=STEPS, end=ENDS, after=STEPS)
def test_a_call_that_outlives_its_caller_ends_whatever_becomes_of_him(
    kind: str, before: list[str], end: str, after: list[str]
) -> None:
    happened = asyncio.run(order(outlive_caller, kind, before, end, after))
    ends = {"CancelledError", "result", "KeyError", "BackendUnavailableError"}
    [ended_by] = [each for each in happened if each in ends]
    assert ended_by == "CancelledError" or "cancelled" not in happened[: happened.index(ended_by)]
    if {*before} - {"turn"}:
        assert ended_by == "CancelledError"
        assert happened.index(ended_by) < happened.index(end), "he waits for it"


@pytest.mark.processes
def test_a_process_exits_although_a_function_hangs() -> None:
    code = """
import asyncio, threading
from kvxfer.runtime import LoopThread, Threads, run_aside

async def main():
    threads, entered = Threads("test", 1), threading.Event()
    def hang():
        entered.set()
        threading.Event().wait()
    asyncio.ensure_future(threads.ask(hang))
    await asyncio.to_thread(entered.wait)
    assert await threads.aclose(timeout_s=0.01) == 1

asyncio.run(main())
print("exits", flush=True)
"""
    ended = run_python("-c", code)
    assert (ended.returncode, ended.stdout) == (0, "exits\n"), ended.stderr


async def test_a_call_that_still_waits_for_a_thread_when_it_is_cancelled_never_begins() -> None:
    threads, begun = Threads("test", 1), list[str]()
    entered, may_end = threading.Event(), threading.Event()

    def run() -> None:
        entered.set()
        may_end.wait(LIMIT_S)

    running = asyncio.ensure_future(threads.run(run))
    waiting = asyncio.ensure_future(threads.run(begun.append, "waiting"))
    await asyncio.to_thread(entered.wait)
    for call in (running, waiting):
        call.cancel()
    try:
        await asyncio.wait([waiting], timeout=LIMIT_S)
        assert waiting.cancelled()
        assert not running.done(), "a function that runs is waited for"
    finally:
        may_end.set()
        await asyncio.wait([running, waiting])
    assert await threads.aclose() == 0
    assert begun == []


async def test_threads_that_were_closed_say_so() -> None:
    threads = Threads("test", 1)
    await threads.aclose()
    for call in (threads.run, threads.ask):
        with pytest.raises(ClosedError, match="test is closed"):
            await call(print)


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


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_an_error_that_ends_processes_ends_only_its_task_on_a_loop_of_others(
    end: type[BaseException],
) -> None:
    thread = LoopThread("loop")

    async def fail() -> None:
        raise end

    with pytest.raises(end):
        thread.run(fail(), 10)
    assert thread.run(asyncio.sleep(0, "through"), 10) == "through"
    thread.stop()


def test_a_stop_ends_the_other_tasks_though_one_exits_when_it_is_cancelled() -> None:
    thread, begun = LoopThread("loop"), threading.Semaphore(0)

    async def wait(then: BaseException) -> None:
        begun.release()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise then from None

    ends = SystemExit(), asyncio.CancelledError(), SystemExit(), asyncio.CancelledError()
    calls = [thread.submit(wait(each)) for each in ends]
    for _ in calls:
        assert begun.acquire(timeout=10)
    thread.stop()
    assert all(call.done() for call in calls)


def test_stop_cancels_what_is_left_and_lets_it_end_though_it_is_called_again_meanwhile() -> None:
    thread, begun, ended = LoopThread("loop"), threading.Event(), threading.Event()
    call_soon, told = thread.loop.call_soon_threadsafe, threading.Semaphore(0)
    other = threading.Thread(target=thread.stop)

    async def wait_and_tidy_up() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            other.start()
            assert all(told.acquire(timeout=10) for _ in range(2))
            await yield_to_loop(NUM_TICKS)
            ended.set()

    left = thread.submit(wait_and_tidy_up())
    assert begun.wait(10)

    def tell(*call: Any) -> None:
        call_soon(*call)
        told.release()

    with patch.object(thread.loop, "call_soon_threadsafe", tell):
        thread.stop()
        other.join()
    assert ended.is_set()
    assert left.cancelled()


def test_a_thread_outlives_a_cancelled_call_that_memory_was_short_for() -> None:
    pool, go_on = threads.DaemonThreads("test", 1), threading.Event()
    pool.submit(go_on.wait)
    with patch.object(threads, "_run", Mock(side_effect=MemoryError)):
        assert pool.submit(int).cancel()
    go_on.set()
    assert pool.submit(int).result(LIMIT_S) == 0
    pool.shutdown()
