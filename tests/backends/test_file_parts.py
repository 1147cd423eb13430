"""Files that hold a part of a chunk: what they are loaded as, and what replaces them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvxfer.backends.file.file_io import IOVector, NamedFile, PosixFileIO, Result
from kvxfer.storage.backend import Status
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import read_payloads
from tests.backends.file_store import (
    hashed_keys,
    open_store,
    path_of,
    store,
)

CHUNK = 4
DONE, MISSING, FAILED = Status.DONE, Status.MISSING, Status.FAILED


def large_pages() -> BlockMemory:
    """Caches whose fragments are so large that files are read straight into them."""
    return BlockMemory([[64 << 10]], num_blocks=32, blocks_per_chunk=CHUNK)


class Swapping(PosixFileIO):
    """Lets something happen to the files between a look at them and their reading."""

    def __init__(self, swap: Callable[[], object]) -> None:
        self._swap = swap

    def read_named(
        self, files: Sequence[NamedFile], vectors: Sequence[IOVector], flags: int
    ) -> list[Result]:
        self._swap()
        return super().read_named(files, vectors, flags)


class Vanishing(PosixFileIO):
    """Lets something happen to the files after they were read."""

    def __init__(self, swap: Callable[[], object]) -> None:
        self._swap = swap

    def read_named(
        self, files: Sequence[NamedFile], vectors: Sequence[IOVector], flags: int
    ) -> list[Result]:
        results = super().read_named(files, vectors, flags)
        self._swap()
        return results


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
    async with open_store(tmp_path, namespace, direct="off", engine="posix") as backend:
        path = path_of(tmp_path, namespace, keys[0])
        await store(backend, keys, memory.describe(0, [0, 1], first_block_index=2))
        part = path.read_bytes()
        await backend.delete(keys)
        await store(backend, keys, memory.describe(0, range(4)))
        whole = path.read_bytes()
        backend._files.file_io = Swapping(lambda: path.write_bytes(part))
        (outcome,) = await backend.load(keys, target)
        assert outcome.status is FAILED
        assert "replaced" in outcome.reason
        path.write_bytes(whole[:-1] + b"?")  # corrupt, and put away by another process meanwhile
        backend._files.file_io = Vanishing(path.unlink)
        (outcome,) = await backend.load(keys, target)
        assert outcome.status is FAILED
        assert "removed" in outcome.reason
