"""Usage of a store: blocks and bytes per namespace, for `kvxfer ls`."""

import contextlib
from collections import defaultdict

import msgspec

from kvxfer.backends.file.folders.block_tree import BlockTree, FoundBlock, require_store
from kvxfer.backends.file.folders.namespace_file import read_namespace
from kvxfer.backends.file.format.header import BlockFileError
from kvxfer.storage.keys import Namespace


class NamespaceUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks and bytes of one namespace.

    Attributes:
        fingerprint: Fingerprint of the namespace.
        namespace: The namespace; None when its `namespace.json` is missing or damaged.
        num_blocks: Files that a lookup can find.
        num_bytes: Bytes that they take on the disk, headers included.
        oldest_use: Last use of the least recently used block, seconds since the epoch, exact to an
            hour; None without blocks.
        newest_use: Last use of the most recently used block.
        num_quarantined: Corrupt files in quarantine.
        quarantined_bytes: Bytes that they take on the disk.
    """

    fingerprint: str
    namespace: Namespace | None
    num_blocks: int
    num_bytes: int
    oldest_use: float | None
    newest_use: float | None
    num_quarantined: int
    quarantined_bytes: int


def measure_usage(tree: BlockTree) -> list[NamespaceUsage]:
    """Walk through the tree and count per namespace, in the order of fingerprints; blocks.

    Raises:
        InvalidArgumentError: The root is not that of a store.
        OSError: The root cannot be read.
    """
    require_store(tree)
    by_fingerprint: dict[str, list[FoundBlock]] = defaultdict(list)
    for block in tree.blocks():
        by_fingerprint[block.fingerprint].append(block)
    return [_measure(tree, name, by_fingerprint[name]) for name in tree.fingerprints()]


def _measure(tree: BlockTree, fingerprint: str, found: list[FoundBlock]) -> NamespaceUsage:
    namespace = None
    with tree.folder(fingerprint) as folder, contextlib.suppress(BlockFileError):
        namespace = read_namespace(folder)
    blocks = [block for block in found if not block.quarantined]
    quarantined = [block for block in found if block.quarantined]
    uses = [block.used for block in blocks]
    return NamespaceUsage(
        fingerprint=fingerprint,
        namespace=namespace,
        num_blocks=len(blocks),
        num_bytes=sum(block.num_bytes_on_disk for block in blocks),
        oldest_use=min(uses, default=None),
        newest_use=max(uses, default=None),
        num_quarantined=len(quarantined),
        quarantined_bytes=sum(block.num_bytes_on_disk for block in quarantined),
    )
