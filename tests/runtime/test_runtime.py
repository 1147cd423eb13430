"""Runtime: whoever asks gets the one in use, and the ordinary one is the operating system's."""

from concurrent.futures import CancelledError, Future

import pytest

from kvxfer import runtime
from kvxfer.runtime import DaemonThreads, OrdinaryRuntime


class FrozenRuntime(OrdinaryRuntime):
    """Runtime whose clock stands still, and whose bytes are all the same."""

    def monotonic(self) -> float:
        return 7.0

    def token_bytes(self, num_bytes: int, /) -> bytes:
        return b"\x11" * num_bytes


def test_a_runtime_in_use_answers_until_its_end_also_where_a_function_was_kept() -> None:
    kept = runtime.monotonic
    with runtime.use(FrozenRuntime()):
        assert kept() == 7.0
        assert runtime.unique_id().bytes[:6] == b"\x11" * 6
        with DaemonThreads("test", 1) as threads:  # for all threads
            assert runtime.result(threads.submit(runtime.monotonic)) == 7.0
    assert kept() != 7.0
    assert len({runtime.unique_id(), runtime.unique_id(), runtime.token_bytes(16)}) == 3


def test_a_result_comes_with_its_error_its_cancellation_or_late() -> None:
    assert runtime.result(_ended(3)) == 3
    with pytest.raises(ZeroDivisionError):
        runtime.result(_ended(ZeroDivisionError()))
    with pytest.raises(TimeoutError):
        runtime.result(Future(), 0)
    cancelled: Future[int] = Future()
    cancelled.cancel()
    with pytest.raises(CancelledError):
        runtime.result(cancelled)


def _ended(outcome: int | Exception) -> "Future[int]":
    future: Future[int] = Future()
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
    return future


def test_threads_that_a_block_of_code_uses_touch_nothing_after_its_end() -> None:
    with DaemonThreads("test", 1) as threads:
        calls = [threads.submit(sum, range(num)) for num in (10_000_000, 1)]
    assert [each.done() for each in calls] == [True, True]
