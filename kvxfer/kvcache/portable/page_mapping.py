"""Page mappings: the correspondence of a worker's blocks and portable pages, byte by byte."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm, prod

import numpy as np
from numpy.typing import NDArray

from kvxfer.checks import require_instances, require_integer
from kvxfer.errors import PageMappingError
from kvxfer.kvcache.fragments import join, touch
from kvxfer.kvcache.layout import same_bytes
from kvxfer.kvcache.page_box import PageBox
from kvxfer.kvcache.portable.page import PortablePage, PortableTensor, tensor_names

DIVISIBLE_AXES = frozenset({"head", "token"})
"""Axes along which a worker's block may have another part than the portable page."""

MAX_DIGEST = (1 << 128) - 1
"""Largest digest of a key, a number of 128 bits."""

Offsets = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Run of equal fragments, evenly spaced on both sides.

    Fragment i is `fragment_size` bytes, at `local_offset + i * local_stride` of the worker's
    block and at `canonical_offset + i * canonical_stride` of the portable page.

    Source: `CopyRun` of vLLM's `vllm/v1/kv_offload/base.py`, whose fields these are.
    """

    local_offset: int
    canonical_offset: int
    fragment_size: int
    num_fragments: int
    local_stride: int
    canonical_stride: int


@dataclass(frozen=True, slots=True, eq=False)
class PageFragments:
    """Fragments that are contiguous both in a worker's blocks and in a portable page.

    Sorted by their place in the page; int64, `(num_fragments,)` each. A block is an index among
    the worker's blocks of the page, a local offset one in that block's payload.
    """

    blocks: Offsets
    local_offsets: Offsets
    page_offsets: Offsets
    lengths: Offsets

    @classmethod
    def join(
        cls, parts: Sequence["PageFragments"], local_cuts: Offsets, page_cuts: Offsets
    ) -> "PageFragments":
        """Sort the pieces of several boxes and join neighbours, but not across the cuts."""
        fields = zip(
            *((p.blocks, p.local_offsets, p.page_offsets, p.lengths) for p in parts), strict=True
        )
        blocks, local, page, lengths = (np.concatenate(field) for field in fields)
        order = np.argsort(page, kind="stable")
        blocks, local, page, lengths = (a[order] for a in (blocks, local, page, lengths))
        touching = touch(page, lengths) & touch(local, lengths)
        touching &= (blocks[1:] == blocks[:-1]) & ~np.isin(local[1:], local_cuts)
        touching &= ~np.isin(page[1:], page_cuts)
        return cls(*join(touching, blocks, local, page, lengths))

    def runs(self) -> list[tuple[int, CopyRun]]:
        """Group the fragments into evenly strided runs, each with the index of its block."""
        fields = np.stack((self.blocks, self.lengths, self.local_offsets, self.page_offsets))
        steps = np.diff(fields)
        runs: list[tuple[int, CopyRun]] = []
        start, count = 0, fields.shape[1]
        while start < count:
            stop = start + 1
            if stop < count and not steps[:2, start].any():
                uneven = np.flatnonzero((steps[:, start:] != steps[:, start : start + 1]).any(0))
                stop = start + int(uneven[0]) + 1 if len(uneven) else count
            block, length, local, page = fields[:, start].tolist()
            local_step, page_step = (
                steps[2:, start].tolist() if stop > start + 1 else (length, length)
            )
            run = CopyRun(local, page, length, stop - start, local_step, page_step)
            runs.append((block, run))
            start = stop
        return runs


@dataclass(frozen=True, slots=True, eq=False)
class PageMapping:
    """Mapping of one worker's blocks to portable pages.

    A page has the tokens of `blocks_per_page` of the worker's blocks, or a block has those of
    `pages_per_block` pages; one of the two numbers is 1.

    Attributes:
        page: The portable page.
        block_size_bytes: Bytes of the payload of one of the worker's blocks.
        blocks_per_page: Consecutive blocks that hold one page.
        pages: Fragments of each page that one block holds.
        num_writers: Number of workers that hold these same bytes.
        writer_index: Index of this worker among them.
    """

    page: PortablePage
    block_size_bytes: int
    blocks_per_page: int
    pages: tuple[PageFragments, ...]
    num_writers: int = 1
    writer_index: int = 0

    @property
    def pages_per_block(self) -> int:
        """Consecutive pages that one block holds."""
        return len(self.pages)

    @property
    def num_bytes(self) -> int:
        """Bytes of a page that this worker holds."""
        return int(self.pages[0].lengths.sum())

    @property
    def shards(self) -> tuple[int, ...]:
        """Shards of a page that this worker holds, whole.

        Raises:
            PageMappingError: The worker holds only a part of some shard.
        """
        held = []
        ends = np.cumsum(self.page.shard_sizes).tolist()
        for shard, (size, end) in enumerate(zip(self.page.shard_sizes, ends, strict=True)):
            for fragments in self.pages:
                inside = (fragments.page_offsets >= end - size) & (fragments.page_offsets < end)
                if (held_bytes := int(fragments.lengths[inside].sum())) not in (0, size):
                    rule = f"all {size} of shard {shard}, or none: use more shards"
                    raise PageMappingError("head", f"{held_bytes} bytes", rule)
            if held_bytes:
                held.append(shard)
        return tuple(held)

    def writes(self, number: int) -> bool:
        """Whether it is this worker's turn to store the bytes that several hold.

        Args:
            number: A number that all workers share, such as the block's id if ids are shared, or a
                digest of the block's key.
        """
        number = require_integer("number", number, maximum=MAX_DIGEST)
        return number % self.num_writers == self.writer_index

    def __str__(self) -> str:
        runs = [run for fragments in self.pages for run in fragments.runs()]
        return (
            f"{self.num_bytes} of {self.page.num_bytes} bytes of a page in {len(runs)} runs, "
            f"{self.blocks_per_page} blocks per page, {self.pages_per_block} pages per block"
        )


def compile_mapping(
    boxes: Sequence[PageBox],
    page: PortablePage,
    *,
    tokens_per_block: int,
    payload_sizes: Sequence[int],
    max_fragments: int | None = None,
) -> PageMapping:
    """Compute the mapping of a worker's blocks to portable pages.

    Args:
        boxes: Boxes of a block's payload; indices of heads are those in the whole model, and of
            tokens those in the block of all workers together.
        page: The portable page.
        tokens_per_block: Tokens that a block spans, over all workers that share its tokens.
        payload_sizes: Bytes of the pieces of a payload; neighbouring bytes of the payload are
            contiguous in memory only within one piece.
        max_fragments: Most fragments, where the boxes are not the caller's own.

    Raises:
        PageMappingError: The page is no rearrangement of the boxes' elements; the error names the
            axis or the tensor that prevents it.
    """
    tokens = page.num_tokens or tokens_per_block
    cuts = np.cumsum(payload_sizes)
    if tokens % tokens_per_block == 0:
        blocks_per_page, firsts = tokens // tokens_per_block, [0]
    elif tokens_per_block % tokens == 0:
        blocks_per_page, firsts = 1, list(range(0, tokens_per_block, tokens))
    else:
        raise PageMappingError("token", f"{tokens_per_block} per block", f"{tokens} per page")
    named: dict[str, list[PageBox]] = {}
    for name, box in zip(tensor_names(boxes), boxes, strict=True):
        named.setdefault(name, []).append(box)
    _require_tensors(named, page)
    pages: list[PageFragments] = []
    left = max_fragments
    for first in firsts:
        parts = []
        for tensor, offset in zip(page.tensors, page.offsets_bytes, strict=True):
            for box in named[tensor.name]:
                placed = box.shifted("token", -first)
                found = _place(placed, tensor, offset, blocks_per_page, tokens_per_block, left)
                if left is not None:
                    left -= sum(len(each.lengths) for each in found)
                parts += found
        if not parts:
            axis = "token" if len(firsts) > 1 else "head"
            raise PageMappingError(axis, f"nothing of page {len(pages)} of a block", "a part of it")
        pages.append(PageFragments.join(parts, cuts, np.cumsum(page.shard_sizes)))
    mapping = PageMapping(page, sum(payload_sizes), blocks_per_page, tuple(pages))
    _require_disjoint(mapping)
    expected = blocks_per_page * sum(box.num_bytes for box in boxes)
    if (num_bytes := sum(int(fragments.lengths.sum()) for fragments in pages)) != expected:
        wanted = f"all {expected} of the blocks"
        raise PageMappingError("page", f"{num_bytes} bytes in pages", wanted)
    return mapping


def verify_mappings(mappings: Sequence[PageMapping]) -> None:
    """Prove that the workers of a model together hold each byte of its portable pages once.

    Every worker's fragments must be bytes of its blocks, none of them twice; and for each turn
    the workers whose turn it is must tile the page exactly once. `compile_mapping` ensures that
    the fragments are all bytes of the blocks that carry data.

    Args:
        mappings: Mappings of all workers for one group.

    Raises:
        PageMappingError: A byte of a page belongs to no worker, or to two; or workers cut their
            blocks into different pages.
        InvalidArgumentError: There is no mapping, which would prove nothing.
    """
    require_instances("mappings", mappings, PageMapping, at_least_one=True)
    of_page: dict[PortablePage, list[PageMapping]] = {}
    for mapping in mappings:
        _require_disjoint(mapping)
        of_page.setdefault(mapping.page, []).append(mapping)  # each opaque worker has its own
    for page, sharing in of_page.items():
        if len(counts := {mapping.pages_per_block for mapping in sharing}) > 1:
            raise PageMappingError("token", f"{sorted(counts)} pages per block", "one number")
        for turn in range(lcm(*(mapping.num_writers for mapping in sharing))):
            writers = [mapping for mapping in sharing if mapping.writes(turn)]
            for index in range(*counts):
                starts, lengths = merge_bytes([mapping.pages[index] for mapping in writers])
                if (starts.tolist(), lengths.tolist()) != ([0], [page.num_bytes]):
                    found = f"{lengths.sum()} bytes of all workers"
                    raise PageMappingError("head", found, f"{page.num_bytes} of a page")


def merge_bytes(parts: Sequence[PageFragments]) -> tuple[Offsets, Offsets]:
    """Merge the bytes of a page that workers have; starts and lengths."""
    starts = np.concatenate([np.zeros(0, np.int64), *(part.page_offsets for part in parts)])
    lengths = np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)])
    order = np.argsort(starts, kind="stable")
    starts, lengths = starts[order], lengths[order]
    starts, lengths = join(touch(starts, lengths), starts, lengths)
    return starts, lengths


def _place(
    box: PageBox,
    tensor: PortableTensor,
    offset: int,
    num_blocks: int,
    tokens_per_block: int,
    max_fragments: int | None,
) -> list[PageFragments]:
    """Compute the fragments of the elements that a box and a portable tensor both have.

    Several blocks are all inside of the page, so the first determines the places of the others.
    """
    _require_same_elements(box, tensor)
    for axis, first, size in zip(tensor.axes, tensor.first, tensor.shape, strict=True):
        narrowed = box.narrowed(axis, first, first + size)
        if narrowed is None:
            return []
        if axis not in DIVISIBLE_AXES and (narrowed is not box or box.extent(axis) != size):
            raise PageMappingError(axis, box.extent(axis), f"{size} of {tensor.name!r}")
        box = narrowed
    strides = dict(zip(tensor.axes, tensor.strides_bytes, strict=True))
    for axis, first in zip(tensor.axes, tensor.first, strict=True):
        offset += (box.first_index(axis) - first) * strides[axis]
    loops = [
        (digit.size, digit.stride_bytes, digit.step * strides[digit.axis])
        for digit in box.digits
        if digit.size > 1
    ]
    length, loops = _coalesce(loops, box.dtype.itemsize)
    count = num_blocks * prod(size for size, _, _ in loops)
    if max_fragments is not None and count > max_fragments:
        raise PageMappingError("page", f"{count} fragments", f"at most {max_fragments}")
    local = np.array([box.offset_bytes], np.int64)
    page = np.array([offset], np.int64)
    for size, local_stride, page_stride in loops:
        index = np.arange(size, dtype=np.int64)
        local = (local[:, None] + index * local_stride).reshape(-1)
        page = (page[:, None] + index * page_stride).reshape(-1)
    blocks = np.arange(num_blocks, dtype=np.int64)
    block_stride = tokens_per_block * strides.get("token", 0)
    page = (page + blocks[:, None] * block_stride).reshape(-1)
    return [
        PageFragments(
            blocks.repeat(len(local)), np.tile(local, num_blocks), page, np.full(len(page), length)
        )
    ]


def _coalesce(
    loops: Sequence[tuple[int, int, int]], length: int
) -> tuple[int, list[tuple[int, int, int]]]:
    """Merge loops over adjacent pieces into one longer piece."""
    left = list(loops)
    while True:
        inner = next((loop for loop in left if loop[1:] == (length, length)), None)
        if inner is None:
            return length, left
        left.remove(inner)
        length *= inner[0]


def _require_same_elements(box: PageBox, tensor: PortableTensor) -> None:
    if not same_bytes(box.dtype, tensor.dtype):
        raise PageMappingError("dtype", box.dtype, f"{tensor.dtype} of {tensor.name!r}")
    if box.encoding != tensor.encoding:
        raise PageMappingError("encoding", box.encoding, f"{tensor.encoding!r} of {tensor.name!r}")
    for axis in box.axes:
        if axis not in tensor.axes and box.extent(axis) > 1:
            raise PageMappingError(axis, box.extent(axis), f"no such axis of {tensor.name!r}")


def _require_tensors(named: Iterable[str], page: PortablePage) -> None:
    missing = sorted({tensor.name for tensor in page.tensors} - set(named))
    if missing:
        raise PageMappingError("layer", sorted(named), f"also {missing}")


def _require_disjoint(mapping: PageMapping) -> None:
    for fragments in mapping.pages:
        ends = fragments.page_offsets + fragments.lengths
        if (ends[:-1] > fragments.page_offsets[1:]).any():
            raise PageMappingError("page", "elements that are there twice", "each element once")
    keys = [
        fragments.blocks * mapping.block_size_bytes + fragments.local_offsets
        for fragments in mapping.pages
    ]
    starts = np.concatenate(keys)
    lengths = np.concatenate([fragments.lengths for fragments in mapping.pages])
    order = np.argsort(starts)
    ends = starts[order] + lengths[order]
    if (ends[:-1] > starts[order][1:]).any():
        raise PageMappingError("page", "bytes that are two elements", "each byte once")
    limit = mapping.blocks_per_page * mapping.block_size_bytes
    if starts.min() < 0 or ends[-1] > limit:
        raise PageMappingError("page", f"bytes up to {int(ends[-1])}", f"at most {limit}")
