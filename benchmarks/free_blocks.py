"""Queue of free blocks, as in vLLM: the block ids that requests get, neighbours or not."""

from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

BlockIds = NDArray[np.int64]


class FreeBlocks:
    """Queue from which vLLM takes blocks, with its prefix cache on.

    Blocks are taken from its head, and the full ones of a request go back to its end, last block
    first: the beginning of a prompt is the likeliest prefix hit. Block 0 is the null block.

    Args:
        num_blocks: Blocks of the cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self._ids = deque(range(1, num_blocks))

    def take(self, count: int) -> BlockIds:
        """Take the blocks of a new request, in its order.

        Raises:
            IndexError: There are not as many free blocks.
        """
        return np.array([self._ids.popleft() for _ in range(count)], np.int64)

    def give_back(self, block_ids: BlockIds) -> None:
        """Return the blocks of a request, given in its order, to the queue."""
        self._ids.extend(block_ids[::-1].tolist())


def assign_blocks(
    num_blocks: int, num_requests: int, blocks_per_request: int
) -> Iterator[BlockIds]:
    """Yield the blocks of each request; a prompt is computed while the one before is sent.

    Args:
        num_blocks: Blocks of the cache, all free at first.
        num_requests: Number of requests, without common prefixes.
        blocks_per_request: Blocks of each.
    """
    free, being_sent = FreeBlocks(num_blocks), None
    for _ in range(num_requests):
        block_ids = free.take(blocks_per_request)
        if being_sent is not None:
            free.give_back(being_sent)
        being_sent = block_ids
        yield block_ids
