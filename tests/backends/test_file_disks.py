"""Disks that are full, broken or hung, and the store's counts: errors are outcomes."""

import asyncio
import contextlib
import errno
import fcntl
import fnmatch
import math
import os
import random
import resource
import stat
import struct
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import xxhash

from kvxfer import Outcome, Status, TransferEngine, make_block_key, runtime
from kvxfer.backends.file import backend as file_backend
from kvxfer.backends.file import file_index, space
from kvxfer.backends.file.file_index import FileIndex, file_ids
from kvxfer.backends.file.folder_store import FolderStore
from kvxfer.backends.file.folders import BlockTree, Ledger, ledger
from kvxfer.backends.file.io import FileIO
from kvxfer.backends.file.space import Space
from kvxfer.errors import BackendUnavailableError, ClosedError
from kvxfer.pages.maintenance import GarbageCollection
from kvxfer.runtime import LogPause
from kvxfer.storage.backend import PAUSED
from kvxfer.storage.observer import Gauge, Reports
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import begin
from kvxfer.units import ByteSize
from tests.backends.file_store import (
    ENGINES,
    bytes_on_disk,
    counted_bytes,
    fail_to,
    flip_bit,
    hashed_keys,
    indexed_store,
    load_verified,
    mounted,
    one_page_memory,
    open_descriptors,
    open_store,
    path_of,
    remove_folder,
    store,
    temporary_files,
    tmpfs,
)
from tests.clock import Clock
from tests.recorder import Recorder

MIB = 1 << 20
FDS = Path("/proc/self/fd")
FILE_BYTES = 8192
NUM_TOLERATED = 5  # errors in a row, after which storing is paused
DONE, FAILED = Status.DONE, Status.FAILED


def call(*arguments: str | Path) -> None:
    subprocess.run(arguments, check=True)


def statuses(outcomes: Sequence[Outcome]) -> list[Status]:
    assert all(outcome.memory_safe for outcome in outcomes)
    assert all(outcome.reason for outcome in outcomes if not outcome.done)
    return [outcome.status for outcome in outcomes]


async def test_what_cannot_be_opened_below_the_root_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = one_page_memory().namespace()
    async with open_store(tmp_path, namespace):
        pass
    for name in ("usage.ledger", namespace.fingerprint):
        with monkeypatch.context() as patched:
            error = PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
            fail_to(patched, "open", name, error)
            with pytest.raises(BackendUnavailableError, match=f"{tmp_path}: .* '{name}'$"):
                open_store(tmp_path, namespace)


ERRORS = [errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EIO, errno.ESTALE]


@pytest.mark.parametrize("number", ERRORS, ids=[errno.errorcode[each] for each in ERRORS])
@pytest.mark.parametrize("call", ["open", "stat"])
async def test_what_cannot_be_told_of_a_block_is_not_said_to_be_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    memory, keys = one_page_memory(), hashed_keys(4)
    blocks, target = memory.describe(0, range(4)), memory.describe(0, range(4, 8))
    async with open_store(tmp_path, memory.namespace()) as backend:
        await store(backend, keys, blocks)
    async with indexed_store(tmp_path, memory.namespace()) as backend:
        with monkeypatch.context() as patched:
            pattern = keys[3].hex()[: 2 if call == "open" else None] + "*"
            fail_to(patched, call, pattern, OSError(number, os.strerror(number)))
            with pytest.raises(BackendUnavailableError, match=os.strerror(number)):
                await backend.lookup(keys)
            with pytest.raises(BackendUnavailableError, match=os.strerror(number)):
                await backend.delete(keys[2:])
            stored = statuses(await store(backend, keys[2:], blocks.take([2, 3])))
            assert stored == [DONE, FAILED]
            if call == "open":
                loaded = await load_verified(backend, keys, target)
                assert loaded == [DONE] * 3 + [FAILED]
        assert await backend.lookup(keys) == [True] * 4
        assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path) == 4 * FILE_BYTES


async def test_after_five_failures_stores_stop_until_a_probe_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    memory, keys = one_page_memory(), iter(hashed_keys(20))
    blocks, target = memory.describe(0, [0]), memory.describe(0, [1])
    first = next(keys)

    failing = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    async with open_store(tmp_path, memory.namespace(), engine="posix") as backend:

        async def store_another() -> str:
            (outcome,) = await store(backend, [next(keys)], blocks)
            return outcome.reason

        await store(backend, [first], blocks)
        monkeypatch.setattr(FileIO, "write", failing)
        for _ in range(NUM_TOLERATED):
            assert "Input/output error" in await store_another()
        assert "paused" in await store_another()
        assert statuses(await store(backend, [first], blocks)) == [DONE], "it is there"
        assert await load_verified(backend, [first], target) == [DONE], "loads go on"
        monkeypatch.undo()
        clock.now += 29.0
        assert "paused" in await store_another()
        clock.now += 1.0
        assert [await store_another() for _ in range(2)] == [""] * 2


async def test_the_reason_of_a_failed_block_names_its_file_or_a_folder_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, (there, new) = one_page_memory(), hashed_keys(2)
    failing = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    files = [path_of(tmp_path, memory.namespace(), key) for key in (there, new)]
    namespace = tmp_path / memory.namespace().fingerprint
    async with indexed_store(tmp_path, memory.namespace(), engine="posix") as backend:
        await store(backend, [there], memory.describe(0, [0]))
        for target, call, key, path in (
            (FileIO, "read", there, files[0]),
            (FileIO, "write", new, files[1]),
            (runtime.disk(), "statvfs", new, namespace),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(target, call, failing)
                move = backend.load if call == "read" else backend.store
                (outcome,) = await move([key], memory.describe(0, [1]))
            assert outcome.reason == f"OSError: {path}: {os.strerror(errno.EIO)}"


async def test_a_paused_store_syncs_no_folder_of_a_disk_that_may_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, keys, go = one_page_memory(), hashed_keys(1), threading.Event()
    async with open_store(tmp_path, memory.namespace(), durability="fsync") as backend:
        await store(backend, keys, memory.describe(0, [0]))
        backend._breaker.trip("the disk hangs")
        monkeypatch.setattr(runtime.disk(), "fsync", lambda _fd: go.wait())
        try:
            stored = asyncio.wait_for(backend.store(keys, memory.describe(0, [0])), 5)
            assert [each.reason for each in await stored] == [PAUSED.reason]
            assert await asyncio.wait_for(backend.lookup(keys), 5) == [True]
        finally:
            go.set()


async def test_no_store_waits_for_a_walk_that_puts_its_files_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, keys, is_locked = one_page_memory(), hashed_keys(2), list[bool]()

    def look(*given: Any) -> Any:
        is_locked.append(backend._ledger._lock.locked())
        return file_ids(*given)

    async with indexed_store(tmp_path, memory.namespace()) as backend:
        assert statuses(await store(backend, keys, memory.describe(0, range(2)))) == [DONE] * 2
        monkeypatch.setattr(file_index, "file_ids", look)
        await asyncio.wrap_future(backend._space.begin_scan())
        assert is_locked == [False] * 2


async def test_others_have_the_count_while_much_is_evicted_or_removed_or_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, keys, removed = one_page_memory(), hashed_keys(11), list[int]()
    lock, remove, pauses = Ledger.locked, Ledger.remove, list[float]()

    def locked(ledger: Ledger) -> Any:
        removed.append(0)
        return lock(ledger)

    def count(ledger: Ledger, num_bytes: int) -> None:
        removed[-1] += 1
        remove(ledger, num_bytes)

    async with open_store(tmp_path, memory.namespace()) as backend:
        await store(backend, keys[:10], memory.describe(0, range(10)))
    async with indexed_store(tmp_path, memory.namespace(), capacity=3 * FILE_BYTES) as backend:
        monkeypatch.setattr(space, "KEYS_PER_LOCK", 2)
        monkeypatch.setattr(file_index, "FILES_PER_STEP", 1)
        monkeypatch.setattr(Ledger, "locked", locked)
        monkeypatch.setattr(Ledger, "remove", count)
        monkeypatch.setattr(runtime, "sleep", pauses.append)
        assert statuses(await store(backend, keys[10:], memory.describe(0, [0]))) == [DONE]
        assert [each for each in removed if each] == [2] * 4
        assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path) == 3 * FILE_BYTES
        num_evictions = len(pauses)
        await asyncio.wrap_future(backend._space.begin_scan())
        num_steps = len(pauses) - num_evictions
        assert sum(await backend.delete(keys)) == 3
        assert (num_evictions, num_steps, len(pauses)) == (3, 7, 3 + 7 + 5)
        assert min(pauses) > ledger.LOCK_PAUSE_S, "in which other processes look at the lock once"


