"""Canonical KV caches: unique byte tensors and, per group, references into them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvxfer.checks import require_instance, require_integer, set_counts
from kvxfer.errors import InvalidArgumentError, LayoutError
from kvxfer.kvcache.config import KVCacheConfig
from kvxfer.kvcache.page_box import PageBox
from kvxfer.kvcache.pages import Pages, find_pages
from kvxfer.kvcache.registered import KVCaches, Layouts, read_registered
from kvxfer.kvcache.rows import Row, join_rows
from kvxfer.kvcache.spec import KVCacheSpec


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheTensor:
    """One tensor of blocks, zero-copy over the engine's own storage.

    Attributes:
        tensor: int8, `(num_blocks, page_size_bytes)`; stride(1) is 1, stride(0) may exceed
            the page.
        page_size_bytes: The possibly padded page.
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
    """One layer's data (or that of a group of layers) inside one canonical tensor.

    Attributes:
        tensor_idx: Index into `CanonicalKVCaches.tensors`.
        page_size_bytes: The un-padded page: the first bytes of each row that carry data.
        layer_names: Layers whose data this is; empty when the engine did not say.
        layout: Axes of the page as `KVLayout` writes them; empty when the engine did not say.
        boxes: What the bytes of the page are, layer by layer; empty when the engine did not say.
    """

    tensor_idx: int
    page_size_bytes: int
    layer_names: tuple[str, ...] = ()
    layout: str = ""
    boxes: tuple[PageBox, ...] = ()

    def __post_init__(self) -> None:
        set_counts(self, "page_size_bytes")
        object.__setattr__(self, "tensor_idx", require_integer("tensor_idx", self.tensor_idx))


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """The KV caches of one worker, in bytes.

    Attributes:
        tensors: Every unique tensor exactly once.
        group_data_refs: For each KV-cache group its refs, in layer order. The bytes of one
            block of group g are the pages of its refs, in this order.
        group_specs: For each group its spec, which with the layouts says what the bytes mean;
            empty when the engine did not say.
        null_block_id: The block that nothing is loaded into; None where there is none.
    """

    tensors: Sequence[CanonicalKVCacheTensor]
    group_data_refs: Sequence[Sequence[CanonicalKVCacheRef]]
    group_specs: Sequence[KVCacheSpec] = ()
    null_block_id: int | None = None

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def canonicalize(
    kv_caches: KVCaches, config: KVCacheConfig, *, layouts: Layouts | None = None
) -> CanonicalKVCaches:
    """View the KV caches that an engine registered as blocks of bytes; nothing is copied.

    A layer's tensor may have its blocks, K/V or heads outermost, NHD or HND strides, packed K/V,
    one latent per token, kernel blocks smaller than the block, down to slots for single tokens,
    padded pages, or share its bytes with layers of other groups. Keys and values may have tensors
    of their own. `LAYOUT_ZOO` lists what engines have.

    Layers that interleave inside a block become one tensor whose rows are whole blocks, and so
    does one tensor of all layers, registered under any name or under every layer's; what the
    steps of its layer axis are is `config.shared_tensors`, or the layers of the only group. A
    ref's page is the leading bytes of the row up to the group's last one.

    Tensors are understood by their strides, never by the order of their shape, and a tensor that
    reads in two ways is refused. That is so also where both readings give the same pages, such as
    NHD and HND with as many heads as tokens: workers that read their pages differently must not
    share them, and the refs' layouts are what tells them apart. Only readings that differ in the
    place of axes of size 1 are one reading.

    Args:
        kv_caches: For each layer its tensor, its keys and its values or, for Mamba, its list of
            states. The result views their memory and keeps it alive.
        config: The blocks, groups and specs.
        layouts: The caller's word for the layout of some entries, as axis strings; checked
            against shape and strides like every other reading.

    Raises:
        InvalidArgumentError: An entry is missing, unknown or not what its spec asks for, tensors
            are on several devices or on the meta device, or a layout names the wrong axes.
        AmbiguousLayoutError: A tensor reads in two ways.
        UnknownLayoutError: A tensor reads as nothing that its spec allows; also when a page is
            not contiguous, or the tensor is a view that conjugates or negates.
        OverlapError: Pages of two layers share some bytes, but not all; or two tensors of one
            layer, such as its keys and its values, share any.
        PageBoundsError: Padded pages reach beyond the storage.
        LayoutError: Pages do not add up to the spec's size, or layers that `config` says share
            a tensor do not.
    """
    caches = read_registered(kv_caches, config, layouts)
    pages = [each for cache in caches for each in find_pages(cache, config.num_blocks)]
    _require_shared(pages, config)
    rows = _in_order_of_use(join_rows(pages), pages)
    device = caches[0].tensors[0].device
    return CanonicalKVCaches(
        tensors=tuple(
            CanonicalKVCacheTensor(row.as_tensor(device), row.size_bytes) for row in rows
        ),
        group_data_refs=tuple(_refs(pages, rows, group) for group in range(len(config.groups))),
        group_specs=tuple(group.spec for group in config.groups),
        null_block_id=config.null_block_id,
    )


