"""CUDA copy engine: copies between the memory of one GPU and host memory."""

from collections.abc import Sequence
from contextlib import ExitStack, suppress

import numpy as np
import torch

from kvxfer.copy_engine.copy_stream import Batch, CopyStream
from kvxfer.copy_engine.cuda_driver import CudaDriver, CudaStream
from kvxfer.copy_engine.engine import Copy, CopyEngine
from kvxfer.copy_engine.method_table import CopyMethod, MethodTable, Way
from kvxfer.copy_engine.pinned_memory import PinnedMemory
from kvxfer.copy_engine.triton import FragmentKernel
from kvxfer.errors import DeviceLostError, InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.fragment_pairs import FragmentPairs, pair_fragments
from kvxfer.kvcache.fragments import run_starts
from kvxfer.kvcache.memory_region import HOST, MemoryRegion

FEWEST_ROWS = 4
"""Minimum number of evenly spaced rows for one strided call; fewer are copied one by one."""

LONGEST_STEP = (1 << 31) - 1
"""Maximum bytes from one such row to the next.
Source: CUDA driver API, CU_DEVICE_ATTRIBUTE_MAX_PITCH of all devices."""


class CudaCopyEngine(CopyEngine):
    """Copy engine between one GPU and host memory, concurrent with the GPU's computation.

    Each direction has a low-priority stream of its own, which copies one batch after another. A
    batch begins once the device has reached the mark in `Descriptors.after`, and an event shows its
    end: the device as a whole is never synchronized. How fragments are copied depends on their mean
    size and the direction:

    - small ones whose host side is pinned: one kernel for the batch (see `MethodTable`); without a
      kernel, they are copied like the others;
    - others whose host side is pinned: one driver call for the batch, from CUDA 12.8 on;
    - otherwise: one call for each series of evenly spaced rows, and one for each of the other
      fragments.

    `DeviceUnavailableError`: there is no such GPU, or no driver.
    """

    def __init__(
        self, device_index: int, methods: MethodTable, kernel: FragmentKernel | None = None
    ) -> None:
        self.device = torch.device("cuda", device_index)
        self.methods = methods
        self._streams: dict[Way, CopyStream] = {}
        self._pinned: list[PinnedMemory] = []
        with ExitStack() as opened:
            self.driver = CudaDriver(device_index)
            opened.callback(self.driver.close)
            has_tables = kernel is not None and self.driver.reads_registered_memory
            for way in Way:
                stream = CopyStream(self.driver, has_tables=has_tables)
                opened.callback(stream.close)
                self._streams[way], has_tables = stream, stream.has_tables
            self._kernel = kernel if has_tables else None
            self._opened = opened.pop_all()

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel may copy small fragments."""
        return self._kernel is not None

    @property
    def has_pinned_all(self) -> bool:
        """Whether all attached host memory is pinned."""
        return all(memory.is_pinned for memory in self._pinned)

    def attach(self, memory: Sequence[MemoryRegion]) -> None:
        """See `CopyEngine.attach`. Pins host memory, or logs a warning if it cannot be pinned."""
        for region in memory:
            ends = region.address, region.address + region.num_bytes - 1
            if region.device == HOST:
                self._pinned.append(PinnedMemory(self.driver, region))
                self._opened.callback(self._pinned[-1].close)
            elif region.device != self.device or not all(map(self.driver.holds, ends)):
                said = f"{region.num_bytes} bytes at {region.address:#x} of {region.device}"
                raise InvalidArgumentError("memory", said, f"memory of {self.device}")

    def time(self, source: Descriptors, destination: Descriptors) -> float:
        """Copy as `copy` does; return the seconds that the device took, by its own clock."""
        batch = self.begin(source, destination, times=True)
        batch.wait()
        return batch.seconds if isinstance(batch, Batch) else 0.0

    def begin(self, source: Descriptors, destination: Descriptors, *, times: bool = False) -> Copy:
        """See `CopyEngine.begin`. One side must be in host memory."""
        way = self._way(source, destination)
        host = destination if way is Way.TO_HOST else source
        pairs = pair_fragments(source, destination)
        if not pairs.lengths.all():  # a driver may refuse a batch that has a copy of no bytes
            pairs = pairs.take(pairs.lengths > 0)
        if not pairs.num_pairs:
            return Copy()
        is_pinned = any(memory.covers(host) for memory in self._pinned)
        marks = [side.after.event for side in (source, destination) if side.after]
        with self._streams[way].batch(marks, times=times) as batch:
            self._enqueue(pairs, way, batch, is_pinned=is_pinned)
        return batch

    def close(self) -> None:
        """See `CopyEngine.close`; no copy may be under way."""
        with suppress(DeviceLostError):  # a lost device has released everything
            self._opened.close()
        self._pinned.clear()

    def _way(self, source: Descriptors, destination: Descriptors) -> Way:
        match (source.device, destination.device):
            case (self.device, device) if device == HOST:
                return Way.TO_HOST
            case (device, self.device) if device == HOST:
                return Way.TO_DEVICE
        devices = f"from {source.device} to {destination.device}"
        expected = f"one side on {self.device} and the other on {HOST}"
        raise InvalidArgumentError("devices", devices, expected)

    def _enqueue(self, pairs: FragmentPairs, way: Way, batch: Batch, *, is_pinned: bool) -> None:
        if is_pinned and self._kernel is not None:
            is_small = self.methods.choose(way, pairs.mean_bytes) is CopyMethod.KERNEL
            if is_small and self._enqueue_kernels(pairs, self._kernel, batch):
                return
        if is_pinned and self.driver.has_batch:
            columns = pairs.destinations, pairs.sources, pairs.lengths
            self.driver.copy_batch(*columns, batch.stream)
        else:
            self._enqueue_each(pairs, way, batch.stream)

    def _enqueue_kernels(self, pairs: FragmentPairs, kernel: FragmentKernel, batch: Batch) -> bool:
        tables = batch.open_tables(pairs.num_pairs)
        with self.driver.current():
            for index, table in enumerate(tables):
                start = index * table.num_fragments
                part = pairs.take(slice(start, start + table.num_fragments))
                kernel.launch(table.fill(*part), batch.stream)
        return bool(tables)

    def _enqueue_each(self, pairs: FragmentPairs, way: Way, stream: CudaStream) -> None:
        to_host = way is Way.TO_HOST
        series, others = _split(pairs)
        for rows in series:
            (to, next_to), (from_, next_from) = (
                side[:2].tolist() for side in (rows.destinations, rows.sources)
            )
            steps = (next_to - to, next_from - from_)
            row_bytes, num_rows = int(rows.lengths[0]), rows.num_pairs
            self.driver.copy_rows(to, from_, steps, row_bytes, num_rows, stream, to_host=to_host)
        self.driver.copy_each(others.destinations, others.sources, others.lengths, stream)


def _split(pairs: FragmentPairs) -> tuple[list[FragmentPairs], FragmentPairs]:
    """Split off series of equal fragments that are evenly spaced on both sides."""
    if pairs.num_pairs < FEWEST_ROWS:
        return [], pairs
    steps = np.stack([np.diff(pairs.destinations), np.diff(pairs.sources)])
    equal = pairs.lengths[1:] == pairs.lengths[:-1]
    usable = equal & ((steps >= pairs.lengths[1:]) & (steps <= LONGEST_STEP)).all(axis=0)
    goes_on = usable[1:] & usable[:-1] & (steps[:, 1:] == steps[:, :-1]).all(axis=0)
    firsts = run_starts(goes_on)
    # The last fragment of one run of steps is the first of the next.
    lasts = np.append(firsts[1:], len(steps[0]))
    is_long = usable[firsts] & (lasts - firsts >= FEWEST_ROWS)
    firsts = firsts + np.concatenate(([False], is_long[:-1]))
    series, left = [], np.ones(pairs.num_pairs, bool)
    for first, last in zip(firsts[is_long].tolist(), lasts[is_long].tolist(), strict=True):
        series.append(pairs.take(slice(first, last + 1)))
        left[first : last + 1] = False
    return series, pairs.take(left)