async def test_a_walk_that_counts_while_a_store_finds_no_count_makes_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, reserve = one_page_memory(), Space._reserve

    def reserve_before_a_walk_ends(self: Space, *given: Any) -> int:
        monkeypatch.undo()
        fitting = reserve(self, *given)
        self.begin_scan().result()
        self._next_scan = math.inf  # as after a slow walk
        return fitting

    async with indexed_store(tmp_path, memory.namespace()) as backend:
        os.truncate(tmp_path / "usage.ledger", 0)
        monkeypatch.setattr(Space, "_reserve", reserve_before_a_walk_ends)
        (outcome,) = await store(backend, hashed_keys(1), memory.describe(0, [0]))
        assert outcome.done, outcome
        assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path) == FILE_BYTES


@pytest.mark.parametrize("num_stores", [1, 3])
async def test_a_store_without_a_count_recovers_once_all_its_folders_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_stores: int
) -> None:
    memory, keys = one_page_memory(), hashed_keys(3)
    async with indexed_store(tmp_path, memory.namespace(), rescan_factor=0.0) as backend:
        await store(backend, keys[:1], memory.describe(0, [0]))
        os.truncate(tmp_path / "usage.ledger", 0)
        with monkeypatch.context() as patched:
            refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            fail_to(patched, "open", keys[0].hex()[:2], refused)
            for _ in range(num_stores):
                (outcome,) = await store(backend, keys[1:2], memory.describe(0, [1]))
                assert "cannot be read" in outcome.reason
        assert statuses(await store(backend, keys[1:2], memory.describe(0, [1]))) == [DONE]
        assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path) == 2 * FILE_BYTES
        num_walks = backend._space._num_walks
        assert statuses(await store(backend, keys[2:], memory.describe(0, [2]))) == [DONE]
        assert backend._space._num_walks == num_walks, "one walk is enough"


async def test_no_store_with_a_count_walks_because_a_folder_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, keys = one_page_memory(), hashed_keys(2)
    async with indexed_store(tmp_path, memory.namespace(), rescan_factor=0.0) as backend:
        await store(backend, keys[:1], memory.describe(0, [0]))
        refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        fail_to(monkeypatch, "open", keys[0].hex()[:2], refused)
        await asyncio.wrap_future(backend._space.begin_scan())
        num_walks = backend._space._num_walks
        assert statuses(await store(backend, keys[1:], memory.describe(0, [1]))) == [DONE]
        assert backend._space._num_walks == num_walks
        assert counted_bytes(tmp_path) == 2 * FILE_BYTES


async def test_an_observer_hears_of_the_blocks_that_the_first_walk_found_before_it_came(
    tmp_path: Path,
) -> None:
    memory, keys, recorder = one_page_memory(), hashed_keys(2), Recorder()
    async with open_store(tmp_path, memory.namespace()) as backend:
        await store(backend, keys, memory.describe(0, range(2)))
    async with indexed_store(tmp_path, memory.namespace()) as backend:
        backend.observe(Reports([recorder], "file"))
        assert recorder.kept == {"file": {*keys}}
        assert recorder.gauges("file")[Gauge.USED_BYTES] == 2 * FILE_BYTES


async def test_a_store_without_room_says_that_a_walk_may_find_blocks_to_evict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, keys, go = one_page_memory(), hashed_keys(2), threading.Event()
    capacity = ByteSize(FILE_BYTES)

    def wait(_tree: BlockTree) -> int:
        go.wait()
        return 0

    async with indexed_store(tmp_path, memory.namespace(), capacity=capacity) as backend:
        async with open_store(tmp_path, memory.namespace()) as other:
            await store(other, keys[:1], memory.describe(0, [0]))
        with monkeypatch.context() as patched:
            patched.setattr(BlockTree, "collect", wait)
            patched.setattr(space, "WALK_WAIT_S", 0.01)
            try:
                (outcome,) = await store(backend, keys[1:], memory.describe(0, [1]))
                assert outcome.reason == "no room until a walk finds blocks to evict"
                assert backend._space.begin_scan() is backend._space.begin_scan()
            finally:
                go.set()
        assert statuses(await store(backend, keys[1:], memory.describe(0, [1]))) == [DONE]


async def test_no_walk_ends_while_room_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, settle = one_page_memory(), FileIndex.settle
    could_end: list[bool] = []

    def look(index: FileIndex, *given: Any, stored: Sequence[bool]) -> Any:
        settled = settle(index, *given, stored=stored)  # a walk no longer counts the room
        could_end.append(not backend._space._ledger._lock.locked())
        return settled

    monkeypatch.setattr(FileIndex, "settle", look)
    async with open_store(tmp_path, memory.namespace(), engine="posix") as backend:
        failing = OSError(errno.EIO, os.strerror(errno.EIO))
        monkeypatch.setattr(FileIO, "write", Mock(side_effect=failing))
        assert statuses(await store(backend, hashed_keys(1), memory.describe(0, [0]))) == [FAILED]
        assert could_end == [False]
        assert counted_bytes(tmp_path) == 0


async def test_no_walk_follows_a_slow_one_before_its_pause_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    memory, keys, collect = one_page_memory(), hashed_keys(4), BlockTree.collect

    def take_a_second(tree: BlockTree) -> int:
        clock.now += 1.0
        return collect(tree)

    async with (
        indexed_store(tmp_path, memory.namespace(), capacity=ByteSize(FILE_BYTES)) as ours,
        open_store(tmp_path, memory.namespace()) as theirs,
    ):
        monkeypatch.setattr(BlockTree, "collect", take_a_second)
        for number, expected in enumerate([DONE, FAILED]):
            await store(theirs, keys[number : number + 1], memory.describe(0, [0]))
            (outcome,) = await store(ours, keys[2 + number :][:1], memory.describe(0, [1]))
            assert outcome.status is expected
        clock.now += 9.9
        assert statuses(await store(ours, keys[3:], memory.describe(0, [1]))) == [FAILED]
        clock.now += 0.1
        assert statuses(await store(ours, keys[3:], memory.describe(0, [1]))) == [DONE]


