"""Door of a backend: what every call passes before anything is read or written."""

import os
from collections.abc import Sequence

import numpy as np

from kvxfer.errors import ClosedError, ForkedError, InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import require_batch
from kvxfer.storage.keys import GROUP_INDEX_BYTES, BlockKey, Namespace


class Door:
    """Lets batches in that can be, while the backend is open, in the process that opened it.

    Args:
        what: What errors call the backend.
        namespace: Says which groups there are and how large their chunks are; without one, keys
            of any group and blocks of any size are let in.

    Attributes:
        chunk_sizes: Bytes of a chunk of each group.
        closed: Whether nothing is let in any more.

    Raises:
        InvalidArgumentError: The namespace has no groups.
    """

    def __init__(self, what: str, namespace: Namespace | None = None) -> None:
        if namespace is not None and not namespace.groups:
            raise InvalidArgumentError("namespace.groups", (), "at least one group")
        self._what = what
        self._pid = os.getpid()
        groups = range(len(namespace.groups)) if namespace is not None else ()
        self.chunk_sizes = [namespace.chunk_size_bytes(g) for g in groups] if namespace else []
        self._limits = np.array(self.chunk_sizes, np.int64)
        self.closed = False

    def check(
        self, keys: Sequence[BlockKey] | None = None, blocks: Descriptors | None = None
    ) -> None:
        """Check a call, and the batch that it is about.

        Raises:
            ClosedError: The backend was closed.
            ForkedError: See `require_same_process`.
            InvalidArgumentError: The batch cannot be, see `require_batch`; there is no such group;
                or a block is larger than a chunk.
        """
        self.require_same_process()
        if self.closed:
            raise ClosedError(self._what)
        if keys is None:
            return
        require_batch(keys, blocks)
        if not self.chunk_sizes:
            return
        groups = np.frombuffer(b"".join(key[-GROUP_INDEX_BYTES:] for key in keys), ">u4")
        if int(groups.max()) >= len(self.chunk_sizes):
            key = keys[int(groups.argmax())]
            raise InvalidArgumentError("key", key, f"a group below {len(self.chunk_sizes)}")
        if blocks is not None:
            stops = blocks.payload_starts + blocks.block_sizes
            over = stops > self._limits[groups]
            if over.any():
                at = int(over.argmax())
                limit = f"at most {self.chunk_sizes[groups[at]]}, as its namespace says"
                what = f"bytes of a block of group {groups[at]}"
                raise InvalidArgumentError(what, int(stops[at]), limit)

    def close(self) -> bool:
        """Let nothing in any more; say whether anything was until now.

        Raises:
            ForkedError: See `require_same_process`.
        """
        self.require_same_process()
        was_open, self.closed = not self.closed, True
        return was_open

    def require_same_process(self) -> None:
        """Check that this process opened the backend.

        Raises:
            ForkedError: It was forked since: threads, locks and memory stayed with the parent.
        """
        if os.getpid() != self._pid:
            raise ForkedError(self._what, self._pid)
