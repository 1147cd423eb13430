"""Shares of a batch: the runs of blocks that its threads move."""

from collections.abc import Iterator

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.fragments import cut_evenly

SHARE_BYTES = 16 << 20
"""Bytes that justify a second thread, where the number of files does not."""


def cut_shares(
    blocks: Descriptors, num_threads: int, files_per_call: int
) -> Iterator[tuple[int, int]]:
    """Cut a batch into runs of blocks of about equal bytes, at most one per thread."""
    worth = max(blocks.num_blocks // files_per_call, blocks.num_bytes // SHARE_BYTES)
    return cut_evenly(blocks.block_sizes, max(1, min(num_threads, worth)))