def _in_order_of_use(rows: Sequence[Row], pages: Sequence[Pages]) -> list[Row]:
    order = {id(page): index for index, page in enumerate(pages)}
    return sorted(rows, key=lambda row: min(order[id(page)] for page in row.members))


def _refs(
    pages: Sequence[Pages], rows: Sequence[Row], group: int
) -> tuple[CanonicalKVCacheRef, ...]:
    """One ref for each row that a group uses, in the order of its layers."""
    row_of = {id(page): index for index, row in enumerate(rows) for page in row.members}
    used: dict[int, list[Pages]] = {}
    for page in (page for page in pages if page.group == group):
        used.setdefault(row_of[id(page)], []).append(page)
    return tuple(_ref(index, rows[index], members) for index, members in used.items())


def _ref(tensor_idx: int, row: Row, members: Sequence[Pages]) -> CanonicalKVCacheRef:
    names = dict.fromkeys(name for page in members for name in page.layer_names)
    layouts = dict.fromkeys(page.layout for page in members)
    return CanonicalKVCacheRef(
        tensor_idx=tensor_idx,
        page_size_bytes=max(p.address - row.address + p.data_size_bytes for p in members),
        layer_names=tuple(names),
        layout=" | ".join(layouts),
        boxes=tuple(box.moved(p.address - row.address) for p in members for box in p.boxes),
    )


def _require_shared(pages: Sequence[Pages], config: KVCacheConfig) -> None:
    """Check the engine's word on which layers share a tensor.

    Groups whose kernels use blocks of different sizes cut the same row differently, so that what
    they have at one position begins at different bytes.
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


def _lines(caches: CanonicalKVCaches) -> list[str]:
    """What `print` shows: tensors, pages, groups, and where each layer is."""
    lines = [f"{len(caches.tensors)} tensors, {len(caches.group_data_refs)} groups"]
    for index, each in enumerate(caches.tensors):
        num_blocks, page = each.tensor.shape
        lines.append(
            f"tensor {index}: {num_blocks} blocks, page {page} bytes, "
            f"stride {each.tensor.stride(0)} bytes, {each.tensor.device}"
        )
    for group, refs in enumerate(caches.group_data_refs):
        total = sum(ref.page_size_bytes for ref in refs)
        lines.append(f"group {group}: {len(refs)} refs, {total} bytes per block")
        for ref in refs:
            layers = ", ".join(ref.layer_names) or "layers not named"
            layout = f" ({ref.layout})" if ref.layout else ""
            lines.append(
                f"  tensor {ref.tensor_idx}, {ref.page_size_bytes} bytes: {layers}{layout}"
            )
    return lines
