"""A file store keeps its capacity and the free space, and damage to their count costs no block."""

import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.backends.file import read_count
from kvxfer.errors import BackendUnavailableError
from kvxfer.storage.backend import Status
from kvxfer.testing import BlockMemory
from kvxfer.units import ByteSize
from tests.backends.file_store import (
    bytes_on_disk,
    counted_bytes,
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


NUM_STORED = 30
MOST = (1 << 64) - 1
OLD_FORMATS = [
    struct.pack("<8sQQ", b"kvxfer01", 0, MOST),
    struct.pack("<8sQQ", b"kvxfer01", MOST, 0),
    struct.pack("<QI", MOST, 3) + b"\xc1\xc1\xc1",
]


def damages(whole: bytes) -> list[bytes]:
    """Contents of a damaged count: bits flipped, cut off, noise, and other formats."""
    rng, num_bits = random.Random(1), 8 * len(whole)
    number = int.from_bytes(whole, "little")
    return [
        *(
            (number ^ 1 << bit).to_bytes(len(whole), "little")
            for bit in range(0, num_bits, 1 + num_bits // 25)
        ),
        *(whole[:length] for length in range(0, len(whole), 1 + len(whole) // 6)),
        *(rng.randbytes(rng.randrange(1, 40 << 10)) for _ in range(5)),
        *OLD_FORMATS,
        whole.ljust(1 << 20, b"\0"),
    ]


@pytest.mark.parametrize("name", ["usage.ledger", "*.claim"])
async def test_no_damage_to_the_count_or_to_claims_evicts_or_raises(
    tmp_path: Path, name: str
) -> None:
    memory = one_page_memory()
    key, *keys = hashed_keys(NUM_STORED + 1)
    async with (
        open_store(tmp_path, memory.namespace()),
        open_store(tmp_path, memory.namespace()) as backend,
    ):
        await backend.wait_indexed()
        paths = list(tmp_path.glob(name))  # noqa: ASYNC240 - few
        outcomes = await store(backend, keys, memory.describe(0, range(NUM_STORED)))
        assert all(outcome.done for outcome in outcomes)
        for damage in damages(paths[0].read_bytes()):
            for path in paths:
                path.write_bytes(damage)  # in place: processes keep the same file open
            (outcome,) = await store(backend, [key], memory.describe(0, [40]))
            assert outcome.done, outcome
            assert await backend.lookup([key, *keys]) == [True] * (NUM_STORED + 1)
            assert await load_verified(backend, [key], memory.describe(0, [41])) == [Status.DONE]
            assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path)
            await backend.delete([key])
    async with open_store(tmp_path, memory.namespace()) as backend:  # after a restart
        assert await backend.lookup(keys) == [True] * NUM_STORED


def make_link(path: Path) -> None:
    (path.parent / "theirs").write_bytes(b"precious")
    path.symlink_to("theirs")


def make_hard_link(path: Path) -> None:
    (path.parent / "theirs").write_bytes(b"precious")
    path.hardlink_to(path.parent / "theirs")


@pytest.mark.parametrize("make", [make_link, make_hard_link, os.mkfifo, os.mkdir])
def test_a_count_that_is_no_file_of_its_own_is_refused_and_left_alone(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "usage.ledger"
    make(path)
    memory = BlockMemory([[4096]], num_blocks=1)
    with pytest.raises(BackendUnavailableError, match=r"usage\.ledger .* regular file of one name"):
        open_store(tmp_path, memory.namespace())
    assert path.is_symlink() or path.is_dir() or path.is_fifo() or path.read_bytes() == b"precious"
    if (tmp_path / "theirs").exists():
        assert (tmp_path / "theirs").read_bytes() == b"precious"


async def test_the_count_can_be_read_without_a_change(tmp_path: Path) -> None:
    memory, root = one_page_memory(4), tmp_path / "store"
    assert read_count(root) is None
    async with open_store(root, memory.namespace()) as backend:
        await store(backend, hashed_keys(4), memory.describe(0, list(range(4))))
    names = sorted(path.name for path in root.iterdir())
    assert read_count(root) == counted_bytes(root) == bytes_on_disk(root) > 0
    assert sorted(path.name for path in root.iterdir()) == names
    flip_bit(root / "usage.ledger", 9)
    assert read_count(root) is None
