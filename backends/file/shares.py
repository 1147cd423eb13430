"""Shares: what each of several threads moves of a batch."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from kvxfer.kvcache.descriptors import Descriptors

SHARE_BYTES = 16 << 20
"""What makes a second thread worth its while, where its files do not."""


def cut_shares(
    blocks: Descriptors, num_threads: int, files_per_call: int
) -> Iterator[tuple[int, int]]:
    """Cut a batch into runs of blocks of about equal bytes, at most one per thread."""
    ends = np.cumsum(blocks.block_sizes)
    worth = max(blocks.num_blocks // files_per_call, int(ends[-1]) // SHARE_BYTES)
    num_shares = max(1, min(num_threads, worth))
    limits = int(ends[-1]) * np.arange(1, num_shares + 1) // num_shares
    stops = dict.fromkeys((np.searchsorted(ends, limits) + 1).tolist())
    yield from pairwise([0, *stops])
