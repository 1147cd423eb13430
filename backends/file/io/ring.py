"""io_uring, which takes an array of operations and returns an array of results.

Source: https://kernel.dk/io_uring.pdf, and `linux/io_uring.h`.
"""

import ctypes
import errno
import mmap
import os

import numpy as np
from numpy.typing import NDArray

OPERATION = np.dtype(
    [
        ("opcode", "u1"),
        ("flags", "u1"),
        ("ioprio", "<u2"),
        ("fd", "<i4"),
        ("offset", "<u8"),
        ("address", "<u8"),
        ("length", "<u4"),
        ("op_flags", "<u4"),
        ("user_data", "<u8"),
        ("buffer_index", "<u2"),
        ("personality", "<u2"),
        ("file_index", "<u4"),
        ("address3", "<u8"),
        ("padding", "<u8"),
    ]
)
"""`struct io_uring_sqe`, 64 bytes."""

READV, WRITEV, FSYNC, OPENAT, CLOSE, RENAMEAT, FTRUNCATE = 1, 2, 3, 18, 19, 35, 55
FIXED_FILE, LINK, HARD_LINK = 1 << 0, 1 << 2, 1 << 3
RENAME_NOREPLACE = 1 << 0

_COMPLETION = np.dtype([("user_data", "<u8"), ("result", "<i4"), ("flags", "<u4")])
_PARAMETERS = np.dtype(
    [
        ("sq_entries", "<u4"),
        ("cq_entries", "<u4"),
        ("flags", "<u4"),
        ("unused", "<u4", 2),
        ("features", "<u4"),
        ("reserved", "<u4", 4),
        ("sq", "<u4", 10),
        ("cq", "<u4", 10),
    ]
)
_HEAD, _TAIL = 0, 1  # indices into the offsets of either queue
_SQ_ARRAY, _CQ_ENTRIES = 6, 5
_SINGLE_MMAP = 1 << 0

_SETUP, _ENTER, _REGISTER = 425, 426, 427  # the same numbers on every architecture
_ENTER_GETEVENTS = 1
_SINGLE_ISSUER, _DEFER_TASKRUN = 1 << 12, 1 << 13
_REGISTER_PROBE, _REGISTER_FILES2, _REGISTER_SPARSE = 8, 13, 1
_SQES_OFFSET = 0x10000000

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


class Ring:
    """One io_uring, used by the thread that created it; any thread may close it.

    Args:
        num_operations: Maximum operations of one `run`, a power of two.
        num_files: Slots for files that operations open and close.

    Attributes:
        last_opcode: Largest opcode that the kernel knows.

    Raises:
        OSError: The kernel has no io_uring, has too old a one, or does not permit it.
    """

    def __init__(self, num_operations: int, num_files: int) -> None:
        parameters = np.zeros((), _PARAMETERS)
        self._fd = _set_up(num_operations, parameters)
        try:
            self._map(parameters)
            # Sparse: the slots are filled by OPENAT. struct io_uring_rsrc_register.
            register = np.array([num_files, _REGISTER_SPARSE, 0, 0, 0, 0, 0, 0], np.uint32)
            _call(_REGISTER, self._fd, _REGISTER_FILES2, register.ctypes.data, register.nbytes)
            probe = np.zeros(16, np.uint8)  # struct io_uring_probe, without a list of operations
            _call(_REGISTER, self._fd, _REGISTER_PROBE, probe.ctypes.data, 0)
            self.last_opcode = int(probe[0])
        except BaseException:
            os.close(self._fd)
            raise

    def run(self, operations: NDArray[np.void]) -> NDArray[np.int32]:
        """Run operations and wait for all of them; the GIL is free meanwhile.

        Args:
            operations: `OPERATION`, `(n,)`; their `user_data` is overwritten.

        Returns:
            int32 `(n,)`: results of the system calls, errors as negative numbers.
        """
        count, tail = len(operations), int(self._submitted[0])
        operations["user_data"] = np.arange(count)
        self._operations[(tail + np.arange(count)) % len(self._operations)] = operations
        self._submitted[0] = (tail + count) & 0xFFFFFFFF
        results = np.empty(count, np.int32)
        unsubmitted, running = count, count
        while running:
            unsubmitted -= self._enter(unsubmitted, running)
            head, ready = int(self._taken[0]), int(self._completed[0])
            ends = np.arange((ready - head) & 0xFFFFFFFF)
            done = self._completions[(head + ends) % len(self._completions)]
            results[done["user_data"].astype(np.int64)] = done["result"]
            self._taken[0] = ready
            running -= len(done)
        return results

    def close(self) -> None:
        """Close the ring; may be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            del self._submitted, self._taken, self._completed, self._operations, self._completions
            for memory in self._maps:  # each has a descriptor of its own
                memory.close()

    def _enter(self, num_submitted: int, num_awaited: int) -> int:
        try:
            return _call(_ENTER, self._fd, num_submitted, num_awaited, _ENTER_GETEVENTS, 0, 0)
        except OSError as exc:
            if exc.errno not in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                raise
            return 0

    def _map(self, parameters: NDArray[np.void]) -> None:
        if not int(parameters["features"]) & _SINGLE_MMAP:
            raise OSError(errno.ENOSYS, "this kernel's io_uring is too old")
        sq, cq = parameters["sq"], parameters["cq"]
        num_entries, num_completions = int(parameters["sq_entries"]), int(parameters["cq_entries"])
        num_bytes = max(
            int(sq[_SQ_ARRAY]) + 4 * num_entries,
            int(cq[_CQ_ENTRIES]) + _COMPLETION.itemsize * num_completions,
        )
        queues = mmap.mmap(self._fd, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        entries = mmap.mmap(
            self._fd,
            OPERATION.itemsize * num_entries,
            mmap.MAP_SHARED | mmap.MAP_POPULATE,
            offset=_SQES_OFFSET,
        )
        self._maps = queues, entries
        words = np.frombuffer(queues, np.uint32, num_bytes // 4)
        self._submitted = words[int(sq[_TAIL]) // 4 :][:1]
        self._taken = words[int(cq[_HEAD]) // 4 :][:1]
        self._completed = words[int(cq[_TAIL]) // 4 :][:1]
        words[int(sq[_SQ_ARRAY]) // 4 :][:num_entries] = np.arange(num_entries)
        self._operations = np.frombuffer(entries, OPERATION, num_entries)
        self._completions = np.frombuffer(
            queues, _COMPLETION, num_completions, offset=int(cq[_CQ_ENTRIES])
        )


def _set_up(num_operations: int, parameters: NDArray[np.void]) -> int:
    """Create a ring; from Linux 6.1 on, one that completes operations on the thread that waits."""
    parameters["flags"] = _SINGLE_ISSUER | _DEFER_TASKRUN
    try:
        return _call(_SETUP, num_operations, parameters.ctypes.data)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
    parameters["flags"] = 0
    return _call(_SETUP, num_operations, parameters.ctypes.data)


def _call(number: int, *arguments: int) -> int:
    done: int = _syscall(ctypes.c_long(number), *map(ctypes.c_size_t, arguments))
    if done < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return done
