"""A file store keeps its capacity and the free space, and evicts in the right order."""

import asyncio
import errno
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from kvxfer.backends.file import BlockTree, FileIndex, FoundBlock, Space, file_ids
from kvxfer.backends.file.folders import Ledger, NamespaceFolder
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.backend import DONE, Outcome, Status
from kvxfer.storage.eviction.policies import ARC, LRU, POLICIES, PolicyName
from kvxfer.storage.gauge import Gauge
from kvxfer.storage.keys import BlockKey
from kvxfer.testing import BlockMemory
from kvxfer.units import ByteSize
from tests.backends.file_store import (
    ENGINES,
    Recording,
    bytes_on_disk,
    counted_bytes,
    flip_bit,
    hashed_keys,
    load_verified,
    one_page_memory,
    open_store,
    path_of,
    store,
    store_batch,
    tmpfs,
)

FILE_BYTES = 8192
NAMESPACE = "0" * 32
MIB = 1 << 20
PAUSE_LIMIT_S = 15.0
NO_ROOM = Outcome(Status.FAILED, reason="no room, and nothing that can be evicted")


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


async def test_lru_evicts_what_was_used_the_longest_time_ago(tmp_path: Path) -> None:
    memory, keys = one_page_memory(), hashed_keys(6)
    async with open_store(tmp_path, memory.namespace(), capacity=4 * FILE_BYTES) as backend:
        await backend.wait_indexed()
        for key in keys[:4]:
            await store(backend, [key], memory.describe(0, [0]))
        await load_verified(backend, keys[:1], memory.describe(0, [1]))
        await store(backend, keys[4:5], memory.describe(0, [0]))
        assert await backend.lookup(keys) == [True, False, True, True, True, False]
        await store(backend, keys[2:3], memory.describe(0, [0]))  # present: a use
        await store(backend, keys[5:], memory.describe(0, [0]))
        assert await backend.lookup(keys) == [True, False, True, False, True, True]


@pytest.mark.parametrize("order", [(0, 2), (2, 0)])
@pytest.mark.parametrize("eviction", ["lru", "arc"])
async def test_the_leading_blocks_get_the_room_whichever_share_is_first(
    tmp_path: Path, eviction: str, order: tuple[int, int]
) -> None:
    memory, keys = one_page_memory(), hashed_keys(4)
    async with open_store(
        tmp_path, memory.namespace(), capacity=2 * FILE_BYTES, eviction=eviction
    ) as backend:
        await backend.wait_indexed()
        batch = store_batch(backend, keys, memory.describe(0, range(4)))
        expected = {0: [DONE] * 2, 2: [NO_ROOM] * 2}
        for start in order:
            assert batch.write(start, start + 2) == expected[start]
        assert await backend.lookup(keys) == [True, True, False, False]
        assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path) == 2 * FILE_BYTES
        batch = store_batch(backend, keys[2:], memory.describe(0, range(2)))
        assert batch.write(0, 2) == [DONE] * 2, "a batch of its own may evict them"
        assert await backend.lookup(keys) == [False, False, True, True]


async def test_room_for_shares_that_never_begin_is_given_back(tmp_path: Path) -> None:
    memory, keys = one_page_memory(), hashed_keys(4)
    async with open_store(tmp_path, memory.namespace(), capacity=4 * FILE_BYTES) as backend:
        await backend.wait_indexed()
        batch = store_batch(backend, keys, memory.describe(0, range(4)))
        assert batch.write(0, 1) == [DONE]
        assert counted_bytes(tmp_path) == 4 * FILE_BYTES
        batch.give_back()
        with closing(Ledger(tmp_path)) as another:
            assert another.reserved_by_others() == 0
        assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path) == FILE_BYTES


async def test_arc_keeps_what_is_used_again_through_a_long_scan(tmp_path: Path) -> None:
    memory, keys = one_page_memory(), hashed_keys(60)
    async with open_store(
        tmp_path, memory.namespace(), capacity=8 * FILE_BYTES, eviction="arc"
    ) as backend:
        await backend.wait_indexed()
        await store(backend, keys[:3], memory.describe(0, range(3)))
        await load_verified(backend, keys[:3], memory.describe(0, range(8, 11)))
        for key in keys[3:]:
            await store(backend, [key], memory.describe(0, [0]))
        assert await backend.lookup(keys[:3]) == [True] * 3
        assert bytes_on_disk(tmp_path) == 8 * FILE_BYTES


