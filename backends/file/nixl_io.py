"""I/O engine over NIXL's POSIX plug-in, which uses io_uring or Linux AIO."""

import ctypes
import fcntl
import logging
import mmap
import os
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvxfer.backends.file.file_io import FileIO, IOVector, PosixFileIO, Result
from kvxfer.backends.nixl_module import import_nixl, nixl_errors
from kvxfer.errors import BackendUnavailableError

logger = logging.getLogger(__name__)

Operation = Literal["READ", "WRITE"]

QUEUES = {"io_uring": "use_uring", "AIO": "use_aio"}
"""Queues of the plug-in, the best first, and the parameters that choose them.

Its third, `use_posix_aio`, is left out: in nixl 1.5.1 a transfer fails while its other I/O is under
way, and the queue is of no use afterwards.
"""

POOL_PIECES = 4096
"""Most pieces of one transfer. With NIXL's default of 65,536 each agent takes 12 MiB."""

SHORTEST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 1e-3

# The plug-in does nothing with memory that is registered, but insists on it.
_ALL_MEMORY = (0, 1 << 56, 0, "")
_FILE_BYTES = 1 << 62
_PIECES_PER_POLL = 64

Integers = NDArray[np.int64]

Rows = NDArray[np.int64]
"""Pieces of memory and their places in files: address, length, offset in the file, open file."""


