"""Hasher: checksums of blocks to send, and of blocks that have arrived."""

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain

from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.errors import ClosedError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.runtime import DaemonThreads, wait_despite_cancel
from kvxfer.storage.integrity import checksum_blocks

NUM_THREADS = 2
"""Threads that copy between registered and other memory."""


class BlockHasher:
    """Hasher of blocks: of those to send on a thread of its own, of those that land where they do.

    One thread hashes faster than blocks are moved; two would compete for memory bandwidth with each
    other and with the transfers.

    Args:
        inline_bytes: Most bytes of a store to hash on the event loop itself: that takes some
            hundred microseconds, less than two thread switches can take.
    """

    def __init__(self, *, inline_bytes: int = 2 << 20) -> None:
        self._inline_bytes = inline_bytes
        self._copying = DaemonThreads("kvxfer-copy", NUM_THREADS)
        self._hashing = DaemonThreads("kvxfer-hash", 1)
        self._copy_engine = CPUCopyEngine()

    async def checksums(self, blocks: Descriptors) -> list[int]:
        """Compute the XXH3-64 of each block."""
        if blocks.num_bytes <= self._inline_bytes:
            return checksum_blocks(blocks, self._copy_engine)
        try:
            done = self._hashing.submit(checksum_blocks, blocks, self._copy_engine)
        except RuntimeError as exc:
            raise ClosedError("hasher") from exc
        return await wait_despite_cancel(done)

    def hash_runs(self, blocks: Descriptors, bounds: Sequence[tuple[int, int]]) -> "RunHashing":
        """Hash blocks as they arrive.

        Args:
            blocks: The blocks.
            bounds: First block and block after the last one of each run that arrives together.
        """
        return RunHashing(self._copy_engine, blocks, bounds)

    async def copy(self, source: Descriptors, destination: Descriptors) -> None:
        """Copy blocks within this process; see `CopyEngine.copy`."""
        await wait_despite_cancel(self._copying.submit(self._copy_engine.copy, source, destination))

    async def aclose(self) -> None:
        """Wait for running calls and end the threads; may be called again."""
        for threads in (self._copying, self._hashing):
            ended: Future[None] = Future()
            threads.shutdown()
            threads.when_ended(partial(ended.set_result, None))
            await wait_despite_cancel(ended)
        self._copy_engine.close()


class RunHashing:
    """Hashing of a batch whose blocks arrive run by run.

    A run is hashed by the thread that calls `landed`, because its bytes are in the caches there.
    Another thread would do it while the next run is read; but each of its calls asks for the
    interpreter lock, and so it holds up the thread that reads for longer than the hashing takes.

    Args:
        copy_engine: Engine that gathers small fragments.
        blocks: The blocks.
        bounds: First block and block after the last one of each run.
    """

    def __init__(
        self, copy_engine: CopyEngine, blocks: Descriptors, bounds: Sequence[tuple[int, int]]
    ) -> None:
        self._copy_engine = copy_engine
        self._blocks = blocks
        self._bounds = bounds
        self._checksums: dict[int, list[int]] = {}

    def landed(self, index: int) -> None:
        """Note that a run has arrived, and hash it; from any thread."""
        run = self._blocks.select(*self._bounds[index])
        self._checksums[index] = checksum_blocks(run, self._copy_engine)

    def checksums(self) -> list[int]:
        """Get the XXH3-64 of each block, once all have arrived."""
        runs = (self._checksums[index] for index in range(len(self._bounds)))
        return list(chain.from_iterable(runs))