@pytest.mark.parametrize("eviction", ["lru", "arc"])
async def test_a_batch_never_evicts_its_own_blocks(tmp_path: Path, eviction: str) -> None:
    memory, keys = one_page_memory(), hashed_keys(6)
    async with open_store(
        tmp_path, memory.namespace(), capacity=4 * FILE_BYTES, eviction=eviction
    ) as backend:
        await backend.wait_indexed()
        await store(backend, keys[:3], memory.describe(0, range(3)))
        outcomes = await store(backend, [*keys[:2], *keys[3:]], memory.describe(0, range(5)))
        done = [outcome.done for outcome in outcomes]
        assert done == [True, True, True, True, False]
        assert await backend.lookup(keys) == [True, True, False, True, True, False]


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


def test_batches_at_one_time_keep_the_free_space_floor_together() -> None:
    keys = hashed_keys(32)
    floor = 3 * MIB
    with tmpfs(8 * MIB) as folder:
        space = make_space(folder, num_files=1 << 20, min_free_bytes=floor)
        fitting = sum(space.reserve([key], [(256 << 10) + 4096]) for key in keys)
        assert 0 < fitting <= 5 * MIB // (260 << 10)


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


async def test_arc_copes_with_more_blocks_than_it_was_made_for(tmp_path: Path) -> None:
    memory = BlockMemory([[1 << 20], [64]], num_blocks=8)
    small = hashed_keys(400, group=1)
    capacity = ByteSize(256 * FILE_BYTES)  # two of the large ones
    async with open_store(
        tmp_path, memory.namespace(), capacity=capacity, eviction="arc"
    ) as backend:
        for start in range(0, 400, 8):
            batch = small[start : start + 8]
            outcomes = await store(backend, batch, memory.describe(1, range(8)))
            assert all(outcome.done for outcome in outcomes)
            await load_verified(backend, batch[:2], memory.describe(1, [0, 1]))
        assert bytes_on_disk(tmp_path) == capacity


async def test_foreign_files_in_the_tree_are_left_alone_and_harm_nobody(tmp_path: Path) -> None:
    memory, keys = one_page_memory(), hashed_keys(8)
    fingerprint = memory.namespace().fingerprint
    folder = tmp_path / fingerprint / "ab"
    folder.mkdir(parents=True, mode=0o700)
    (tmp_path / ("f" * 32)).symlink_to("/etc")
    (tmp_path / "README").write_text("hello")
    foreign = [
        f"{'ab' * 121}.safetensors",
        "ab cd.safetensors",
        "ABCDEF0123.safetensors",
        "abc.safetensors",
        ".safetensors",
        f"{'cd' * 12}.safetensors",  # in the wrong folder
        "notes.txt",
    ]
    for name in foreign:
        (folder / name).write_text("mine")
    capacity = ByteSize(5 * FILE_BYTES)
    async with open_store(tmp_path, memory.namespace(), capacity=capacity) as backend:
        await backend.wait_indexed()
        for key in keys:
            assert all(o.done for o in await store(backend, [key], memory.describe(0, [0])))
        await backend.purge()
    assert {path.name for path in folder.iterdir()} >= set(foreign)


def test_a_capacity_below_one_block_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="8192 bytes or more"):
        open_store(tmp_path, one_page_memory().namespace(), capacity=ByteSize(8191))


def make_small_files(folder: Path, keys: list[BlockKey]) -> None:
    for number in range(256):
        (folder / f"{number:02x}").mkdir(parents=True, mode=0o700)
    for key in keys:
        path = folder / key.hex()[:2] / f"{key.hex()}.safetensors"
        path.write_bytes(b"?")


async def test_lookups_answer_while_an_index_is_rebuilt_and_it_finds_every_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, keys = BlockMemory([[64]], num_blocks=4), hashed_keys(20_000)
    namespace = memory.namespace()
    await asyncio.to_thread(make_small_files, tmp_path / namespace.fingerprint, keys)
    half_way, go_on = threading.Event(), threading.Event()
    walk = BlockTree.blocks

    def walk_with_a_pause(tree: BlockTree, fingerprint: str = "") -> Iterator[FoundBlock]:
        for number, block in enumerate(walk(tree, fingerprint)):
            if number == len(keys) // 2:
                half_way.set()
                go_on.wait(PAUSE_LIMIT_S)
            yield block

    monkeypatch.setattr(BlockTree, "blocks", walk_with_a_pause)
    capacity = ByteSize(len(keys) * 4096)
    async with open_store(tmp_path, namespace, capacity=capacity) as backend:
        indexed = asyncio.create_task(backend.wait_indexed())
        try:
            assert await asyncio.to_thread(half_way.wait, PAUSE_LIMIT_S)
            assert await backend.lookup(keys) == [True] * len(keys)
            assert not indexed.done()
        finally:
            go_on.set()
        await indexed
        assert counted_bytes(tmp_path) == capacity


