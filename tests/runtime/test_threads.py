"""Threads: a function runs to its end, also when its caller is cancelled; a loop on one of them."""

import asyncio
import subprocess
import sys
import threading

import pytest

from kvxfer.runtime import LoopThread, Threads

TIMEOUT_S = 10.0


class Gate:
    """Blocking function that can be observed and released."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.passed = False

    def __call__(self, value: str = "through") -> str:
        self.entered.set()
        assert self.opened.wait(TIMEOUT_S)
        self.passed = True
        return value

    async def until_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, TIMEOUT_S)


async def test_a_cancelled_call_ends_when_its_function_does_and_not_before() -> None:
    threads, gate = Threads("test", 1), Gate()
    call = asyncio.ensure_future(threads.run(gate))
    await gate.until_entered()
    for _ in range(3):  # also when it is cancelled over and over
        call.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not call.done()
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert gate.passed
    await threads.aclose()


async def test_closing_leaves_behind_what_does_not_end_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    threads, gate = Threads("test", 1), Gate()
    call = asyncio.ensure_future(threads.run(gate))
    await gate.until_entered()
    assert await threads.aclose(timeout_s=0.01) == 1
    assert "test: 1 calls still run after 0.01 s" in caplog.text
    ended = threading.Event()
    threads.when_ended(ended.set)
    assert not ended.is_set()
    gate.opened.set()
    assert await call == "through"
    assert await asyncio.to_thread(ended.wait, TIMEOUT_S)


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
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ended.stdout == "exits\n"


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