async def test_no_room_stays_reserved_when_it_cannot_be_taken_off_the_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, keys, failing = one_page_memory(), hashed_keys(2), Mock(side_effect=OSError(errno.EIO))
    async with indexed_store(tmp_path, memory.namespace(), engine="posix") as backend:
        assert statuses(await store(backend, keys[:1], memory.describe(0, [0]))) == [DONE]
        assert backend._ledger.reserved == 0
        with monkeypatch.context() as patched:
            patched.setattr(FileIO, "write", failing)
            patched.setattr(Ledger, "give_back", failing)
            assert statuses(await store(backend, keys[1:], memory.describe(0, [0]))) == [FAILED]
        assert backend._ledger.reserved == 0
        assert counted_bytes(tmp_path) == 2 * FILE_BYTES, "until the next walk"
        await asyncio.wrap_future(backend._space.begin_scan())
        assert counted_bytes(tmp_path) == FILE_BYTES


async def test_what_did_not_fit_is_given_back_when_an_eviction_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, full = one_page_memory(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*_: Any, **_more: Any) -> int:
        raise MemoryError

    async with indexed_store(tmp_path, memory.namespace(), engine="posix") as backend:
        monkeypatch.setattr(FileIO, "write", Mock(side_effect=full))
        monkeypatch.setattr(backend._space, "evict", fail)
        assert statuses(await store(backend, hashed_keys(1), memory.describe(0, [0]))) == [FAILED]
        assert backend._ledger.reserved == counted_bytes(tmp_path) == 0


async def test_a_block_that_did_not_fit_is_stored_once_others_were_found_and_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, keys, write = one_page_memory(), hashed_keys(3), FileIO.write
    failing = iter([OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))] * 2)

    def fail_twice(*given: Any) -> Any:
        for error in failing:
            raise error
        return write(*given)

    async with indexed_store(tmp_path, memory.namespace(), engine="posix") as backend:
        async with open_store(tmp_path, memory.namespace()) as other:
            await store(other, keys[:2], memory.describe(0, range(2)))
        monkeypatch.setattr(FileIO, "write", fail_twice)
        for expected in (FAILED, DONE):
            assert statuses(await store(backend, keys[2:], memory.describe(0, [0]))) == [expected]
        assert sum(await backend.lookup(keys)) == 2
        assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path) == 2 * FILE_BYTES


async def test_a_walk_has_what_it_found_before_a_store_in_its_place_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, keys, recorder = one_page_memory(), hashed_keys(1), Recorder()

    def fail_to_store(_seconds: float) -> None:  # a store whose lookup had not found the key
        backend._space.reserve(keys, [FILE_BYTES])
        backend._space.settle(keys, stored=[False])

    async with indexed_store(tmp_path, memory.namespace()) as backend:
        backend.observe(Reports([recorder]))
        async with open_store(tmp_path, memory.namespace()) as other:
            await store(other, keys, memory.describe(0, [0]))
        with monkeypatch.context() as patched:
            patched.setattr(runtime, "sleep", fail_to_store)
            await asyncio.wrap_future(backend._space.begin_scan())
        assert counted_bytes(tmp_path) == FILE_BYTES
        assert recorder.kept == {"engine": {*keys}}
        assert not recorder.mistakes


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
async def test_files_are_evicted_where_there_can_be_no_more_of_them(engine: str) -> None:
    memory, keys = one_page_memory(), hashed_keys(600)
    with mounted("-t", "tmpfs", "-o", "size=32m,nr_inodes=300", "tmpfs") as folder:
        for _ in range(2):  # the second call finds everything full
            async with indexed_store(folder, memory.namespace(), engine=engine) as backend:
                for first in range(0, len(keys), 20):
                    chosen = keys[first : first + 20]
                    outcomes = await store(backend, chosen, memory.describe(0, range(20)))
                    assert [outcome.reason for outcome in outcomes] == [""] * 20
                target = memory.describe(0, range(20, 40))
                assert await load_verified(backend, chosen, target) == [DONE] * 20
                assert counted_bytes(folder) == bytes_on_disk(folder)
                assert temporary_files(folder) == []


@contextlib.asynccontextmanager
async def full_disk() -> AsyncIterator[Path]:
    """Make a full disk with a store of 20 blocks."""
    memory = one_page_memory()
    with mounted("-t", "tmpfs", "-o", "size=4m", "tmpfs") as folder:
        async with open_store(folder / "store", memory.namespace()) as backend:
            outcomes = await store(backend, hashed_keys(20), memory.describe(0, range(20)))
            assert [outcome.status for outcome in outcomes] == [DONE] * 20
        with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass
        yield folder


async def test_a_store_is_opened_on_a_full_disk_and_keeps_most_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = one_page_memory()
    monkeypatch.setattr(file_backend, "ROOM_BYTES", 5 * FILE_BYTES)
    async with full_disk() as folder:
        async with indexed_store(folder / "store", memory.namespace(model="another")) as backend:
            (outcome,) = await store(backend, hashed_keys(1), memory.describe(0, [0]))
            assert outcome.done
        assert len(list(FolderStore(folder / "store").blocks())) == 15 + 1
        for each in FolderStore(folder / "store").blocks():
            (folder / "store" / each.path).unlink()
        with (folder / "filler").open("ab", buffering=0) as filler, contextlib.suppress(OSError):
            while filler.write(bytes(4096)):
                pass
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(file_backend, "make_root", Mock(side_effect=[None, full]))
        for root in (folder / "store", folder / "no store"):
            with pytest.raises(BackendUnavailableError, match="No space left"):
                open_store(root, memory.namespace(model="a third"))


async def test_a_shared_folder_on_a_full_disk_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with full_disk() as folder:
        (folder / "store").chmod(0o777)
        async with open_store(folder / "store", one_page_memory().namespace(model="another")):
            pass
    assert len([text for text in caplog.messages if "any user can plant" in text]) == 1