@pytest.mark.parametrize(
    ("fragment_bytes", "expected"), [(4096, [8] * 5), (MIB, [32, 8])], ids=["gathered", "zero-copy"]
)
async def test_a_round_that_is_gathered_takes_8_mib_of_scratch_and_any_other_32_of_files(
    tmp_path: Path, fragment_bytes: int, expected: list[int]
) -> None:
    memory = BlockMemory([[fragment_bytes] * (MIB // fragment_bytes)], num_blocks=80)
    keys, fields = hashed_keys(40), {"direct": "off", "read_threads": 1, "write_threads": 1}
    engine = Recording()
    async with open_store(tmp_path, memory.namespace(), file_io=engine, **fields) as backend:
        for move, blocks in ((backend.store, range(40)), (backend.load, range(40, 80))):
            assert all(each.done for each in await move(keys, memory.describe(0, blocks)))
            assert engine.num_files == expected
            engine.num_files.clear()


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
    space.scan()
    return space


def test_a_walk_makes_every_block_a_candidate_for_eviction(tmp_path: Path) -> None:
    policy, keys = LRU(2000), hashed_keys(2000)
    make_small_files(tmp_path / NAMESPACE, keys)
    make_space(tmp_path, num_files=len(keys), policy=policy)
    assert {policy.evict() for _ in keys} == set(file_ids(NAMESPACE, keys))
    assert len(policy) == 0


def write_file(root: Path, key: BlockKey) -> None:
    path = root / NAMESPACE / key.hex()[:2] / f"{key.hex()}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_a_walk_does_not_forget_what_is_reserved(tmp_path: Path, eviction: PolicyName) -> None:
    space, keys = make_space(tmp_path, num_files=5, eviction=eviction), hashed_keys(9)
    assert space.reserve(keys[:3], [FILE_BYTES] * 3) == 3
    space.scan()
    assert space.reserve(keys[3:], [FILE_BYTES] * 6) == 2
    space.settle(keys[:5], stored=[False] * 5)
    assert space.reserve(keys[3:], [FILE_BYTES] * 6) == 5


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_a_block_deleted_while_it_is_stored_is_forgotten(
    tmp_path: Path, eviction: PolicyName
) -> None:
    space, keys = make_space(tmp_path, num_files=3, eviction=eviction), hashed_keys(6)
    assert space.reserve(keys[:3], [FILE_BYTES] * 3) == 3
    for key in keys[:3]:
        write_file(tmp_path, key)
    assert space.remove(keys[:2]) == [True, True]
    with (tmp_path / "replaced").open("w") as file:  # by another one, which is not corrupt
        space.quarantine(keys[2], file.fileno())
    space.settle(keys[:3], stored=[True] * 3)
    assert space.reserve(keys[3:], [FILE_BYTES] * 3) == 3
    space.settle(keys[3:], stored=[False] * 3)
    assert space.reserve(keys[:3], [FILE_BYTES] * 3) == 3


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
    space.scan()
    assert space.reserve(keys[2:5], [FILE_BYTES] * 3) == 3


class Damaged(NamespaceFolder):
    """Folder on a damaged disk: no file can be removed."""

    def remove(self, key: BlockKey) -> bool:
        raise OSError(errno.EIO, "Input/output error", key.hex())


class Interrupted(BlockTree):
    """Tree in which something happens at the end of each walk."""

    then: Callable[[], object] = bool

    def blocks(self, fingerprint: str = "", prefix: bytes = b"") -> Iterator[FoundBlock]:
        yield from super().blocks(fingerprint, prefix)
        self.then()


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_a_file_that_cannot_be_evicted_during_a_walk_is_counted(
    tmp_path: Path, eviction: PolicyName
) -> None:
    keys, tree, ledger = hashed_keys(3), Interrupted(tmp_path), Ledger(tmp_path)
    make_small_files(tmp_path / NAMESPACE, keys[:2])
    space = Space(
        tree,
        Damaged(tmp_path, NAMESPACE),
        ledger,
        POLICIES[eviction](2),
        capacity_bytes=bytes_on_disk(tmp_path),
        min_free_bytes=0,
        rescan_factor=math.inf,
    )
    space.scan()
    fitting: list[int] = []
    tree.then = lambda: fitting.append(space.reserve(keys[2:], [FILE_BYTES]))
    space.scan()
    with ledger.locked():
        assert ledger.used == bytes_on_disk(tmp_path)
    assert fitting == [0]


def test_a_walk_is_learned_in_steps_between_which_others_use_the_index() -> None:
    file_index, keys = FileIndex(LRU(5000)), hashed_keys(5000)
    files = file_ids(NAMESPACE, keys)
    file_index.admit(files[:1], [FILE_BYTES])
    file_index.settle(files[:1], stored=[True])
    file_index.begin_walk()
    walk = [FoundBlock(NAMESPACE, k.hex()[:2], k, FILE_BYTES, float(i)) for i, k in enumerate(keys)]
    num_known, evicted = [1], set[BlockKey]()
    for _ in file_index.learn_walk(walk):
        num_known.append(int(file_index.gauges()[Gauge.STORED_BLOCKS]))
        victim = file_index.choose_victim()
        assert victim is not None
        evicted.add(victim.key)
    assert max(b - a for a, b in pairwise(num_known)) <= 500
    total, reserved = file_index.end_walk()
    assert (total, reserved) == ((len(keys) - len(evicted)) * FILE_BYTES, 0)
    while (victim := file_index.choose_victim()) is not None:
        assert victim.key not in evicted
        evicted.add(victim.key)
    assert evicted == set(keys)


def claims_in(root: Path) -> list[Path]:
    return list(root.glob("*.claim"))


async def test_a_store_without_room_does_not_wait_for_a_long_walk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory, keys, opened = one_page_memory(), hashed_keys(4), threading.Event()
    fields = {"capacity": 2 * FILE_BYTES, "close_timeout_s": 0.01}
    async with open_store(tmp_path, memory.namespace(), **fields) as backend:
        await store(backend, keys[:2], memory.describe(0, [0, 1]))
    really_walk, really_close = BlockTree.blocks, Ledger.close
    closed = threading.Event()

    def walk(tree: BlockTree, fingerprint: str = "") -> Iterator[FoundBlock]:
        assert opened.wait(PAUSE_LIMIT_S)
        yield from really_walk(tree, fingerprint)

    def close(ledger: Ledger) -> None:
        really_close(ledger)
        closed.set()

    monkeypatch.setattr(BlockTree, "blocks", walk)
    monkeypatch.setattr(Ledger, "close", close)
    try:
        async with open_store(tmp_path, memory.namespace(), **fields) as backend:
            for key in keys[2:]:
                (outcome,) = await store(backend, [key], memory.describe(0, [2]))
                assert outcome.reason == "no room before the walk through the folders has ended"
            assert await backend.lookup(keys) == [True, True, False, False]
        assert not closed.is_set(), "a walk uses it"
        assert "stopped" not in caplog.text, "no failure of the disk"
    finally:
        opened.set()
    assert await asyncio.to_thread(closed.wait, PAUSE_LIMIT_S)
    assert await asyncio.to_thread(claims_in, tmp_path) == []


@pytest.mark.parametrize("policy", [LRU, ARC])
def test_what_happens_during_a_walk_is_not_counted_twice(policy: type[LRU | ARC]) -> None:
    file_index, keys = FileIndex(policy(20)), hashed_keys(8)
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
    walk = [found(index) for index in (0, 1, 2, 3, 4)]
    assert all(file_index.learn_walk([*walk, found(7), found(1, away=True)]))
    total, reserved = file_index.end_walk()
    # In quarantine: 1. Stored: 3 and 4. On their way: 2 and 6. Another process's: 7.
    assert total == 6 * FILE_BYTES
    assert reserved == 3 * FILE_BYTES
    file_index.settle([files[2], files[6]], stored=[True, True])
    victims = []
    while (victim := file_index.choose_victim()) is not None:
        victims.append(victim)
    assert victims[0].quarantined
    assert {keys.index(victim.key) for victim in victims} == {1, 2, 3, 4, 6, 7}
