"""Calls of a backend: whatever it does wrong is the outcome of each block."""

import asyncio
from typing import Any

import pytest

from kvxfer.errors import BackendUnavailableError, ClosedError
from kvxfer.storage import calls as calls_module
from kvxfer.storage.backend import DONE, Begun, Status
from kvxfer.storage.call_guard import CallGuard
from kvxfer.storage.calls import begin_call, call_backend, drain_in_the_end, poll_begun
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import cancel, make_keys, yield_to_loop

LIMIT_S = 10.0
KEYS = make_keys(2)
BLOCKS = BlockMemory([[64]], num_blocks=2).describe(0, [0, 1])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (7, "store: TypeError(\"'int' object is not iterable\")"),
        ([DONE], "store gave 1 outcomes for 2 keys"),
        ([DONE] * 3, "store gave 3 outcomes for 2 keys"),
        (OSError("no memory"), "store: OSError('no memory')"),
    ],
)
@pytest.mark.parametrize("is_now", [False, True])
async def test_what_a_backend_gives_wrongly_fails_each_block(
    given: Any, reason: str, *, is_now: bool
) -> None:
    def give() -> Any:
        if isinstance(given, Exception):
            raise given
        return given

    async def store_later(*_: object) -> Any:
        return give()

    def store(*_: object) -> Begun:
        return Begun(give())

    if is_now:
        begun = begin_call(store, KEYS, BLOCKS)
        assert begun is not None
        outcomes = poll_begun(begun, "store", len(KEYS))
    else:
        outcomes = await call_backend(store_later, KEYS, BLOCKS, name="store")
    assert outcomes is not None
    assert [(each.status, each.reason) for each in outcomes] == [(Status.FAILED, reason)] * 2


async def test_a_call_that_cancels_itself_has_failed_and_may_still_touch_memory() -> None:
    async def store(*_: object) -> Any:
        raise asyncio.CancelledError

    for outcome in await call_backend(store, KEYS, BLOCKS):
        assert (outcome.status, outcome.memory_safe) == (Status.FAILED, False)
        assert "the call was cancelled, and its caller was not" in outcome.reason


async def test_the_callers_cancellation_is_one() -> None:
    async def store(*_: object) -> Any:
        await asyncio.Event().wait()

    storing = asyncio.ensure_future(call_backend(store, KEYS, BLOCKS))
    await yield_to_loop(2)
    await cancel(storing)
    assert storing.cancelled()


async def test_outcomes_may_come_one_by_one() -> None:
    async def store(*_: object) -> Any:
        return iter([DONE, DONE])

    assert await call_backend(store, KEYS, BLOCKS) == [DONE, DONE]
    begun = Begun(iter([DONE, DONE]))  # type: ignore[arg-type]
    assert poll_begun(begun, "store", len(KEYS)) == [DONE, DONE]


async def test_nothing_is_no_outcome_but_of_a_call_that_would_have_to_wait() -> None:
    async def store(*_: object) -> Any:
        return None

    assert {each.status for each in await call_backend(store, KEYS, BLOCKS)} == {Status.FAILED}
    assert begin_call(lambda *_: None, KEYS, BLOCKS) is None


# Draining


async def test_a_drain_that_raises_is_made_again_until_it_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls_module, "FIRST_DRAIN_PAUSE_S", 0.001)
    errors: list[BaseException] = [OSError("device"), asyncio.CancelledError(), OSError("device")]

    async def drain() -> None:
        if errors:
            raise errors.pop()

    assert await drain_in_the_end(drain, "memory", asyncio.Event())
    assert not errors


async def test_a_drain_that_raises_is_given_up_when_nobody_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def drain() -> None:
        raise OSError("device")

    gives_up = asyncio.Event()
    draining = asyncio.ensure_future(drain_in_the_end(drain, "memory", gives_up))
    await yield_to_loop(3)
    assert not draining.done()
    gives_up.set()
    assert not await draining
    assert "memory is lost" in caplog.text


# Closing


class Closing:
    """Backend whose closing takes as long as the test says."""

    def __init__(self, *errors: BaseException) -> None:
        self.may_end = asyncio.Event()
        self.num_begun = self.num_ended = 0
        self._guard = CallGuard("backend")
        self._errors = list(errors)

    async def aclose(self) -> None:
        await self._guard.aclose(self._release)

    async def _release(self) -> None:
        self.num_begun += 1
        await self.may_end.wait()
        if self._errors:
            raise self._errors.pop()
        self.num_ended += 1


async def test_what_a_cancelled_close_began_is_waited_for_by_the_next() -> None:
    backend = Closing()
    first = asyncio.ensure_future(backend.aclose())
    await yield_to_loop(2)
    await cancel(first)
    with pytest.raises(ClosedError):
        backend._guard.check()
    second = asyncio.ensure_future(backend.aclose())
    await yield_to_loop(5)
    assert not second.done()
    backend.may_end.set()
    await second
    await backend.aclose()
    assert (backend.num_begun, backend.num_ended) == (1, 1)
    assert backend._guard.released


@pytest.mark.parametrize("error", [OSError("disk"), asyncio.CancelledError()], ids=repr)
async def test_a_close_that_failed_is_made_again(error: BaseException) -> None:
    backend = Closing(error)
    backend.may_end.set()
    with pytest.raises((OSError, BackendUnavailableError)):
        await backend.aclose()
    assert not backend._guard.released
    await backend.aclose()
    assert (backend.num_begun, backend.num_ended) == (2, 1)


def test_a_close_whose_event_loop_ended_is_made_again() -> None:
    async def close(backend: Closing) -> None:
        closing = asyncio.ensure_future(backend.aclose())
        await yield_to_loop(2)
        closing.cancel()

    backend = Closing()
    asyncio.run(close(backend))
    backend.may_end.set()
    asyncio.run(backend.aclose())
    assert (backend.num_begun, backend.num_ended) == (2, 1)