async def test_a_full_disk_has_room_for_a_collection_that_makes_room() -> None:
    async with full_disk() as folder:
        found = FolderStore(folder / "store")
        with pytest.raises(OSError, match="No space left"):
            GarbageCollection(found).run()  # finds nothing to remove
        removed = GarbageCollection(found, capacity_bytes=5 * bytes_on_disk(folder) // 20).run()
        assert removed.num_excess == 15
        assert len(list(found.blocks())) == 5
        assert removed.num_bytes_left == bytes_on_disk(folder)


async def test_one_name_that_cannot_be_written_stops_no_other_store(tmp_path: Path) -> None:
    memory, keys = one_page_memory(), hashed_keys(2 + 2 * NUM_TOLERATED)
    path_of(tmp_path, memory.namespace(), keys[0]).mkdir(parents=True)
    blocks = memory.describe(0, [0])
    async with indexed_store(tmp_path, memory.namespace()) as backend:
        for _ in range(2 * NUM_TOLERATED):
            (outcome,) = await store(backend, keys[:1], blocks)
            assert outcome.status is FAILED
            assert "directory" in outcome.reason
        assert await load_verified(backend, keys[:1], memory.describe(0, [1])) == [Status.MISSING]
        (outcome,) = await store(backend, keys[1:2], blocks)
        assert outcome.done
        for key in keys[2:]:
            outcomes = await store(backend, [keys[0], key], memory.describe(0, [0, 1]))
            assert [outcome.status for outcome in outcomes] == [FAILED, DONE]


def freeze(folder: Path) -> None:
    """Let every write to a file system hang until it is thawed."""
    done = subprocess.run(["fsfreeze", "-f", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot freeze a file system here: {done.stderr.decode().strip()}")


async def test_a_hung_disk_times_out_and_everything_goes_on_when_it_is_back(
    tmp_path: Path, clock: Clock
) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(32 * MIB)
    call("mkfs.ext4", "-q", image)
    memory, keys = BlockMemory([[65536]], num_blocks=16), hashed_keys(8)
    with mounted("-o", "loop", str(image)) as folder:
        backend = open_store(folder / "store", memory.namespace())
        await backend.wait_indexed()
        async with TransferEngine(memory.caches, backend) as engine:
            assert statuses(await engine.store(keys[:2], [[0, 1]])) == [DONE] * 2
            freeze(folder)
            try:
                outcomes = await engine.store(keys[2:4], [[2, 3]], timeout_s=0.2)
                assert [o.status for o in outcomes] == [Status.TIMED_OUT] * 2
                assert not any(outcome.memory_safe for outcome in outcomes)
                loaded = await engine.load(keys[:2], [[8, 9]], timeout_s=10)
                assert statuses(loaded) == [DONE] * 2, "loads go on"
                assert await engine.lookup(keys[:3]) == [True, True, False]
                clock.now += 31.0
                outcomes = await engine.store(keys[4:5], [[4]], timeout_s=5)
                assert statuses(outcomes) == [FAILED], "a stalled write opens the breaker"
                assert "paused" in outcomes[0].reason
            finally:
                call("fsfreeze", "-u", folder)
            await asyncio.wait_for(engine.drain(), 10)
            clock.now += 30.0
            assert statuses(await engine.store(keys[5:], [[5, 6, 7]])) == [DONE] * 3
            assert statuses(await engine.load(keys[5:], [[10, 11, 12]])) == [DONE] * 3


async def test_deletes_and_purges_do_not_wait_for_a_flush_that_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, keys, go = one_page_memory(), hashed_keys(2), threading.Event()
    async with open_store(tmp_path, memory.namespace()) as backend:
        await store(backend, keys, memory.describe(0, range(2)))
        monkeypatch.setattr(runtime.disk(), "sync_file_system", lambda _fd: go.wait())
        flush = asyncio.create_task(backend.flush())
        try:
            await asyncio.sleep(0)  # the flush is the first on its thread
            assert await asyncio.wait_for(backend.delete(keys[:1]), 5) == [True]
            assert await asyncio.wait_for(backend.purge(), 5) == 1
            assert not flush.done()
        finally:
            go.set()
        await flush


@pytest.mark.parametrize("call", ["store", "delete", "purge"])
async def test_a_call_that_waits_while_its_store_is_closed_says_what_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    memory, keys, hung, go = one_page_memory(), hashed_keys(1), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hang(*_: object) -> list[Any]:
        loop.call_soon_threadsafe(hung.set)
        go.wait()
        return keys

    async with indexed_store(tmp_path, memory.namespace()) as backend:
        owner, name = {
            "store": (backend._files, "have_files"),  # asks for what another process stores
            "delete": (backend._space, "remove"),
            "purge": (backend, "_list_keys"),
        }[call]
        monkeypatch.setattr(owner, name, hang)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "store": lambda: backend.store(keys, memory.describe(0, [0])),
            "delete": lambda: asyncio.gather(backend.delete(keys), backend.delete(keys)),
            "purge": lambda: backend.purge(keys[0][:1]),
        }
        files = file_ids(memory.namespace().fingerprint, keys)
        with contextlib.closing(Ledger(tmp_path)) as others, others.claimed(files):
            called = asyncio.ensure_future(calls[call]())
            await hung.wait()
        closing = await begin(backend.aclose(), turns=50)
        go.set()
        with pytest.raises(ClosedError, match=r"^file backend is closed$"):
            await called
        await closing


async def test_files_are_closed_only_after_calls_that_hang_while_their_store_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, keys, hung, go = one_page_memory(), hashed_keys(1), asyncio.Event(), threading.Event()
    loop, closed = asyncio.get_running_loop(), asyncio.Event()

    def hang(*_: object) -> list[bool]:
        loop.call_soon_threadsafe(hung.set)
        go.wait()
        return [closed.is_set()]

    def close_files() -> None:
        close()
        loop.call_soon_threadsafe(closed.set)

    async with indexed_store(tmp_path, memory.namespace(), close_timeout_s=0.1) as backend:
        close = backend._files.close
        monkeypatch.setattr(backend._files, "close", close_files)
        monkeypatch.setattr(backend._files, "have_files", hang)
        asking = asyncio.ensure_future(backend.lookup(keys))
        await hung.wait()
        await backend.aclose()
        assert not closed.is_set()
        go.set()
        assert await asking == [False]
        await closed.wait()


async def test_a_delete_that_goes_on_without_its_caller_takes_no_block_stored_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, keys, hung, go = one_page_memory(), hashed_keys(1), asyncio.Event(), threading.Event()
    loop, removed = asyncio.get_running_loop(), asyncio.Event()
    async with open_store(tmp_path, memory.namespace()) as backend:
        await store(backend, keys, memory.describe(0, [0]))
        remove = backend._space.remove

        def hang(*arguments: Any) -> Any:
            loop.call_soon_threadsafe(hung.set)
            go.wait()
            try:
                return remove(*arguments)
            finally:
                loop.call_soon_threadsafe(removed.set)

        monkeypatch.setattr(backend._space, "remove", hang)
        deleting = asyncio.ensure_future(backend.delete(keys))
        await hung.wait()
        deleting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await deleting
        storing = await begin(store(backend, keys, memory.describe(0, [0])), turns=50)
        go.set()
        await removed.wait()
        await storing
        assert await backend.lookup(keys) == [True]


async def test_a_store_that_is_cancelled_while_its_backend_is_closed_is_cancelled(
    tmp_path: Path,
) -> None:
    memory, keys, go = one_page_memory(), hashed_keys(2), threading.Event()
    async with indexed_store(tmp_path, memory.namespace(), write_threads=1) as backend:
        backend._writers.start(go.wait)
        storing = await begin(store(backend, keys, memory.describe(0, range(2))), turns=50)
        closing = await begin(backend.aclose(), turns=50)
        storing.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await storing
        await closing


@pytest.mark.parametrize("num_levels", [1, 2, 3], ids=["folder", "namespace", "root"])
@pytest.mark.parametrize("is_nfs", [False, True])
async def test_what_others_store_in_a_folder_made_anew_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_levels: int, *, is_nfs: bool
) -> None:
    disk, fstat = runtime.disk(), runtime.disk().fstat

    def answer(call: Callable[..., Any], *given: Any, **more: Any) -> Any:
        """Fail like an NFS client for files that another host has removed."""
        fd = given[0] if call is fstat else more.get("dir_fd")
        if fd is not None and not fstat(fd).st_nlink:
            raise OSError(errno.ESTALE, "another host has removed it")
        return call(*given, **more)

    for name in ("fstat", "open", "stat") if is_nfs else ():
        monkeypatch.setattr(disk, name, partial(answer, getattr(disk, name)))
    memory, keys, root = one_page_memory(), hashed_keys(4), tmp_path / "store"
    removed = path_of(root, memory.namespace(), keys[0]).parents[num_levels - 1]
    async with (
        open_store(root, memory.namespace(), engine="posix" if is_nfs else "auto") as ours,
        open_store(root, memory.namespace(), engine="posix" if is_nfs else "auto") as theirs,
    ):
        await store(ours, keys, memory.describe(0, range(4)))
        for version in range(3):
            await asyncio.to_thread(remove_folder, removed)
            assert (await ours.lookup(keys[:1])) == [False]
            await store(theirs, keys, memory.describe(0, range(4)), version=version)
            assert await ours.lookup(keys) == [True] * 4
            target = memory.describe(0, [4])
            assert await load_verified(ours, keys[:1], target, version=version) == [DONE]


class EndedServer:
    """FUSE server that has ended: files that were open there no longer answer.

    Files opened from now on are those of the next server, which has the same content.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        links = {fd: Path(f"/proc/self/fd/{fd}").resolve() for fd in runtime.disk().listdir(FDS)}
        self._lost = {int(fd) for fd, path in links.items() if path.is_relative_to(root)}
        for name in ("close", "flock", "fstat", "mkdir", "open", "pread", "pwrite", "stat"):
            call = partial(self._answer, getattr(runtime.disk(), name))
            monkeypatch.setattr(runtime.disk(), name, call)
        monkeypatch.setattr(runtime.disk(), "dup2", partial(self._dup2, runtime.disk().dup2))

    def _dup2(self, dup2: Callable[..., int], fd: int, known: int, **more: Any) -> int:
        self._lost.discard(known)
        return dup2(fd, known, **more)

    def _answer(self, call: Callable[..., Any], *given: Any, **more: Any) -> Any:
        lost = self._lost.intersection([more.get("dir_fd", -1), given[0]])
        if call is os.close and lost:
            self._lost -= lost
            is_folder = stat.S_ISDIR(os.fstat(given[0]).st_mode)
            call(*given)
            if is_folder:
                return None
        if lost:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return call(*given, **more)


@pytest.mark.parametrize("is_back", [True, False])
async def test_a_store_whose_file_server_was_started_again_goes_on_and_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_back: bool
) -> None:
    memory, keys, root, mounted = one_page_memory(), hashed_keys(8), tmp_path / "a", tmp_path / "b"
    async with indexed_store(root, memory.namespace(), engine="posix") as backend:
        await store(backend, keys[:4], memory.describe(0, range(4)))
        EndedServer(root, monkeypatch)
        root.rename(mounted)
        root.mkdir()  # the folder below the mount
        assert await backend.lookup(keys[:4]) == [False] * 4
        assert await load_verified(backend, keys[:1], memory.describe(0, [4])) == [Status.MISSING]
        assert statuses(await store(backend, keys[4:5], memory.describe(0, [0]))) == [FAILED]
        root.rmdir()  # it is empty
        mounted.rename(root)
        if is_back:
            assert await backend.lookup(keys[:4]) == [True] * 4
            assert await load_verified(backend, keys[:2], memory.describe(0, [4, 5])) == [DONE] * 2
            outcomes = await store(backend, keys[4:], memory.describe(0, range(4)))
            assert statuses(outcomes) == [DONE] * 4
            assert counted_bytes(root) == bytes_on_disk(root) == 8 * FILE_BYTES
    assert not [each for each in open_descriptors() if str(tmp_path) in each]
    assert not fnmatch.filter(runtime.disk().listdir(root), "*.claim")


async def test_blocks_are_stored_where_the_folder_is_though_an_old_one_was_moved_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `mv store old; rm -rf old` while a store created files in it.

    Nothing may be created in the old folder, which may be read-only or being removed.
    """
    memory, keys = one_page_memory(), hashed_keys(8)
    root, old = tmp_path / "store", tmp_path / "old"
    capacity = ByteSize(4 * FILE_BYTES)
    async with indexed_store(root, memory.namespace(), capacity=capacity) as ours:
        await store(ours, keys[:4], memory.describe(0, range(4)))
        root.rename(old)
        for path in old.rglob("*"):
            if path.is_file():
                path.unlink()
        make = runtime.disk().mkdir

        def refuse(path: str | Path, mode: int, *, dir_fd: int | None = None) -> None:
            if dir_fd and Path(f"/proc/self/fd/{dir_fd}").readlink().is_relative_to(old):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            make(path, mode, dir_fd=dir_fd)

        monkeypatch.setattr(runtime.disk(), "mkdir", refuse)
        for some in (keys[:4], keys[4:8]):
            await store(ours, some, memory.describe(0, range(4)))
        async with open_store(root, memory.namespace(), capacity=capacity) as theirs:
            assert await theirs.lookup(keys) == await ours.lookup(keys)
            assert sum(await theirs.lookup(keys)) == 4
            assert counted_bytes(root) == bytes_on_disk(root) == capacity
        assert bytes_on_disk(old) == 0
        assert (root / memory.namespace().fingerprint / "namespace.json").exists()


@pytest.mark.parametrize("moved", ["root", "root, and made anew", "folder of the namespace"])
async def test_blocks_are_stored_where_the_path_leads_once_its_folder_was_moved(
    tmp_path: Path, moved: str
) -> None:
    """As after `mv store old`, which keeps the old blocks, and perhaps a new store."""
    memory, keys = one_page_memory(), hashed_keys(8)
    root, old, capacity = tmp_path / "store", tmp_path / "old", ByteSize(4 * FILE_BYTES)
    async with indexed_store(root, memory.namespace(), capacity=capacity) as ours:
        await store(ours, keys[:4], memory.describe(0, range(4)))
        (root if "root" in moved else root / memory.namespace().fingerprint).rename(old)
        if "anew" in moved:
            async with open_store(root, memory.namespace()):
                pass
        assert await ours.lookup(keys) == [True] * 4 + [False] * 4, "until a block is stored"
        for some in (keys[4:], keys[:4]):
            assert statuses(await store(ours, some, memory.describe(0, range(4)))) == [DONE] * 4
            assert counted_bytes(root) == bytes_on_disk(root) == capacity
        async with open_store(root, memory.namespace(), capacity=capacity) as theirs:
            assert await theirs.lookup(keys) == [True] * 4 + [False] * 4
        assert bytes_on_disk(old) == capacity


@pytest.mark.parametrize("error", [OSError(errno.EIO, os.strerror(errno.EIO)), MemoryError()])
@pytest.mark.parametrize("pattern", ["store", "usage.ledger", "*.claim"])
async def test_no_count_is_made_anew_because_its_path_cannot_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, pattern: str
) -> None:
    memory, keys, root = one_page_memory(), hashed_keys(2), tmp_path / "store"
    async with indexed_store(root, memory.namespace()) as backend:
        await store(backend, keys[:1], memory.describe(0, [0]))
        before = sorted(root.glob("*"))
        if pattern == root.name:
            root.rename(tmp_path / "old")
        with monkeypatch.context() as patched:
            fail_to(patched, "stat", pattern, error)
            (outcome,) = await store(backend, keys[1:], memory.describe(0, [1]))
            assert outcome.status is FAILED
            assert not root.exists() or sorted(root.glob("*")) == before
        assert statuses(await store(backend, keys[1:], memory.describe(0, [1]))) == [DONE]


