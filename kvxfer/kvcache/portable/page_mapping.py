"""Page mappings: how a worker's blocks correspond to portable pages, byte by byte."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from types import MappingProxyType

import numpy as np
import torch

from kvxfer.checks import (
    require_instance,
    require_instances,
    require_integer,
    require_positive,
    require_sequence,
    require_text,
    require_texts,
)
from kvxfer.errors import InvalidArgumentError, PageMappingError
from kvxfer.kvcache.canonical import CanonicalKVCacheRef, CanonicalKVCaches
from kvxfer.kvcache.fragments import join, touch
from kvxfer.kvcache.layout import dense_strides, same_bytes
from kvxfer.kvcache.page_box import Digit, PageBox
from kvxfer.kvcache.payload_memory import Offsets
from kvxfer.kvcache.portable.page import (
    PortablePage,
    PortableTensor,
    natural_order,
    portable_page,
    tensor_names,
)
from kvxfer.kvcache.portable.worker_shard import OPAQUE, WorkerShard
from kvxfer.kvcache.spec import KVCacheSpec

DIVISIBLE_AXES = frozenset({"head", "token"})
"""Axes along which a worker's block and a portable page may cover different ranges."""

ROW = "row"
"""Layer name of opaque bytes that may be those of several layers."""

USUAL_PARTS = re.compile("k|v|latent|state[0-9]+")
"""Parts whose order of axes may be given even if the caches have no such part."""

MAX_DIGEST = (1 << 128) - 1
"""Maximum digest of a key, a number of 128 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class PageFragments:
    """Fragments that are contiguous both in a worker's blocks and in a portable page.

    Sorted by their place in the page; int64, `(num_fragments,)` each. `blocks` are indices among
    the worker's blocks of the page, `local_offsets` are bytes into the payload of that block.
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
        num_writers: Number of workers that hold the same bytes.
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
        """Whether it is this worker's turn to store the bytes that several workers hold.

        Args:
            number: A number that all workers share, such as the block's id if ids are shared, or a
                digest of the block's key.
        """
        number = require_integer("number", number, maximum=MAX_DIGEST)
        return number % self.num_writers == self.writer_index

    def __str__(self) -> str:
        num_fragments = sum(len(each.blocks) for each in self.pages)
        return (
            f"{self.num_bytes} of {self.page.num_bytes} bytes of a page in {num_fragments} "
            f"fragments, {self.blocks_per_page} blocks per page, {self.pages_per_block} pages per "
            "block"
        )


