"""Staging for GPUs: host buffers between device memory and a backend that cannot reach it."""

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from itertools import chain
from typing import TypeVar

from kvxfer.checks import require_positive
from kvxfer.copy_engine.devices import DeviceCopyEngine
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.errors import ClosedError, DeviceError, DeviceLostError, InvalidArgumentError
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.runtime import Threads, run_aside
from kvxfer.storage.backend import (
    DONE,
    Backend,
    BlockMover,
    Outcome,
    Purgeable,
    Status,
    TellsKept,
    WrappingBackend,
    positions_done,
)
from kvxfer.storage.call_guard import CallGuard
from kvxfer.storage.eviction.retention import Retaining
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Reports
from kvxfer.storage.staging_memory import DEFAULT_STAGING_BYTES, staging_of
from kvxfer.transfer.job import Direction

logger = logging.getLogger(__name__)

MoverT = TypeVar("MoverT", bound=BlockMover)


class StagedBackend(WrappingBackend):
    """Backend for blocks in GPU memory, on top of a backend that reaches only host memory.

    A batch is cut into parts that each fit into a staging buffer. Each part is copied to its buffer
    and then stored, or loaded and then copied, on its own: while one waits for the medium, others
    are copied. All calls share the buffers, loads before stores. The inner backend gets each part
    as a batch of its own. Blocks in memory that it reaches itself are passed on unchanged.

    A load copies only the blocks that arrived; the memory of the others stays as it was. Memory
    that the inner backend reports as unsafe is a staging buffer, which is not reused before the
    backend is drained; no transfer touches the device's memory then.

    A lost device ends staging, since this process can no longer use it: blocks that were being
    copied are `FAILED` with memory that is not safe, later ones `FAILED` at once. A drain does not
    wait for a lost device, which never ends its work.

    Args:
        inner: Backend that reads and writes host memory; closed with this one.
        copy_engine: Copies between host and device; closed with this backend.
        largest_block_bytes: Bytes of the largest block that will be moved.
        staging_bytes: Bound on the memory of all buffers; raised to two of the largest block, and
            to one for each tier.

    Attributes:
        memory_kinds: Those of `inner`, and "cuda".

    Raises:
        InvalidArgumentError: `inner` cannot reach host memory, or a bound is not positive.
    """

    passes_on = frozenset({Purgeable, Reports, Retaining, TellsKept})

    def __init__(
        self,
        inner: Backend,
        copy_engine: CopyEngine,
        largest_block_bytes: int,
        *,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
    ) -> None:
        if "cpu" not in inner.memory_kinds:
            kinds = sorted(inner.memory_kinds)
            raise InvalidArgumentError("memory_kinds of the backend", kinds, "'cpu' among them")
        largest_block_bytes = require_positive("largest_block_bytes", largest_block_bytes)
        staging_bytes = require_positive("staging_bytes", staging_bytes)
        super().__init__(inner)
        self.memory_kinds = inner.memory_kinds | {"cuda"}
        self._copy_engine = copy_engine
        self._staging = staging_of(inner, staging_bytes, largest_block_bytes)
        self._threads = Threads("kvxfer-stage", self._staging.num_buffers)
        self._pinned = False
        self._lost = ""
        self._guard = CallGuard("staged backend")
        inner.attach([self._staging.region])

    def attach(self, memory: Sequence[MemoryRegion]) -> None:
        """See `Backend.attach`. The staging buffers are pinned once there is a device.

        Raises:
            DeviceUnavailableError: Memory is on a device that cannot be used.
        """
        direct = [region for region in memory if self._is_direct(region.device.type)]
        staged = [region for region in memory if not self._is_direct(region.device.type)]
        if direct:
            self.inner.attach(direct)
        if staged:
            self._copy_engine.attach(staged if self._pinned else [*staged, self._staging.region])
            self._pinned = True

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`."""
        self._guard.check_batch(keys)
        return await self.inner.lookup(keys)

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.delete`."""
        self._guard.check_batch(keys)
        return await self.inner.delete(keys)

    async def flush(self) -> None:
        """See `Backend.flush`."""
        self._guard.check()
        await self.inner.flush()

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`."""
        return await self._move(Direction.STORE, keys, blocks)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`."""
        return await self._move(Direction.LOAD, keys, blocks)

    async def aclose(self) -> None:
        """See `Backend.aclose`. Closes the backend, and then the copy engine."""
        await self._guard.aclose(self._release)

    async def _release(self) -> None:
        self._staging.withdraw()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._end_copies)
            stack.push_async_callback(self._staging.aclose)
            stack.push_async_callback(self.inner.aclose)

    async def _end_copies(self) -> None:
        if not await self._threads.aclose():  # else a thread still copies
            await run_aside("kvxfer-close", self._copy_engine.close)

    async def _move(
        self, direction: Direction, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        """Move a batch; return or raise only once no part of it touches memory."""
        self._guard.check_batch(keys, blocks)
        if self._is_direct(blocks.device.type):
            move = self.inner.store if direction is Direction.STORE else self.inner.load
            return await move(keys, blocks)
        largest, most = int(blocks.block_sizes.max()), self._staging.buffer_bytes
        if largest > most:
            raise InvalidArgumentError("bytes of a block", largest, f"at most {most}")
        cuts = self._staging.cut(blocks.block_sizes.tolist())
        parts = [
            asyncio.create_task(self._move_part(direction, keys[i:j], blocks.select(i, j)))
            for i, j in cuts
        ]
        await asyncio.gather(*parts, return_exceptions=True)
        return list(chain.from_iterable(part.result() for part in parts))

    async def _move_part(
        self, direction: Direction, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        """Move blocks that fit into one buffer through it."""
        sizes, starts = blocks.block_sizes.tolist(), blocks.payload_starts.tolist()
        try:
            async with self._staging.hold(sizes, starts, priority=direction) as staged:
                if direction is Direction.STORE:
                    copied = await self._copy(blocks, staged.blocks)
                    if not copied.done:
                        return [copied] * len(keys)
                    return _safe(await staged.move(self.inner.store, keys, staged.blocks))
                outcomes = _safe(await staged.move(self.inner.load, keys, staged.blocks))
                if arrived := positions_done(outcomes):
                    copied = await self._copy(staged.blocks.take(arrived), blocks.take(arrived))
                    for index in arrived:
                        outcomes[index] = copied
                return outcomes
        except ClosedError:
            reason = self._lost or "the backend is closed"
            return [Outcome(Status.FAILED, reason=reason)] * len(keys)

    async def _copy(self, source: Descriptors, destination: Descriptors) -> Outcome:
        """Copy on a thread, to the end even if cancelled; return one outcome for all the blocks."""
        try:
            await self._threads.run(self._copy_blocking, source, destination)
        except DeviceError as exc:
            is_safe = not isinstance(exc, DeviceLostError)
            return Outcome(Status.FAILED, memory_safe=is_safe, reason=str(exc))
        except Exception as exc:
            logger.exception("copy of %d blocks failed", source.num_blocks)
            return Outcome(Status.FAILED, reason=repr(exc))
        finally:
            if self._lost:  # checked here, since a cancelled call does not see the error
                self._staging.withdraw()
        return DONE

    def _copy_blocking(self, source: Descriptors, destination: Descriptors) -> None:
        try:
            self._copy_engine.copy(source, destination)
        except DeviceLostError as exc:
            self._lost = self._lost or str(exc)
            raise

    def _is_direct(self, device_type: str) -> bool:
        return device_type in self.inner.memory_kinds


def stage(
    backend: MoverT,
    caches: CanonicalKVCaches,
    largest_block_bytes: int,
    opened: ExitStack,
    *,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
) -> MoverT | StagedBackend:
    """Wrap a backend in staging buffers, unless it reaches the memory of caches itself.

    A mover that is not a `Backend` must reach that memory itself. `opened` closes the copy engine
    opened here, but not the backend.
    """
    kinds = {each.tensor.device.type for each in caches.tensors}
    if kinds <= backend.memory_kinds:
        return backend
    staged = kinds - backend.memory_kinds == {"cuda"} and "cpu" in backend.memory_kinds
    if not staged or not isinstance(backend, Backend):
        reachable = ", ".join(sorted(backend.memory_kinds))
        raise InvalidArgumentError("device of caches", sorted(kinds), f"one of {reachable}")
    copy_engine = DeviceCopyEngine()
    opened.callback(copy_engine.close)
    return StagedBackend(backend, copy_engine, largest_block_bytes, staging_bytes=staging_bytes)


def _safe(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Mark outcomes as memory-safe: only the staging buffer may still be touched."""
    return [dataclasses.replace(outcome, memory_safe=True) for outcome in outcomes]