@pytest.mark.parametrize("folder", ["", "store"])
async def test_nothing_is_stored_on_the_disk_below_a_mount_that_was_taken_away(
    folder: str,
) -> None:
    memory, keys = one_page_memory(), hashed_keys(4)
    with tmpfs(MIB) as mount:
        root = mount / folder
        async with indexed_store(root, memory.namespace()) as backend:
            await store(backend, keys[:2], memory.describe(0, range(2)))
            call("umount", "--lazy", mount)
            try:
                (outcome,) = await store(backend, keys[2:3], memory.describe(0, [0]))
                assert outcome.status is FAILED
                assert str(root) in outcome.reason
                assert not runtime.disk().listdir(mount)
                assert await load_verified(backend, keys[:2], memory.describe(0, [4, 5])) == [
                    DONE,
                    DONE,
                ]
            finally:
                call("mount", "-t", "tmpfs", "tmpfs", mount)


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_folder_gets_no_more_temporary_files_while_one_cannot_be_removed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    engine: str,
) -> None:
    """As after `chattr +a`, which lets files be created, but not be renamed or removed."""
    memory, keys = one_page_memory(), [make_block_key(bytes([0, n]), 0) for n in range(2)]
    refused = PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    async with indexed_store(tmp_path, memory.namespace(), engine=engine) as backend:
        path_of(tmp_path, memory.namespace(), keys[0]).mkdir(parents=True)  # no file may replace it
        with monkeypatch.context() as patched:
            fail_to(patched, "unlink", "*.tmp", refused)
            for _ in range(3):
                outcomes = await store(backend, keys[:1], memory.describe(0, [0]))
                assert statuses(outcomes) == [FAILED]
                assert len(temporary_files(tmp_path)) == 1
        assert len([each for each in caplog.messages if "cannot remove" in each]) == 1
        assert statuses(await store(backend, keys[1:], memory.describe(0, [0]))) == [DONE]
        assert not temporary_files(tmp_path)


