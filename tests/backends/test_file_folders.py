"""Folders that are removed or blocked while processes use the store."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvxfer import runtime
from kvxfer.backends.file import FileBackend
from kvxfer.backends.file.folders import NamespaceFolder
from kvxfer.backends.file.maintenance import FolderStore, GarbageCollection
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import BlockKey
from kvxfer.testing import BlockMemory
from tests.backends.file_store import (
    ENGINES,
    bytes_on_disk,
    counted_bytes,
    flip_bit,
    hashed_keys,
    load_verified,
    one_page_memory,
    open_store,
    path_of,
    quarantine_of,
    remove_folder,
    store,
)

DONE, CORRUPT, MISSING = Status.DONE, Status.CORRUPT, Status.MISSING


@contextlib.asynccontextmanager
async def two_backends(
    root: Path, memory: BlockMemory, *, engine: str = "auto"
) -> AsyncIterator[tuple[FileBackend, FileBackend]]:
    """Open two backends of one namespace in one folder, as two processes do."""
    async with (
        open_store(root, memory.namespace(), engine=engine) as ours,
        open_store(root, memory.namespace(), engine=engine) as theirs,
    ):
        await ours.wait_indexed()
        await theirs.wait_indexed()
        yield ours, theirs


def removed_folder(root: Path, memory: BlockMemory, key: BlockKey, removed: str) -> Path:
    """Folder of a key, of its namespace, or of the store."""
    path = path_of(root, memory.namespace(), key)
    return {"folder": path.parent, "namespace": path.parents[1], "root": root}[removed]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("removed", ["folder", "namespace", "root"])
async def test_what_others_store_in_a_folder_made_anew_is_found(
    tmp_path: Path, removed: str, engine: str
) -> None:
    memory, keys, root = one_page_memory(), hashed_keys(4), tmp_path / "store"
    async with two_backends(root, memory, engine=engine) as (ours, theirs):
        await store(ours, keys, memory.describe(0, range(4)))
        for version in range(3):
            await asyncio.to_thread(remove_folder, removed_folder(root, memory, keys[0], removed))
            assert (await ours.lookup(keys[:1])) == [False]
            await store(theirs, keys, memory.describe(0, range(4)), version=version)
            assert await ours.lookup(keys) == [True] * 4
            loaded = await load_verified(
                ours, keys[:1], memory.describe(0, range(4, 5)), version=version
            )
            assert loaded == [DONE]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("removed", ["folder", "namespace", "root"])
async def test_what_others_store_in_a_folder_made_anew_is_loaded_without_a_lookup(
    tmp_path: Path, removed: str, engine: str
) -> None:
    memory, keys, root = one_page_memory(), hashed_keys(1), tmp_path / "store"
    async with two_backends(root, memory, engine=engine) as (ours, theirs):
        await store(ours, keys, memory.describe(0, [0]))
        await asyncio.to_thread(remove_folder, removed_folder(root, memory, keys[0], removed))
        await store(theirs, keys, memory.describe(0, [0]), version=1)
        target = memory.describe(0, [1])
        assert await load_verified(ours, keys, target, version=1) == [DONE]


@pytest.mark.parametrize("removed", ["folder", "namespace", "root"])
async def test_what_others_store_in_a_folder_made_anew_is_deleted(
    tmp_path: Path, removed: str
) -> None:
    memory, keys, root = one_page_memory(), hashed_keys(1), tmp_path / "store"
    async with two_backends(root, memory) as (ours, theirs):
        await store(ours, keys, memory.describe(0, [0]))
        await asyncio.to_thread(remove_folder, removed_folder(root, memory, keys[0], removed))
        await store(theirs, keys, memory.describe(0, [0]))
        await ours.delete(keys)
        assert await theirs.lookup(keys) == [False]
        assert bytes_on_disk(root) == 0


async def test_a_use_is_noted_in_a_folder_made_anew(tmp_path: Path) -> None:
    memory, keys = one_page_memory(), hashed_keys(1)
    path = path_of(tmp_path, memory.namespace(), keys[0])
    async with two_backends(tmp_path, memory) as (ours, theirs):
        await store(ours, keys, memory.describe(0, [0]))
        with NamespaceFolder(tmp_path, memory.namespace().fingerprint) as folder:
            assert folder.sizes(keys) == [8192]
            await asyncio.to_thread(remove_folder, path.parent)
            await store(theirs, keys, memory.describe(0, [0]))
            os.utime(path, (1, 1))
            folder.note_use(keys[0])
        assert path.stat().st_mtime > 1


@pytest.mark.parametrize("whole", ["with all else", "alone"])
async def test_corrupt_blocks_are_put_away_after_the_quarantine_was_removed(
    tmp_path: Path, whole: str
) -> None:
    memory, keys = one_page_memory(), hashed_keys(3)
    async with open_store(tmp_path, memory.namespace()) as backend:
        await backend.wait_indexed()
        for key in keys:
            away = quarantine_of(tmp_path, memory.namespace(), key)
            await store(backend, [key], memory.describe(0, [0]))
            flip_bit(path_of(tmp_path, memory.namespace(), key), 8 * 4100)
            assert await load_verified(backend, [key], memory.describe(0, [1])) == [CORRUPT]
            assert away.exists()
            assert await backend.lookup([key]) == [False]
            if whole == "alone":
                await asyncio.to_thread(remove_folder, away.parent)
            else:
                GarbageCollection(FolderStore(tmp_path)).run()
                assert not away.parents[1].exists()


@pytest.mark.parametrize("in_the_way", ["a file", "a folder of the file's name"])
async def test_a_corrupt_block_that_cannot_be_put_away_is_removed(
    tmp_path: Path, in_the_way: str
) -> None:
    memory, keys = one_page_memory(), hashed_keys(1)
    away = quarantine_of(tmp_path, memory.namespace(), keys[0])
    async with open_store(tmp_path, memory.namespace()) as backend:
        await backend.wait_indexed()
        await store(backend, keys, memory.describe(0, [0]))
        if in_the_way == "a file":
            away.parent.write_text("")
        else:
            away.mkdir(parents=True)
        flip_bit(path_of(tmp_path, memory.namespace(), keys[0]), 8 * 4100)
        assert await load_verified(backend, keys, memory.describe(0, [1])) == [CORRUPT]
        assert await backend.lookup(keys) == [False]
        assert counted_bytes(tmp_path) == 0
        await store(backend, keys, memory.describe(0, [0]))
        assert await load_verified(backend, keys, memory.describe(0, [1])) == [DONE]
        assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path) == 8192


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_removed_folders_keep_no_descriptors(tmp_path: Path) -> None:
    memory, keys, root = one_page_memory(), hashed_keys(8), tmp_path / "store"
    async with open_store(root, memory.namespace(), engine="posix") as backend:
        await backend.wait_indexed()
        counts = []
        for _ in range(3):
            await store(backend, keys, memory.describe(0, range(8)))
            counts.append(num_descriptors())
            await asyncio.to_thread(remove_folder, root)
            assert await load_verified(backend, keys, memory.describe(0, range(8))) == [MISSING] * 8
        assert counts[0] == counts[1] == counts[2]


async def test_blocks_that_are_there_are_found_without_a_look_at_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, keys = one_page_memory(), hashed_keys(4)
    async with open_store(tmp_path, memory.namespace()) as backend:
        await backend.wait_indexed()
        await store(backend, keys, memory.describe(0, range(4)))

        def look(fd: int) -> os.stat_result:
            pytest.fail(f"looked at {fd}")

        with monkeypatch.context() as patched:
            patched.setattr(runtime.disk(), "fstat", look)
            assert await backend.lookup(keys) == [True] * 4
