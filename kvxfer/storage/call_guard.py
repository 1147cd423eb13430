"""Entry checks of a backend: it is open, it was not forked, and the batch is valid."""

import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import ClosedError, ForkedError, InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.runtime import Once
from kvxfer.storage.backend import require_batch
from kvxfer.storage.keys import GROUP_INDEX_BYTES, BlockKey, Namespace, groups_of

FEW_BLOCKS = 12
"""Maximum number of blocks that are checked faster one by one than by numpy."""


def chunk_bytes(keys: Sequence[BlockKey], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Find the chunk size of each key's group, in bytes; the group must exist."""
    groups = groups_of(keys)
    if int(groups.max()) >= len(sizes):
        at = int(groups.argmax())
        raise InvalidArgumentError(f"keys[{at}]", keys[at], f"a group below {len(sizes)}")
    return sizes[groups]


def require_within(
    chunks: NDArray[np.int64], starts: NDArray[np.int64], sizes: NDArray[np.int64]
) -> None:
    """Check that blocks are not empty, and within chunks of these sizes; no sum can overflow."""
    outside = (starts < 0) | (sizes < 1) | (starts > chunks - sizes)
    if outside.any():
        at = int(outside.argmax())
        what, found = f"start and size of keys[{at}]", (int(starts[at]), int(sizes[at]))
        raise InvalidArgumentError(what, found, f"within its chunk of {chunks[at]} bytes")


class CallGuard:
    """Entry checks of a backend's calls: open, not forked, keys and blocks valid.

    Args:
        what: Name of the backend in errors.
        namespace: Gives the groups and their chunk sizes; without one, keys of any group and
            blocks of any size pass.

    Attributes:
        chunk_sizes: Bytes of a chunk of each group.
        closed: Whether every call is refused because the backend was closed.

    Raises:
        InvalidArgumentError: The namespace has no groups.
    """

    def __init__(self, what: str, namespace: Namespace | None = None) -> None:
        if namespace is not None and not namespace.groups:
            raise InvalidArgumentError("namespace.groups", (), "at least one group")
        self._what = what
        self._pid = os.getpid()
        self.chunk_sizes = namespace.chunk_sizes if namespace else []
        self._limits = np.array(self.chunk_sizes, np.int64)
        groups = [group.to_bytes(GROUP_INDEX_BYTES, "big") for group in range(len(self._limits))]
        self._limit_of = dict(zip(groups, self.chunk_sizes, strict=True))
        self.closed = False
        self._releasing = Once()

    def check(self) -> None:
        """Check a call without a batch.

        Raises:
            ClosedError: The backend was closed.
            ForkedError: It was opened by another process.
        """
        if self.closed or os.getpid() != self._pid:
            self.require_same_process()
            raise ClosedError(self._what)

    def check_batch(self, keys: Sequence[BlockKey], *blocks: Descriptors) -> None:
        """Check a call with a batch: its keys, and its blocks if given.

        Raises:
            ClosedError: The backend was closed.
            ForkedError: See `check`.
            InvalidArgumentError: The batch is invalid, see `require_batch`; a key's group does not
                exist; or a block is not within its chunk.
        """
        self.check()
        require_batch(keys, *blocks)
        if not self.chunk_sizes or (len(keys) <= FEW_BLOCKS and self._fit(keys, blocks)):
            return
        chunks = chunk_bytes(keys, self._limits)
        for each in blocks:
            require_within(chunks, each.payload_starts, each.block_sizes)

    def _fit(self, keys: Sequence[BlockKey], batches: Sequence[Descriptors]) -> bool:
        """Whether a few keys and blocks fit; faster for them than numpy."""
        limits = [self._limit_of.get(key[-GROUP_INDEX_BYTES:], 0) for key in keys]
        for each in batches:
            starts, sizes = each.payload_starts.tolist(), each.block_sizes.tolist()
            for limit, start, size in zip(limits, starts, sizes, strict=True):
                if not 0 <= start <= limit - size < limit:
                    return False
        return 0 not in limits

    @property
    def released(self) -> bool:
        """Whether `aclose` has released everything."""
        return self._releasing.is_done

    def close(self) -> None:
        """Refuse every later call; may be called again.

        Raises:
            ForkedError: See `check`.
        """
        self.require_same_process()
        self.closed = True

    async def aclose(self, release: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Refuse every later call, and release what the backend has; may be called again.

        The release goes on if its caller is cancelled, and every call waits for its end. If it
        failed, or was cancelled with its event loop, a later call repeats it.
        """
        self.close()
        await self._releasing.run(release)

    def require_same_process(self) -> None:
        """Check that this process opened the backend.

        Raises:
            ForkedError: This is a fork: threads, locks and memory stayed with the parent.
        """
        if os.getpid() != self._pid:
            raise ForkedError(self._what, self._pid)
