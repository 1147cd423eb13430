"""Checksums of blocks that leave and of blocks that have arrived."""

from collections.abc import Sequence

from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.checksums import checksum_blocks
from kvxfer.storage.threads import Threads

NUM_THREADS = 2

INLINE_BYTES = 2 << 20
"""What is hashed on the event loop: some hundred microseconds, less than two changes of threads
can take. Also of a batch in small fragments, which are gathered, a millisecond at most."""


class BlockHasher:
    """Hashes blocks on threads of its own, beside whatever moves."""

    def __init__(self) -> None:
        self._threads = Threads("kvxfer-hash", NUM_THREADS)
        self._copy_engine = CPUCopyEngine()

    async def checksums(self, blocks: Descriptors) -> list[int]:
        """XXH3-64 of each block."""
        if blocks.num_bytes <= INLINE_BYTES:
            return checksum_blocks(blocks, self._copy_engine)
        return await self._threads.run(checksum_blocks, blocks, self._copy_engine)

    async def verify(self, blocks: Descriptors, expected: Sequence[int]) -> dict[int, int]:
        """Find the blocks that have the expected checksum; the checksum of each by position."""
        actual = await self.checksums(blocks)
        pairs = zip(actual, expected, strict=True)
        return {index: each for index, (each, wanted) in enumerate(pairs) if each == wanted}

    async def copy(self, source: Descriptors, destination: Descriptors) -> None:
        """Copy blocks within this process; see `CopyEngine.copy`."""
        await self._threads.run(self._copy_engine.copy, source, destination)

    async def aclose(self) -> None:
        """Let the threads end; may be called again."""
        await self._threads.aclose()
        self._copy_engine.close()
