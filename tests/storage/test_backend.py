"""Backend interface: the parts that all backends share."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.backends.file import FileBackend, FileConfig
from kvxfer.backends.object import ObjectBackend
from kvxfer.errors import (
    DuplicateError,
    InvalidArgumentError,
    LengthMismatchError,
)
from kvxfer.storage import calls as calls_module
from kvxfer.storage.backend import (
    DONE,
    Begun,
    CopySource,
    Purgeable,
    Status,
    WrappingBackend,
    can_purge_all,
    require_batch,
)
from kvxfer.storage.calls import begin_call, call_backend, drain_in_the_end, poll_begun
from kvxfer.storage.keys import BlockKey, GroupIdentity, Namespace, make_block_key
from kvxfer.testing import BlockMemory, DictBackend
from kvxfer.testing.conformance.suite import make_keys, yield_to_loop
from kvxfer.units import ByteSize

A, B, C = (make_block_key(name, 0) for name in (b"a", b"b", b"c"))
MEMORY = BlockMemory([[8]], num_blocks=4)


def test_a_batch_with_one_key_per_block_is_accepted() -> None:
    require_batch([A, B, C], MEMORY.describe(0, [3, 0, 1]))
    require_batch([A, B, C])


def test_an_empty_batch_is_refused() -> None:
    none = MEMORY.describe(0, [0]).take(np.zeros(0, np.int64))
    with pytest.raises(InvalidArgumentError, match="at least one key"):
        require_batch([], none)


@pytest.mark.parametrize("block_ids", [[0], [0, 1, 2]])
def test_keys_and_blocks_that_differ_in_number_are_refused(block_ids: list[int]) -> None:
    with pytest.raises(LengthMismatchError) as caught:
        require_batch([A, B], MEMORY.describe(0, block_ids))
    assert (caught.value.num_keys, caught.value.num_blocks) == (2, len(block_ids))


def test_a_key_that_appears_twice_is_refused_by_name() -> None:
    with pytest.raises(DuplicateError) as caught:
        require_batch([A, B, A])
    assert caught.value.value == A


def test_what_is_no_key_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"keys\[1\] is b'ab'"):
        require_batch([A, BlockKey(b"ab")])


def test_what_has_no_order_or_no_length_is_no_batch() -> None:
    for keys in (iter([A]), {A}, {A: 0}, A, None, 1):
        with pytest.raises(InvalidArgumentError, match="keys is"):
            require_batch(keys)  # type: ignore[arg-type]


def test_object_storage_is_never_purged_of_the_blocks_of_everybody() -> None:
    assert issubclass(ObjectBackend, Purgeable)
    assert not can_purge_all(ObjectBackend)
    assert can_purge_all(FileBackend)
    assert not can_purge_all(DictBackend)


def test_a_wrapper_provides_only_what_it_says_need_not_pass_through_it(tmp_path: Path) -> None:
    class Passing(WrappingBackend):
        passes_on = frozenset({Purgeable})

    namespace = Namespace(model="m", groups=(GroupIdentity(page_sizes_bytes=(64,)),))
    files = FileBackend(FileConfig(path=str(tmp_path), capacity=ByteSize(1 << 20)), namespace)
    for backend in (files, Passing(files), Passing(Passing(files))):
        assert backend.provide(Purgeable) is files
    assert files.provide(CopySource) is files
    assert WrappingBackend(files).provide(Purgeable) is None
    assert Passing(files).provide(CopySource) is None
    assert Passing(DictBackend(None, namespace)).provide(Purgeable) is None


async def test_leaving_the_context_closes_the_backend_also_after_an_error() -> None:
    closed = []

    class Closing(DictBackend):
        async def aclose(self) -> None:
            closed.append(True)

    async def fail() -> None:
        async with Closing(None, MEMORY.namespace()) as backend:
            assert isinstance(backend, Closing)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert closed == [True]


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


async def test_nothing_is_no_outcome_but_of_a_call_that_would_have_to_wait() -> None:
    async def store(*_: object) -> Any:
        return None

    assert {each.status for each in await call_backend(store, KEYS, BLOCKS)} == {Status.FAILED}
    assert begin_call(lambda *_: None, KEYS, BLOCKS) is None


LIMIT_S = 10.0


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