def test_a_store_is_not_opened_by_a_process_that_may_open_too_few_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        with pytest.raises(BackendUnavailableError, match="may open 200 files: raise `ulimit -n`"):
            open_store(tmp_path, one_page_memory().namespace())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_what_a_delete_removed_before_it_failed_for_want_of_memory_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, keys, recorder = one_page_memory(), hashed_keys(2), Recorder()
    async with indexed_store(tmp_path, memory.namespace()) as backend:
        backend.observe(Reports([recorder]))
        await store(backend, keys, memory.describe(0, range(2)))
        with monkeypatch.context() as patched:
            fail_to(patched, "unlink", f"{keys[1].hex()}*", MemoryError())
            with pytest.raises(BackendUnavailableError, match="MemoryError"):
                await backend.delete(keys)
        assert [*recorder.kept.values()] == [{keys[1]}]


@pytest.mark.parametrize("error", [OSError(errno.EIO, os.strerror(errno.EIO)), MemoryError()])
async def test_a_folder_made_anew_is_described_though_the_first_attempt_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    memory, keys = one_page_memory(), hashed_keys(1)
    folder = tmp_path / memory.namespace().fingerprint
    async with indexed_store(tmp_path, memory.namespace()) as backend:
        await asyncio.to_thread(remove_folder, folder)
        with monkeypatch.context() as patched:
            fail_to(patched, "rename", "*.tmp", error)
            assert statuses(await store(backend, keys, memory.describe(0, [0]))) == [FAILED]
        assert statuses(await store(backend, keys, memory.describe(0, [0]))) == [DONE]
        assert (folder / "namespace.json").exists()


@pytest.mark.parametrize("error", [OSError(errno.EIO, os.strerror(errno.EIO)), MemoryError()])
async def test_a_folder_keeps_its_texts_if_it_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    memory = one_page_memory()
    async with open_store(tmp_path, memory.namespace()):
        pass
    folder = tmp_path / memory.namespace().fingerprint
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    with FolderStore(tmp_path).namespace(folder.name) as namespace:
        fail_to(monkeypatch, "rmdir", folder.name, error)
        with contextlib.suppress(MemoryError):
            assert not namespace.remove_empty()
    assert {path.name: path.read_text() for path in folder.iterdir()} == texts


async def test_a_file_that_was_only_read_may_close_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, keys = one_page_memory(), hashed_keys(2)
    async with indexed_store(tmp_path, memory.namespace(), engine="posix") as backend:
        await store(backend, keys, memory.describe(0, [0, 1]))
        close = runtime.disk().close

        def close_with_an_error(fd: int) -> None:
            is_read = not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
            close(fd)
            if is_read:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(runtime.disk(), "close", close_with_an_error)
        assert await load_verified(backend, keys, memory.describe(0, [2, 3])) == [DONE] * 2
        assert statuses(await store(backend, keys[:1], memory.describe(0, [0]))) == [DONE]
        FolderStore(tmp_path).require()


# Capacity, free space, and the count of bytes


@pytest.mark.parametrize("size_bytes", [0, 10 * FILE_BYTES])
@pytest.mark.parametrize("end", ["evict", "load", "delete"])
async def test_a_file_that_other_programs_have_grown_or_cut_leaves_the_count_right(
    tmp_path: Path, size_bytes: int, end: str
) -> None:
    memory, keys, capacity = one_page_memory(), hashed_keys(8), ByteSize(4 * FILE_BYTES)
    async with indexed_store(tmp_path, memory.namespace(), capacity=capacity) as backend:
        await store(backend, keys[:4], memory.describe(0, range(4)))
        os.truncate(path_of(tmp_path, memory.namespace(), keys[3]), size_bytes)
        if end == "load":
            (outcome,) = await backend.load(keys[3:4], memory.describe(0, [0]))
            assert outcome.status is Status.CORRUPT
        elif end == "delete":
            assert await backend.delete(keys[3:4]) == [True]
        for key in keys[4:]:
            assert statuses(await store(backend, [key], memory.describe(0, [0]))) == [DONE]
            assert counted_bytes(tmp_path) >= bytes_on_disk(tmp_path)
        assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path) == capacity


