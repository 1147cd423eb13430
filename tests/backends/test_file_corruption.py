"""Corruption: a load gives the stored bytes or none, whatever happened to the file."""

import contextlib
import logging
import os
import random
import shutil
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvxfer.backends.file import FileBackend, file_ids
from kvxfer.backends.file.folders import Ledger
from kvxfer.backends.file.io import PosixFileIO, Result
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import BlockKey
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import SENTINEL
from kvxfer.testing.payloads import read_payloads
from tests.backends.file_store import (
    ENGINES,
    config,
    flip_bit,
    hashed_keys,
    load_verified,
    open_store,
    path_of,
    quarantine_of,
    store,
    temporary_folder,
)

SOURCE, TARGET = [0, 1], [2, 3]
NEVER_DONE = {Status.MISSING, Status.CORRUPT}


class Store:
    """A backend in a folder, with blocks of odd size in chunks of two."""

    def __init__(self, root: Path, **fields: object) -> None:
        self.root = root
        self.memory = BlockMemory([[512, 7, 4096], [64]], num_blocks=8, blocks_per_chunk=2)
        self.namespace = self.memory.namespace()
        self.backend = open_store(root, self.namespace, **fields)
        (self.key,) = hashed_keys(1)
        self.path = path_of(root, self.namespace, self.key)
        self.away = quarantine_of(root, self.namespace, self.key)

    async def store(self) -> bytes:
        (outcome,) = await store(self.backend, [self.key], self.memory.describe(0, SOURCE))
        assert outcome.done, outcome
        return self.path.read_bytes()

    async def load(self) -> Status:
        self.memory.fill(SENTINEL)
        target = self.memory.describe(0, TARGET)
        (status,) = await load_verified(self.backend, [self.key], target)
        return status

    async def require_quarantine(self, num_corrupt: int) -> None:
        """Check that lookups miss the file, and that it was counted and quarantined."""
        assert await self.backend.lookup([self.key]) == [False]
        assert await self.load() is Status.MISSING
        assert self.backend.num_corrupt == num_corrupt
        assert self.away.exists()


@pytest.mark.parametrize("engine", ENGINES)
async def test_no_flipped_bit_is_ever_loaded(tmp_path: Path, engine: str) -> None:
    rng = random.Random(engine)
    direct = "off" if engine == "posix" else "auto"
    memory, keys = (
        BlockMemory([[512, 7, 4096]], num_blocks=200, blocks_per_chunk=2),
        hashed_keys(50),
    )
    namespace = memory.namespace()
    source, target = memory.describe(0, range(100)), memory.describe(0, range(100, 200))
    async with open_store(tmp_path, namespace, engine=engine, direct=direct) as backend:
        for turn in range(1, 5):  # 200 files
            assert {outcome.status for outcome in await store(backend, keys, source)} == {
                Status.DONE
            }
            stored = [path_of(tmp_path, namespace, key).read_bytes() for key in keys]
            for index, key in enumerate(keys):
                # Half of them in the header's text, which is a small part of the file.
                end = 600 if index % 2 else len(stored[index])
                flip_bit(path_of(tmp_path, namespace, key), rng.randrange(8 * end))
            assert set(await load_verified(backend, keys, target)) == {Status.CORRUPT}
            assert backend.num_corrupt == 50 * turn
            assert await backend.lookup(keys) == [False] * 50
            assert set(await load_verified(backend, keys, target)) == {Status.MISSING}
            assert all(quarantine_of(tmp_path, namespace, key).exists() for key in keys)


async def test_large_blocks_read_straight_into_memory_are_verified_too(tmp_path: Path) -> None:
    rng = random.Random(8)
    memory = BlockMemory([[256 << 10, 256 << 10]], num_blocks=4, padding_bytes=4096)
    (key,) = hashed_keys(1)
    path = path_of(tmp_path, memory.namespace(), key)
    async with open_store(tmp_path, memory.namespace()) as backend:
        for _ in range(20):
            assert [o.done for o in await store(backend, [key], memory.describe(0, [0]))] == [True]
            flip_bit(path, rng.randrange(8 * path.stat().st_size))
            assert await load_verified(backend, [key], memory.describe(0, [1])) == [Status.CORRUPT]


