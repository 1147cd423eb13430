"""Hasher: checksums of blocks to send, and of blocks that have arrived."""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from typing import TypeVar

from kvxfer.backends.nixl.agents.base import to_its_end
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.errors import ClosedError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.integrity import checksum_blocks

T = TypeVar("T")

NUM_THREADS = 2
"""Threads that copy between registered and other memory."""

INLINE_BYTES = 2 << 20
"""Most bytes to hash at once, on the event loop or the thread of an agent: that takes some hundred
microseconds, less than two thread switches can take. A batch in small fragments, which are
gathered, takes a millisecond at most."""


class BlockHasher:
    """Hasher of blocks, on a thread of its own, while other blocks are moved.

    One thread hashes faster than blocks are moved; two would compete for memory bandwidth with each
    other and with the transfers.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kvxfer-copy")
        self._hashing = CallThread("kvxfer-hash")
        self._copy_engine = CPUCopyEngine()

    async def checksums(self, blocks: Descriptors) -> list[int]:
        """Compute the XXH3-64 of each block."""
        if blocks.num_bytes <= INLINE_BYTES:
            return checksum_blocks(blocks, self._copy_engine)
        done: Future[list[int]] = Future()
        self._hashing.begin(
            partial(_end_with, done, partial(checksum_blocks, blocks, self._copy_engine))
        )
        return await to_its_end(done)

    def hash_runs(self, runs: Sequence[Descriptors]) -> "RunHashing":
        """Hash blocks as they arrive; `RunHashing.settle` has to be awaited in the end.

        Args:
            runs: Blocks that arrive together.
        """
        return RunHashing(self._hashing, self._copy_engine, runs)

    async def copy(self, source: Descriptors, destination: Descriptors) -> None:
        """Copy blocks within this process; see `CopyEngine.copy`."""
        await to_its_end(self._threads.submit(self._copy_engine.copy, source, destination))

    async def aclose(self) -> None:
        """Wait for running calls and end the threads; may be called again."""
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.to_thread(self._hashing.end)
        self._copy_engine.close()


class RunHashing:
    """Hashing of a batch whose blocks arrive run by run.

    A run of at most `INLINE_BYTES` is hashed by the thread that calls `landed`, because its bytes
    are in the caches there; no thread waits for a run that has not landed.

    Args:
        thread: Thread that hashes larger runs.
        copy_engine: Engine that gathers small fragments.
        runs: Blocks that arrive together.

    Attributes:
        checksums: XXH3-64 of the landed blocks, by their position among all runs in a row; complete
            once settled.
    """

    def __init__(
        self, thread: "CallThread", copy_engine: CopyEngine, runs: Sequence[Descriptors]
    ) -> None:
        self.checksums: dict[int, int] = {}
        self._thread = thread
        self._copy_engine = copy_engine
        self._runs = runs
        self._firsts = list(accumulate((run.num_blocks for run in runs), initial=0))
        self._is_alone = True
        self._error: Exception | None = None

    def landed(self, index: int) -> None:
        """Note that a run has arrived, and hash it; from any thread."""
        if self._runs[index].num_bytes <= INLINE_BYTES:
            self._hash(index)
        else:
            self._is_alone = False
            self._thread.begin(partial(self._hash, index))

    async def settle(self) -> None:
        """Wait until all landed runs are hashed; no more may land."""
        if not self._is_alone:
            over: Future[None] = Future()
            self._thread.begin(partial(over.set_result, None))
            await to_its_end(over)
        if self._error:
            raise self._error

    def _hash(self, index: int) -> None:
        try:
            checksums = checksum_blocks(self._runs[index], self._copy_engine)
        except Exception as exc:  # noqa: BLE001 - raised by `settle`
            self._error = exc
            return
        self.checksums.update(enumerate(checksums, start=self._firsts[index]))


class CallThread:
    """Thread that makes calls, one after the other.

    Handing a call over takes some microseconds, where an executor takes two hundred: the calling
    thread is about to move the next run.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, call: Callable[[], None]) -> None:
        """Queue a call, which must not raise, after those that were begun before.

        Raises:
            ClosedError: The thread was ended.
        """
        with self._lock:  # after the end a call would never be made
            if self._ended:
                raise ClosedError("hasher")
            self._calls.put(call)

    def end(self) -> None:
        """Wait for queued calls and for the thread; blocks, may be called again."""
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
    except Exception as exc:  # noqa: BLE001 - raised by `done.result()`
        done.set_exception(exc)
