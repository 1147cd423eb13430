"""Canonical allocation: one buffer in which each block is contiguous across all layers.

`why_not_canonical` lists every condition that a model does not meet.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Protocol, runtime_checkable

import torch

from kvxfer.checks import (
    require_flag,
    require_instance,
    require_instances,
    require_one_per_group,
    require_positive,
)
from kvxfer.errors import InvalidArgumentError, KVXferError
from kvxfer.kvcache.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    join_refs,
    layer_boxes,
)
from kvxfer.kvcache.config import KVCacheConfig
from kvxfer.kvcache.layout import KVLayout, axis_size, dense_strides, page_layout
from kvxfer.kvcache.memory_region import require_device
from kvxfer.kvcache.spec import AttentionSpec, KVCacheSpec


@runtime_checkable
class AttentionBackend(Protocol):
    """Shape and memory order that an engine's attention kernel expects of a cache."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Axis of each dimension of the cache's shape, named as in `KVLayout`; one is `block`."""

    def cache_shape(self, spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
        """Compute the shape of one layer's cache, in elements.

        Args:
            spec: The layer's spec, with the tokens of a kernel block as `tokens_per_block`.
            num_blocks: Number of kernel blocks.
        """

    def stride_order(self) -> tuple[int, ...] | None:
        """List the dimensions of `(num_layers, *cache_shape)`, outermost in memory first.

        None if the kernel cannot read a cache with a layer dimension.
        """


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Attention backend described by the names of its axes.

    Attributes:
        shape: Axes in the order of the shape, e.g. `"kv block token head dim"`.
        memory: The same axes and `layer`, outermost first in memory, e.g.
            `"block layer kv token head dim"`; None if the kernel takes no layer dimension.
    """

    shape: str
    memory: str | None

    def __post_init__(self) -> None:
        shape = KVLayout.parse(self.shape, name="shape")
        object.__setattr__(self, "shape", str(shape))
        if self.memory is not None:
            memory = KVLayout.parse(self.memory, name="memory")
            object.__setattr__(self, "memory", str(memory))
            if sorted(memory.axes) != sorted(("layer", *shape.axes)):
                expected = f"the axes of {self.shape!r} and 'layer'"
                raise InvalidArgumentError("memory", self.memory, expected)

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes in the order of the shape."""
        return tuple(self.shape.split())

    def cache_shape(self, spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
        """Compute the shape of one layer's cache, in elements.

        Raises:
            InvalidArgumentError: The spec lacks one of the axes.
        """
        require_instance("spec", spec, AttentionSpec)
        num_blocks = require_positive("num_blocks", num_blocks)
        (form,) = spec.cache_tensors
        sizes = {**form.axis_sizes, "block": num_blocks}
        for axis in self.axes:
            if axis not in sizes and not sizes.keys() >= set(axis.split("*")):
                raise InvalidArgumentError("shape", self.shape, f"axes of {sorted(sizes)}")
        return tuple(axis_size(axis, sizes) for axis in self.axes)

    def stride_order(self) -> tuple[int, ...] | None:
        """List the dimensions of `(num_layers, *cache_shape)`, outermost in memory first."""
        if self.memory is None:
            return None
        logical = ("layer", *self.axes)
        return tuple(logical.index(axis) for axis in self.memory.split())


class AllocationCondition(Enum):
    """Condition for a canonical allocation; the value is its description."""

    CROSS_LAYER_WANTED = "the connector wants blocks of all layers"
    HYBRID_SUPPORTED = "the connector supports several KV-cache groups"
    ATTENTION = "every layer is an attention layer"
    ONE_PAGE_SIZE = "all pages have one size, in bytes"
    SHARED_TENSORS = "the config says which layers share a tensor"
    TENSOR_SIZE = "a shared tensor has one page for each block, in bytes"
    LAYER_DIMENSION = "the attention backend takes a layer dimension"
    ONE_ORDER = "all attention backends order memory alike"
    BLOCK_OUTERMOST = "blocks are outermost in memory"
    KERNEL_BLOCKS = "kernel blocks divide a block and its page"
    CACHE_SHAPE = "the attention backend's shape has the elements of a page"


@dataclass(frozen=True, slots=True)
class AllocationRefusal:
    """Unmet condition, with the group, layer or tensor that does not meet it.

    Attributes:
        found: Value that violates the condition.
        expected: Value that would meet it.
        group: Index of the KV-cache group concerned, if any.
        layer_name: Name of the layer concerned, if any.
        tensor_index: Index into `KVCacheConfig.shared_tensors` of the tensor concerned, if any.
    """

    condition: AllocationCondition
    found: object
    expected: object
    group: int | None = None
    layer_name: str | None = None
    tensor_index: int | None = None

    def __str__(self) -> str:
        places = {"group": self.group, "layer": self.layer_name, "tensor": self.tensor_index}
        named = [f"{what} {place!r}" for what, place in places.items() if place is not None]
        where = f" ({', '.join(named)})" if named else ""
        return f"{self.condition.value}{where}: found {self.found}, expected {self.expected}"


class AllocationRefusedError(KVXferError, ValueError):
    """Refusal of a canonical allocation; register per-layer tensors instead.

    Attributes:
        refusals: Every unmet condition, as listed by `why_not_canonical`.
    """

    def __init__(self, refusals: Sequence[AllocationRefusal]) -> None:
        self.refusals = tuple(refusals)
        super().__init__("; ".join(map(str, self.refusals)))


class _Request:
    """Arguments of a canonical allocation; misuse raises, `refusals` lists unmet conditions."""

    def __init__(
        self,
        config: KVCacheConfig,
        backends: Sequence[AttentionBackend],
        tokens_per_kernel_block: Sequence[int] | None,
    ) -> None:
        require_instance("config", config, KVCacheConfig)
        num_groups = len(config.groups)
        if tokens_per_kernel_block is None:
            tokens_per_kernel_block = [group.spec.tokens_per_block for group in config.groups]
        require_one_per_group("backends", backends, num_groups)
        require_one_per_group("tokens_per_kernel_block", tokens_per_kernel_block, num_groups)
        require_instances("backends", backends, AttentionBackend)
        self.config, self.backends = config, backends
        self.tokens_per_kernel_block = [
            require_positive(f"tokens_per_kernel_block[{group}]", tokens)
            for group, tokens in enumerate(tokens_per_kernel_block)
        ]
        self.layers = [
            (index, name, group.spec.for_layer(name))
            for index, group in enumerate(config.groups)
            for name in group.layer_names
        ]

    def kernel_blocks_per_block(self, group: int) -> int:
        """Count the kernel blocks in a block of `group`; meaningful only if they divide it."""
        spec = self.config.groups[group].spec
        return spec.tokens_per_block // self.tokens_per_kernel_block[group]

    def refusals(
        self, wants_cross_layer_blocks: object, supports_hybrid_groups: object
    ) -> tuple[AllocationRefusal, ...]:
        """List every unmet condition; see `why_not_canonical` for the arguments."""
        unmet = []
        num_groups = len(self.config.groups)
        if not require_flag("wants_cross_layer_blocks", wants_cross_layer_blocks):
            unmet.append(AllocationRefusal(AllocationCondition.CROSS_LAYER_WANTED, "no", "yes"))
        is_supported = require_flag("supports_hybrid_groups", supports_hybrid_groups)
        if num_groups > 1 and not is_supported:
            condition, found = AllocationCondition.HYBRID_SUPPORTED, f"{num_groups} groups"
            unmet.append(AllocationRefusal(condition, found, "1 group"))
        return (
            *unmet,
            *_refusals_of_layers(self),
            *_refusals_of_tensors(self),
            *_refusals_of_backends(self),
            *_refusals_of_kernel_blocks(self),
        )


@dataclass(frozen=True, slots=True)
class CanonicalAllocation:
    """KV caches whose blocks are contiguous across all layers.

    Attributes:
        buffer: int8, `(num_positions * tensor_size_bytes,)`; owns the memory.
        kv_caches: View of each layer in the shape that its attention backend expects. Layers of
            different groups may share memory, since no block belongs to two groups at a time.
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

    A row has one page per position, that is, per entry of `config.shared_tensors`. If kernel
    blocks are smaller than blocks, a row is a sequence of kernel blocks, each with its part of
    every position. Each part of a page ends with its padding; if an axis such as the heads lies
    between blocks and layers, parts interleave, and all padding is at the kernel block's end.

    A group's ref covers the row from its start to the last byte of the group's layers.

    Args:
        config: The blocks, groups and specs, and which layers share a tensor; with a single group
            the shared tensors may be left out.
        backends: The attention backend of each group.
        tokens_per_kernel_block: Tokens of each group's kernel blocks; by default those of its
            blocks.
        wants_cross_layer_blocks: Whether the connector wants blocks of all layers.
        supports_hybrid_groups: Whether the connector can tell several groups apart; ignored for a
            single group.
        device: Device of the buffer.
        pinned: Whether to pin the memory, so that a GPU copies from and to it directly; host only.

    Raises:
        AllocationRefusedError: A condition is not met; `refusals` lists all of them.
        InvalidArgumentError: There is not one backend and one kernel block per group, a backend
            contradicts itself, `pinned` is set for device memory or without CUDA, or the buffer
            does not fit into memory.
    """
    device, pinned = require_device("device", device), require_flag("pinned", pinned)
    if pinned and device.type != "cpu":
        raise InvalidArgumentError("pinned", pinned, f"False: {device} is not host memory")
    if pinned and not torch.cuda.is_available():
        raise InvalidArgumentError("pinned", pinned, "False: memory cannot be pinned without CUDA")
    request = _Request(config, backends, tokens_per_kernel_block)
    refusals = request.refusals(wants_cross_layer_blocks, supports_hybrid_groups)
    if refusals:
        raise AllocationRefusedError(refusals)
    _, _, spec = request.layers[0]
    row_bytes = len(request.config.layer_positions) * spec.page_size_bytes
    num_bytes = config.num_blocks * row_bytes
    try:
        buffer = torch.zeros(num_bytes, dtype=torch.int8, device=device, pin_memory=pinned)
    except (RuntimeError, TypeError) as exc:  # TypeError: a size beyond torch's integers
        expected = f"as many blocks of {row_bytes} bytes as fit into the memory of {device}"
        raise InvalidArgumentError("config.num_blocks", config.num_blocks, expected) from exc
    rows = CanonicalKVCacheTensor(buffer.view(config.num_blocks, row_bytes), row_bytes)
    views = {name: _view(buffer, request, group, name) for group, name, _ in request.layers}
    return CanonicalAllocation(
        buffer=buffer,
        kv_caches={name: view for name, (view, _) in views.items()},
        caches=CanonicalKVCaches(
            tensors=(rows,),
            group_data_refs=tuple(
                (join_refs([views[name][1] for name in group.layer_names]),)
                for group in config.groups
            ),
            group_specs=tuple(group.spec for group in config.groups),
            null_block_id=config.null_block_id,
        ),
    )


def why_not_canonical(
    config: KVCacheConfig,
    backends: Sequence[AttentionBackend],
    *,
    tokens_per_kernel_block: Sequence[int] | None = None,
    wants_cross_layer_blocks: bool = True,
    supports_hybrid_groups: bool = True,
) -> tuple[AllocationRefusal, ...]:
    """List every unmet condition for a canonical allocation; empty if it is possible.

    The arguments are those of `allocate_canonical`.

    Raises:
        InvalidArgumentError: There is not one backend and one kernel block per group, or a
            backend contradicts itself.
    """
    request = _Request(config, backends, tokens_per_kernel_block)
    return request.refusals(wants_cross_layer_blocks, supports_hybrid_groups)


def _refusals_of_layers(request: _Request) -> Iterator[AllocationRefusal]:
    _, first_name, first = request.layers[0]
    for group, name, spec in request.layers:
        if not isinstance(spec, AttentionSpec):
            condition, found = AllocationCondition.ATTENTION, type(spec).__name__
            yield AllocationRefusal(condition, found, "an AttentionSpec", group, name)
        if (size := spec.page_size_bytes) != first.page_size_bytes:
            expected = f"{first.page_size_bytes}, like layer {first_name!r}"
            yield AllocationRefusal(AllocationCondition.ONE_PAGE_SIZE, size, expected, group, name)


def _refusals_of_tensors(request: _Request) -> Iterator[AllocationRefusal]:
    config, positions = request.config, request.config.layer_positions
    condition = AllocationCondition.SHARED_TENSORS
    if not positions:
        yield AllocationRefusal(condition, "no shared tensor", "at least one")
        return
    index_of = {name: index for index, names in enumerate(positions) for name in names}
    owners: dict[tuple[int, int], tuple[str, KVCacheSpec]] = {}
    for group, name, spec in request.layers:
        if name not in index_of:
            yield AllocationRefusal(condition, "no tensor", "one", group, name)
            continue
        owner, other = owners.setdefault((group, index_of[name]), (name, spec))
        if spec != other:
            expected = f"{other}, like layer {owner!r} in the same tensor"
            yield AllocationRefusal(condition, spec, expected, group, name, index_of[name])
    condition, (_, _, first) = AllocationCondition.TENSOR_SIZE, request.layers[0]
    needed = first.page_size_bytes * config.num_blocks
    expected = f"{needed}, which is {config.num_blocks} pages of {first.page_size_bytes}"
    for index, size in enumerate(config.shared_tensor_sizes_bytes):
        if size != needed:
            yield AllocationRefusal(condition, size, expected, tensor_index=index)


def _refusals_of_backends(request: _Request) -> Iterator[AllocationRefusal]:
    orders = [_memory_axes(backend) for backend in request.backends]
    stated = [(group, axes) for group, axes in enumerate(orders) if axes is not None]
    for group, axes in enumerate(orders):
        if axes is None:
            found = f"none for {' '.join(request.backends[group].axes)!r}"
            yield AllocationRefusal(
                AllocationCondition.LAYER_DIMENSION, found, "a stride order", group
            )
            continue
        found, (first_group, first) = repr(" ".join(axes)), stated[0]
        if axes != first:
            expected = f"{' '.join(first)!r}, like group {first_group}"
            yield AllocationRefusal(AllocationCondition.ONE_ORDER, found, expected, group)
        if axes[0] != "block":
            condition, expected = AllocationCondition.BLOCK_OUTERMOST, "'block' first"
            yield AllocationRefusal(condition, found, expected, group)


def _refusals_of_kernel_blocks(request: _Request) -> Iterator[AllocationRefusal]:
    for group, each in enumerate(request.config.groups):
        tokens, kernel_tokens = each.spec.tokens_per_block, request.tokens_per_kernel_block[group]
        if tokens % kernel_tokens:
            found, expected = f"{kernel_tokens} tokens", f"a divisor of {tokens} tokens"
            yield AllocationRefusal(AllocationCondition.KERNEL_BLOCKS, found, expected, group)
            continue
        for name in each.layer_names:
            spec = each.spec.for_layer(name)
            if isinstance(spec, AttentionSpec):
                yield from _refusals_of_page(request, group, name, spec)


def _refusals_of_page(
    request: _Request, group: int, layer_name: str, spec: AttentionSpec
) -> Iterator[AllocationRefusal]:
    """Check that a page splits into kernel blocks of whole elements, in the backend's shape."""
    ratio, item = request.kernel_blocks_per_block(group), spec.dtype.itemsize
    if spec.page_size_bytes % (ratio * item):
        found = f"a page of {spec.page_size_bytes} bytes"
        expected = f"{ratio} kernel blocks of whole {spec.dtype} elements"
        yield AllocationRefusal(
            AllocationCondition.KERNEL_BLOCKS, found, expected, group, layer_name
        )
        return
    backend, needed = request.backends[group], spec.unpadded_page_size_bytes // item
    shape = backend.cache_shape(_kernel_spec(spec, ratio), ratio)
    sizes = dict(zip(backend.axes, shape, strict=False))
    fits = len(shape) == len(backend.axes) and sizes["block"] == ratio and prod(shape) == needed
    if not fits:
        found = f"{shape} as {' '.join(backend.axes)!r} for {ratio} kernel blocks"
        yield AllocationRefusal(
            AllocationCondition.CACHE_SHAPE, found, f"{needed} elements", group, layer_name
        )