def map_caches(
    caches: CanonicalKVCaches,
    shard: WorkerShard,
    *,
    tokens_per_page: int | None = None,
    num_shards: int = 1,
    state_heads: Sequence[str | None] = (),
    axes: Mapping[str, Sequence[str]] = MappingProxyType({}),
    opaque: str = "",
) -> tuple[PageMapping, ...]:
    """Map the blocks of a worker's caches to portable pages, with one mapping for each group.

    Args:
        caches: Caches from `canonicalize` or `allocate_canonical`, whose refs have boxes.
        shard: Position of this worker in the model.
        tokens_per_page: Tokens of a portable page: a divisor or a multiple of a block's tokens,
            counted over all workers that share them, and at most those of all blocks. By default,
            those of one block.
        num_shards: Equal shares of the heads, stored under separate keys. A worker must hold whole
            shares, so choose the largest number of workers among which heads will be divided.
        state_heads: Axis (`s0`, `s1`, ...) along which workers divide each state of a recurrent
            layer; by default, states can be mapped on a single worker only.
        axes: See `portable_page`; all engines that share pages must pass the same.
        opaque: If given, groups that cannot be mapped are stored as plain bytes, for equal workers
            only. The text must name all that must be equal besides the rank, such as engine,
            release and layout. The reason is added to the encoding of the stored tensors.

    Raises:
        PageMappingError: A group cannot be mapped; the error says why. Never with `opaque`.
        InvalidArgumentError: The caches have no specs, the heads cannot be divided into
            `num_shards`, or a name in `axes` or `state_heads` is unknown.
    """
    require_instance("caches", caches, CanonicalKVCaches)
    require_instance("shard", shard, WorkerShard)
    num_shards = require_positive("num_shards", num_shards)
    _require_known_names(caches, axes, state_heads)
    opaque = require_text("opaque", opaque)
    if tokens_per_page is not None:
        tokens_per_page = require_positive("tokens_per_page", tokens_per_page)
    if not caches.group_specs and not opaque:
        raise InvalidArgumentError("caches", "without group_specs", "caches made by canonicalize")
    mappings = []
    for group, refs in enumerate(caches.group_data_refs):
        spec = caches.group_specs[group] if caches.group_specs else None
        try:
            boxes = shard.place(_name_heads(payload_boxes(refs), state_heads))
            if spec is None:
                raise PageMappingError("token", "no spec", "the tokens of a block")  # noqa: TRY301
            tokens_per_block = spec.tokens_per_block * shard.num_token_shares
            tokens = tokens_per_page or tokens_per_block
            limit = tokens_per_block * min(len(caches.tensors[r.tensor_idx].tensor) for r in refs)
            if tokens > limit:
                raise InvalidArgumentError("tokens_per_page", tokens, f"at most {limit}")
            page = portable_page(boxes, shard, num_tokens=tokens, num_shards=num_shards, axes=axes)
            mappings.append(_map(refs, boxes, page, shard, tokens_per_block))
        except PageMappingError as exc:
            if not opaque:
                raise
            # The encoding is part of the namespace: rewording a `PageMappingError` hides old pages.
            encoding = f"{opaque}, worker {shard.rank} of {shard.num_workers} ({exc})"
            encoding += _contents(spec, refs, shard)
            names = [r.layer_names[0] if len(r.layer_names) == 1 else ROW for r in refs]
            boxes = opaque_boxes([ref.page_size_bytes for ref in refs], names, encoding)
            mappings.append(_map(refs, boxes, portable_page(boxes, shard, num_tokens=1), shard, 1))
    return tuple(mappings)


def _require_known_names(
    caches: CanonicalKVCaches, axes: Mapping[str, Sequence[str]], state_heads: Sequence[str | None]
) -> None:
    """Refuse mistyped names of parts and of state axes, which would have no effect."""
    require_instance("axes", axes, Mapping)
    parts = {box.part for refs in caches.group_data_refs for ref in refs for box in ref.boxes}
    for part, names in axes.items():
        if part not in parts and not USUAL_PARTS.fullmatch(str(part)):
            raise InvalidArgumentError("axes", part, f"k, v, latent, state0 or {sorted(parts)}")
        require_texts(f"axes[{part!r}]", names)
    require_sequence("state_heads", state_heads, "an axis, or None, for each state")
    for index, axis in enumerate(state_heads):
        name = f"state_heads[{index}]"
        if axis is not None and not re.fullmatch("s[0-9]+", require_text(name, axis)):
            raise InvalidArgumentError(name, axis, "'s0', 's1', ..., or None")


def _contents(
    spec: KVCacheSpec | None, refs: Sequence[CanonicalKVCacheRef], shard: WorkerShard
) -> str:
    """Describe what opaque boxes leave out: encodings, layers of one row, shares of tokens."""
    forms = spec.cache_tensors if spec else ()
    contents = "".join(sorted({f", {form.encoding}" for form in forms if form.encoding}))
    if any(len(ref.layer_names) > 1 for ref in refs):
        contents += f", layers {[list(ref.layer_names) for ref in refs]}"
    if (shares := shard.num_token_shares) > 1:
        contents += f", {shard.interleave_tokens} tokens in turn of {shares} workers"
    return contents


def _map(
    refs: Sequence[CanonicalKVCacheRef],
    boxes: Sequence[PageBox],
    page: PortablePage,
    shard: WorkerShard,
    tokens_per_block: int,
) -> PageMapping:
    num_writers, writer_index = shard.writers(boxes)
    sizes = [ref.page_size_bytes for ref in refs]
    mapping = compile_mapping(boxes, page, tokens_per_block=tokens_per_block, payload_sizes=sizes)
    return replace(mapping, num_writers=num_writers, writer_index=writer_index)


