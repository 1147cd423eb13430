"""Backend interface: the parts that all backends share."""

from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from kvxfer import GroupIdentity, Namespace, Status, make_block_key, runtime
from kvxfer.backends.file import FileBackend, FileConfig
from kvxfer.backends.object import ObjectBackend
from kvxfer.copy_engine.engine import Copy
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.backend import (
    DONE,
    Begun,
    CopySource,
    Purgeable,
    WrappingBackend,
    can_purge_all,
)
from kvxfer.storage.call_guard import CallGuard
from kvxfer.storage.calls import begin_call, call_backend, poll_begun, wait_for_begun
from kvxfer.testing import BlockMemory, DictBackend
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.testing.simulation import Simulation
from kvxfer.units import ByteSize


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


KEYS = make_keys(2)
BLOCKS = BlockMemory([[64]], num_blocks=2).describe(0, [0, 1])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (7, "store: TypeError(\"'int' object is not iterable\")"),
        ([DONE], "store returned 1 outcomes for 2 keys"),
        ([DONE] * 3, "store returned 3 outcomes for 2 keys"),
        ([DONE, Status.DONE], "store returned a Status in place of an Outcome"),
        ([DONE, None], "store returned a NoneType in place of an Outcome"),
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


async def test_a_backend_that_raises_at_each_call_is_logged_once_in_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    raise_error = AsyncMock(side_effect=OSError("disk on fire"))
    for _ in range(20):
        outcomes = await call_backend(raise_error, KEYS, BLOCKS, name="store of a broken backend")
        assert {each.status for each in outcomes} == {Status.FAILED}
    [line] = caplog.records
    assert line.getMessage().startswith("store of a broken backend of 2 blocks failed: disk on")
    assert line.exc_info is not None


def test_a_key_of_a_group_that_is_not_there_is_named_by_its_place() -> None:
    guard = CallGuard("backend", BlockMemory([[64]], num_blocks=2).namespace())
    with pytest.raises(InvalidArgumentError, match=r"keys\[1\] is b'b.*; expected a group below 1"):
        guard.check_batch([*KEYS[:1], make_block_key(b"b", 1)])


@pytest.mark.parametrize("call", ["poll", "wait"])
def test_what_a_copy_that_fails_held_is_given_back(call: str) -> None:
    copy, given_back = Mock(Copy), Mock()
    copy.has_ended.side_effect = RuntimeError("no copy")
    with pytest.raises(RuntimeError, match="no copy"):
        getattr(Begun((), copy, given_back), call)()
    given_back.assert_called_once_with()


def test_a_long_copy_is_looked_at_more_and_more_rarely() -> None:
    simulation, looks_at = Simulation(0), list[float]()

    class Slow(Copy):
        def has_ended(self) -> bool:
            looks_at.append(runtime.monotonic())
            return looks_at[-1] >= looks_at[0] + 0.1

    def main() -> None:
        simulation.run(wait_for_begun(Begun((DONE,), Slow())))

    with runtime.use(simulation.runtime):
        simulation.runtime.scheduler.run(main)
    assert len(looks_at) < 300
    assert looks_at[1] < looks_at[0] + 0.0002
    assert looks_at[-1] < looks_at[0] + 0.101
