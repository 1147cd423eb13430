"""Streams of a GPU: ours, which copy one batch after another, and marks on those of an engine."""

import mmap
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer import runtime
from kvxfer.copy_engine.cuda_driver import (
    LEGACY_STREAM,
    NUM_EVENTS,
    CudaDriver,
    CudaEvent,
    CudaStream,
)
from kvxfer.copy_engine.engine import Copy
from kvxfer.copy_engine.pinned_memory import PinnedMemory
from kvxfer.errors import DeviceError, DeviceLostError
from kvxfer.kvcache.descriptors import StreamMark
from kvxfer.kvcache.fragments import Addresses
from kvxfer.kvcache.memory_region import MemoryRegion

TABLE_FRAGMENTS = 1 << 16
"""Maximum fragments of one launch of the kernel, whose table is 1.5 MiB of pinned memory."""

NUM_TABLES = 4
"""Tables of each stream that are pinned in advance: see `NUM_EVENTS`."""


class FragmentTable(PinnedMemory):
    """Table of fragments' addresses and lengths, in pinned memory that a kernel can read.

    Attributes:
        num_fragments: Fragments that it has room for.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self.num_fragments = TABLE_FRAGMENTS
        self._values = np.frombuffer(mmap.mmap(-1, 3 * 8 * self.num_fragments), np.uint64)
        region = MemoryRegion(self._values.ctypes.data, self._values.nbytes, self._values)
        super().__init__(driver, region)

    def fill(self, *columns: Addresses) -> NDArray[np.uint64]:
        """Fill in sources, destinations and lengths; return the filled part, `(3, n)`."""
        table = self._values[: 3 * len(columns[0])].reshape(3, -1)
        for row, column in zip(table, columns, strict=True):
            row[:] = column
        return table


class CopyStream:
    """Stream for the batches of one direction, in order; each caller polls its own batch.

    Attributes:
        handle: The driver's handle.
        has_tables: Whether there are tables; False if their memory cannot be pinned.
        idle_events, idle_tables: Resources of batches that have ended, for reuse.
    """

    def __init__(self, driver: CudaDriver, *, has_tables: bool = False) -> None:
        self.driver = driver
        self.handle = driver.open_stream()
        self._turn = runtime.lock()
        self.idle_events = [driver.open_event() for _ in range(NUM_EVENTS)]
        self.idle_tables: list[FragmentTable] = []
        while has_tables and len(self.idle_tables) < NUM_TABLES:
            self.idle_tables.append(FragmentTable(driver))
            has_tables = self.idle_tables[-1].is_pinned
        self.has_tables = has_tables

    @contextmanager
    def batch(self, marks: Sequence[int], *, times: bool = False) -> Iterator["Batch"]:
        """Lock the stream to enqueue one batch, which goes on after the end of the context.

        If the context raises, copies that were already enqueued end before the error is passed on.
        The batch waits for the events `marks`. With `times`, the device measures how long it takes.

        Raises:
            DeviceLostError: The end of the batch cannot be observed.
        """
        batch = Batch(self, times=times)
        try:
            with self._turn, self.driver.current():
                try:
                    for mark in marks:
                        self.driver.wait(self.handle, CudaEvent(mark))
                    if batch.start is not None:
                        self.driver.record(batch.start, self.handle)
                    yield batch
                finally:
                    batch.record()
        except BaseException:
            if batch.is_recorded:
                batch.wait()
            raise

    def close(self) -> None:
        """Destroy the stream; no batch may be under way."""
        for table in self.idle_tables:
            table.close()
        for event in self.idle_events:
            self.driver.close_event(event)
        self.driver.close_stream(self.handle)


class Batch(Copy):
    """Batch of copies in a stream, with the resources that it needs until it has ended.

    Attributes:
        stream: Stream that copies it.
        start: Event that records when the device begins the batch, if that is measured.
        is_recorded: Whether the end of the batch can be observed.
    """

    def __init__(self, owner: CopyStream, *, times: bool = False) -> None:
        self._owner, self._driver = owner, owner.driver
        self.stream = owner.handle
        self.start = self._driver.open_event(times=True) if times else None
        try:
            self._event = self._driver.open_event(times=True) if times else owner.idle_events.pop()
        except IndexError:  # more concurrent batches than ever before
            self._event = self._driver.open_event()
        self._tables: list[FragmentTable] = []
        self.is_recorded = False
        self._ended = False

    def open_tables(self, num_fragments: int) -> list[FragmentTable]:
        """Take tables for `num_fragments`; none if no memory can be pinned for them."""
        idle = self._owner.idle_tables
        for _ in range(0, num_fragments, TABLE_FRAGMENTS):
            table = idle.pop() if idle else FragmentTable(self._driver)
            if not table.is_pinned:
                return []
            self._tables.append(table)
        return self._tables

    @property
    def seconds(self) -> float:
        """Seconds that the device took for the batch, which has ended and was timed."""
        assert self.start is not None
        return self._driver.seconds_between(self.start, self._event)

    def record(self) -> None:
        """Mark the end of the batch, once everything was enqueued.

        Raises:
            DeviceLostError: The end of the batch cannot be observed.
        """
        try:
            self._driver.record(self._event, self.stream)
        except DeviceError as exc:
            raise DeviceLostError(exc.device_index, exc.call, exc.code) from exc
        self.is_recorded = True

    def has_ended(self) -> bool:
        """See `Copy.has_ended`. Only one thread may call it at a time."""
        if not self._ended and self._driver.has_passed(self._event):
            self._ended = True
            events = (self._event, self.start)
            self._owner.idle_events.extend(event for event in events if event is not None)
            self._owner.idle_tables.extend(self._tables)
        return self._ended


class ComputeStream:
    """Source of marks on torch's current stream of a device; copies wait for such a mark.

    Thread-safe. The event of a mark is reused once the mark is garbage. The driver is not closed
    with the stream.
    """

    def __init__(self, driver: CudaDriver, device: torch.device) -> None:
        self._driver = driver
        self._device = device
        self._idle = deque(driver.open_event() for _ in range(NUM_EVENTS))
        self._closed = False

    def mark(self) -> StreamMark:
        """Mark the end of the work on the calling thread's current stream; does not block.

        `DeviceError`: the stream is being captured as a graph, and copies that wait for the mark
        would become a part of that graph.
        """
        handle = torch.cuda.current_stream(self._device).cuda_stream
        stream = CudaStream(handle) if handle else LEGACY_STREAM  # what torch means by 0
        try:
            event = self._idle.pop()
        except IndexError:
            event = self._driver.open_event()
        mark = _Mark(event, self._driver)
        # Garbage is collected in any thread, at any moment, so `_take_back` must take no lock.
        weakref.finalize(mark, self._take_back, event).atexit = False
        with self._driver.current():
            self._driver.record(event, stream)
            if self._driver.is_captured(stream):
                call = "cuStreamIsCapturing"
                raise DeviceError(self._driver.device_index, call, "a stream that is captured")
        return mark

    def close(self) -> None:
        """Destroy the events; those of marks in use follow when the marks are garbage."""
        self._closed = True
        while self._idle:
            self._close_event(self._idle.pop())

    def _take_back(self, event: CudaEvent) -> None:
        if self._closed:
            self._close_event(event)
        else:
            self._idle.append(event)

    def _close_event(self, event: CudaEvent) -> None:
        with suppress(DeviceError):  # a lost device has destroyed its events
            self._driver.close_event(event)


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Mark:
    event: int
    driver: CudaDriver

    def has_passed(self) -> bool:
        return self.driver.has_passed(CudaEvent(self.event))
