"""Usage of a store: blocks and bytes per namespace, for `kvxfer ls`."""

import contextlib
import math

import msgspec

from kvxfer.pages.header import BlockFileError
from kvxfer.pages.maintenance.block_store import BlockStore
from kvxfer.pages.texts import kinds_in, read_namespace
from kvxfer.storage.integrity import Integrity
from kvxfer.storage.keys import Namespace


class NamespaceUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks and bytes of one namespace.

    Bytes are those on the disk, headers included. `oldest_use` and `newest_use` are the last uses
    of the least and of the most recently used block, seconds since the epoch, exact to an hour.
    """

    fingerprint: str
    namespace: Namespace | None  # None when its `namespace.json` is missing or damaged
    integrity: tuple[Integrity, ...]  # that its blocks may have
    num_blocks: int  # that a lookup can find
    num_bytes: int
    oldest_use: float | None  # None without blocks
    newest_use: float | None
    num_quarantined: int
    quarantined_bytes: int


def measure_usage(store: BlockStore) -> list[NamespaceUsage]:
    """Measure each namespace of a store by a walk, sorted by fingerprint; blocks the thread."""
    store.require()
    return [_measure(store, fingerprint) for fingerprint in store.fingerprints()]


def _measure(store: BlockStore, fingerprint: str) -> NamespaceUsage:
    namespace = None
    with store.namespace(fingerprint) as opened:
        integrity = tuple(kinds_in(opened))
        with contextlib.suppress(BlockFileError):
            namespace = read_namespace(opened)
    counts, num_bytes = [0, 0], [0, 0]  # by whether a block is in quarantine
    oldest, newest = math.inf, -math.inf
    for block in store.blocks(fingerprint):
        if block.misplaced:  # no lookup finds it
            continue
        counts[block.quarantined] += 1
        num_bytes[block.quarantined] += block.num_bytes_on_disk
        if not block.quarantined:
            oldest, newest = min(oldest, block.used), max(newest, block.used)
    return NamespaceUsage(
        fingerprint=fingerprint,
        namespace=namespace,
        integrity=integrity,
        num_blocks=counts[False],
        num_bytes=num_bytes[False],
        oldest_use=oldest if counts[False] else None,
        newest_use=newest if counts[False] else None,
        num_quarantined=counts[True],
        quarantined_bytes=num_bytes[True],
    )
