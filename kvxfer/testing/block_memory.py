"""KV caches of a simulated engine, for tests."""

from collections.abc import Sequence

import torch
from numpy.typing import ArrayLike

from kvxfer.kvcache.canonical import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvxfer.kvcache.describer import describe
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.keys import GroupIdentity, Namespace


class BlockMemory:
    """Canonical caches in host memory that scatter every block.

    Each page of a block lies in a tensor of its own, with padded pages and gaps between its rows.

    Args:
        page_sizes_bytes: For each group, the un-padded page sizes of one block, in payload order.
        num_blocks: Blocks of each group.
        blocks_per_chunk: Blocks stored under one key.
        padding_bytes: Bytes after each page: half of them in the padded page, half between rows.

    Attributes:
        caches: The canonical caches.
        blocks_per_chunk: As given.
        num_blocks: As given.
    """

    def __init__(
        self,
        page_sizes_bytes: Sequence[Sequence[int]],
        *,
        num_blocks: int,
        blocks_per_chunk: int = 1,
        padding_bytes: int = 8,
    ) -> None:
        self.num_blocks = num_blocks
        self.blocks_per_chunk = blocks_per_chunk
        self._page_sizes_bytes = tuple(tuple(pages) for pages in page_sizes_bytes)
        self._storages: list[torch.Tensor] = []
        tensors: list[CanonicalKVCacheTensor] = []
        groups: list[list[CanonicalKVCacheRef]] = []
        for pages in self._page_sizes_bytes:
            refs = []
            for page in pages:
                storage = torch.zeros(num_blocks, page + padding_bytes, dtype=torch.int8)
                padded = page + padding_bytes // 2
                refs.append(CanonicalKVCacheRef(len(tensors), page))
                tensors.append(CanonicalKVCacheTensor(storage[:, :padded], padded))
                self._storages.append(storage)
            groups.append(refs)
        self.caches = CanonicalKVCaches(tensors, groups)

    @property
    def num_groups(self) -> int:
        """Number of KV-cache groups."""
        return len(self._page_sizes_bytes)

    def chunk_size_bytes(self, group: int) -> int:
        """Compute the bytes stored under one key of a group."""
        return sum(self._page_sizes_bytes[group]) * self.blocks_per_chunk

    def namespace(self, *, model: str = "model", revision: str = "") -> Namespace:
        """Make the namespace of these caches, as an engine would."""
        groups = tuple(GroupIdentity(page_sizes_bytes=pages) for pages in self._page_sizes_bytes)
        return Namespace(
            model=model, revision=revision, groups=groups, blocks_per_chunk=self.blocks_per_chunk
        )

    def describe(
        self, group: int, block_ids: ArrayLike, *, first_block_index: int = 0
    ) -> Descriptors:
        """Describe blocks; see `kvxfer.kvcache.describe`."""
        return describe(
            self.caches,
            group,
            block_ids,
            blocks_per_chunk=self.blocks_per_chunk,
            first_block_index=first_block_index,
        )

    def fill(self, byte: int) -> None:
        """Write one byte everywhere, padding included."""
        for storage in self._storages:
            storage.view(torch.uint8).fill_(byte)

    def snapshot(self) -> bytes:
        """Copy every byte, padding included."""
        return b"".join(storage.numpy().tobytes() for storage in self._storages)
