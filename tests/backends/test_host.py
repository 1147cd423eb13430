"""The host backend keeps every promise of `Backend`; its slots, and memory that processes share."""

import asyncio
import contextlib
import errno
import inspect
import multiprocessing
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import AsyncMock, Mock, patch

import numpy as np
import pytest
import torch

from kvxfer import Backend, BlockKey, Namespace, Outcome, Status, make_block_key, runtime
from kvxfer.backends.host import (
    HostBackend,
    HostConfig,
    HostPool,
    Integrity,
    MemoryIntegrity,
    PoolShape,
)
from kvxfer.backends.host import backend as host_backend
from kvxfer.backends.host import memory as memory_module
from kvxfer.backends.host.available_memory import AvailableMemory
from kvxfer.backends.host.held_tiers import HeldTiers
from kvxfer.backends.host.memory import SHARED_MEMORY, SharedSegment
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.errors import (
    BackendUnavailableError,
    CapacityError,
    ClosedError,
    InvalidArgumentError,
    NamespaceMismatchError,
)
from kvxfer.storage.backend import DONE, MISSING, PARTIAL
from kvxfer.storage.lending import BlockParts
from kvxfer.storage.staging_memory import ALIGNMENT_BYTES, aligned
from kvxfer.testing import BackendStateMachine, BackendTests, BlockMemory
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from kvxfer.units import ByteSize
from tests.backends.file_store import mounted
from tests.backends.host_blocks import flip
from tests.backends.processes import start
from tests.examples import examples

CAPACITY = ByteSize(1 << 20)
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HAS_HUGE_PAGES = HUGE_PAGES.exists() and "[never]" not in HUGE_PAGES.read_text()


def capacity_for(namespace: Namespace, num_blocks: int) -> ByteSize:
    """Compute a capacity in which exactly `num_blocks` chunks of the largest group fit."""
    shape = PoolShape(num_blocks, num_parts=1, part_size_bytes=aligned(max(namespace.chunk_sizes)))
    return ByteSize(shape.num_bytes + ALIGNMENT_BYTES)


class TestHostBackend(BackendTests):
    max_blocks = 5
    more: ClassVar[dict[str, Any]] = {}

    async def make_backend(self, namespace: Namespace) -> Backend:
        return HostBackend(HostConfig(capacity=capacity_for(namespace, 64), **self.more), namespace)

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        return HostBackend(HostConfig(capacity=capacity_for(namespace, 5), **self.more), namespace)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        """Damage the tag: only `full` integrity notices other changes in memory."""
        assert isinstance(backend, HostBackend)
        backend.pool._tags["stop"][backend._index.slot_of(key)] = 1 << 40


class TestHostBackendFull(TestHostBackend):
    more: ClassVar[dict[str, Any]] = {"integrity": MemoryIntegrity.FULL, "eviction": "arc"}

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        assert isinstance(backend, HostBackend)
        flip(backend, key, at=0)


class HostStateMachine(BackendStateMachine):
    async def make_backend(self, namespace: Namespace) -> Backend:
        return HostBackend(HostConfig(capacity=capacity_for(namespace, 12)), namespace)


class BoundedHostStateMachine(BackendStateMachine):
    bounded = True

    async def make_backend(self, namespace: Namespace) -> Backend:
        capacity = capacity_for(namespace, 3)
        return HostBackend(HostConfig(capacity=capacity, eviction="arc"), namespace)


TestHostStateMachine = HostStateMachine.TestCase
TestBoundedHostStateMachine = BoundedHostStateMachine.TestCase
# Every example opens a backend, with its threads and its shared memory.
TestHostStateMachine.settings = examples(15, steps=30)
TestBoundedHostStateMachine.settings = examples(15, steps=30)


async def store_one(memory: BlockMemory, backend: HostBackend) -> tuple[BlockKey, bytes]:
    key = make_block_key(b"block", 0)
    blocks = memory.describe(0, [3])
    payload = make_payload(key, memory.chunk_size_bytes(0))
    write_payloads(blocks, [payload])
    assert [outcome.done for outcome in await backend.store([key], blocks)] == [True]
    return key, payload


@pytest.mark.parametrize("integrity", [MemoryIntegrity.FENCED, Integrity.FAST])
def test_memory_that_others_write_is_verified(integrity: Any) -> None:
    shared = HostConfig(capacity=ByteSize(1 << 20), shared=True, integrity=integrity)
    assert shared.integrity is MemoryIntegrity.FULL
    assert HostConfig(capacity=ByteSize(1 << 20)).integrity is MemoryIntegrity.FENCED


