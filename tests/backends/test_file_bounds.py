"""A file store keeps its capacity and the free space, and evicts in the right order."""

import os
import random
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from kvxfer.backends.file import BlockTree, FileIndex, FoundBlock, Space, file_ids
from kvxfer.backends.file.folders import Ledger, NamespaceFolder
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.backend import Status
from kvxfer.storage.eviction.policies import ARC, LRU, POLICIES, PolicyName
from kvxfer.storage.keys import BlockKey
from kvxfer.testing import BlockMemory
from kvxfer.units import ByteSize
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
    store,
    tmpfs,
)

FILE_BYTES = 8192
MIB = 1 << 20


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("eviction", ["lru", "arc"])
async def test_whatever_happens_the_capacity_is_kept_and_the_count_is_right(
    tmp_path: Path, eviction: str, engine: str
) -> None:
    rng = random.Random(11)
    memory = BlockMemory([[30_000], [64], [5000]], num_blocks=16)
    capacity = 200_000
    keys = [hashed_keys(24, group=group) for group in range(3)]
    fields = {"capacity": ByteSize(capacity), "eviction": eviction, "engine": engine}
    async with (
        open_store(tmp_path, memory.namespace(), **fields) as ours,
        open_store(tmp_path, memory.namespace(revision="other"), **fields) as theirs,
    ):
        await ours.wait_indexed()
        await theirs.wait_indexed()
        for _ in range(60):
            backend = rng.choice([ours, theirs])
            namespace = memory.namespace(revision="" if backend is ours else "other")
            group = rng.randrange(3)
            chosen = rng.sample(keys[group], rng.randint(1, 4))
            action = rng.random()
            if action < 0.6:
                outcomes = await store(backend, chosen, memory.describe(group, range(len(chosen))))
                assert all(outcome.done for outcome in outcomes)
            elif action < 0.8:
                target = memory.describe(group, range(len(chosen)))
                await load_verified(backend, chosen, target)
            elif action < 0.9:
                await backend.delete(chosen)
            else:
                path = path_of(tmp_path, namespace, chosen[0])
                if path.exists():
                    flip_bit(path, 8 * 4100)
                    target = memory.describe(group, [0])
                    assert await load_verified(backend, chosen[:1], target) == [Status.CORRUPT]
            assert bytes_on_disk(tmp_path) <= capacity
            assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path)


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


def test_a_capacity_below_one_block_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="8192 bytes or more"):
        open_store(tmp_path, one_page_memory().namespace(), capacity=ByteSize(8191))


NAMESPACE = "0" * 32


@pytest.mark.parametrize("policy", [LRU, ARC])
def test_what_happens_during_a_walk_is_not_counted_twice(policy: type[LRU | ARC]) -> None:
    file_index, keys = FileIndex(policy(20)), hashed_keys(10)
    files = file_ids(NAMESPACE, keys)

    def found(index: int, *, away: bool = False) -> FoundBlock:
        folder = "quarantine" if away else keys[index].hex()[:2]
        return FoundBlock(NAMESPACE, folder, keys[index], FILE_BYTES, float(index))

    for file in files[:5]:
        file_index.admit([file], [FILE_BYTES])
    file_index.settle(files[:4], stored=[True] * 4)  # the fifth one is on its way
    file_index.begin_walk()
    file_index.admit([files[5]], [FILE_BYTES])
    file_index.admit([files[6]], [FILE_BYTES])
    file_index.settle(files[4:6], stored=[True, False])
    file_index.remove(files[0])
    file_index.quarantine(files[1], FILE_BYTES)
    file_index.remove(files[2])  # found before, and now replaced
    file_index.admit(files[2:3], [FILE_BYTES])
    file_index.admit(files[8:], [FILE_BYTES] * 2)
    file_index.settle(files[8:9], stored=[True])  # behind the walk
    walk = [found(index) for index in (0, 1, 2, 3, 4, 6, 7, 9)]
    assert all(file_index.learn_walk([*walk, found(1, away=True)]))
    file_index.remove(files[9])  # found before
    # In quarantine: 1. Stored: 3, 4 and 8. On their way: 2, 6 and 9. Another process's: 7, and
    # perhaps the one that was found in the place of 6.
    assert file_index.end_walk() == 9 * FILE_BYTES
    file_index.settle([files[2], files[6], files[9]], stored=[True] * 3)
    victims = []
    while (victim := file_index.choose_victim()) is not None:
        victims.append(victim)
    assert victims[0].quarantined
    assert {keys.index(victim.key) for victim in victims} == {1, 2, 3, 4, 6, 7, 8}


def make_space(
    root: Path,
    *,
    num_files: int,
    eviction: PolicyName = "lru",
    min_free_bytes: int = 0,
    folder: NamespaceFolder | None = None,
    policy: LRU | None = None,
) -> Space:
    space = Space(
        BlockTree(root),
        folder or NamespaceFolder(root, NAMESPACE),
        Ledger(root),
        POLICIES[eviction](num_files) if policy is None else policy,
        capacity_bytes=num_files * FILE_BYTES,
        min_free_bytes=min_free_bytes,
        rescan_factor=0,
    )
    space.begin_scan().result()
    return space


class Stubborn(NamespaceFolder):
    """Folder from which nothing can be removed, until that is allowed."""

    allowed = False

    def sizes(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        return [FILE_BYTES] * len(keys)

    def remove(self, key: BlockKey) -> bool:
        if not self.allowed:
            raise PermissionError(13, "Permission denied")
        return super().remove(key)


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_an_eviction_that_fails_leaves_no_reservation(tmp_path: Path, eviction: PolicyName) -> None:
    folder, keys = Stubborn(tmp_path, NAMESPACE), hashed_keys(6)
    space = make_space(tmp_path, num_files=3, eviction=eviction, folder=folder)
    assert space.reserve(keys[:2], [FILE_BYTES] * 2) == 2
    space.settle(keys[:2], stored=[True] * 2)
    with pytest.raises(PermissionError):
        space.reserve(keys[2:5], [FILE_BYTES] * 3, spare=keys[:1])
    folder.allowed = True
    with closing(Ledger(tmp_path)) as another:
        assert another.reserved_by_others() == 0
    space.begin_scan().result()
    assert space.reserve(keys[2:5], [FILE_BYTES] * 3) == 3
