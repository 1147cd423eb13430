"""Copy streams: GPU streams that copy one batch after the other."""

import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvxfer.copy_engine.cuda_driver import CudaDriver, CudaEvent, CudaStream
from kvxfer.copy_engine.pinned_memory import PinnedMemory
from kvxfer.errors import DeviceError, DeviceLostError
from kvxfer.kvcache.fragments import Addresses
from kvxfer.kvcache.memory_region import MemoryRegion

SHORTEST_WAIT_S, LONGEST_WAIT_S = 20e-6, 500e-6
"""Pauses between two queries of an event; each is twice as long as the one before."""

TABLE_FRAGMENTS = 1 << 16


class FragmentTable:
    """Table of fragments' addresses and lengths, in pinned memory that a kernel can read.

    Args:
        driver: Driver of the kernel's GPU.

    Attributes:
        is_pinned: Whether the memory could be pinned.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._values = np.frombuffer(mmap.mmap(-1, 3 * 8 * TABLE_FRAGMENTS), np.uint64)
        region = MemoryRegion(self._values.ctypes.data, self._values.nbytes, self._values)
        self._memory = PinnedMemory(driver, region)
        self.is_pinned = self._memory.is_pinned

    def fill(self, *columns: Addresses) -> NDArray[np.uint64]:
        """Fill in sources, destinations and lengths, at most `TABLE_FRAGMENTS`, as `(3, n)`."""
        table = self._values[: 3 * len(columns[0])].reshape(3, -1)
        for row, column in zip(table, columns, strict=True):
            row[:] = column
        return table

    def close(self) -> None:
        """Unpin the memory."""
        self._memory.close()


class CopyStream:
    """Stream for the batches of one direction, in order; each caller waits for its own.

    Args:
        driver: The GPU.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._stream = driver.open_stream()
        self._turn = threading.Lock()
        self._events: list[CudaEvent] = []
        self._tables: list[FragmentTable] = []

    @contextmanager
    def batch(self, marks: Sequence[int]) -> Iterator["Batch"]:
        """Lock the stream to enqueue one batch; at the end of the context wait for that batch.

        On an error, copies that were enqueued before it end before it is raised.

        Args:
            marks: Events that the batch has to wait for.

        Raises:
            DeviceLostError: The end of the batch cannot be observed.
        """
        try:
            event = self._events.pop()
        except IndexError:  # more concurrent batches than ever before
            event = self._driver.open_event()
        batch, recorded = Batch(self._driver, self._stream, self._tables), False
        try:
            with self._turn:
                for mark in marks:
                    self._driver.wait(self._stream, CudaEvent(mark))
                try:
                    yield batch
                finally:
                    self._record(event)
                    recorded = True
        finally:
            if recorded:
                self._wait(event)
                self._events.append(event)
                self._tables += batch.tables

    def close(self) -> None:
        """Destroy the stream; no batch may be under way."""
        for table in self._tables:
            table.close()
        for event in self._events:
            self._driver.close_event(event)
        self._driver.close_stream(self._stream)

    def _record(self, event: CudaEvent) -> None:
        try:
            self._driver.record(event, self._stream)
        except DeviceError as exc:  # without the event the end of the batch cannot be observed
            raise DeviceLostError(exc.device_index, exc.call, exc.code) from exc

    def _wait(self, event: CudaEvent) -> None:
        pause_s = SHORTEST_WAIT_S
        while not self._driver.has_passed(event):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_WAIT_S)


class Batch:
    """Batch that is being enqueued, with the resources that it needs until it is done.

    Attributes:
        stream: Stream that copies it.
        tables: Tables that its kernels read.
    """

    def __init__(self, driver: CudaDriver, stream: CudaStream, idle: list[FragmentTable]) -> None:
        self._driver = driver
        self.stream = stream
        self._idle = idle
        self.tables: list[FragmentTable] = []

    def open_tables(self, num_fragments: int) -> list[FragmentTable]:
        """Provide tables for so many fragments; none if no memory can be pinned for them."""
        for _ in range(-(-num_fragments // TABLE_FRAGMENTS)):
            table = self._idle.pop() if self._idle else FragmentTable(self._driver)
            if not table.is_pinned:
                return []
            self.tables.append(table)
        return self.tables
