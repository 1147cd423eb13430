"""Direction of loads: a measurement whether reading, or the holder's writing, is faster."""

import time
from collections.abc import Awaitable, Callable

import numpy as np

from kvxfer.backends.nixl.connection import Connection
from kvxfer.backends.nixl.extents import RegionTable
from kvxfer.backends.nixl.link import Link
from kvxfer.backends.nixl.messages import Moved, Probe
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion

PROBE_BYTES = 4 << 20
NUM_PROBES = 3


async def is_reading_faster(
    connection: Connection, link: Link, memory: RegionTable, scratch: MemoryRegion
) -> bool:
    """Measure both directions with a few megabytes.

    Args:
        connection: Connection to the holder.
        link: Link to its memory.
        memory: Our registered memory.
        scratch: Region of it that nothing else uses now.

    Raises:
        KVXferError: The holder's memory cannot be reached by the link.
    """
    address, num_bytes = link.remote.regions[0]
    size = min(PROBE_BYTES, num_bytes, scratch.num_bytes)
    ours, theirs = _stretch(scratch.address, size), _stretch(address, size)
    extents = memory.locate(ours)

    async def read() -> None:
        await link.read(theirs, ours)

    async def write() -> None:
        await connection.move(lambda number: Probe(request_id=number, extents=extents), Moved)

    return await _best_time(read) < await _best_time(write)


async def _best_time(probe: Callable[[], Awaitable[None]]) -> float:
    times = []
    for _ in range(NUM_PROBES):
        started = time.perf_counter()
        await probe()
        times.append(time.perf_counter() - started)
    return min(times)


def _stretch(address: int, num_bytes: int) -> Descriptors:
    return Descriptors.of_pieces(np.array([address], np.uint64), [num_bytes])