def payload_boxes(refs: Sequence[CanonicalKVCacheRef]) -> list[PageBox]:
    """List the boxes of a group's payload, the pages of its refs back to back, layer by layer.

    Of layers that share the same bytes, only the first in natural order is listed.
    """
    boxes: list[PageBox] = []
    start = 0
    for ref in refs:
        if not ref.boxes:
            raise PageMappingError("layout", f"bytes of {list(ref.layer_names)}", "named axes")
        boxes += [box.moved(start) for box in ref.boxes]
        start += ref.page_size_bytes
    boxes.sort(key=lambda box: natural_order(box.layer_name))
    distinct: dict[PageBox, PageBox] = {}
    for box in boxes:
        distinct.setdefault(replace(box, layer_name=""), box)
    return list(distinct.values())


def opaque_boxes(
    sizes: Sequence[int], layer_names: Sequence[str], encoding: str = ""
) -> tuple[PageBox, ...]:
    """Describe the pieces of a block as plain bytes; `encoding` names all that must be equal."""
    return tuple(
        PageBox(
            layer_name=name,
            part=f"{OPAQUE}{index}",
            dtype=torch.uint8,
            digits=(Digit("byte", size, 1),),
            offset_bytes=sum(sizes[:index]),
            encoding=encoding,
        )
        for index, (name, size) in enumerate(zip(layer_names, sizes, strict=True))
    )


