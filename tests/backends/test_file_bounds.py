"""A file store keeps its capacity and the free space, and evicts in the right order."""

import os
import time
from pathlib import Path

import pytest

from kvxfer.storage.backend import Status
from kvxfer.testing import BlockMemory
from kvxfer.units import ByteSize
from tests.backends.file_store import (
    bytes_on_disk,
    flip_bit,
    hashed_keys,
    load_verified,
    one_page_memory,
    open_store,
    path_of,
    store,
    tmpfs,
)

FILE_BYTES = 8192
MIB = 1 << 20


@pytest.mark.parametrize("eviction", ["lru", "arc"])
async def test_a_store_opened_again_evicts_the_oldest_first(tmp_path: Path, eviction: str) -> None:
    memory, keys = one_page_memory(), hashed_keys(7)
    fields = {"capacity": ByteSize(4 * FILE_BYTES), "eviction": eviction}
    async with open_store(tmp_path, memory.namespace(), **fields) as backend:
        await store(backend, keys[:4], memory.describe(0, range(4)))
    ages = [200, 400, 100, 300]
    for key, age in zip(keys, ages, strict=False):
        os.utime(path_of(tmp_path, memory.namespace(), key), (time.time() - age,) * 2)
    async with open_store(tmp_path, memory.namespace(), **fields) as backend:
        await backend.wait_indexed()
        for number, key in enumerate(keys[4:], 1):
            await store(backend, [key], memory.describe(0, [0]))
            there = await backend.lookup(keys[:4])
            gone = sorted((age for age, found in zip(ages, there, strict=True) if not found))
            assert gone == sorted(ages)[-number:]


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
            (folder / "filler").write_bytes(bytes(5 * MIB // 2))  # somebody else takes the room
            (outcome,) = await store(backend, keys[:1], memory.describe(0, [0]))
            assert outcome.done
            found = os.statvfs(folder)
            assert found.f_bavail * found.f_frsize >= floor
            assert 0 < sum(await backend.lookup(keys)) < num_before
        async with open_store(folder, memory.namespace(), min_free=ByteSize(8 * MIB)) as backend:
            (outcome,) = await store(backend, keys[1:2], memory.describe(0, [0]))
            assert "no room" in outcome.reason
            assert outcome.status is Status.FAILED


async def test_files_of_a_dead_namespace_make_room(tmp_path: Path) -> None:
    memory, keys = one_page_memory(), hashed_keys(6)
    capacity = ByteSize(4 * FILE_BYTES)
    dead = memory.namespace(model="dead")
    async with open_store(tmp_path, dead, capacity=capacity) as backend:
        await store(backend, keys[:4], memory.describe(0, range(4)))
        flip_bit(path_of(tmp_path, dead, keys[0]), 8 * 4100)
        await load_verified(backend, keys[:1], memory.describe(0, [5]))
    async with open_store(tmp_path, memory.namespace(), capacity=capacity) as backend:
        for key in keys:
            assert all(o.done for o in await store(backend, [key], memory.describe(0, [0])))
            assert bytes_on_disk(tmp_path) <= capacity
        assert sum(await backend.lookup(keys)) == 4
        assert not list(tmp_path.glob(f"{dead.fingerprint}/*/*.safetensors"))  # noqa: ASYNC240 - few
