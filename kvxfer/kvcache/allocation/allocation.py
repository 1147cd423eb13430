"""Canonical allocation: one buffer in which every block of all layers is one piece of memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from kvxfer.checks import require_flag
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.allocation.attention_backend import AttentionBackend, kernel_spec, memory_axes
from kvxfer.kvcache.allocation.refusal import (
    AllocationRefusedError,
    AllocationRequest,
    why_not_canonical,
)
from kvxfer.kvcache.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    layer_boxes,
)
from kvxfer.kvcache.config import KVCacheConfig
from kvxfer.kvcache.layout import KVLayout, page_layout
from kvxfer.kvcache.memory_region import require_device
from kvxfer.kvcache.page_box import PageBox
from kvxfer.kvcache.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class CanonicalAllocation:
    """KV caches whose blocks are contiguous over all layers.

    Attributes:
        buffer: int8, `(num_positions * tensor_size_bytes,)`; owns the memory.
        kv_caches: For each layer the view that its attention backend expects. Layers of different
            groups may share memory, since no block belongs to two groups at a time.
        caches: The same memory as one tensor `(num_blocks, page_size_bytes * num_positions)` and
            one ref per group.
    """

    buffer: torch.Tensor
    kv_caches: Mapping[str, torch.Tensor]
    caches: CanonicalKVCaches


def allocate_canonical(
    config: KVCacheConfig,
    backends: Sequence[AttentionBackend],
    *,
    tokens_per_kernel_block: Sequence[int] | None = None,
    wants_cross_layer_blocks: bool = True,
    supports_hybrid_groups: bool = True,
    device: torch.device | str = "cpu",
    pinned: bool = False,
) -> CanonicalAllocation:
    """Allocate one zeroed buffer whose rows are blocks of all layers, and view it per layer.

    A row has one page for each position, that is, for each of `config.shared_tensors`. Where
    kernel blocks are smaller than blocks, a row consists of kernel blocks, each with its part of
    every position. A padded page ends in its padding; when an axis such as the heads lies between
    blocks and layers, the pages of a row interleave and the padding is at the row's end.

    A group's ref is the leading bytes of the row, up to the last one of its layers.

    Args:
        config: The blocks, groups and specs, and which layers share a tensor.
        backends: The attention backend of each group.
        tokens_per_kernel_block: Tokens of a kernel block, for each group; by default those of a
            block.
        wants_cross_layer_blocks: Whether the connector wants blocks of all layers.
        supports_hybrid_groups: Whether the connector can tell several groups apart.
        device: Device of the buffer.
        pinned: Whether to pin the memory, so that a GPU copies from and to it directly; host only.

    Raises:
        AllocationRefusedError: A condition does not hold; has the list of `why_not_canonical`.
        InvalidArgumentError: There is not one backend and one kernel block per group, a backend
            contradicts itself, or `pinned` is set for device memory or without CUDA.
    """
    device, pinned = require_device("device", device), require_flag("pinned", pinned)
    if pinned and device.type != "cpu":
        raise InvalidArgumentError("pinned", pinned, f"False on {device}: it is not host memory")
    if pinned and not torch.cuda.is_available():
        raise InvalidArgumentError("pinned", pinned, "False without CUDA, which pins the memory")
    refusals = why_not_canonical(
        config,
        backends,
        tokens_per_kernel_block=tokens_per_kernel_block,
        wants_cross_layer_blocks=wants_cross_layer_blocks,
        supports_hybrid_groups=supports_hybrid_groups,
    )
    if refusals:
        raise AllocationRefusedError(refusals)
    request = AllocationRequest.of(config, backends, tokens_per_kernel_block)
    slices = {name: _slice_of(request, group, name) for group, name, _ in request.layers()}
    _, _, spec = next(request.layers())
    row_bytes = len(request.positions) * spec.page_size_bytes
    buffer = torch.zeros(
        config.num_blocks * row_bytes, dtype=torch.int8, device=device, pin_memory=pinned
    )
    rows = CanonicalKVCacheTensor(buffer.view(config.num_blocks, row_bytes), row_bytes)
    return CanonicalAllocation(
        buffer=buffer,
        kv_caches={
            name: buffer.view(each.dtype).as_strided(each.shape, each.strides, each.offset)
            for name, each in slices.items()
        },
        caches=CanonicalKVCaches(
            tensors=(rows,),
            group_data_refs=tuple((_ref(group.layer_names, slices),) for group in config.groups),
            group_specs=tuple(group.spec for group in config.groups),
            null_block_id=config.null_block_id,
        ),
    )


@dataclass(frozen=True, slots=True)
class _Slice:
    """Part of the buffer that belongs to one layer.

    Attributes:
        dtype: Type of the elements; shape and strides count them.
        shape: Shape that the attention backend expects.
        strides: Stride of each dimension of the shape.
        offset: Index of the first element.
        end_bytes: Bytes from the start of a row to the end of the layer's page.
        layout: Layout of a row.
        boxes: Boxes of the layer's page; offsets count from the start of a row.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    end_bytes: int
    layout: str
    boxes: tuple[PageBox, ...]


def _slice_of(request: AllocationRequest, group: int, layer_name: str) -> _Slice:
    spec = request.config.groups[group].spec.for_layer(layer_name)
    backend, ratio = request.backends[group], request.kernel_blocks_per_block(group)
    memory = memory_axes(backend)
    assert isinstance(spec, AttentionSpec), "refused otherwise"
    assert memory is not None, "refused otherwise"
    position = next(i for i, names in enumerate(request.positions) if layer_name in names)
    shape = backend.cache_shape(kernel_spec(spec, ratio), request.config.num_blocks * ratio)
    sizes = {**dict(zip(backend.axes, shape, strict=True)), "layer": len(request.positions)}
    item = spec.dtype.itemsize
    strides = _strides(memory, sizes, spec.page_size_bytes // (ratio * item))
    offset = position * strides["layer"]
    inside = sum((sizes[a] - 1) * strides[a] for a in memory if a not in {"block", "layer"})
    boxes = layer_boxes(
        layer_name,
        spec.cache_tensors[0],
        [(axis, sizes[axis], strides[axis]) for axis in memory if axis != "layer"],
        kernel_blocks_per_block=ratio,
        outer={},
    )
    return _Slice(
        dtype=spec.dtype,
        shape=shape,
        strides=tuple(strides[axis] for axis in backend.axes),
        offset=offset,
        end_bytes=((ratio - 1) * strides["block"] + offset + inside + 1) * item,
        layout=page_layout(KVLayout(memory), ratio),
        boxes=tuple(box.moved(offset * item) for box in boxes),
    )


def _strides(memory: Sequence[str], sizes: Mapping[str, int], page_elements: int) -> dict[str, int]:
    """Compute the stride of each axis, elements; a layer has `page_elements` of a kernel block."""
    strides, dense = {}, 1
    for axis in reversed(memory):
        strides[axis] = dense
        dense *= sizes[axis]
    if prod(sizes[axis] for axis in memory[1 : memory.index("layer")]) == 1:
        strides["layer"] = page_elements
    strides["block"] = page_elements * sizes["layer"]
    return strides


def _ref(layer_names: Sequence[str], slices: Mapping[str, _Slice]) -> CanonicalKVCacheRef:
    return CanonicalKVCacheRef(
        tensor_idx=0,
        page_size_bytes=max(slices[name].end_bytes for name in layer_names),
        layer_names=tuple(layer_names),
        layout=slices[layer_names[0]].layout,
        boxes=tuple(box for name in layer_names for box in slices[name].boxes),
    )
