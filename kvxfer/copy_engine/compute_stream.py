"""Compute streams: the GPU work of a serving engine, marked so that copies wait for it."""

import contextlib
import weakref
from collections import deque
from dataclasses import dataclass

import torch

from kvxfer.copy_engine.cuda_driver import (
    LEGACY_STREAM,
    NUM_EVENTS,
    CudaDriver,
    CudaEvent,
    CudaStream,
)
from kvxfer.errors import DeviceError
from kvxfer.kvcache.descriptors import StreamMark


class ComputeStream:
    """Source of marks on torch's current stream of a device; copies wait for such a mark.

    May be used from several threads. An event is reused once the mark that had it is garbage.

    Args:
        driver: Driver of the device; not closed with the stream.
        device: The device.
    """

    def __init__(self, driver: CudaDriver, device: torch.device) -> None:
        self._driver = driver
        self._device = device
        self._idle = deque(driver.open_event() for _ in range(NUM_EVENTS))
        self._closed = False

    def mark(self) -> StreamMark:
        """Mark the end of the work on the calling thread's current stream; does not block.

        Raises:
            DeviceError: The driver refused, or the stream is captured as a graph: what copies
                waited for would become a part of it, with the copies.
            DeviceLostError: The device is gone.
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
        """Destroy the events, those of marks in use as soon as they are garbage."""
        self._closed = True
        while self._idle:
            self._close_event(self._idle.pop())

    def _take_back(self, event: CudaEvent) -> None:
        if self._closed:
            self._close_event(event)
        else:
            self._idle.append(event)

    def _close_event(self, event: CudaEvent) -> None:
        with contextlib.suppress(DeviceError):  # a lost device takes its events along
            self._driver.close_event(event)


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Mark:
    event: int
    driver: CudaDriver

    def has_passed(self) -> bool:
        return self.driver.has_passed(CudaEvent(self.event))
