"""Contents of a chaos run: the bytes of every key, by which any process can check any block."""

import functools
from dataclasses import dataclass

import xxhash

from kvxfer.storage.keys import BlockKey, Namespace, make_block_key
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import make_payload

NUM_KEYS = 40


@dataclass(frozen=True)
class Shape:
    """Shape of a pretended model's blocks.

    All shapes have the same keys, and different bytes under each.

    Attributes:
        number: Number of the shape.
        page_sizes_bytes: For each KV-cache group the pages of a block.
        blocks_per_chunk: Blocks stored under one key.
        num_blocks: Blocks of each group in a worker's caches.
    """

    number: int
    page_sizes_bytes: tuple[tuple[int, ...], ...]
    blocks_per_chunk: int
    num_blocks: int

    @property
    def namespace(self) -> Namespace:
        """Namespace for `connect`, which fills in the groups."""
        return Namespace(model=f"chaos/{self.number}", revision="1")

    def open_memory(self) -> BlockMemory:
        """Caches of this shape."""
        return BlockMemory(
            self.page_sizes_bytes,
            num_blocks=self.num_blocks,
            blocks_per_chunk=self.blocks_per_chunk,
        )

    def payload(self, key: BlockKey) -> bytes:
        """The bytes of a whole chunk."""
        return _payload(self, key)

    def keys(self, group: int) -> list[BlockKey]:
        """The keys of a group; the first ones are drawn most often."""
        return [make_block_key(xxhash.xxh3_128_digest(b"%d" % n), group) for n in range(NUM_KEYS)]

    @property
    def groups(self) -> range:
        """KV-cache groups."""
        return range(len(self.page_sizes_bytes))


# Fragments above and below 16 KiB, from where on files are read straight into the blocks.
SHAPES = (
    Shape(0, ((32 << 10, 20 << 10), (1000, 512, 3000)), blocks_per_chunk=4, num_blocks=160),
    Shape(1, ((192 << 10,), (4196, 2000)), blocks_per_chunk=1, num_blocks=48),
    Shape(2, ((16 << 10,),), blocks_per_chunk=8, num_blocks=256),
)


@functools.cache
def _payload(shape: Shape, key: BlockKey) -> bytes:
    group = int.from_bytes(key[-4:], "big")
    num_bytes = sum(shape.page_sizes_bytes[group]) * shape.blocks_per_chunk
    return make_payload(key, num_bytes, version=shape.number)
