"""Disks without room for more bytes or more files, and names that cannot be written."""

import os
from collections.abc import Sequence
from pathlib import Path

from kvxfer.backends.file.breaker import MAX_ERRORS
from kvxfer.backends.file.file_io import IOVector, PosixFileIO, Result
from kvxfer.storage.backend import Status
from tests.backends.file_store import (
    hashed_keys,
    one_page_memory,
    open_store,
    path_of,
    store,
    until_scanned,
)

ONE_BY_ONE = {"engine": "posix", "write_threads": 1}
DONE, FAILED = Status.DONE, Status.FAILED


async def test_one_name_that_cannot_be_written_stops_no_other_store(tmp_path: Path) -> None:
    memory, keys = one_page_memory(), hashed_keys(2 + 2 * MAX_ERRORS)
    path_of(tmp_path, memory.namespace(), keys[0]).mkdir(parents=True)
    blocks = memory.describe(0, [0])
    async with open_store(tmp_path, memory.namespace()) as backend:
        await until_scanned(backend)
        for _ in range(2 * MAX_ERRORS):
            (outcome,) = await store(backend, keys[:1], blocks)
            assert outcome.status is FAILED
            assert "directory" in outcome.reason
        (outcome,) = await store(backend, keys[1:2], blocks)
        assert outcome.done
        for key in keys[2:]:
            outcomes = await store(backend, [keys[0], key], memory.describe(0, [0, 1]))
            assert [outcome.status for outcome in outcomes] == [FAILED, DONE]


async def test_a_call_that_wrote_some_blocks_is_no_failure_of_the_medium(tmp_path: Path) -> None:
    memory, keys = one_page_memory(), hashed_keys(4 * MAX_ERRORS)
    async with open_store(tmp_path, memory.namespace(), **ONE_BY_ONE) as backend:
        await until_scanned(backend)
        backend._files.file_io = FirstOnly()
        for first in range(0, len(keys), 2):
            chosen = keys[first : first + 2]
            outcomes = await store(backend, chosen, memory.describe(0, [0, 1]))
            assert [outcome.status for outcome in outcomes] == [DONE, FAILED]
            assert "Input/output error" in outcomes[1].reason


class FirstOnly(PosixFileIO):
    """What a disk with a few bad sectors does to every other file."""

    def __init__(self) -> None:
        self._num_written = 0

    def write(self, fds: Sequence[int], vectors: Sequence[IOVector]) -> list[Result]:
        results = super().write(fds, vectors)
        for index in range(len(results)):
            self._num_written += 1
            if self._num_written % 2 == 0:
                results[index] = OSError(5, os.strerror(5))
        return results