def _view(
    buffer: torch.Tensor, request: _Request, group: int, layer_name: str
) -> tuple[torch.Tensor, CanonicalKVCacheRef]:
    """View a layer's part of the buffer, and create the ref to its pages."""
    spec = request.config.groups[group].spec.for_layer(layer_name)
    backend, ratio = request.backends[group], request.kernel_blocks_per_block(group)
    memory = _memory_axes(backend)
    assert isinstance(spec, AttentionSpec), "refused otherwise"
    assert memory is not None, "refused otherwise"
    positions = request.config.layer_positions
    position = next(i for i, names in enumerate(positions) if layer_name in names)
    shape = backend.cache_shape(_kernel_spec(spec, ratio), request.config.num_blocks * ratio)
    sizes = {**dict(zip(backend.axes, shape, strict=True)), "layer": len(positions)}
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
    view = buffer.view(spec.dtype).as_strided(shape, [strides[a] for a in backend.axes], offset)
    return view, CanonicalKVCacheRef(
        tensor_idx=0,
        page_size_bytes=((ratio - 1) * strides["block"] + offset + inside + 1) * item,
        layer_names=(layer_name,),
        layout=page_layout(KVLayout(memory), ratio),
        boxes=tuple(box.moved(offset * item) for box in boxes),
    )


