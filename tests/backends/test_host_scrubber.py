"""A scrubber finds blocks that changed in memory, and takes no slot that is overwritten for one."""

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import xxhash

from kvxfer.backends.host import HostBackend, HostConfig, MemoryIntegrity, scrubber
from kvxfer.runtime import threads as threads_module
from kvxfer.storage.backend import Status
from kvxfer.storage.gauge import Gauge
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.lending import BlockParts
from kvxfer.storage.observer import Event, Observer, Removal, Removed, Reports
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys, store_generated
from kvxfer.testing.payloads import make_payload, write_payloads
from kvxfer.units import ByteSize
from tests.backends.host_blocks import flip

KEYS = make_keys(3)
CAPACITY = ByteSize(1 << 20)
NAME = "kvxfer-scrub"


@pytest.fixture
def memory() -> BlockMemory:
    return BlockMemory([[4096]], num_blocks=8)


def open_host(memory: BlockMemory, **fields: Any) -> HostBackend:
    return HostBackend(HostConfig(capacity=CAPACITY, **fields), memory.namespace())


def scrub(backend: HostBackend) -> int:
    """Read every slot once; return the bytes that were read."""
    pool = backend.pool
    return sum(backend._scrubber.scrub(pool, slot) for slot in pool.occupied())


def find_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith(NAME)]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One round follows the other."""
    for name in ("ROUND_S", "BATCH_S"):
        monkeypatch.setattr(scrubber, name, 0.001)
    yield
    assert find_threads() == []


async def test_a_block_that_changed_since_it_was_seen_is_dropped_counted_and_logged(
    memory: BlockMemory, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []

    class Told(Observer):
        def note(self, event: Event) -> None:
            events.append(event)

    async with open_host(memory) as backend:
        backend.observe(Reports([Told()]))
        await store_generated(backend, KEYS, memory.describe(0, range(3)))
        assert scrub(backend) == 3 * 4096
        flip(backend, KEYS[1])
        with caplog.at_level(logging.WARNING):
            assert scrub(backend) == 3 * 4096
        assert await backend.lookup(KEYS) == [True, False, True]
        assert [each for each in events if isinstance(each, Removed)] == [
            Removed("engine", [KEYS[1]], Removal.CORRUPT)
        ]
        assert f"{KEYS[1].hex()} has changed in memory" in caplog.text
        assert backend._gauges()[Gauge.SCRUBBED_BYTES] == 6 * 4096


async def test_a_block_that_came_with_a_checksum_is_verified_at_first_sight(
    memory: BlockMemory,
) -> None:
    payload = make_payload(KEYS[0], 4096)
    async with open_host(memory) as backend:
        async with backend.make_room(BlockParts(KEYS[:1], [0], [4096])) as room:
            assert room.blocks is not None
            write_payloads(room.blocks, [payload])
            room.arrived[0] = xxhash.xxh3_64_intdigest(payload)
        flip(backend, KEYS[0])
        scrub(backend)
        assert await backend.lookup(KEYS[:1]) == [False]


async def test_what_was_hashed_after_it_changed_is_compared_with_what_was_seen_before(
    memory: BlockMemory,
) -> None:
    async with open_host(memory) as backend:
        await store_generated(backend, KEYS[:1], memory.describe(0, [0]))
        scrub(backend)
        flip(backend, KEYS[0])
        async with backend.lend(BlockParts(KEYS[:1], [0], [4096])) as lent:
            assert lent.outcomes[0].status is Status.DONE
        scrub(backend)
        assert await backend.lookup(KEYS[:1]) == [False]


@pytest.mark.parametrize("moment", ["before", "during"])
async def test_a_slot_that_was_overwritten_is_no_fault(
    memory: BlockMemory, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    async with open_host(memory) as backend:
        await store_generated(backend, KEYS[:1], memory.describe(0, [0]))
        scrub(backend)
        (slot,) = backend.pool.occupied()
        await backend.delete(KEYS[:1])
        sums_of = backend.pool.sums_of

        def overwrite(slot: int) -> tuple[list[int], list[int], int]:
            """Read the new bytes of a slot whose generation was looked at before."""
            store(KEYS[1])
            return sums_of(slot)

        def store(key: BlockKey) -> None:
            write_payloads(memory.describe(0, [1]), [make_payload(key, 4096)])
            begun = backend.begin_store([key], memory.describe(0, [1]))
            assert begun is not None
            assert begun.wait()[0].done

        if moment == "during":
            monkeypatch.setattr(backend.pool, "sums_of", overwrite)
        else:
            store(KEYS[1])
        backend._scrubber.scrub(backend.pool, slot)
        assert backend.pool.occupied() == [slot]
        assert await backend.lookup([KEYS[1]]) == [True]


async def test_the_thread_finds_a_change_and_ends_with_the_backend(
    memory: BlockMemory, at_once: None
) -> None:
    dropped = threading.Event()

    class Told(Observer):
        def note(self, event: Event) -> None:
            if isinstance(event, Removed):
                dropped.set()

    async with open_host(memory) as backend:
        assert find_threads() == [], "nothing is there to be read"
        backend.observe(Reports([Told()]))
        await store_generated(backend, KEYS, memory.describe(0, range(3)))
        [thread] = find_threads()
        while backend._scrubber.num_bytes < 3 * 4096:
            thread.join(0.001)
        flip(backend, KEYS[0])
        assert dropped.wait(10)
        assert await backend.lookup(KEYS) == [False, True, True]
        thread.join(0.001)
    thread.join(10)


@pytest.mark.parametrize("fields", [{"scrub_mib_per_s": 0}, {"integrity": MemoryIntegrity.OFF}])
async def test_no_thread_is_started_where_nothing_is_scrubbed(
    memory: BlockMemory, fields: dict[str, Any]
) -> None:
    async with open_host(memory, **fields) as backend:
        await store_generated(backend, KEYS, memory.describe(0, range(3)))
        assert find_threads() == []


async def test_the_pool_stays_mapped_while_the_thread_does_not_end(
    memory: BlockMemory, monkeypatch: pytest.MonkeyPatch, at_once: None
) -> None:
    monkeypatch.setattr(threads_module, "CLOSE_TIMEOUT_S", 0.05)
    began, may_end = threading.Event(), threading.Event()
    backend = open_host(memory)

    def hang(_: int) -> tuple[list[int], list[int], int]:
        began.set()
        assert may_end.wait(10)
        return [], [], 0

    monkeypatch.setattr(backend.pool, "sums_of", hang)
    await store_generated(backend, KEYS, memory.describe(0, range(3)))
    [thread] = find_threads()
    assert began.wait(10)
    await backend.aclose()
    assert len(backend.pool.slots)
    may_end.set()
    thread.join(10)
    backend.pool.close()


def test_a_backend_that_nobody_closed_is_not_kept(memory: BlockMemory, at_once: None) -> None:
    backend = open_host(memory)
    begun = backend.begin_store(KEYS[:1], memory.describe(0, [0]))
    assert begun is not None
    assert begun.wait()[0].done
    [thread] = find_threads()
    gone = weakref.ref(backend.pool)
    executor = backend._scrubber._threads._executor
    del backend, begun
    gc.collect()
    while gone() is not None:
        thread.join(0.001)
    executor.shutdown()
    thread.join(10)
