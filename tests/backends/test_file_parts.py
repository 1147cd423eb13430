"""Files of a part of a chunk: which blocks they serve, and which stores replace them."""

import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from kvxfer.backends.file import FileBackend, file_ids
from kvxfer.backends.file.folders import Ledger
from kvxfer.backends.file.io import IOVector, NamedFile, PosixFileIO, Result
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import BlockKey
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import read_payloads
from tests.backends.file_store import (
    Failing,
    OtherEngine,
    bytes_on_disk,
    config,
    counted_bytes,
    fail_to_open,
    hashed_keys,
    load_verified,
    open_store,
    path_of,
    store,
    store_batch,
)

CHUNK = 4
DONE, MISSING, FAILED = Status.DONE, Status.MISSING, Status.FAILED


def large_pages() -> BlockMemory:
    """Caches whose fragments are so large that files are read straight into them."""
    return BlockMemory([[64 << 10]], num_blocks=32, blocks_per_chunk=CHUNK)


def one_page_chunks() -> BlockMemory:
    """Caches whose whole chunks are files of five pages."""
    return BlockMemory([[4096]], num_blocks=32, blocks_per_chunk=CHUNK)


class Watched(FileBackend):
    """Backend that does something before the first lookup."""

    before_lookup: Callable[[], Awaitable[object]] | None = None

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        if self.before_lookup:
            before, self.before_lookup = self.before_lookup, None
            await before()
        return await super().lookup(keys)


class Swapping(PosixFileIO):
    """I/O engine that calls a function between a look at files and their reading."""

    def __init__(self, swap: Callable[[], object]) -> None:
        self._swap = swap

    def read_named(
        self, files: Sequence[NamedFile], vectors: Sequence[IOVector], flags: int
    ) -> list[Result]:
        self._swap()
        return super().read_named(files, vectors, flags)


class Vanishing(PosixFileIO):
    """I/O engine that calls a function after files were read."""

    def __init__(self, swap: Callable[[], object]) -> None:
        self._swap = swap

    def read_named(
        self, files: Sequence[NamedFile], vectors: Sequence[IOVector], flags: int
    ) -> list[Result]:
        results = super().read_named(files, vectors, flags)
        self._swap()
        return results


async def test_a_part_that_is_replaced_is_counted_once(tmp_path: Path) -> None:
    memory, keys = one_page_chunks(), hashed_keys(2)
    async with open_store(tmp_path, memory.namespace(), capacity=2 * 5 * 4096) as backend:
        await backend.wait_indexed()
        await store(backend, keys, memory.describe(0, [0, 1, 2, 3], first_block_index=3))
        assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path) == (2 + 4) * 4096
        outcomes = await store(backend, keys, memory.describe(0, range(8)), version=1)
        assert all(outcome.done for outcome in outcomes)
        assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path) == 2 * 5 * 4096
        target = memory.describe(0, range(8, 16))
        assert await load_verified(backend, keys, target, version=1) == [DONE] * 2


async def test_a_part_of_another_process_is_replaced(tmp_path: Path) -> None:
    memory, keys = one_page_chunks(), hashed_keys(1)
    async with (
        open_store(tmp_path, memory.namespace()) as ours,
        open_store(tmp_path, memory.namespace()) as theirs,
    ):
        await ours.wait_indexed()
        await theirs.wait_indexed()
        whole = memory.describe(0, range(4))
        batch = store_batch(ours, keys, whole)
        batch.make_room()  # it is not there
        await store(theirs, keys, memory.describe(0, [8, 9]))
        assert [each.reason for each in batch.write(0, 1) if each] == [
            "another process is storing this block"
        ]
        assert [outcome.done for outcome in await store(ours, keys, whole)] == [True]
        assert await load_verified(ours, keys, memory.describe(0, range(12, 16))) == [DONE]


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


@pytest.mark.usefixtures("clock")
async def test_while_stores_are_paused_a_part_does_not_pass_for_the_whole(tmp_path: Path) -> None:
    memory, keys = one_page_chunks(), hashed_keys(2)
    disk = OtherEngine()
    async with open_store(tmp_path, memory.namespace(), file_io=disk) as backend:
        await store(backend, keys, memory.describe(0, range(6)))
        disk.engine = Failing()
        for key in hashed_keys(5, first=2):
            await store(backend, [key], memory.describe(0, range(4)))
        disk.engine = PosixFileIO()
        outcomes = await store(backend, keys, memory.describe(0, range(8)))
        assert [outcome.status for outcome in outcomes] == [DONE, FAILED]
        assert "paused" in outcomes[1].reason
        assert await load_verified(backend, keys, memory.describe(0, range(8, 14))) == [DONE] * 2


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


async def test_a_part_that_cannot_be_read_fails_the_store_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, keys = one_page_chunks(), hashed_keys(2)
    async with open_store(tmp_path, memory.namespace()) as backend:
        await store(backend, keys[:1], memory.describe(0, [0]))
        with monkeypatch.context() as patched:
            name = f"{keys[0].hex()}.safetensors"
            fail_to_open(patched, name, OSError(5, os.strerror(5)))
            outcomes = await store(backend, keys, memory.describe(0, range(8)))
        assert [outcome.status for outcome in outcomes] == [FAILED, DONE]
        assert "Input/output error" in outcomes[0].reason


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


async def test_a_chunk_that_becomes_a_part_while_it_is_read_is_no_miss(tmp_path: Path) -> None:
    memory, keys = large_pages(), hashed_keys(1)
    target = memory.describe(0, range(16, 20))
    namespace = memory.namespace()
    disk = OtherEngine()
    async with open_store(tmp_path, namespace, direct="off", file_io=disk) as backend:
        path = path_of(tmp_path, namespace, keys[0])
        await store(backend, keys, memory.describe(0, [0, 1], first_block_index=2))
        part = path.read_bytes()
        await backend.delete(keys)
        await store(backend, keys, memory.describe(0, range(4)))
        whole = path.read_bytes()
        disk.engine = Swapping(lambda: path.write_bytes(part))
        (outcome,) = await backend.load(keys, target)
        assert outcome.status is FAILED
        assert "replaced" in outcome.reason
        path.write_bytes(whole[:-1] + b"?")  # corrupt, and put away by another process meanwhile
        disk.engine = Vanishing(path.unlink)
        (outcome,) = await backend.load(keys, target)
        assert outcome.status is FAILED
        assert "removed" in outcome.reason