def _name_heads(boxes: Sequence[PageBox], state_heads: Sequence[str | None]) -> list[PageBox]:
    axes = {f"state{index}": axis for index, axis in enumerate(state_heads)}
    named = []
    for box in boxes:
        axis = axes.get(box.part)
        digits = tuple(replace(d, axis="head") if d.axis == axis else d for d in box.digits)
        named.append(replace(box, digits=digits))
    return named


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
        boxes: Boxes of a block's payload. Head indices are those in the whole model; token indices
            are those in the block of all workers together.
        page: The portable page.
        tokens_per_block: Tokens that a block spans, over all workers that share its tokens.
        payload_sizes: Bytes of the pieces of a payload; neighbouring bytes of the payload are
            contiguous in memory only within one piece.
        max_fragments: Maximum number of fragments, for boxes that another process described.

    Raises:
        PageMappingError: The page is not a rearrangement of the boxes' elements; the error names
            the axis or the tensor that prevents it.
    """
    tokens = page.num_tokens or tokens_per_block
    cuts = np.cumsum(payload_sizes)
    if tokens % tokens_per_block == 0:
        blocks_per_page, firsts = tokens // tokens_per_block, [0]
    elif tokens_per_block % tokens == 0:
        blocks_per_page, firsts = 1, list(range(0, tokens_per_block, tokens))
    else:
        raise PageMappingError("token", f"{tokens_per_block} per block", f"{tokens} per page")
    alike = _group_alike(boxes, page)
    pages: list[PageFragments] = []
    left = max_fragments
    for first in firsts:
        parts = []
        for box, tensor, starts in alike:
            placed = box.shifted("token", -first)
            found = _place(placed, tensor, starts, blocks_per_page, tokens_per_block, left)
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
    """Prove that all workers of a model together hold each byte of a group's pages once.

    Every worker's fragments must lie in its blocks, none overlapping another; and in each turn,
    the workers whose turn it is must tile the page exactly once. `compile_mapping` ensures that
    the fragments are all bytes of the blocks that carry data.

    Raises:
        PageMappingError: A byte of a page belongs to no worker, or to two; or workers cut their
            blocks into different pages.
        InvalidArgumentError: There is no mapping, which would prove nothing.
    """
    require_instances("mappings", mappings, PageMapping, at_least_one=True)
    of_page: dict[PortablePage, list[PageMapping]] = {}
    for mapping in mappings:
        _require_disjoint(mapping)
        of_page.setdefault(mapping.page, []).append(mapping)  # opaque workers share no page
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
    """Merge the bytes of a page that several workers have; return starts and lengths."""
    starts = np.concatenate([np.zeros(0, np.int64), *(part.page_offsets for part in parts)])
    lengths = np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)])
    order = np.argsort(starts, kind="stable")
    starts, lengths = starts[order], lengths[order]
    starts, lengths = join(touch(starts, lengths), starts, lengths)
    return starts, lengths


def _group_alike(
    boxes: Sequence[PageBox], page: PortablePage
) -> list[tuple[PageBox, PortableTensor, list[tuple[int, int]]]]:
    """Group boxes that differ only in place: one, its tensor, and all (block, page) offsets."""
    named: dict[str, list[PageBox]] = {}
    for name, box in zip(tensor_names(boxes), boxes, strict=True):
        named.setdefault(name, []).append(box)
    if missing := sorted({tensor.name for tensor in page.tensors} - set(named)):
        raise PageMappingError("layer", sorted(named), f"also {missing}")
    alike: dict[object, tuple[PageBox, PortableTensor, list[tuple[int, int]]]] = {}
    offset = 0
    for tensor in page.tensors:
        for box in named[tensor.name]:
            moved = replace(box, layer_name="", part="", offset_bytes=0)
            kind = moved, replace(tensor, name="")
            alike.setdefault(kind, (moved, tensor, []))[-1].append((box.offset_bytes, offset))
        offset += tensor.num_bytes
    return list(alike.values())


def _place(
    box: PageBox,
    tensor: PortableTensor,
    starts: Sequence[tuple[int, int]],
    num_blocks: int,
    tokens_per_block: int,
    max_fragments: int | None,
) -> list[PageFragments]:
    """Compute the fragments of the elements that a box and a portable tensor both have.

    `starts` lists every place of the pair: its offset in the block, and in the page. The blocks of
    a page lie wholly inside it, so the first block determines the places of the others.
    """
    _require_same_elements(box, tensor)
    for axis, first, size in zip(tensor.axes, tensor.first, tensor.shape, strict=True):
        narrowed = box.narrowed(axis, first, first + size)
        if narrowed is None:
            return []
        if axis not in DIVISIBLE_AXES and (narrowed is not box or box.extent(axis) != size):
            raise PageMappingError(axis, box.extent(axis), f"{size} of {tensor.name!r}")
        box = narrowed
    steps_bytes = dense_strides(tensor.shape, tensor.dtype.itemsize)
    strides = dict(zip(tensor.axes, steps_bytes, strict=True))
    firsts = zip(tensor.axes, tensor.first, strict=True)
    offset = sum((box.first_index(axis) - first) * strides[axis] for axis, first in firsts)
    loops = [
        (digit.size, digit.stride_bytes, digit.step * strides[digit.axis])
        for digit in box.digits
        if digit.size > 1
    ]
    length, loops = _coalesce(loops, box.dtype.itemsize)
    count = num_blocks * len(starts) * prod(size for size, _, _ in loops)
    if max_fragments is not None and count > max_fragments:
        raise PageMappingError("page", f"{count} fragments", f"at most {max_fragments}")
    local, page = np.add(np.array(starts, np.int64).T, [[box.offset_bytes], [offset]])
    for size, local_stride, page_stride in loops:
        index = np.arange(size, dtype=np.int64)
        local = (local[:, None] + index * local_stride).reshape(-1)
        page = (page[:, None] + index * page_stride).reshape(-1)
    blocks = np.arange(num_blocks, dtype=np.int64)
    block_stride = tokens_per_block * strides.get("token", 0)
    page = (page + blocks[:, None] * block_stride).reshape(-1)
    lengths = np.full(len(page), length)
    return [PageFragments(blocks.repeat(len(local)), np.tile(local, num_blocks), page, lengths)]


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


def _require_disjoint(mapping: PageMapping) -> None:
    for fragments in mapping.pages:
        ends = fragments.page_offsets + fragments.lengths
        if (ends[:-1] > fragments.page_offsets[1:]).any():
            raise PageMappingError("page", "elements that are there twice", "each element once")
    size = mapping.block_size_bytes
    starts = np.concatenate([each.blocks * size + each.local_offsets for each in mapping.pages])
    lengths = np.concatenate([each.lengths for each in mapping.pages])
    order = np.argsort(starts)
    ends = starts[order] + lengths[order]
    if (ends[:-1] > starts[order][1:]).any():
        raise PageMappingError("page", "bytes that are two elements", "each byte once")
    limit = mapping.blocks_per_page * size
    if starts.min() < 0 or ends[-1] > limit:
        raise PageMappingError("page", f"bytes up to {int(ends[-1])}", f"at most {limit}")