@pytest.mark.parametrize("start", [-512, -1, 2**63 - 1, -(2**63)])
async def test_a_block_that_begins_outside_its_chunk_is_refused_and_nothing_is_touched(
    start: int,
) -> None:
    memory = BlockMemory([[512]], num_blocks=8)
    async with HostBackend(HostConfig(capacity=ByteSize(1 << 20)), memory.namespace()) as backend:
        key, payload = await store_one(memory, backend)
        outside = replace(memory.describe(0, [1]), payload_starts=np.array([start]))
        other = make_block_key(b"other", 0)
        for move in (backend.store, backend.load):
            with pytest.raises(InvalidArgumentError, match=rf"start and size .* \({start}, 512\)"):
                await move([other], outside)
        blocks = memory.describe(0, [5])
        assert [outcome.done for outcome in await backend.load([key], blocks)] == [True]
        assert read_payloads(blocks) == [payload]


@pytest.mark.parametrize("verb", ["delete", "scrub", "purge", "purge while it is pinned"])
async def test_a_block_that_was_removed_is_proven_to_nobody_who_knows_its_place(
    memory: BlockMemory, verb: str
) -> None:
    async with open_host(memory, integrity=MemoryIntegrity.FULL) as backend:
        key, payload = await store_one(memory, backend)
        generation = backend.pool.generations.of(0)
        pinned = [key] if verb.endswith("pinned") else []
        backend.pin(pinned)
        if verb == "scrub":
            backend._drop_changed(0, generation)
        else:
            await (backend.delete([key]) if verb == "delete" else backend.purge())
        backend.unpin(pinned)
        assert backend.pool.generations.of(0) != generation
        assert backend.pool.slots[0].tobytes() != payload


async def test_a_slot_that_others_write_to_is_proven_to_nobody_who_knows_its_former_place(
    memory: BlockMemory,
) -> None:
    config = HostConfig(capacity=capacity_for(memory.namespace(), 1))
    async with HostBackend(config, memory.namespace()) as backend:
        await store_one(memory, backend)
        generation = backend.pool.generations.of(0)
        offered = BlockParts([OTHER], [0], [memory.chunk_size_bytes(0)])
        async with backend.make_room(offered) as room:
            assert room.blocks is not None
            assert backend.pool.generations.of(0) != generation


def call_under(lock: threading.Lock, method: Callable[..., Any], *given: Any, **more: Any) -> Any:
    assert lock.locked(), method
    return method(*given, **more)


async def test_its_index_is_used_under_its_lock_only(memory: BlockMemory) -> None:
    async with open_host(memory) as backend:
        for name, method in inspect.getmembers(backend._index, inspect.ismethod):
            if name != "gauges":
                setattr(backend._index, name, partial(call_under, backend._lock, method))
        key, _ = await store_one(memory, backend)
        blocks, parts = memory.describe(0, [4]), BlockParts([key], [0], [512])
        assert [each.done for each in await backend.load([key], blocks)] == [True]
        async with backend.lend(parts), backend.make_room(replace(parts, keys=[OTHER])):
            assert backend.peek([key], fenced=True) is not None
        assert await backend.delete([key]) == [True]
        await backend.purge()


async def test_a_store_that_waits_for_another_one_until_memory_is_closed_is_refused(
    memory: BlockMemory,
) -> None:
    backend = open_host(memory)
    async with backend.make_room(BlockParts([OTHER], [0], [memory.chunk_size_bytes(0)])):
        storing = asyncio.ensure_future(backend.store([OTHER], memory.describe(0, [3])))
        await asyncio.sleep(0)
        await backend.aclose()
    with pytest.raises(ClosedError):
        await storing


async def test_closed_memory_makes_no_room_even_for_blocks_that_are_still_being_stored(
    memory: BlockMemory,
) -> None:
    backend, parts = open_host(memory), BlockParts([OTHER], [0], [memory.chunk_size_bytes(0)])
    async with backend.make_room(parts):
        await backend.aclose()
        with pytest.raises(ClosedError):
            async with asyncio.timeout(1), backend.make_room(parts):
                pass


async def test_memory_stays_mapped_if_the_scrubber_cannot_be_stopped(memory: BlockMemory) -> None:
    backend = open_host(memory)
    with (
        patch.object(backend._scrubber, "aclose", AsyncMock(return_value=False)),
        patch.object(backend.pool, "close") as unmap,
    ):
        await backend.aclose()
    unmap.assert_not_called()