def _strides(memory: Sequence[str], sizes: Mapping[str, int], page_elements: int) -> dict[str, int]:
    """Compute each axis's stride in elements; a layer's kernel block has `page_elements`."""
    strides = dict(zip(memory, dense_strides([sizes[axis] for axis in memory]), strict=True))
    if prod(sizes[axis] for axis in memory[1 : memory.index("layer")]) == 1:
        strides["layer"] = page_elements
    strides["block"] = page_elements * sizes["layer"]
    return strides


def _memory_axes(backend: AttentionBackend) -> tuple[str, ...] | None:
    """List a cross-layer cache's axes, outermost first; None if the kernel takes no such cache."""
    order, logical = backend.stride_order(), ("layer", *backend.axes)
    if "block" not in logical:
        raise InvalidArgumentError("axes", backend.axes, "'block' and other axes")
    if order is None:
        return None
    if sorted(order) != list(range(len(logical))):
        raise InvalidArgumentError("stride_order", order, f"each dimension of {logical} once")
    return tuple(logical[dim] for dim in order)


def _kernel_spec(spec: AttentionSpec, kernel_blocks_per_block: int) -> AttentionSpec:
    """Derive the spec of a kernel block, without padding."""
    tokens = spec.tokens_per_block // kernel_blocks_per_block
    return replace(spec, tokens_per_block=tokens, page_size_padded=None)