@pytest.mark.parametrize("eviction", ["lru", "arc"])
async def test_a_store_opened_again_evicts_the_oldest_first(tmp_path: Path, eviction: str) -> None:
    memory, keys = one_page_memory(), hashed_keys(7)
    fields = {"capacity": ByteSize(4 * FILE_BYTES), "eviction": eviction}
    async with open_store(tmp_path, memory.namespace(), **fields) as backend:
        await store(backend, keys[:4], memory.describe(0, range(4)))
    ages = [200, 400, 100, -7200]  # negative: a clock was ahead
    for key, age in zip(keys, ages, strict=False):
        os.utime(path_of(tmp_path, memory.namespace(), key), (time.time() - age,) * 2)
    async with indexed_store(tmp_path, memory.namespace(), **fields) as backend:
        await load_verified(backend, keys[3:4], memory.describe(0, [4]))
        used = os.stat(path_of(tmp_path, memory.namespace(), keys[3])).st_mtime  # noqa: PTH116
        assert abs(used - time.time()) < 60
        for number, key in enumerate(keys[4:], 1):
            await store(backend, [key], memory.describe(0, [0]))
            there = await backend.lookup(keys[:4])
            gone = sorted((age for age, found in zip(ages, there, strict=True) if not found))
            assert gone == sorted(ages)[-number:]


async def test_blocks_stored_during_the_first_walk_are_evicted_after_those_that_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, keys, go = one_page_memory(), hashed_keys(5), threading.Event()
    async with open_store(tmp_path, memory.namespace()) as backend:
        await store(backend, keys[:2], memory.describe(0, range(2)))
    monkeypatch.setattr(BlockTree, "collect", lambda _tree: go.wait() and 0)
    capacity = ByteSize(3 * FILE_BYTES)
    async with open_store(tmp_path, memory.namespace(), capacity=capacity) as backend:
        try:
            assert statuses(await store(backend, keys[2:3], memory.describe(0, [0]))) == [DONE]
        finally:
            go.set()
        await backend.wait_indexed()
        assert statuses(await store(backend, keys[3:], memory.describe(0, [0, 1]))) == [DONE] * 2
        assert await backend.lookup(keys) == [False] * 2 + [True] * 3


async def test_a_block_that_is_only_stored_again_is_not_collected_as_unused(tmp_path: Path) -> None:
    memory, keys = one_page_memory(), hashed_keys(2)
    async with open_store(tmp_path, memory.namespace()) as backend:
        await store(backend, keys, memory.describe(0, range(2)))
    for key in keys:
        os.utime(path_of(tmp_path, memory.namespace(), key), (time.time() - 9000,) * 2)
    async with indexed_store(tmp_path, memory.namespace()) as backend:
        await store(backend, keys[:1], memory.describe(0, [0]))
        removed = GarbageCollection(FolderStore(tmp_path), max_age_s=4000.0).run()
        assert removed.num_old == 1
        assert await backend.lookup(keys) == [True, False]


async def test_the_free_space_floor_is_kept_by_evicting(tmp_path: Path) -> None:
    memory, keys = BlockMemory([[256 << 10]], num_blocks=4), hashed_keys(30)
    floor = 3 * MIB
    with tmpfs(8 * MIB) as folder:
        async with open_store(folder, memory.namespace(), min_free=ByteSize(floor)) as backend:
            for key in keys:
                (outcome,) = await store(backend, [key], memory.describe(0, [0]))
                assert outcome.done, outcome
                found = os.statvfs(folder)
                assert found.f_bavail * found.f_frsize >= floor
            assert sum(await backend.lookup(keys)) > 10
            num_before = sum(await backend.lookup(keys))
            (folder / "filler").write_bytes(bytes(5 * MIB // 2))  # another program takes the room
            (outcome,) = await store(backend, keys[:1], memory.describe(0, [0]))
            assert outcome.done
            found = os.statvfs(folder)
            assert found.f_bavail * found.f_frsize >= floor
            assert 0 < sum(await backend.lookup(keys)) < num_before
            places = [memory.describe(0, [block]) for block in range(4)]
            await asyncio.gather(*map(partial(store, backend), [[k] for k in keys[4:8]], places))
            found = os.statvfs(folder)
            assert found.f_bavail * found.f_frsize >= floor
        async with open_store(folder, memory.namespace(), min_free=ByteSize(8 * MIB)) as backend:
            (outcome,) = await store(backend, keys[1:2], memory.describe(0, [0]))
            assert "no room" in outcome.reason
            assert outcome.status is FAILED


@pytest.mark.parametrize("kind", ["ramfs", "tmpfs"])
async def test_a_file_system_that_does_not_say_how_much_it_has_is_bounded_by_the_capacity(
    kind: str,
) -> None:
    memory, keys = one_page_memory(), hashed_keys(6)
    with mounted("-t", kind, "-o", "size=0", kind) as folder:
        bounds = {"capacity": ByteSize(4 * FILE_BYTES), "min_free": ByteSize(MIB)}
        async with open_store(folder, memory.namespace(), **bounds) as backend:
            for some in (keys[:3], keys[3:]):
                outcomes = await store(backend, some, memory.describe(0, range(3)))
                assert [outcome.reason for outcome in outcomes] == [""] * 3
            assert sum(await backend.lookup(keys)) == 4


async def test_files_of_a_dead_namespace_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, keys = one_page_memory(), hashed_keys(6)
    capacity = ByteSize(4 * FILE_BYTES)
    dead = memory.namespace(model="dead")
    async with open_store(tmp_path, dead, capacity=capacity) as backend:
        await store(backend, keys[:4], memory.describe(0, range(4)))
        flip_bit(path_of(tmp_path, dead, keys[0]), 8 * 4100)
        await load_verified(backend, keys[:1], memory.describe(0, [5]))
    async with indexed_store(tmp_path, memory.namespace(), capacity=capacity) as backend:
        with monkeypatch.context() as patched:
            fail_to(patched, "open", tmp_path.name, OSError(errno.EMFILE, "no descriptors"))
            assert statuses(await store(backend, keys[:1], memory.describe(0, [0]))) == [FAILED]
        assert backend._space.index.gauges()[Gauge.QUARANTINED_BLOCKS] == 1, "the next to go"
        for key in keys:
            assert all(o.done for o in await store(backend, [key], memory.describe(0, [0])))
            assert bytes_on_disk(tmp_path) <= capacity
        assert sum(await backend.lookup(keys)) == 4
        assert not list(tmp_path.glob(f"{dead.fingerprint}/*/*.safetensors"))  # noqa: ASYNC240 - few


@pytest.mark.parametrize("model", ["model", "another user's"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
async def test_files_that_may_not_be_removed_are_passed_over_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, model: str
) -> None:
    memory, keys = one_page_memory(), hashed_keys(8)
    capacity = ByteSize(4 * FILE_BYTES)
    theirs = memory.namespace(model=model)
    async with open_store(tmp_path, theirs, capacity=capacity) as backend:
        await store(backend, keys[:2], memory.describe(0, range(2)))
    async with indexed_store(tmp_path, memory.namespace(), capacity=capacity) as backend:
        for key in keys[:2]:
            refused = OSError(number, os.strerror(number))
            fail_to(monkeypatch, "unlink", f"{key.hex()}*", refused)
        for key in keys[2:]:
            assert statuses(await store(backend, [key], memory.describe(0, [0]))) == [DONE]
            assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path) <= capacity
        assert await backend.lookup(keys[2:]) == [False] * 4 + [True] * 2


async def test_a_store_looks_once_at_each_of_many_files_that_may_not_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, keys, capacity = one_page_memory(), hashed_keys(7), ByteSize(6 * FILE_BYTES)
    theirs = memory.namespace(model="another user's")
    async with open_store(tmp_path, theirs, capacity=capacity) as backend:
        await store(backend, keys[:6], memory.describe(0, range(6)))
    async with indexed_store(tmp_path, memory.namespace(), capacity=capacity) as backend:
        monkeypatch.setattr(space, "KEYS_PER_LOCK", 2)
        refused = OSError(errno.EACCES, os.strerror(errno.EACCES))
        with monkeypatch.context() as patched:
            fail_to(patched, "unlink", "*.safetensors", refused)
            storing = asyncio.wait_for(store(backend, keys[6:], memory.describe(0, [0])), 5)
            assert statuses(await storing) == [FAILED]
        assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path) == capacity


async def test_a_store_tries_few_of_its_own_files_in_a_folder_that_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory, keys, capacity = one_page_memory(), hashed_keys(7), ByteSize(6 * FILE_BYTES)
    async with indexed_store(tmp_path, memory.namespace(), capacity=capacity) as backend:
        await store(backend, keys[:6], memory.describe(0, range(6)))
        monkeypatch.setattr(space, "KEYS_PER_LOCK", 2)
        monkeypatch.setattr(backend._space, "_log_pause", LogPause(0.0))
        refused = OSError(errno.EACCES, os.strerror(errno.EACCES))
        fail_to(monkeypatch, "unlink", "*.safetensors", refused)
        (outcome,) = await store(backend, keys[6:], memory.describe(0, [0]))
        assert outcome.status is FAILED
        assert os.strerror(errno.EACCES) in outcome.reason
        assert caplog.text.count("cannot evict") == 2
        monkeypatch.setattr(backend._space, "_log_pause", LogPause())
        for _ in range(2):
            assert statuses(await store(backend, keys[6:], memory.describe(0, [0]))) == [FAILED]
        assert caplog.text.count("cannot evict") == 3
        assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path) == capacity