@pytest.mark.parametrize("engine", ENGINES)
async def test_no_file_of_another_length_is_ever_loaded(tmp_path: Path, engine: str) -> None:
    rng = random.Random(9)
    made = Store(tmp_path, engine=engine)
    async with made.backend:
        stored = await made.store()
        lengths = [0, 1, 7, 8, 4095, 4096, 4097, len(stored) - 1, len(stored) + 1]
        lengths += [rng.randrange(len(stored)) for _ in range(8)]
        lengths += [len(stored) + rng.randrange(1 << 20) for _ in range(4)]
        for turn, length in enumerate(lengths, 1):
            padding = rng.randbytes(max(0, length - len(stored)))
            made.path.write_bytes(stored[:length] + padding)
            assert await made.load() is Status.CORRUPT
            await made.require_quarantine(turn)
            assert await made.store() == stored


async def test_files_that_changed_places_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    memory = BlockMemory([[512]], num_blocks=8)
    keys = hashed_keys(2)
    paths = [path_of(tmp_path, memory.namespace(), key) for key in keys]
    async with open_store(tmp_path, memory.namespace()) as backend:
        await store(backend, keys, memory.describe(0, [0, 1]))
        paths[0].rename(tmp_path / "other")
        paths[1].rename(paths[0])
        (tmp_path / "other").rename(paths[1])
        loaded = await load_verified(backend, keys, memory.describe(0, [2, 3]))
        assert loaded == [Status.CORRUPT] * 2
        assert await backend.lookup(keys) == [False] * 2
        assert backend.num_corrupt == 2


async def test_a_file_of_another_namespace_is_not_loaded(tmp_path: Path) -> None:
    memory, keys = BlockMemory([[512]], num_blocks=8), hashed_keys(1)
    ours, theirs = memory.namespace(), memory.namespace(revision="another")
    async with open_store(tmp_path, theirs) as backend:
        await store(backend, keys, memory.describe(0, [0]), version=1)
    path = path_of(tmp_path, ours, keys[0])
    path.parent.mkdir(parents=True)
    shutil.copy(path_of(tmp_path, theirs, keys[0]), path)
    async with open_store(tmp_path, ours) as backend:
        assert await backend.lookup(keys) == [True]
        assert await load_verified(backend, keys, memory.describe(0, [1])) == [Status.CORRUPT]
        assert await backend.lookup(keys) == [False]


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
    tmp_path: Path, make: Callable[[Path], None], engine: str
) -> None:
    with temporary_folder("ext4") as root:
        made = Store(root, engine=engine)
        async with made.backend:
            stored = await made.store()
            made.path.rename(made.path.with_name("kept"))
            make(made.path)
            assert await made.backend.lookup([made.key]) == [False]
            assert await made.load() in NEVER_DONE | {Status.FAILED}
            assert await made.load() in NEVER_DONE | {Status.FAILED}
            assert await made.backend.lookup([made.key]) == [False]
            assert await made.store() == stored
            assert await made.load() is Status.DONE


async def test_a_corrupt_block_is_logged_once_with_its_key_and_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Store(tmp_path)
    async with made.backend:
        await made.store()
        flip_bit(made.path, 8 * 5000)
        with caplog.at_level(logging.WARNING):
            await made.load()
            await made.load()
        (record,) = [record for record in caplog.records if record.name.startswith("kvxfer")]
        assert made.key.hex() in record.getMessage()
        assert "checksum" in record.getMessage()


CHUNK = 4
DONE, MISSING, FAILED = Status.DONE, Status.MISSING, Status.FAILED


def one_page_chunks() -> BlockMemory:
    """Caches whose whole chunks are files of five pages."""
    return BlockMemory([[4096]], num_blocks=32, blocks_per_chunk=CHUNK)


