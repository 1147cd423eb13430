"""Folders that are removed or blocked while processes use the store."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvxfer.backends.file import FileBackend
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
