"""Disks without room for more bytes or more files, and names that cannot be written."""

import contextlib
import os
import subprocess
from collections.abc import Sequence
from errno import EDQUOT, ENOSPC
from pathlib import Path

import pytest

from kvxfer.backends.file.io import IOVector, PosixFileIO, Result
from kvxfer.backends.file.maintenance import FolderStore, GarbageCollection
from kvxfer.storage.backend import Status
from tests.backends.file_store import (
    bytes_on_disk,
    counted_bytes,
    hashed_keys,
    load_verified,
    mounted,
    one_page_memory,
    open_store,
    path_of,
    places,
    store,
    temporary_files,
)

ONE_BY_ONE = {"write_threads": 1}
NUM_TOLERATED = 5  # errors in a row, after which storing is paused
DONE, FAILED = Status.DONE, Status.FAILED


@pytest.mark.slow
@pytest.mark.parametrize("place", places("posix-ext4", "uring-tmpfs"))
async def test_files_are_evicted_where_there_can_be_no_more_of_them(
    tmp_path: Path, place: str
) -> None:
    engine, file_system = place.split("-")
    memory, keys = one_page_memory(), hashed_keys(600)
    image = tmp_path / "image"
    if file_system == "ext4":
        with image.open("wb") as file:
            file.truncate(32 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-N", "300", image], check=True)  # noqa: ASYNC221
        arguments = ["-o", "loop", str(image)]
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


class Full(PosixFileIO):
    """I/O engine with room for a number of files, whose lack shows only when they are written."""

    def __init__(self, root: Path, num_files: int, errno: int) -> None:
        self.num_failed = 0
        self._root = root
        self._num_files = num_files
        self._errno = errno

    def write(self, fds: Sequence[int], vectors: Sequence[IOVector]) -> list[Result]:
        results = super().write(fds, vectors)
        free = self._num_files - len(list(self._root.rglob("*.safetensors")))
        errors = [OSError(self._errno, os.strerror(self._errno)) for _ in results[max(0, free) :]]
        self.num_failed += len(errors)
        return [*results[: max(0, free)], *errors]


@pytest.mark.parametrize("errno", [ENOSPC, EDQUOT])
async def test_files_are_evicted_when_a_write_finds_no_room(tmp_path: Path, errno: int) -> None:
    memory, keys = one_page_memory(), hashed_keys(12)
    full = Full(tmp_path, 4, errno)
    async with open_store(tmp_path, memory.namespace(), file_io=full, **ONE_BY_ONE) as backend:
        await backend.wait_indexed()
        for first in range(0, len(keys), 3):
            chosen = keys[first : first + 3]
            outcomes = await store(backend, chosen, memory.describe(0, range(3)))
            assert [outcome.reason for outcome in outcomes] == [""] * 3
            assert (
                await load_verified(backend, chosen, memory.describe(0, range(3, 6))) == [DONE] * 3
            )
            assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path)
        assert full.num_failed
        assert temporary_files(tmp_path) == []


async def test_files_of_others_are_evicted_by_the_store_after_one_that_found_no_room(
    tmp_path: Path,
) -> None:
    memory, keys, full = one_page_memory(), hashed_keys(8), Full(tmp_path, 4, EDQUOT)
    async with (
        open_store(tmp_path, memory.namespace(), file_io=full, **ONE_BY_ONE) as ours,
        open_store(tmp_path, memory.namespace(), **ONE_BY_ONE) as theirs,
    ):
        await ours.wait_indexed()
        await store(theirs, keys[:4], memory.describe(0, range(4)))
        outcomes = await store(ours, keys[4:], memory.describe(0, range(4)))
        assert [outcome.status for outcome in outcomes] == [FAILED] * 4
        outcomes = await store(ours, keys[4:], memory.describe(0, range(4)))
        assert [outcome.status for outcome in outcomes] == [DONE] * 4
        assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path)


async def test_what_is_too_much_for_the_disk_fails_and_evicts_nothing_of_its_batch(
    tmp_path: Path,
) -> None:
    memory, keys = one_page_memory(), hashed_keys(8)
    full = Full(tmp_path, 4, ENOSPC)
    async with open_store(tmp_path, memory.namespace(), file_io=full, **ONE_BY_ONE) as backend:
        await backend.wait_indexed()
        await store(backend, keys[:4], memory.describe(0, range(4)))
        outcomes = await store(backend, keys[3:], memory.describe(0, range(5)))
        assert [outcome.status for outcome in outcomes] == [DONE] * 4 + [FAILED]
        assert await backend.lookup(keys) == [False] * 3 + [True] * 4 + [False]
        assert full.num_failed <= 4 + 1
        assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path)


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


async def test_a_call_that_wrote_some_blocks_is_no_failure_of_the_medium(tmp_path: Path) -> None:
    memory, keys = one_page_memory(), hashed_keys(4 * NUM_TOLERATED)
    fields = {"file_io": FirstOnly(), **ONE_BY_ONE}
    async with open_store(tmp_path, memory.namespace(), **fields) as backend:
        await backend.wait_indexed()
        for first in range(0, len(keys), 2):
            chosen = keys[first : first + 2]
            outcomes = await store(backend, chosen, memory.describe(0, [0, 1]))
            assert [outcome.status for outcome in outcomes] == [DONE, FAILED]
            assert "Input/output error" in outcomes[1].reason


class FirstOnly(PosixFileIO):
    """I/O engine that fails for every other file, like a disk with a few bad sectors."""

    def __init__(self) -> None:
        self._num_written = 0

    def write(self, fds: Sequence[int], vectors: Sequence[IOVector]) -> list[Result]:
        results = super().write(fds, vectors)
        for index in range(len(results)):
            self._num_written += 1
            if self._num_written % 2 == 0:
                results[index] = OSError(5, os.strerror(5))
        return results
