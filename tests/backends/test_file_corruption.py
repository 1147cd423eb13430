"""Corruption: a load gives the stored bytes or none, whatever happened to the file."""

import errno
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvxfer.backends.file import FileBackend
from kvxfer.backends.file.folder_store import FolderStore
from kvxfer.backends.file.folders import Ledger
from kvxfer.pages.maintenance import GarbageCollection
from kvxfer.storage import BlockKey, Status
from kvxfer.testing import BlockMemory
from tests.backends.file_store import (
    ENGINES,
    PAGE_BYTES,
    bytes_on_disk,
    counted_bytes,
    flip_bit,
    hashed_keys,
    load_verified,
    open_store,
    path_of,
    store,
    temporary_folder,
)

DONE, MISSING = Status.DONE, Status.MISSING
PAGES = [512, 7, 4096]


def open_in_chunks(
    root: Path, num_keys: int, pages: list[int], engine: str
) -> tuple[FileBackend, BlockMemory, list[BlockKey], list[Path]]:
    """Open a backend of blocks in chunks of two; with room in memory for all, twice."""
    memory = BlockMemory(
        [pages], num_blocks=4 * num_keys, blocks_per_chunk=2, padding_bytes=PAGE_BYTES
    )
    direct = "off" if engine == "posix" else "auto"
    backend = open_store(root, memory.namespace(), engine=engine, direct=direct)
    keys = hashed_keys(num_keys)
    return backend, memory, keys, [path_of(root, memory.namespace(), key) for key in keys]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("num_keys", "pages"),
    [(50, PAGES), (5, [256 << 10, 256 << 10])],
    ids=["copied", "read straight into memory"],
)
async def test_no_flipped_bit_is_ever_loaded(
    tmp_path: Path, engine: str, num_keys: int, pages: list[int]
) -> None:
    rng = random.Random(engine)
    backend, memory, keys, paths = open_in_chunks(tmp_path, num_keys, pages, engine)
    source = memory.describe(0, range(2 * num_keys))
    target = memory.describe(0, range(2 * num_keys, 4 * num_keys))
    async with backend:
        for _ in range(4):
            assert {outcome.status for outcome in await store(backend, keys, source)} == {DONE}
            for index, path in enumerate(paths):
                # Half of them in the header's text, which is a small part of the file.
                end = 600 if index % 2 else path.stat().st_size
                flip_bit(path, rng.randrange(8 * end))
            assert set(await load_verified(backend, keys, target)) == {Status.CORRUPT}
            assert await backend.lookup(keys) == [False] * num_keys
            assert set(await load_verified(backend, keys, target)) == {MISSING}
            assert all((path.parents[1] / "quarantine" / path.name).exists() for path in paths)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("pages", [PAGES, [256 << 10, 256 << 10]])
async def test_a_file_that_is_removed_as_it_is_read_is_a_miss_only_if_no_memory_was_written(
    tmp_path: Path, engine: str, pages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, memory, keys, (path,) = open_in_chunks(tmp_path, 1, pages, engine)
    async with backend:
        await store(backend, keys, memory.describe(0, [0, 1]))
        flip_bit(path, 8 * (PAGE_BYTES + 1))
        gone = Mock(side_effect=FileNotFoundError(errno.ENOENT, "gone"))
        monkeypatch.setattr(backend._folder, "open_block", gone)
        memory.fill(0xA5)
        before = memory.snapshot()
        [outcome] = await backend.load(keys, memory.describe(0, [2, 3]))
        assert outcome.status is (MISSING if memory.snapshot() == before else Status.FAILED)


async def test_a_corrupt_block_takes_the_place_of_what_is_in_quarantine_not_of_what_was(
    tmp_path: Path,
) -> None:
    backend, memory, keys, (path,) = open_in_chunks(tmp_path, 1, PAGES, "posix")
    async with backend:
        for is_collected in (True, False, False):
            await store(backend, keys, memory.describe(0, [0, 1]))
            flip_bit(path, 8 * PAGE_BYTES)
            loaded = await load_verified(backend, keys, memory.describe(0, [2, 3]))
            assert loaded == [Status.CORRUPT]
            assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path) > 0
            if is_collected:
                assert GarbageCollection(FolderStore(tmp_path)).run().num_quarantined == 1
                assert counted_bytes(tmp_path) == 0


async def test_a_corrupt_block_is_evicted_as_one_in_quarantine_where_the_count_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, memory, keys, (path,) = open_in_chunks(tmp_path, 1, PAGES, "posix")
    async with backend:
        await store(backend, keys, memory.describe(0, [0, 1]))
        flip_bit(path, 8 * PAGE_BYTES)
        monkeypatch.setattr(Ledger, "locked", Mock(side_effect=OSError))
        assert await load_verified(backend, keys, memory.describe(0, [2, 3])) == [Status.CORRUPT]
        monkeypatch.undo()
        victim = backend._space.index.choose_victim()
        assert victim is not None
        assert victim.quarantined


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("is_loaded", [True, False])
async def test_no_file_of_another_length_is_ever_loaded_and_a_store_replaces_it(
    tmp_path: Path, engine: str, *, is_loaded: bool
) -> None:
    rng = random.Random(9)
    size = 4 * PAGE_BYTES  # as below
    lengths = [0, 1, 7, 8, 4095, 4096, 4097, 8192]
    lengths += [rng.randrange(8 << 10) for _ in range(8)]
    lengths += [size + rng.randrange(1, 1 << 20) for _ in range(4)]
    num_keys = len(lengths)
    backend, memory, keys, paths = open_in_chunks(tmp_path, num_keys, PAGES, engine)
    source = memory.describe(0, range(2 * num_keys))
    target = memory.describe(0, range(2 * num_keys, 4 * num_keys))
    async with backend:
        await store(backend, keys, source)
        for path, length in zip(paths, lengths, strict=True):
            stored = path.read_bytes()
            assert len(stored) < size
            path.write_bytes(stored[:length] + rng.randbytes(max(0, length - len(stored))))
        if is_loaded:
            assert set(await load_verified(backend, keys, target)) == {Status.CORRUPT}
            assert await backend.lookup(keys) == [False] * num_keys
        outcomes = await store(backend, keys, source, version=1)
        assert {outcome.status for outcome in outcomes} == {DONE}
        assert set(await load_verified(backend, keys, target, version=1)) == {DONE}


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        folder = os.open(path.parent, os.O_RDONLY)  # a socket's address is a short path
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)


def link_to_itself(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    shutil.copy(path.with_name("kept"), elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", [make_socket, link_to_itself, os.mkfifo])
async def test_what_is_no_file_is_never_loaded_and_a_store_replaces_it(
    make: Callable[[Path], None], engine: str
) -> None:
    with temporary_folder("ext4") as root:
        backend, memory, keys, [path] = open_in_chunks(root, 1, PAGES, engine)
        source, target = memory.describe(0, [0, 1]), memory.describe(0, [2, 3])
        async with backend:
            await store(backend, keys, source)
            path.rename(path.with_name("kept"))
            make(path)
            for _ in range(2):
                assert await backend.lookup(keys) == [False]
                assert await load_verified(backend, keys, target) == [MISSING]
                assert path.is_symlink() or path.exists()
            (outcome,) = await store(backend, keys, source)
            assert outcome.done
            assert path.is_file()
            assert await load_verified(backend, keys, target) == [DONE]
