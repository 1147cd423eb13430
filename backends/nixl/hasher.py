"""Checksums of blocks that leave and of blocks that have arrived."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvxfer.backends.nixl.extents import part
from kvxfer.backends.nixl.transfer_agent import all_over, to_its_end
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.checksums import checksum_blocks

NUM_THREADS = 2

INLINE_BYTES = 2 << 20
"""What is hashed at once, on the event loop or the thread of an agent: some hundred microseconds,
less than two changes of threads can take. Also of a batch in small fragments, which are gathered,
a millisecond at most."""


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
        """Verify blocks as they arrive; `Verification.settle` has to be awaited in the end."""
        return Verification(self._threads, self._copy_engine, blocks, expected)

    async def copy(self, source: Descriptors, destination: Descriptors) -> None:
        """Copy blocks within this process; see `CopyEngine.copy`."""
        await to_its_end(self._threads.submit(self._copy_engine.copy, source, destination))

    async def aclose(self) -> None:
        """Wait for what runs and let the threads end; may be called again."""
        await asyncio.to_thread(self._threads.shutdown)
        self._copy_engine.close()


class Verification:
    """Finds out which blocks of a batch that arrives run by run are what they should be.

    A run of at most `INLINE_BYTES` is hashed by who says that it has landed, as its bytes are in
    the caches there; no thread waits for what has not landed.

    Args:
        threads: Where larger runs are hashed.
        copy_engine: Gathers small fragments.
        blocks: The whole batch.
        expected: XXH3-64 that each block must have.

    Attributes:
        intact: Of the blocks that have landed and have the expected checksum, the checksum by
            position; complete once settled.
    """

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        copy_engine: CopyEngine,
        blocks: Descriptors,
        expected: Sequence[int],
    ) -> None:
        self.intact: dict[int, int] = {}
        self._threads = threads
        self._copy_engine = copy_engine
        self._blocks = blocks
        self._expected = expected
        self._begun: list[Future[None]] = []

    def landed(self, start: int, stop: int) -> None:
        """Say that a run of blocks has arrived; from any thread."""
        run = part(self._blocks, start, stop)
        if run.num_bytes <= INLINE_BYTES:
            self._verify(run, start)
        else:
            self._begun.append(self._threads.submit(self._verify, run, start))

    async def settle(self) -> None:
        """Wait until all that has landed is verified; nothing more may land."""
        await to_its_end(all_over(self._begun))

    def _verify(self, run: Descriptors, start: int) -> None:
        expected = self._expected[start : start + run.num_blocks]
        found = _intact(checksum_blocks(run, self._copy_engine), expected)
        self.intact.update({start + row: checksum for row, checksum in found.items()})


def _intact(actual: Sequence[int], expected: Sequence[int]) -> dict[int, int]:
    pairs = zip(actual, expected, strict=True)
    return {index: each for index, (each, wanted) in enumerate(pairs) if each == wanted}
