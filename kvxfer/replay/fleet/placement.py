"""Placement of a trace's blocks at the holders of a fleet, and what moves when holders change."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvxfer.backends.nixl import Endpoint, rank
from kvxfer.replay.fleet.holders import Placement
from kvxfer.replay.fleet.settings import Fleet
from kvxfer.storage.keys import BlockKey, make_block_key

KEYS_AT_A_TIME = 2048
"""Keys that are ranked together, so that their weights fit in the caches of a processor."""

PORT = 7000


def place(fleet: Fleet, num_blocks: int, *, without: frozenset[int] = frozenset()) -> Placement:
    """Place blocks at the holders of each group, without some that have failed."""
    keys = make_keys(num_blocks)
    groups = np.arange(fleet.holders) * fleet.groups // fleet.holders
    there = np.array([holder not in without for holder in range(fleet.holders)])
    return [
        place_at(keys, np.flatnonzero((groups == group) & there), fleet.replicas)
        for group in range(fleet.groups)
    ]


def place_at(
    keys: Sequence[BlockKey], holders: NDArray[np.intp], replicas: int
) -> NDArray[np.int32]:
    """Find the holders of keys, first choice first; no rows where there is no holder."""
    if not len(holders):
        return np.zeros((0, len(keys)), np.int32)
    endpoints = [Endpoint(f"holder-{holder}", PORT) for holder in holders.tolist()]
    parts = [
        holders[rank(keys[start : start + KEYS_AT_A_TIME], endpoints, replicas)]
        for start in range(0, len(keys), KEYS_AT_A_TIME)
    ]
    return np.concatenate(parts, axis=1).astype(np.int32)


def make_keys(num_blocks: int) -> list[BlockKey]:
    """Make the keys of the blocks of a trace, as hashes of prompts are: the same for a number."""
    return [make_block_key(block.to_bytes(16, "big"), 0) for block in range(num_blocks)]


def count_moved(
    before: NDArray[np.int32], after: NDArray[np.int32], changed: frozenset[int]
) -> tuple[float, float]:
    """Count which share of the copies of blocks is wanted at a holder that did not have it.

    Args:
        before: Holders of each block, `(replicas, num_blocks)`.
        after: The same after holders have come or gone.
        changed: The holders that came or went.

    Returns:
        The share, and the part of it that neither goes to a holder that came nor replaces one that
        went.
    """
    moved = ~(after[:, None] == before[None]).any(axis=1)
    of_changed = np.isin(after, list(changed)) | np.isin(before, list(changed)).any(axis=0)
    return float(moved.mean()), float((moved & ~of_changed).mean())
