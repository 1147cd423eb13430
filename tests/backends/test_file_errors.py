"""Disks that are full, broken, hung or forbidden: each error is an outcome, and stores go on."""

import asyncio
import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvxfer.backends.file.io import IOVector, PosixFileIO, Result
from kvxfer.backends.file.maintenance import (
    FolderStore,
    GarbageCollection,
)
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.storage.backend import Outcome, Status
from kvxfer.testing import BlockMemory
from kvxfer.transfer.engine import TransferEngine
from kvxfer.units import ByteSize
from tests.backends.file_store import (
    bytes_on_disk,
    counted_bytes,
    fail_to,
    flip_bit,
    hashed_keys,
    load_verified,
    mounted,
    one_page_memory,
    open_store,
    path_of,
    places,
    remove_folder,
    store,
    temporary_files,
    temporary_folder,
)
from tests.clock import Clock

MIB = 1 << 20
NOBODY = 65534
NUM_TOLERATED = 5  # errors in a row, after which storing is paused
DONE, FAILED, MISSING = Status.DONE, Status.FAILED, Status.MISSING


def call(*arguments: str | Path) -> None:
    subprocess.run(arguments, check=True)


def statuses(outcomes: Sequence[Outcome]) -> list[Status]:
    assert all(outcome.memory_safe for outcome in outcomes)
    assert all(outcome.reason for outcome in outcomes if not outcome.done)
    return [outcome.status for outcome in outcomes]


def make_image(tmp_path: Path, *options: str) -> Path:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(32 * MIB)
    call("mkfs.ext4", "-q", *options, image)
    return image