class NoThreads(runtime.Runtime):
    def start_thread(self, *given: Any, **more: Any) -> threading.Thread:
        raise RuntimeError("can't start new thread")


async def test_a_store_ends_also_where_no_thread_can_be_started(memory: BlockMemory) -> None:
    with runtime.use(NoThreads()):
        async with open_host(memory) as backend:
            key, _ = await store_one(memory, backend)
            assert await backend.lookup([key]) == [True]


async def test_blocks_without_checksums_are_lent_without_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = BlockMemory([[3 << 20]], num_blocks=4)
    config = HostConfig(capacity=ByteSize(16 << 20), integrity=MemoryIntegrity.OFF)
    async with HostBackend(config, memory.namespace()) as backend:
        key, payload = await store_one(memory, backend)
        monkeypatch.setattr(backend._threads, "run", Mock(side_effect=AssertionError))
        for num_bytes in (len(payload), 2 << 20):
            async with backend.lend(BlockParts([key], [0], [num_bytes])) as lent:
                assert [outcome.done for outcome in lent.outcomes] == [True]
                assert lent.checksums == [0]


async def test_a_checksum_that_another_reader_adds_meanwhile_makes_no_block_corrupt(
    memory: BlockMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_host(memory) as backend:
        pool, keys = backend.pool, [make_block_key(content, 0) for content in (b"one", b"two")]
        size = memory.chunk_size_bytes(0)
        await backend.store(keys, memory.describe(0, [1, 2]))
        _, _, slots = backend.pin(keys)
        assert pool.find(slots[:1], keys[:1], [0], [size])[0] == [DONE]
        checksum = pool._checksum

        def hash_while_another_reads(*part: int) -> int:
            monkeypatch.setattr(pool, "_checksum", checksum)
            pool.find(slots[1:], keys[1:], [0], [size])
            return checksum(*part)

        monkeypatch.setattr(pool, "_checksum", hash_while_another_reads)
        assert pool.find(slots, keys, [0, 0], [100, 100])[0] == [DONE, DONE]
        backend.unpin(keys)


async def test_memory_is_scrubbed_though_memory_was_short_when_that_was_to_begin(
    memory: BlockMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_host(memory) as backend:
        threads = backend._scrubber._threads
        with monkeypatch.context() as patched:
            patched.setattr(threads, "start", Mock(side_effect=MemoryError))
            with pytest.raises(MemoryError):
                await backend.store([KEY], memory.describe(0, [1]))
        with patch.object(threads, "start", wraps=threads.start) as start_thread:
            for key in (KEY, OTHER):
                assert await backend.store([key], memory.describe(0, [1])) == [DONE]
        start_thread.assert_called_once()


async def test_a_store_that_memory_is_short_for_keeps_its_slots_until_its_copy_has_ended(
    memory: BlockMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = replace(memory.describe(0, [1]), device=torch.device("cuda", 0))
    async with open_host(memory) as backend:
        copy, was_storing = Mock(), list[bool]()
        copy.wait = lambda: was_storing.extend(backend._index.are_storing([KEY]))
        monkeypatch.setattr(backend.pool, "begin_write", lambda *_: (copy, Mock()))
        monkeypatch.setattr(host_backend, "_SharedBegun", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            backend.begin_store([KEY], blocks)
        assert (was_storing, backend.is_storing(KEY)) == ([True], False)


def test_memory_is_enough_for_a_block_and_no_more_than_the_system_says_there_is(
    memory: BlockMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = BlockMemory([[8192]], num_blocks=8).namespace()
    with pytest.raises(InvalidArgumentError, match="16416 bytes or more"):
        HostBackend(HostConfig(capacity=ByteSize(8192)), large)
    with pytest.raises(CapacityError) as info:
        HostBackend(HostConfig(capacity=ByteSize.parse("100TiB")), memory.namespace())
    assert info.value.needed_bytes > info.value.available_bytes > 0
    little = AvailableMemory(CAPACITY // 2, "/sys/fs/cgroup/memory.max")
    monkeypatch.setattr(AvailableMemory, "read", lambda: little)
    with pytest.raises(CapacityError, match=rf"{little.limit}.* {CAPACITY // 2} are available"):
        open_host(memory)


def mapping_at(address: int) -> dict[str, str]:
    """Read the kernel's data of a mapping. Source: proc_pid_smaps(5)."""
    fields = dict[str, str]()
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside:
            name, _, value = line.partition(":")
            fields[name] = value.strip().removesuffix(" kB")
    return fields


async def test_its_memory_is_there_at_once_in_huge_pages_and_not_that_of_a_forked_process(
    memory: BlockMemory,
) -> None:
    capacity = ByteSize(8 << 20)
    async with HostBackend(HostConfig(capacity=capacity), memory.namespace()) as backend:
        found = mapping_at(backend.pool.region.address)
        assert int(found["Rss"]) >= capacity * 9 // 10 >> 10
        assert "dc" in found["VmFlags"].split()
        if HAS_HUGE_PAGES:
            assert int(found["AnonHugePages"]) > 0


def open_host(memory: BlockMemory, **fields: Any) -> HostBackend:
    return HostBackend(HostConfig(capacity=CAPACITY, **fields), memory.namespace())


KEY, OTHER = make_block_key(b"one", 0), make_block_key(b"other", 0)
CHUNKS = BlockMemory([[1000, 24]], num_blocks=8, blocks_per_chunk=2)


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("offset", [0, 1023, 2047])
def test_each_part_of_a_slot_gives_back_its_own_bytes_or_says_that_they_changed(
    part: int, offset: int
) -> None:
    source, target = CHUNKS.describe(0, [1, 2]), CHUNKS.describe(0, [5, 6])
    payloads = [make_payload(KEY, CHUNKS.chunk_size_bytes(0), version=each) for each in range(2)]
    shape = PoolShape(num_slots=4, num_parts=2, part_size_bytes=4096)
    engine, space = CPUCopyEngine(num_threads=1), CHUNKS.namespace()
    pool = HostPool(shape, space, engine, integrity=MemoryIntegrity.FULL)
    with contextlib.closing(pool):

        def read(key: BlockKey, part: int) -> Outcome:
            """Read a part of the slot; unless it is done, it must write nothing."""
            before = CHUNKS.snapshot()
            [outcome] = pool.read([3], [key], target, part=part)
            assert outcome.done or CHUNKS.snapshot() == before
            assert not outcome.done or read_payloads(target) == [payloads[part]]
            return outcome

        for number, payload in enumerate(payloads):
            write_payloads(source, [payload])
            pool.write([3], [KEY], source, part=number)
        assert read(KEY, 0).done
        assert read(KEY, 1).done
        assert read(OTHER, part).status is Status.MISSING
        pool.slots[3][part, offset] ^= 0x10
        assert pool.verify(3, KEY).status is Status.CORRUPT
        assert read(KEY, part).status is Status.CORRUPT
        assert read(KEY, 1 - part).done


def test_a_slot_of_which_a_part_lacks_its_first_bytes_does_not_hold_the_block() -> None:
    shape = PoolShape(num_slots=4, num_parts=2, part_size_bytes=4096)
    engine = CPUCopyEngine(num_threads=1)
    with contextlib.closing(HostPool(shape, CHUNKS.namespace(), engine)) as pool:
        for part, start in enumerate((0, 1024)):
            pool.tag([3], [KEY], [start], [4096], [None], part=part)
        assert pool.verify(3, KEY) == PARTIAL
        assert pool.holds([3], [KEY]) == [False]
        pool.unseal([3])
        assert pool.verify(3, KEY) == MISSING  # it is empty, and no part is stored


GIB = 1 << 30
UNIFIED = "30 24 0:26 {top} {at} rw - cgroup2 cgroup2 rw,nsdelegate"
LEGACY = "31 24 0:27 {top} {at}/memory rw - cgroup cgroup rw,memory"
LIMITED = {"memory.max": f"{GIB}"}
POD = {
    "memory/memory.limit_in_bytes": "9223372036854771712",
    "memory/pod/memory.limit_in_bytes": f"{2 * GIB}",
    "memory/pod/memory.usage_in_bytes": f"{GIB + 7}",
    "memory/pod/memory.stat": "inactive_file 1\ntotal_inactive_file 7\n",
}


@pytest.mark.parametrize(
    ("group", "mount", "top", "at", "files", "limit"),
    [
        ("0::/", UNIFIED, "/", "groups", LIMITED, "memory.max"),
        ("0::/docker/1", UNIFIED, "/docker/1", "groups", LIMITED, "memory.max"),
        ("0::/docker/1", UNIFIED, "/docker/2", "groups", LIMITED, "memory.max"),
        ("0::/", UNIFIED, "/", "my groups", LIMITED, "memory.max"),
        ("8:memory:/pod/process", LEGACY, "/", "groups", POD, "memory/pod/memory.limit_in_bytes"),
    ],
    ids=["of a container", "bound", "strange", "with a space", "version 1"],
)
def test_the_limit_of_a_group_is_found(
    tmp_path: Path, group: str, mount: str, top: str, at: str, files: dict[str, str], limit: str
) -> None:
    mounted = mount.format(top=top, at=f"/{at}".replace(" ", r"\040"))
    files = {f"{at}/{name}": text for name, text in files.items()} | {
        "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n",
        "proc/self/cgroup": f"3:cpu:/elsewhere\n{group}\n",
        "proc/self/mountinfo": f"24 1 0:23 / /sys rw - sysfs sysfs rw\n{mounted}\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert AvailableMemory.read(tmp_path) == (GIB, f"/{at}/{limit}")


SIZE = 1 << 16


def map_segment(name: str, folder: Path, told: Connection) -> None:
    memory_module.SHARED_MEMORY = folder
    with contextlib.closing(SharedSegment(name, b"header", SIZE)) as segment:
        segment.memory[5000] += 1
        told.send("ready")
        told.recv()


def create_for_ever(name: str, folder: Path, told: Connection) -> None:
    """Stop in the middle of the creation of a segment."""

    def reserve(fd: int, num_bytes: int) -> None:
        told.send("ready")
        told.recv()

    memory_module.SHARED_MEMORY = folder
    memory_module._reserve = reserve
    SharedSegment(name, b"header", SIZE)


@pytest.mark.parametrize("short", ["_chosen", "_no_room"])
async def test_a_store_for_which_memory_is_short_leaves_its_slot_and_its_key_free(
    memory: BlockMemory, monkeypatch: pytest.MonkeyPatch, short: str
) -> None:
    keys = [make_block_key(name, 0) for name in (b"block", b"other")]
    async with open_host(memory) as backend:
        await store_one(memory, backend)
        room = backend.make_room(BlockParts(keys, [0, 0], [64, 64]))
        blocks = memory.describe(0, [3, 4])
        calls: dict[str, Any] = {
            "_chosen": backend.store(keys, blocks),
            "_no_room": room.__aenter__(),
        }
        with monkeypatch.context() as patched:
            patched.setattr(f"kvxfer.backends.host.backend.{short}", Mock(side_effect=MemoryError))
            with pytest.raises(MemoryError):
                await calls.pop(short)
        for other in calls.values():
            other.close()
        outcomes = await backend.store(keys, blocks)
        assert [outcome.done for outcome in outcomes] == [True] * 2
        assert await backend.lookup(keys) == [True] * 2


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a segment in a folder of our own, since other processes clean up the common one."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        monkeypatch.setattr(memory_module, "SHARED_MEMORY", Path(folder))
        yield "test"
        assert not path_of("test").exists()


def test_shared_memory_without_a_limit_has_room_for_a_segment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with mounted("-t", "tmpfs", "-o", "size=0", "tmpfs") as folder:  # podman's --shm-size=0
        monkeypatch.setattr(memory_module, "SHARED_MEMORY", folder)
        SharedSegment("test", b"header", SIZE).close()


def path_of(name: str) -> Path:
    return memory_module.SHARED_MEMORY / f"kvxfer-{name}"


@contextlib.contextmanager
def child_with(
    name: str, work: Callable[..., None] = map_segment
) -> Iterator[tuple[BaseProcess, Connection]]:
    told, its_end = multiprocessing.Pipe()
    child = start(work, name, memory_module.SHARED_MEMORY, its_end)
    try:
        assert told.recv() == "ready"
        yield child, told
    finally:
        child.kill()
        child.join()


@pytest.mark.processes
def test_two_processes_see_the_same_bytes_and_the_last_one_removes_them(name: str) -> None:
    segment = SharedSegment(name, b"header", SIZE)
    segment.memory[5000] = 41
    with child_with(name) as (child, told):
        assert segment.memory[5000] == 42
        segment.close()
        assert path_of(name).exists()
        told.send("end")
        child.join()
        assert child.exitcode == 0


@pytest.mark.processes
def test_what_a_killed_process_left_is_replaced_by_zeroed_memory_or_removed_by_the_next_one(
    name: str,
) -> None:
    with child_with(name):
        pass
    assert path_of(name).exists()
    segment = SharedSegment(name, b"another header", 2 * SIZE)
    assert len(segment.memory) == 2 * SIZE
    assert segment.memory[5000] == 0
    assert path_of(name).stat().st_mode & 0o777 == 0o600
    with child_with("killed"):
        pass
    SharedSegment("other", b"header", SIZE).close()
    assert not path_of("killed").exists()
    assert path_of(name).exists(), "it is used"
    segment.close()


@pytest.mark.parametrize(
    ("header", "size", "shown"),
    [(b"other", SIZE, "other"), (b"head", SIZE, "head.;"), (b"header", 2 * SIZE, str(2 * SIZE))],
)
def test_a_process_that_expects_something_else_is_refused_with_both_values(
    name: str, header: bytes, size: int, shown: str
) -> None:
    segment = SharedSegment(name, b"header", SIZE)
    with pytest.raises(InvalidArgumentError, match=shown) as info:
        SharedSegment(name, header, size)
    assert "header" in str(info.value)
    segment.close()


def test_memory_that_another_user_has_made_is_not_mapped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path_of(name).touch(0o666)
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: path_of(name).stat().st_uid + 1)
        with pytest.raises(InvalidArgumentError, match=rf"{path_of(name)} of user \d+"):
            SharedSegment(name, b"header", SIZE)
    assert not path_of(name).read_bytes()
    path_of(name).unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_name_that_another_user_has_is_refused_by_name(name: str) -> None:
    with contextlib.closing(SharedSegment(name, b"header", SIZE)):
        os.seteuid(65534)
        try:
            with pytest.raises(InvalidArgumentError, match=f"{path_of(name)} that this user may"):
                SharedSegment(name, b"header", SIZE)
        finally:
            os.seteuid(0)


def test_memory_that_another_user_has_left_keeps_nobody_from_creating_some(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path_of("left").touch(0o666)
    unlink = Path.unlink

    def unlink_own(path: Path, **how: bool) -> None:
        if path == path_of("left"):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, **how)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink_own)
        SharedSegment(name, b"header", SIZE).close()
    path_of("left").unlink()


@pytest.mark.processes
def test_a_process_that_stops_while_it_creates_is_waited_for_until_a_deadline_or_its_death(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "CREATION_TIMEOUT_S", 0.2)
    with (
        child_with(name, create_for_ever),
        pytest.raises(BackendUnavailableError, match=f"{path_of(name)}: another process"),
    ):
        SharedSegment(name, b"header", SIZE)
    SharedSegment(name, b"header", SIZE).close()


@pytest.mark.parametrize("bad", ["../escape", "a/b", "a b", "x\n"])
def test_a_name_cannot_leave_the_folder(bad: str) -> None:
    with pytest.raises(InvalidArgumentError):
        SharedSegment(bad, b"header", SIZE)


def test_memory_that_is_not_there_is_refused_and_nothing_is_left(name: str) -> None:
    with pytest.raises(CapacityError) as info:
        SharedSegment(name, b"header", 1 << 50)
    assert info.value.needed_bytes == 1 << 50
    assert 0 < info.value.available_bytes < 1 << 50


async def test_memory_that_is_reserved_for_a_model_is_given_to_no_other() -> None:
    begun, may_open = threading.Event(), threading.Event()
    first, second = (BlockMemory([[size]], num_blocks=1).namespace() for size in (64, 128))

    def open_backend(namespace: Namespace) -> HostBackend:
        begun.set()
        assert may_open.wait(30)
        return HostBackend(HostConfig(capacity=CAPACITY), namespace)

    held = HeldTiers(open_backend)
    asking = asyncio.create_task(held.settle(first))
    await asyncio.to_thread(begun.wait, 30)
    asking.cancel()
    await asyncio.wait([asking])
    may_open.set()
    with pytest.raises(NamespaceMismatchError):
        await held.settle(second)
    assert (await held.settle(first)).provide(HostBackend)
    await held.aclose()


async def test_tiers_whose_preparation_failed_are_prepared_before_they_are_used(
    memory: BlockMemory,
) -> None:
    config, prepare = HostConfig(capacity=CAPACITY), AsyncMock(side_effect=[OSError("tier"), None])
    held = HeldTiers(partial(HostBackend, config), prepare=prepare)
    with pytest.raises(OSError, match="tier"):
        await held.settle(memory.namespace())
    for _ in range(2):
        await held.settle(memory.namespace())
    assert prepare.await_count == 2
    await held.aclose()
