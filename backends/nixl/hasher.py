"""Checksums of blocks that leave and of blocks that have arrived."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvxfer.backends.nixl.extents import part
from kvxfer.backends.nixl.transfer_agent import to_its_end
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.checksums import checksum_blocks

NUM_THREADS = 2

INLINE_BYTES = 2 << 20
"""What is hashed on the event loop: some hundred microseconds, less than two changes of threads
can take. Also of a batch in small fragments, which are gathered, a millisecond at most."""


class BlockHasher:
    """Hashes blocks on threads of its own, beside whatever moves."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kvxfer-hash")
        self._copy_engine = CPUCopyEngine()

    async def checksums(self, blocks: Descriptors) -> list[int]:
        """XXH3-64 of each block."""
        if blocks.num_bytes <= INLINE_BYTES:
            return checksum_blocks(blocks, self._copy_engine)
        return await to_its_end(self._threads.submit(checksum_blocks, blocks, self._copy_engine))

    async def verify(self, blocks: Descriptors, expected: Sequence[int]) -> dict[int, int]:
        """Find the blocks that have the expected checksum; the checksum of each by position."""
        return _intact(await self.checksums(blocks), expected)

    def verification(self, blocks: Descriptors, expected: Sequence[int]) -> "Verification":
        """Verify blocks as they arrive; `Verification.settle` has to be awaited in the end.

        A batch of `INLINE_BYTES` is hashed on the thread that says that it has landed, where its
        bytes are in the caches.
        """
        at_once = blocks.num_bytes <= INLINE_BYTES
        submit = _run_at_once if at_once else self._threads.submit
        return Verification(submit, self._copy_engine, blocks, expected)

    async def copy(self, source: Descriptors, destination: Descriptors) -> None:
        """Copy blocks within this process; see `CopyEngine.copy`."""
        await to_its_end(self._threads.submit(self._copy_engine.copy, source, destination))

    async def aclose(self) -> None:
        """Wait for what runs and let the threads end; may be called again."""
        await asyncio.to_thread(self._threads.shutdown)
        self._copy_engine.close()


class Verification:
    """Finds out which blocks of a batch that arrives run by run are what they should be.

    No thread waits for what has not landed.

    Args:
        submit: Runs what hashes the blocks that have landed, those of one batch one after the
            other.
        copy_engine: Gathers small fragments.
        blocks: The whole batch.
        expected: XXH3-64 that each block must have.

    Attributes:
        intact: Of the blocks that have landed and have the expected checksum, the checksum by
            position; complete once settled.
    """

    def __init__(
        self,
        submit: Callable[[Callable[[], None]], "Future[None]"],
        copy_engine: CopyEngine,
        blocks: Descriptors,
        expected: Sequence[int],
    ) -> None:
        self.intact: dict[int, int] = {}
        self._submit = submit
        self._copy_engine = copy_engine
        self._blocks = blocks
        self._expected = expected
        self._lock = threading.Lock()
        self._landed: deque[tuple[int, int]] = deque()
        self._is_running = False
        self._begun: list[Future[None]] = []

    def landed(self, start: int, stop: int) -> None:
        """Say that a run of blocks has arrived; from any thread, and at once."""
        with self._lock:
            self._landed.append((start, stop))
            was_running, self._is_running = self._is_running, True
        if not was_running:
            self._begun.append(self._submit(self._run))

    async def settle(self) -> None:
        """Wait until all that has landed is verified; nothing more may land."""
        for running in reversed(self._begun):  # one began when the one before was over
            await to_its_end(running)

    def _run(self) -> None:
        while (bounds := self._next()) is not None:
            start, stop = bounds
            checksums = checksum_blocks(part(self._blocks, start, stop), self._copy_engine)
            found = _intact(checksums, self._expected[start:stop])
            self.intact |= {start + row: each for row, each in found.items()}

    def _next(self) -> tuple[int, int] | None:
        with self._lock:
            self._is_running = bool(self._landed)
            return self._landed.popleft() if self._landed else None


def _run_at_once(call: Callable[[], None]) -> "Future[None]":
    done: Future[None] = Future()
    try:
        call()
    except Exception as exc:  # noqa: BLE001 - whoever waits for the future gets it
        done.set_exception(exc)
    else:
        done.set_result(None)
    return done


def _intact(actual: Sequence[int], expected: Sequence[int]) -> dict[int, int]:
    pairs = zip(actual, expected, strict=True)
    return {index: each for index, (each, wanted) in enumerate(pairs) if each == wanted}
