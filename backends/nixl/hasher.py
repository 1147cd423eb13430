"""Checksums of blocks that leave and of blocks that have arrived."""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from typing import TypeVar

from kvxfer.backends.nixl.transfer_agent import to_its_end
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.errors import ClosedError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.integrity import checksum_blocks

T = TypeVar("T")

NUM_THREADS = 2
"""That copy between memory that is registered and such as is not."""

INLINE_BYTES = 2 << 20
"""What is hashed at once, on the event loop or the thread of an agent: some hundred microseconds,
less than two changes of threads can take. Also of a batch in small fragments, which are gathered,
a millisecond at most."""


class BlockHasher:
    """Hashes blocks on a thread of its own, beside whatever moves.

    One is faster than what moves blocks, and two would keep each other, and that, from memory.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kvxfer-copy")
        self._hashing = CallThread("kvxfer-hash")
        self._copy_engine = CPUCopyEngine()

    async def checksums(self, blocks: Descriptors) -> list[int]:
        """XXH3-64 of each block."""
        if blocks.num_bytes <= INLINE_BYTES:
            return checksum_blocks(blocks, self._copy_engine)
        done: Future[list[int]] = Future()
        self._hashing.begin(
            partial(_end_with, done, partial(checksum_blocks, blocks, self._copy_engine))
        )
        return await to_its_end(done)

    async def verify(self, blocks: Descriptors, expected: Sequence[int]) -> dict[int, int]:
        """Find the blocks that have the expected checksum; the checksum of each by position."""
        return _intact(await self.checksums(blocks), expected)

    def verification(self, runs: Sequence[Descriptors], expected: Sequence[int]) -> "Verification":
        """Verify blocks as they arrive; `Verification.settle` has to be awaited in the end.

        Args:
            runs: What arrives together.
            expected: XXH3-64 that each block must have, of all runs in a row.
        """
        return Verification(self._hashing, self._copy_engine, runs, expected)

    async def copy(self, source: Descriptors, destination: Descriptors) -> None:
        """Copy blocks within this process; see `CopyEngine.copy`."""
        await to_its_end(self._threads.submit(self._copy_engine.copy, source, destination))

    async def aclose(self) -> None:
        """Wait for what runs and let the threads end; may be called again."""
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.to_thread(self._hashing.end)
        self._copy_engine.close()


class Verification:
    """Finds out which blocks of a batch that arrives run by run are what they should be.

    A run of at most `INLINE_BYTES` is hashed by who says that it has landed, as its bytes are in
    the caches there; no thread waits for what has not landed.

    Args:
        thread: Where larger runs are hashed.
        copy_engine: Gathers small fragments.
        runs: What arrives together.
        expected: XXH3-64 that each block must have, of all runs in a row.

    Attributes:
        intact: Of the blocks that have landed and have the expected checksum, the checksum by
            position; complete once settled.
    """

    def __init__(
        self,
        thread: "CallThread",
        copy_engine: CopyEngine,
        runs: Sequence[Descriptors],
        expected: Sequence[int],
    ) -> None:
        self.intact: dict[int, int] = {}
        self._thread = thread
        self._copy_engine = copy_engine
        self._runs = runs
        self._firsts = list(accumulate((run.num_blocks for run in runs), initial=0))
        self._expected = expected
        self._is_alone = True
        self._error: Exception | None = None

    def landed(self, index: int) -> None:
        """Say that a run has arrived; from any thread."""
        if self._runs[index].num_bytes <= INLINE_BYTES:
            self._verify(index)
        else:
            self._is_alone = False
            self._thread.begin(partial(self._verify, index))

    async def settle(self) -> None:
        """Wait until all that has landed is verified; nothing more may land."""
        if not self._is_alone:
            over: Future[None] = Future()
            self._thread.begin(partial(over.set_result, None))
            await to_its_end(over)
        if self._error:
            raise self._error

    def _verify(self, index: int) -> None:
        first, after = self._firsts[index : index + 2]
        try:
            checksums = checksum_blocks(self._runs[index], self._copy_engine)
        except Exception as exc:  # noqa: BLE001 - whoever settles this gets it
            self._error = exc
            return
        found = _intact(checksums, self._expected[first:after])
        self.intact.update({first + row: checksum for row, checksum in found.items()})


class CallThread:
    """Makes calls on a thread, one after the other.

    Handing one over takes some microseconds, where an executor takes two hundred: those who do it
    are about to move the next run.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, call: Callable[[], None]) -> None:
        """Make a call, which raises nothing, after those that were begun before.

        Raises:
            ClosedError: The thread was ended.
        """
        with self._lock:  # behind the end a call would never be made
            if self._ended:
                raise ClosedError("hasher")
            self._calls.put(call)

    def end(self) -> None:
        """Wait for what was begun, and for the thread; blocks, may be called again."""
        with self._lock:
            self._ended = True
            self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _end_with(done: "Future[T]", call: Callable[[], T]) -> None:
    try:
        done.set_result(call())
    except Exception as exc:  # noqa: BLE001 - whoever waits for `done` gets it
        done.set_exception(exc)


def _intact(actual: Sequence[int], expected: Sequence[int]) -> dict[int, int]:
    pairs = zip(actual, expected, strict=True)
    return {index: each for index, (each, wanted) in enumerate(pairs) if each == wanted}