@pytest.mark.parametrize("error", [OSError(errno.EIO, os.strerror(errno.EIO)), MemoryError()])
async def test_a_file_that_an_eviction_fails_to_remove_stays_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    memory, keys = one_page_memory(), hashed_keys(2)
    async with indexed_store(tmp_path, memory.namespace(), capacity=FILE_BYTES) as backend:
        await store(backend, keys[:1], memory.describe(0, [0]))
        with monkeypatch.context() as patched:
            fail_to(patched, "unlink", "*.safetensors", error)
            (outcome,) = await store(backend, keys[1:], memory.describe(0, [0]))
        assert outcome.status is FAILED
        assert backend._space.index.gauges()[Gauge.STORED_BLOCKS] == 1


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EIO])
async def test_what_stays_in_quarantine_is_tried_once_for_a_walk_and_costs_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    memory, keys = one_page_memory(), hashed_keys(10)
    async with indexed_store(tmp_path, memory.namespace(), capacity=4 * FILE_BYTES) as backend:
        monkeypatch.setattr(backend._space, "_log_pause", LogPause(0.0))
        for key in keys[:2]:
            await store(backend, [key], memory.describe(0, [0]))
            flip_bit(path_of(tmp_path, memory.namespace(), key), 8 * 5000)
            corrupt = await load_verified(backend, [key], memory.describe(0, [0]))
            assert corrupt == [Status.CORRUPT]
            fail_to(monkeypatch, "unlink", f"{key.hex()}*", OSError(number, os.strerror(number)))
        for key in keys[2:]:
            assert statuses(await store(backend, [key], memory.describe(0, [0]))) == [DONE]
            assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path)
        assert await backend.lookup(keys[2:]) == [False] * 6 + [True] * 2
        assert caplog.text.count("cannot evict") == 2
        monkeypatch.undo()
        await asyncio.wrap_future(backend._space.begin_scan())
        assert statuses(await store(backend, keys[:2], memory.describe(0, [0, 1]))) == [DONE] * 2
        assert await backend.lookup(keys) == [True] * 2 + [False] * 6 + [True] * 2


NUM_STORED = 30
MOST = (1 << 64) - 1
OLD_FORMATS = [
    struct.pack("<8sQQ", b"kvxfer01", 0, MOST),
    struct.pack("<8sQQ", b"kvxfer01", MOST, 0),
    struct.pack("<QI", MOST, 3) + b"\xc1\xc1\xc1",
]


def damages(whole: bytes) -> list[bytes]:
    """Make damaged counts: with flipped bits, truncated, noise, and other formats."""
    rng, num_bits = random.Random(1), 8 * len(whole)
    number = int.from_bytes(whole, "little")
    listed = struct.pack("<I", 1) + b"\xc1"  # a complete list of files, in no valid form
    return [
        whole[:24] + listed[:4] + xxhash.xxh3_64_digest(listed) + listed[4:],
        *(
            (number ^ 1 << bit).to_bytes(len(whole), "little")
            for bit in range(0, num_bits, 1 + num_bits // 25)
        ),
        *(whole[:length] for length in range(0, len(whole), 1 + len(whole) // 6)),
        *(rng.randbytes(rng.randrange(1, 40 << 10)) for _ in range(5)),
        *OLD_FORMATS,
        whole.ljust(1 << 20, b"\0"),
    ]


@pytest.mark.parametrize("name", ["usage.ledger", "*.claim"])
async def test_no_damage_to_the_count_or_to_claims_evicts_or_raises(
    tmp_path: Path, name: str
) -> None:
    memory = one_page_memory()
    key, *keys = hashed_keys(NUM_STORED + 1)
    async with (
        open_store(tmp_path, memory.namespace()),
        open_store(tmp_path, memory.namespace()) as backend,
    ):
        await backend.wait_indexed()
        paths = list(tmp_path.glob(name))  # noqa: ASYNC240 - few
        outcomes = await store(backend, keys, memory.describe(0, range(NUM_STORED)))
        assert all(outcome.done for outcome in outcomes)
        for damage in damages(paths[0].read_bytes()):
            for path in paths:
                path.write_bytes(damage)  # in place: processes keep the same file open
            (outcome,) = await store(backend, [key], memory.describe(0, [40]))
            assert outcome.done, outcome
            assert await backend.lookup([key, *keys]) == [True] * (NUM_STORED + 1)
            assert await load_verified(backend, [key], memory.describe(0, [41])) == [DONE]
            assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path)
            await backend.delete([key])
    async with open_store(tmp_path, memory.namespace()) as backend:  # after a restart
        assert await backend.lookup(keys) == [True] * NUM_STORED


def make_link(path: Path) -> None:
    (path.parent / "theirs").write_bytes(b"precious")
    path.symlink_to("theirs")


def make_hard_link(path: Path) -> None:
    (path.parent / "theirs").write_bytes(b"precious")
    path.hardlink_to(path.parent / "theirs")


@pytest.mark.parametrize("make", [make_link, make_hard_link, os.mkfifo, os.mkdir])
def test_a_count_that_is_no_file_of_its_own_is_refused_and_left_alone(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "usage.ledger"
    make(path)
    with pytest.raises(BackendUnavailableError, match=r"usage\.ledger .* a single hard link"):
        open_store(tmp_path, one_page_memory().namespace())
    assert path.is_symlink() or path.is_dir() or path.is_fifo() or path.read_bytes() == b"precious"
    if (tmp_path / "theirs").exists():
        assert (tmp_path / "theirs").read_bytes() == b"precious"