class NixlFileIO(FileIO):
    """I/O engine that moves the files of a call in one NIXL transfer.

    NIXL does not say which file of a failed transfer failed, nor why. So its files are moved again
    by `PosixFileIO`, whose system calls do; a file that these can move has not failed.

    Calls under way at the same time use an agent each; agents are kept for later calls.

    Args:
        queues: Names in `QUEUES` to try, the best first.

    Raises:
        BackendUnavailableError: NIXL, its POSIX plug-in, or a queue that it can use is missing.
    """

    files_per_call = 64

    def __init__(self, queues: Sequence[str] = tuple(QUEUES)) -> None:
        self._nixl = import_nixl(otherwise="use engine=posix")
        self._errors = nixl_errors(self._nixl)
        self._posix = PosixFileIO()
        self._lock = threading.Lock()
        self._warned = False
        self._closed = False
        self._queue, agent = self._open_queue(queues)
        self._idle = [agent]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(queue={self._queue!r})"

    def read(self, fds: Sequence[int], vectors: Sequence[IOVector]) -> list[Result]:
        """See `FileIO.read`.

        NIXL takes a short read for a failure, so it is asked for what the files have. Where
        O_DIRECT allows whole pages only, the rest of a last page is read with `preadv`.
        """
        results: list[Result] = []
        for fd, vector in zip(fds, vectors, strict=True):
            try:
                results.append(min(os.fstat(fd).st_size, int(vector[:, 1].sum())))
            except OSError as exc:
                results.append(exc)
        found = [index for index, result in enumerate(results) if isinstance(result, int)]
        fds, vectors = [fds[index] for index in found], [vectors[index] for index in found]
        sizes = np.array([results[index] for index in found], np.int64)
        rests = np.array([_rest(*each) for each in zip(fds, sizes.tolist(), strict=True)], np.int64)
        if self._move("READ", fds, _rows(fds, vectors, sizes - rests)):
            read: list[Result] = [
                _read_rest(fd, vector, int(size), int(rest)) if rest else int(size)
                for fd, vector, size, rest in zip(fds, vectors, sizes, rests, strict=True)
            ]
        else:
            read = self._judge(self._posix.read(fds, vectors), sizes)
        for index, result in zip(found, read, strict=True):
            results[index] = result
        return results

    def write(self, fds: Sequence[int], vectors: Sequence[IOVector]) -> list[Result]:
        """See `FileIO.write`."""
        sizes = np.array([int(vector[:, 1].sum()) for vector in vectors], np.int64)
        if self._move("WRITE", fds, _rows(fds, vectors, sizes)):
            return list(sizes.tolist())
        return self._judge(self._posix.write(fds, vectors), sizes)

    def close(self) -> None:
        """See `FileIO.close`."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for agent in idle:
            agent.close()

    def _open_queue(self, queues: Sequence[str]) -> tuple[str, "_Agent"]:
        """Open an agent with the first queue that this machine has."""
        reasons = []
        for queue in queues:
            try:
                return queue, _Agent(self._nixl, queue)
            except self._errors as exc:
                reasons.append(f"{queue}: {exc}")
        raise BackendUnavailableError(
            "NIXL's POSIX plug-in is missing, or this machine lets it use neither io_uring nor "
            f"AIO ({'; '.join(reasons)}); use engine=posix"
        )

    def _move(self, operation: Operation, fds: Sequence[int], rows: Rows) -> bool:
        """Move everything; return whether it succeeded. No transfer is under way afterwards."""
        if not len(rows):
            return True
        agent = None
        try:
            agent = self._take()
            agent.move(operation, fds, rows)
        except self._errors as exc:
            logger.debug("a NIXL transfer of %d files failed: %s", len(fds), exc)
            # Closed in case its queue is what failed: the next call has a new one.
            if agent is not None:
                agent.close()
            return False
        self._keep(agent)
        return True

    def _take(self) -> "_Agent":
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Agent(self._nixl, self._queue)

    def _keep(self, agent: "_Agent") -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(agent)
                return
        agent.close()

    def _judge(self, results: list[Result], sizes: Integers) -> list[Result]:
        """Warn, once, when a transfer failed and none of its files did."""
        if not self._warned and results == sizes.tolist():
            self._warned = True
            logger.warning(
                "%r failed to move files that preadv or pwritev could move; "
                "NIXL says why on standard error",
                self,
            )
        return results


class _Agent:
    """NIXL agent with a queue of the POSIX plug-in, for one caller at a time.

    Args:
        nixl: The module.
        queue: One of `QUEUES`.
    """

    def __init__(self, nixl: Any, queue: str) -> None:
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = nixl.nixl_agent(f"kvxfer-{uuid.uuid4()}", config)
        self._agent.create_backend(
            "POSIX", {QUEUES[queue]: "true", "ios_pool_size": str(POOL_PIECES)}
        )
        self._memory = self._agent.register_memory([_ALL_MEMORY], "DRAM")

    def move(self, operation: Operation, fds: Sequence[int], rows: Rows) -> None:
        """Move bytes; no transfer is under way after it returns, or raises an error of NIXL."""
        described = [(0, _FILE_BYTES, fd, "") for fd in set(fds)]
        files = self._agent.register_memory(described, "FILE")
        try:
            for start in range(0, len(rows), POOL_PIECES):
                self._transfer(operation, rows[start : start + POOL_PIECES])
        finally:
            self._agent.deregister_memory(files)

    def close(self) -> None:
        """Release every resource."""
        self._agent.deregister_memory(self._memory)
        del self._agent

    def _transfer(self, operation: Operation, rows: Rows) -> None:
        agent = self._agent
        addresses, lengths, offsets, fds = rows.view(np.uint64).T
        memory = np.column_stack([addresses, lengths, np.zeros_like(lengths)])
        files = np.column_stack([offsets, lengths, fds])
        handle = agent.initialize_xfer(
            operation,
            agent.get_xfer_descs(memory, "DRAM"),
            agent.get_xfer_descs(files, "FILE"),
            agent.name,
        )
        try:
            if agent.transfer(handle) == "PROC":
                self._wait(handle, 2 * len(rows) // _PIECES_PER_POLL)
        finally:
            handle.release()

    def _wait(self, handle: Any, busy_polls: int) -> None:
        """Poll to the end: at first without pauses, since each poll posts some of the pieces."""
        started, polls = time.perf_counter(), 0
        try:
            while self._agent.check_xfer_state(handle) == "PROC":
                polls += 1
                if polls > busy_polls:
                    elapsed_s = time.perf_counter() - started
                    time.sleep(min(max(elapsed_s / 16, SHORTEST_PAUSE_S), LONGEST_PAUSE_S))
        finally:
            # After an interrupt, too: a transfer that is released goes on.
            while self._agent.check_xfer_state(handle) == "PROC":
                pass


def _rows(fds: Sequence[int], vectors: Sequence[IOVector], sizes: Integers) -> Rows:
    """Describe the leading `sizes[i]` bytes of file i."""
    if not fds:
        return np.empty((0, 4), np.int64)
    pieces = np.concatenate(vectors).astype(np.int64)
    counts = [len(vector) for vector in vectors]
    totals = np.concatenate([[0], np.cumsum(pieces[:, 1])])
    firsts = totals[np.cumsum([0, *counts[:-1]])]
    offsets = totals[:-1] - np.repeat(firsts, counts)
    lengths = np.minimum(pieces[:, 1], np.repeat(sizes, counts) - offsets)
    columns = [pieces[:, 0], lengths, offsets, np.repeat(fds, counts)]
    rows: Rows = np.column_stack(columns)[lengths > 0]
    return rows


def _rest(fd: int, num_bytes: int) -> int:
    """Count the bytes at the end of `num_bytes` that O_DIRECT can read only as a part of a page."""
    rest = num_bytes % mmap.PAGESIZE
    if rest and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
        return rest
    return 0


def _read_rest(fd: int, vector: IOVector, num_bytes: int, rest: int) -> Result:
    """Read the last, partial page of a file; returns the bytes read of all of it."""
    start, views, offset = num_bytes - rest, [], 0
    for address, length in vector.tolist():
        skipped = min(max(start - offset, 0), length)
        wanted = min(length, start + mmap.PAGESIZE - offset) - skipped
        if wanted > 0:
            views.append((ctypes.c_char * wanted).from_address(address + skipped))
        offset += length
    try:
        return start + os.preadv(fd, views, start)
    except OSError as exc:
        return exc
