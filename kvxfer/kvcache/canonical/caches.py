"""Canonical KV caches: byte tensors of blocks and, per group, references into them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvxfer.checks import (
    require_instance,
    require_instances,
    require_integer,
    require_one_per_group,
    require_sequence,
    require_text,
    require_texts,
    set_counts,
)
from kvxfer.errors import InvalidArgumentError, LayoutError
from kvxfer.kvcache.canonical.layer_pages import LayerPages, find_pages
from kvxfer.kvcache.canonical.registered import KVCaches, Layouts, read_registered
from kvxfer.kvcache.canonical.rows import Row, join_rows
from kvxfer.kvcache.config import KVCacheConfig
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.kvcache.page_box import PageBox
from kvxfer.kvcache.spec import KVCacheSpec


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheTensor:
    """Byte tensor of blocks, zero-copy over the engine's own storage.

    Attributes:
        tensor: int8, `(num_blocks, page_size_bytes)`; stride(1) is 1, stride(0) may exceed
            the page.
        page_size_bytes: Bytes of a page, padding included.
    """

    tensor: torch.Tensor
    page_size_bytes: int

    def __post_init__(self) -> None:
        require_instance("tensor", self.tensor, torch.Tensor)
        set_counts(self, "page_size_bytes")
        shape, page = tuple(self.tensor.shape), self.page_size_bytes
        if self.tensor.dtype != torch.int8:
            raise InvalidArgumentError("tensor.dtype", self.tensor.dtype, "torch.int8")
        if len(shape) != 2 or shape[1] != page or shape[0] <= 0:
            raise InvalidArgumentError("tensor.shape", shape, f"(num_blocks, {page})")
        if self.tensor.stride(1) != 1 or self.tensor.stride(0) < page:
            raise InvalidArgumentError("tensor.stride", self.tensor.stride(), f"(>= {page}, 1)")


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheRef:
    """Reference to the data of a layer, or of a group of layers, inside one canonical tensor.

    Attributes:
        tensor_idx: Index into `CanonicalKVCaches.tensors`.
        page_size_bytes: Bytes of the un-padded page: each row's leading bytes that carry data.
        layer_names: Layers whose data this is; empty if unknown.
        layout: Axes of the page as `KVLayout` writes them, see `join_refs`; empty if unknown.
        boxes: Meaning of the bytes of the page, layer by layer; empty if unknown.
    """

    tensor_idx: int
    page_size_bytes: int
    layer_names: tuple[str, ...] = ()
    layout: str = ""
    boxes: tuple[PageBox, ...] = ()

    def __post_init__(self) -> None:
        set_counts(self, "page_size_bytes")
        object.__setattr__(self, "tensor_idx", require_integer("tensor_idx", self.tensor_idx))
        object.__setattr__(self, "layer_names", require_texts("layer_names", self.layer_names))
        object.__setattr__(self, "layout", require_text("layout", self.layout))
        require_instances("boxes", self.boxes, PageBox)
        object.__setattr__(self, "boxes", tuple(self.boxes))


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """KV caches of one worker, in bytes.

    Attributes:
        tensors: Every distinct tensor exactly once.
        group_data_refs: Refs of each KV-cache group, in layer order. The bytes of one block of
            group g are the pages of its refs, in this order.
        group_specs: Spec of each group; with the layouts, it gives the bytes their meaning. Empty
            if unknown.
        null_block_id: Id of the null block, which is never loaded into; None without one.

    Raises:
        InvalidArgumentError: A ref names a tensor or bytes that do not exist; there is no group, or
            one without a ref; or there are specs, but not one for each group.
    """

    tensors: Sequence[CanonicalKVCacheTensor]
    group_data_refs: Sequence[Sequence[CanonicalKVCacheRef]]
    group_specs: Sequence[KVCacheSpec] = ()
    null_block_id: int | None = None

    def __post_init__(self) -> None:
        require_instances("tensors", self.tensors, CanonicalKVCacheTensor)
        require_sequence("group_data_refs", self.group_data_refs, "the refs of each group")
        if not len(self.group_data_refs):
            raise InvalidArgumentError("group_data_refs", self.group_data_refs, "one group or more")
        for group, refs in enumerate(self.group_data_refs):
            name = f"group_data_refs[{group}]"
            require_instances(name, refs, CanonicalKVCacheRef, at_least_one=True)
            for index, ref in enumerate(refs):
                at = f"{name}[{index}]"
                if ref.tensor_idx >= len(self.tensors):
                    expected = f"one of {len(self.tensors)} tensors"
                    raise InvalidArgumentError(f"{at}.tensor_idx", ref.tensor_idx, expected)
                padded, size = self.tensors[ref.tensor_idx].page_size_bytes, ref.page_size_bytes
                if size > padded:
                    expected = f"at most {padded}, the page of its tensor"
                    raise InvalidArgumentError(f"{at}.page_size_bytes", size, expected)
        require_instances("group_specs", self.group_specs, KVCacheSpec)
        if len(self.group_specs):
            require_one_per_group("group_specs", self.group_specs, len(self.group_data_refs))
        if self.null_block_id is not None:
            null = require_integer("null_block_id", self.null_block_id)
            object.__setattr__(self, "null_block_id", null)


def canonicalize(
    kv_caches: KVCaches, config: KVCacheConfig, *, layouts: Layouts | None = None
) -> CanonicalKVCaches:
    """View the KV caches that an engine registered as blocks of bytes; nothing is copied.

    A layer's tensor may have blocks, K/V or heads outermost; NHD or HND strides; packed K/V; one
    latent per token; kernel blocks smaller than the block, down to slots for single tokens; padded
    pages; and bytes shared with layers of other groups. Keys and values may have separate tensors.
    `LAYOUT_ZOO` lists the layouts of engines.

    Layers that interleave inside a block become one tensor whose rows are whole blocks. So does one
    tensor of all layers, registered once under any name or under the name of every layer; the
    indices of its layer axis are `config.shared_tensors`, or the layers of the only group. A ref's
    page covers the row from its start to the group's last byte.

    A tensor is matched with layouts by its strides, never by the order of its shape, and a tensor
    that fits two layouts is refused, even if both give the same pages, such as NHD and HND with as
    many heads as tokens: workers that read their pages differently must not share them, and only
    the refs' layouts tell them apart. Layouts that differ only in the position of axes of size 1
    are the same. The shape of a state names its axes, so a state whose axes of equal size have
    another order in memory is refused, too.

    Args:
        kv_caches: Each layer's tensor, its separate keys and values or, for Mamba, its list of
            states. The result views their memory and keeps it alive.
        config: The blocks, groups and specs.
        layouts: Layouts of some entries as axis strings, one for all tensors of a layer or one per
            tensor; checked against shape and strides like any other layout.

    Raises:
        InvalidArgumentError: An entry is missing, unknown or does not match its spec, tensors
            are on several devices or on the meta device, or a layout names the wrong axes.
        AmbiguousLayoutError: A tensor fits two layouts.
        UnknownLayoutError: A tensor fits no layout of its spec, its pages are not contiguous, or
            it is a conjugated, negated or quantized view of its bytes.
        OverlapError: Pages of two layers share some bytes, but not all; or two tensors of one
            layer, such as its keys and its values, share any.
        PageBoundsError: Padded pages reach beyond the storage.
        LayoutError: Pages do not add up to the spec's size, or layers do not share a tensor as
            `config.shared_tensors` requires.
    """
    caches = read_registered(kv_caches, config, layouts)
    pages = [each for cache in caches for each in find_pages(cache, config.num_blocks)]
    _require_shared(pages, config)
    order = {id(page): index for index, page in enumerate(pages)}
    rows = sorted(join_rows(pages), key=lambda row: min(order[id(page)] for page in row.members))
    device = caches[0].tensors[0].device
    return CanonicalKVCaches(
        tensors=tuple(
            CanonicalKVCacheTensor(row.as_tensor(device), row.size_bytes) for row in rows
        ),
        group_data_refs=tuple(_refs(pages, rows, group) for group in range(len(config.groups))),
        group_specs=tuple(group.spec for group in config.groups),
        null_block_id=config.null_block_id,
    )


def _refs(
    pages: Sequence[LayerPages], rows: Sequence[Row], group: int
) -> tuple[CanonicalKVCacheRef, ...]:
    """Create one ref for each row that a group uses, in layer order."""
    row_of = {id(page): index for index, row in enumerate(rows) for page in row.members}
    used: dict[int, list[CanonicalKVCacheRef]] = {}
    for page in (page for page in pages if page.group == group):
        index = row_of[id(page)]
        start = page.address - rows[index].address
        ref = CanonicalKVCacheRef(
            tensor_idx=index,
            page_size_bytes=start + page.data_size_bytes,
            layer_names=page.layer_names,
            layout=page.layout,
            boxes=tuple(box.moved(start) for box in page.boxes),
        )
        used.setdefault(index, []).append(ref)
    return tuple(map(join_refs, used.values()))


def join_refs(refs: Sequence[CanonicalKVCacheRef]) -> CanonicalKVCacheRef:
    """Join refs to pages of one row into one ref.

    The layout lists where the pages begin, unless they are back to back or evenly spaced, so that
    caches with different bytes for equal tokens have different layouts.
    """
    layouts = [ref.layout for ref in refs]
    layout = layouts[0] if len({*layouts}) == 1 else " | ".join(layouts)
    starts = [
        min(box.offset_bytes for box in ref.boxes if box.layer_name == name)
        for ref in refs
        for name in ref.layer_names
    ]
    step = max(1, starts[-1] // max(1, len(starts) - 1))
    in_a_row = [0, *(ref.page_size_bytes for ref in refs[:-1])]
    if len(starts) > 1 and starts not in (in_a_row, [*range(0, len(starts) * step, step)]):
        layout += f" at {', '.join(map(str, starts))}"
    return CanonicalKVCacheRef(
        tensor_idx=refs[0].tensor_idx,
        page_size_bytes=max(ref.page_size_bytes for ref in refs),
        layer_names=tuple(dict.fromkeys(name for ref in refs for name in ref.layer_names)),
        layout=layout,
        boxes=tuple(box for ref in refs for box in ref.boxes),
    )


def _require_shared(pages: Sequence[LayerPages], config: KVCacheConfig) -> None:
    """Check that layers share tensors as the config requires.

    Groups whose kernels use blocks of different sizes are exempt: they cut the same row
    differently, so their pages at one position begin at different bytes.
    """
    starts: dict[str, set[int]] = {}
    num_fragments = {name: page.num_fragments for page in pages for name in page.layer_names}
    for page in pages:
        for name in page.layer_names:
            starts.setdefault(name, set()).add(page.address)
    for names in config.shared_tensors:
        for name in names[1:]:
            first = names[0]
            if num_fragments[name] == num_fragments[first] and starts[name] != starts[first]:
                raise LayoutError(
                    f"layers {first!r} and {name!r} share a tensor according to the config, "
                    f"but begin at {sorted(starts[first])} and {sorted(starts[name])}"
                )


def memory_regions(caches: CanonicalKVCaches) -> list[MemoryRegion]:
    """List the memory regions of caches; no two regions overlap."""
    spans = sorted(
        (str(tensor.device), start, start + (len(tensor) - 1) * tensor.stride(0) + tensor.shape[1])
        for tensor in (each.tensor for each in caches.tensors)
        for start in [tensor.data_ptr()]
    )
    joined: list[tuple[str, int, int]] = []
    for device, start, stop in spans:
        before, first, last = joined[-1] if joined else ("", 0, 0)
        if device == before and start < last:  # rows of several tensors interleave
            joined[-1] = (device, first, max(stop, last))
        else:
            joined.append((device, start, stop))
    return [
        MemoryRegion(start, stop - start, caches, torch.device(device))
        for device, start, stop in joined
    ]