@pytest.fixture
def folder_of_nobody() -> Iterator[Path]:
    """A folder of a process that is nobody: root may do everything."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become nobody")
    with temporary_folder("ext4") as folder:  # not below pytest's, which only its owner may enter
        os.chown(folder, NOBODY, NOBODY)
        os.seteuid(NOBODY)  # of all threads
        try:
            yield folder
        finally:
            os.seteuid(0)


async def test_missing_permissions_are_outcomes(folder_of_nobody: Path) -> None:
    memory, keys, root = one_page_memory(), hashed_keys(4), folder_of_nobody / "store"
    file = path_of(root, memory.namespace(), keys[0])
    async with open_store(root, memory.namespace()) as backend:
        await store(backend, keys[:2], memory.describe(0, [0, 1]))
        flip_bit(path_of(root, memory.namespace(), keys[1]), 8 * 4100)
        file.chmod(0)
        (outcome,) = await backend.load(keys[:1], memory.describe(0, [1]))
        assert outcome.reason == "PermissionError: Permission denied"
        file.chmod(0o600)
        for inner in [*file.parents[1].iterdir(), file.parents[1]]:
            inner.chmod(0o500)
        outcomes = await store(backend, keys[2:], memory.describe(0, [0, 1]))
        assert [each.reason for each in outcomes] == ["PermissionError: Permission denied"] * 2
        for _ in range(2):  # what is corrupt cannot be put away
            loaded = await load_verified(backend, keys, memory.describe(0, [1, 2, 3, 4]))
            assert loaded == [DONE, Status.CORRUPT, MISSING, MISSING]
        with pytest.raises(BackendUnavailableError, match="Permission denied"):
            await backend.delete(keys[:1])
        file.parents[1].chmod(0o700)
    root.chmod(0o500)
    with pytest.raises(BackendUnavailableError, match="Permission denied"):
        open_store(root, memory.namespace(revision="another"))


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
    async with open_store(tmp_path, memory.namespace()) as backend:
        await backend.wait_indexed()
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
        assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path) == 4 * 8192


async def test_after_five_failures_stores_stop_until_a_probe_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    memory, keys, disk = one_page_memory(), iter(hashed_keys(20)), PosixFileIO()
    blocks, target = memory.describe(0, [0]), memory.describe(0, [1])
    first = next(keys)

    def fail(fds: Sequence[int], _: Sequence[IOVector]) -> list[Result]:
        return [OSError(errno.EIO, os.strerror(errno.EIO)) for _ in fds]

    async with open_store(tmp_path, memory.namespace(), file_io=disk) as backend:

        async def store_another() -> str:
            (outcome,) = await store(backend, [next(keys)], blocks)
            return outcome.reason

        await store(backend, [first], blocks)
        monkeypatch.setattr(disk, "write", fail)
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


@pytest.mark.slow
@pytest.mark.parametrize("place", places("posix-ext4", "uring-tmpfs"))
async def test_files_are_evicted_where_there_can_be_no_more_of_them(
    tmp_path: Path, place: str
) -> None:
    engine, file_system = place.split("-")
    memory, keys = one_page_memory(), hashed_keys(600)
    if file_system == "ext4":
        arguments = ["-o", "loop", str(make_image(tmp_path, "-N", "300"))]
    else:
        arguments = ["-t", "tmpfs", "-o", "size=32m,nr_inodes=300", "tmpfs"]
    with mounted(*arguments) as folder:
        for _ in range(2):  # the second one finds everything full
            async with open_store(folder, memory.namespace(), engine=engine) as backend:
                await backend.wait_indexed()
                for first in range(0, len(keys), 20):
                    chosen = keys[first : first + 20]
                    outcomes = await store(backend, chosen, memory.describe(0, range(20)))
                    assert [outcome.reason for outcome in outcomes] == [""] * 20
                target = memory.describe(0, range(20, 40))
                assert await load_verified(backend, chosen, target) == [DONE] * 20
                assert counted_bytes(folder) == bytes_on_disk(folder)
                assert temporary_files(folder) == []


async def test_a_full_disk_has_room_for_a_collection_that_makes_room(tmp_path: Path) -> None:
    memory, keys = one_page_memory(), hashed_keys(20)
    with mounted("-t", "tmpfs", "-o", "size=4m", "tmpfs") as folder:
        async with open_store(folder / "store", memory.namespace()) as backend:
            outcomes = await store(backend, keys, memory.describe(0, range(20)))
            assert [outcome.status for outcome in outcomes] == [DONE] * 20
        with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass
        found = FolderStore(folder / "store")
        with pytest.raises(OSError, match="No space left"):
            GarbageCollection(found).run()  # nothing is to go
        removed = GarbageCollection(found, capacity_bytes=5 * bytes_on_disk(folder) // 20).run()
        assert removed.num_excess == 15
        assert len(list(found.blocks())) == 5
        assert removed.num_bytes_left == bytes_on_disk(folder)


async def test_one_name_that_cannot_be_written_stops_no_other_store(tmp_path: Path) -> None:
    memory, keys = one_page_memory(), hashed_keys(2 + 2 * NUM_TOLERATED)
    path_of(tmp_path, memory.namespace(), keys[0]).mkdir(parents=True)
    blocks = memory.describe(0, [0])
    async with open_store(tmp_path, memory.namespace()) as backend:
        await backend.wait_indexed()
        for _ in range(2 * NUM_TOLERATED):
            (outcome,) = await store(backend, keys[:1], blocks)
            assert outcome.status is FAILED
            assert "directory" in outcome.reason
        (outcome,) = await store(backend, keys[1:2], blocks)
        assert outcome.done
        for key in keys[2:]:
            outcomes = await store(backend, [keys[0], key], memory.describe(0, [0, 1]))
            assert [outcome.status for outcome in outcomes] == [FAILED, DONE]


@pytest.mark.parametrize(
    ("name", "fields", "wrong"),
    [
        ("a\0b", {}, "path"),
        ("\ud800", {}, "path"),
        ("store", {"rescan_factor": float("nan")}, "rescan_factor is .*; expected 0 or more"),
        ("store", {"close_timeout_s": float("inf")}, "close_timeout_s is .*; expected 0 or more"),
        ("store", {"capacity": ByteSize(8191)}, "8192 bytes or more"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    tmp_path: Path, name: str, fields: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=wrong):
        open_store(tmp_path / name, one_page_memory().namespace(), **fields)


def freeze(folder: Path) -> None:
    """Let every write to a file system hang until it is thawed."""
    done = subprocess.run(["fsfreeze", "-f", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot freeze a file system here: {done.stderr.decode().strip()}")


async def test_a_hung_disk_times_out_and_everything_goes_on_when_it_is_back(
    tmp_path: Path, clock: Clock
) -> None:
    image = make_image(tmp_path)
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


@pytest.mark.parametrize("num_levels", [1, 2, 3], ids=["folder", "namespace", "root"])
async def test_what_others_store_in_a_folder_made_anew_is_found(
    tmp_path: Path, num_levels: int
) -> None:
    memory, keys, root = one_page_memory(), hashed_keys(4), tmp_path / "store"
    removed = path_of(root, memory.namespace(), keys[0]).parents[num_levels - 1]
    async with (
        open_store(root, memory.namespace()) as ours,
        open_store(root, memory.namespace()) as theirs,
    ):
        await store(ours, keys, memory.describe(0, range(4)))
        for version in range(3):
            await asyncio.to_thread(remove_folder, removed)
            assert (await ours.lookup(keys[:1])) == [False]
            await store(theirs, keys, memory.describe(0, range(4)), version=version)
            assert await ours.lookup(keys) == [True] * 4
            target = memory.describe(0, [4])
            assert await load_verified(ours, keys[:1], target, version=version) == [DONE]
