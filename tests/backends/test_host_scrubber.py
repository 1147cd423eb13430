"""A scrubber finds blocks that changed in memory, and takes no slot that is overwritten for one."""

import logging
import threading
from typing import Any

import pytest

from kvxfer.backends.host import HostBackend, HostConfig, MemoryIntegrity
from kvxfer.storage.gauge import Gauge
from kvxfer.storage.observer import Event, Observer, Removal, Removed, Reports
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys, store_generated
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


@pytest.mark.parametrize("fields", [{"scrub_mib_per_s": 0}, {"integrity": MemoryIntegrity.OFF}])
async def test_no_thread_is_started_where_nothing_is_scrubbed(
    memory: BlockMemory, fields: dict[str, Any]
) -> None:
    async with open_host(memory, **fields) as backend:
        await store_generated(backend, KEYS, memory.describe(0, range(3)))
        assert find_threads() == []
