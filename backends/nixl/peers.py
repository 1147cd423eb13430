"""Placement of blocks at peers, by rendezvous hashing.

Every peer has a weight for every key, a hash of the two, and the heaviest peers hold the block. So
all processes agree without communication, in whatever order they know the peers, and when a peer
leaves, only its blocks move.

Source: Thaler, Ravishankar: "Using name-based mappings to increase hit rates", IEEE/ACM
Transactions on Networking 6(1), 1998.
"""

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvxfer.endpoint import Endpoint
from kvxfer.storage.keys import BlockKey

# Finalizer of SplitMix64, a bijection. Source: https://prng.di.unimi.it/splitmix64.c
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


def rank(
    keys: Sequence[BlockKey], endpoints: Sequence[Endpoint], replicas: int
) -> NDArray[np.intp]:
    """Rank the peers that hold each key, best first; `endpoints` are distinct, and not empty.

    The answer for a key depends only on the key and the set of endpoints. It is part of the
    protocol, because processes that store and processes that load must agree.

    Returns:
        Indices into `endpoints`, `(min(replicas, num_endpoints), num_keys)`.
    """
    if len(endpoints) == 1:
        return np.zeros((1, len(keys)), np.intp)
    weights = _mix(
        _hashes([str(endpoint).encode() for endpoint in endpoints])[:, None] ^ _hashes(keys)
    )
    ranked: NDArray[np.intp]
    if replicas == 1:
        ranked = weights.argmax(axis=0)[None]
    else:
        ranked = weights.argsort(axis=0)[::-1][:replicas]
    return ranked


def _hashes(names: Sequence[bytes]) -> NDArray[np.uint64]:
    return np.fromiter(map(xxhash.xxh3_64_intdigest, names), np.uint64, len(names))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scatter the bits; different values stay different."""
    values = (values ^ (values >> _SHIFTS[0])) * _MULTIPLIERS[0]
    values = (values ^ (values >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return values ^ (values >> _SHIFTS[2])