@pytest.mark.parametrize("damage", ["cut off", "empty", "no block file"])
async def test_what_is_no_block_file_is_replaced(tmp_path: Path, damage: str) -> None:
    memory, keys = one_page_chunks(), hashed_keys(1)
    path = path_of(tmp_path, memory.namespace(), keys[0])
    async with open_store(tmp_path, memory.namespace()) as backend:
        await backend.wait_indexed()
        await store(backend, keys, memory.describe(0, range(4)))
        data = path.read_bytes()
        path.write_bytes(
            {"cut off": data[:-4096], "empty": b"", "no block file": b"?" * 8192}[damage]
        )
        (outcome,) = await store(backend, keys, memory.describe(0, range(4)), version=1)
        assert outcome.done
        target = memory.describe(0, range(8, 12))
        assert await load_verified(backend, keys, target, version=1) == [DONE]


def large_pages() -> BlockMemory:
    """Caches whose fragments are so large that files are read straight into them."""
    return BlockMemory([[64 << 10]], num_blocks=32, blocks_per_chunk=CHUNK)


@pytest.mark.parametrize("first", [0, 2])
async def test_of_a_part_asked_as_a_whole_no_memory_is_written(tmp_path: Path, first: int) -> None:
    memory, keys = large_pages(), hashed_keys(3)
    async with open_store(tmp_path, memory.namespace(), direct="off") as backend:
        await store(backend, keys[1:2], memory.describe(0, [4, 5], first_block_index=first))
        await store(backend, keys[2:], memory.describe(0, range(8, 12)))
        target = memory.describe(0, range(16, 28))
        before = read_payloads(target)
        outcomes = await backend.load(keys, target)
        assert [outcome.status for outcome in outcomes] == [MISSING, MISSING, DONE]
        assert read_payloads(target)[:2] == before[:2]


async def test_a_chunk_that_becomes_a_part_while_it_is_read_is_no_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, keys = large_pages(), hashed_keys(1)
    target = memory.describe(0, range(16, 20))
    namespace, disk = memory.namespace(), PosixFileIO()
    really_read = disk.read_named

    def replace_and_read(*args: Any) -> list[Result]:
        path.write_bytes(part)
        return really_read(*args)

    def read_and_remove(*args: Any) -> list[Result]:
        results = really_read(*args)
        path.unlink()
        return results

    async with open_store(tmp_path, namespace, direct="off", file_io=disk) as backend:
        path = path_of(tmp_path, namespace, keys[0])
        await store(backend, keys, memory.describe(0, [0, 1], first_block_index=2))
        part = path.read_bytes()
        await backend.delete(keys)
        await store(backend, keys, memory.describe(0, range(4)))
        whole = path.read_bytes()
        monkeypatch.setattr(disk, "read_named", replace_and_read)
        (outcome,) = await backend.load(keys, target)
        assert outcome.status is FAILED
        assert "replaced" in outcome.reason
        path.write_bytes(whole[:-1] + b"?")  # corrupt, and put away by another process meanwhile
        monkeypatch.setattr(disk, "read_named", read_and_remove)
        (outcome,) = await backend.load(keys, target)
        assert outcome.status is FAILED
        assert "removed" in outcome.reason


class Watched(FileBackend):
    """Backend that does something before the first lookup."""

    before_lookup: Callable[[], Awaitable[object]] | None = None

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        if self.before_lookup:
            before, self.before_lookup = self.before_lookup, None
            await before()
        return await super().lookup(keys)


async def test_a_part_that_another_process_is_storing_is_waited_for_and_replaced(
    tmp_path: Path,
) -> None:
    memory, keys = one_page_chunks(), hashed_keys(1)
    namespace = memory.namespace()
    async with (
        Watched(config(tmp_path), namespace) as ours,
        open_store(tmp_path, namespace) as theirs,
    ):
        await ours.wait_indexed()
        await theirs.wait_indexed()
        claim, ledger = contextlib.ExitStack(), Ledger(tmp_path)
        claim.callback(ledger.close)
        claim.enter_context(ledger.claimed(file_ids(namespace.fingerprint, keys)))

        async def let_theirs_store() -> None:
            claim.close()
            await store(theirs, keys, memory.describe(0, [8, 9]))

        ours.before_lookup = let_theirs_store
        assert [each.done for each in await store(ours, keys, memory.describe(0, range(4)))] == [
            True
        ]
        assert await load_verified(ours, keys, memory.describe(0, range(12, 16))) == [DONE]
