"""Threads: whatever happens to the caller, the function runs to its end."""

import asyncio
import threading

import pytest

from kvxfer.storage.threads import Threads

TIMEOUT_S = 10.0


class Gate:
    """A blocking function that can be watched and let through."""

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


async def test_arguments_results_and_errors_pass_through() -> None:
    threads = Threads("test", 1)
    assert await threads.run(divmod, 7, 2) == (3, 1)
    assert await threads.run(sorted, [1, 3, 2], reverse=True) == [3, 2, 1]
    with pytest.raises(ZeroDivisionError):
        await threads.run(divmod, 1, 0)
    await threads.aclose()


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


async def test_an_error_after_cancellation_is_not_reported_as_lost() -> None:
    threads, gate = Threads("test", 1), Gate()

    def fail() -> None:
        gate()
        raise ValueError

    call = asyncio.ensure_future(threads.run(fail))
    await gate.until_entered()
    call.cancel()
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    await threads.aclose()  # the fixture of all tests fails on an exception nobody retrieved


async def test_no_more_functions_run_at_one_time_than_there_are_threads() -> None:
    threads, gates = Threads("test", 2), [Gate() for _ in range(3)]
    calls = [asyncio.ensure_future(threads.run(gate)) for gate in gates]
    await gates[0].until_entered()
    await gates[1].until_entered()
    assert not gates[2].entered.is_set()
    for gate in gates:
        gate.opened.set()
    assert await asyncio.gather(*calls) == ["through"] * 3
    await threads.aclose()


async def test_closing_waits_for_what_runs_and_may_be_repeated() -> None:
    threads, gate = Threads("test", 1), Gate()
    call = asyncio.ensure_future(threads.run(gate))
    await gate.until_entered()
    closing = asyncio.ensure_future(threads.aclose())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not closing.done()
    gate.opened.set()
    await closing
    assert await call == "through"
    await threads.aclose()
