"""Refusals of canonical allocation: the conditions that a model does not meet."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

from kvxfer.checks import (
    require_flag,
    require_instance,
    require_instances,
    require_one_per_group,
    require_positive,
)
from kvxfer.errors import KVXferError
from kvxfer.kvcache.allocation.attention_backend import AttentionBackend, kernel_spec, memory_axes
from kvxfer.kvcache.config import KVCacheConfig
from kvxfer.kvcache.spec import AttentionSpec, KVCacheSpec


class AllocationCondition(Enum):
    """Condition of a canonical allocation; the value describes it in words."""

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
    """Condition that does not hold, with the group, layer or tensor concerned.

    Attributes:
        condition: The condition.
        found: Value that violates it.
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
    """Canonical allocation that a model does not allow; register per-layer tensors instead.

    Attributes:
        refusals: Every condition that does not hold, as `why_not_canonical` lists them.
    """

    def __init__(self, refusals: Sequence[AllocationRefusal]) -> None:
        self.refusals = tuple(refusals)
        super().__init__("; ".join(map(str, self.refusals)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationRequest:
    """Arguments of a canonical allocation, checked for misuse only.

    Attributes:
        config: The blocks, groups and specs.
        backends: The attention backend of each group.
        tokens_per_kernel_block: Tokens of a kernel block, for each group.
    """

    config: KVCacheConfig
    backends: tuple[AttentionBackend, ...]
    tokens_per_kernel_block: tuple[int, ...]

    @classmethod
    def of(
        cls,
        config: KVCacheConfig,
        backends: Sequence[AttentionBackend],
        tokens_per_kernel_block: Sequence[int] | None,
    ) -> "AllocationRequest":
        """Check the arguments; kernel blocks are as large as blocks by default."""
        require_instance("config", config, KVCacheConfig)
        num_groups = len(config.groups)
        if tokens_per_kernel_block is None:
            tokens_per_kernel_block = [group.spec.tokens_per_block for group in config.groups]
        for name, given in (
            ("backends", backends),
            ("tokens_per_kernel_block", tokens_per_kernel_block),
        ):
            require_one_per_group(name, given, num_groups)
        require_instances("backends", backends, AttentionBackend)
        return cls(
            config=config,
            backends=tuple(backends),
            tokens_per_kernel_block=tuple(
                require_positive(f"tokens_per_kernel_block[{group}]", tokens)
                for group, tokens in enumerate(tokens_per_kernel_block)
            ),
        )

    @property
    def positions(self) -> tuple[tuple[str, ...], ...]:
        """Layers at each position of a block; one each in a single group without shared tensors."""
        if self.config.shared_tensors or len(self.config.groups) > 1:
            return self.config.shared_tensors
        return tuple((name,) for name in self.config.layer_names)

    def kernel_blocks_per_block(self, group: int) -> int:
        """Compute the kernel blocks in a block of `group`; meaningful only if they divide it."""
        spec = self.config.groups[group].spec
        return spec.tokens_per_block // self.tokens_per_kernel_block[group]

    def layers(self) -> Iterator[tuple[int, str, KVCacheSpec]]:
        """Yield group, name and spec of every layer, group by group."""
        for index, group in enumerate(self.config.groups):
            for name in group.layer_names:
                yield index, name, group.spec.for_layer(name)


def why_not_canonical(
    config: KVCacheConfig,
    backends: Sequence[AttentionBackend],
    *,
    tokens_per_kernel_block: Sequence[int] | None = None,
    wants_cross_layer_blocks: bool = True,
    supports_hybrid_groups: bool = True,
) -> tuple[AllocationRefusal, ...]:
    """List every unmet condition of a canonical allocation; empty if it is possible.

    Args:
        config: The blocks, groups and specs, and which layers share a tensor; with a single group
            the shared tensors may be left out.
        backends: The attention backend of each group.
        tokens_per_kernel_block: Tokens of a kernel block, for each group; by default those of a
            block.
        wants_cross_layer_blocks: Whether the connector wants blocks of all layers.
        supports_hybrid_groups: Whether the connector can tell several groups apart; ignored for a
            single group.

    Raises:
        InvalidArgumentError: There is not one backend and one kernel block per group, or a
            backend contradicts itself.
    """
    request = AllocationRequest.of(config, backends, tokens_per_kernel_block)
    return (
        *_refusals_of_connector(
            request,
            wanted=require_flag("wants_cross_layer_blocks", wants_cross_layer_blocks),
            hybrid_supported=require_flag("supports_hybrid_groups", supports_hybrid_groups),
        ),
        *_refusals_of_layers(request),
        *_refusals_of_tensors(request),
        *_refusals_of_backends(request),
        *_refusals_of_kernel_blocks(request),
    )


def _refusals_of_connector(
    request: AllocationRequest, *, wanted: bool, hybrid_supported: bool
) -> Iterator[AllocationRefusal]:
    num_groups = len(request.config.groups)
    if not wanted:
        yield AllocationRefusal(AllocationCondition.CROSS_LAYER_WANTED, "no", "yes")
    if num_groups > 1 and not hybrid_supported:
        yield AllocationRefusal(
            AllocationCondition.HYBRID_SUPPORTED, f"{num_groups} groups", "1 group"
        )


def _refusals_of_layers(request: AllocationRequest) -> Iterator[AllocationRefusal]:
    _, first_name, first = next(request.layers())
    for group, name, spec in request.layers():
        if not isinstance(spec, AttentionSpec):
            yield AllocationRefusal(
                AllocationCondition.ATTENTION, type(spec).__name__, "an AttentionSpec", group, name
            )
        if spec.page_size_bytes != first.page_size_bytes:
            expected = f"{first.page_size_bytes} like layer {first_name!r}"
            yield AllocationRefusal(
                AllocationCondition.ONE_PAGE_SIZE, spec.page_size_bytes, expected, group, name
            )


def _refusals_of_tensors(request: AllocationRequest) -> Iterator[AllocationRefusal]:
    config, positions = request.config, request.positions
    if not positions:
        yield AllocationRefusal(
            AllocationCondition.SHARED_TENSORS, "no shared tensor", "at least one"
        )
        return
    index_of = {name: index for index, names in enumerate(positions) for name in names}
    owners: dict[tuple[int, int], tuple[str, KVCacheSpec]] = {}
    for group, name, spec in request.layers():
        if name not in index_of:
            yield AllocationRefusal(
                AllocationCondition.SHARED_TENSORS, "no tensor", "one", group, name
            )
            continue
        owner, other = owners.setdefault((group, index_of[name]), (name, spec))
        if spec != other:
            expected = f"{other}, like layer {owner!r} in the same tensor"
            yield AllocationRefusal(
                AllocationCondition.SHARED_TENSORS, spec, expected, group, name, index_of[name]
            )
    _, _, first = next(request.layers())
    needed = first.page_size_bytes * config.num_blocks
    expected = f"{needed}, which is {config.num_blocks} pages of {first.page_size_bytes}"
    for index, size in enumerate(config.shared_tensor_sizes_bytes):
        if size != needed:
            yield AllocationRefusal(
                AllocationCondition.TENSOR_SIZE, size, expected, tensor_index=index
            )


def _refusals_of_backends(request: AllocationRequest) -> Iterator[AllocationRefusal]:
    orders = [memory_axes(backend) for backend in request.backends]
    stated = [(group, axes) for group, axes in enumerate(orders) if axes is not None]
    for group, axes in enumerate(orders):
        if axes is None:
            found = f"none for {' '.join(request.backends[group].axes)!r}"
            yield AllocationRefusal(
                AllocationCondition.LAYER_DIMENSION, found, "a stride order", group
            )
            continue
        first_group, first = stated[0]
        if axes != first:
            expected = f"{' '.join(first)!r} like group {first_group}"
            yield AllocationRefusal(
                AllocationCondition.ONE_ORDER, repr(" ".join(axes)), expected, group
            )
        if axes[0] != "block":
            yield AllocationRefusal(
                AllocationCondition.BLOCK_OUTERMOST, repr(" ".join(axes)), "'block' first", group
            )


def _refusals_of_kernel_blocks(request: AllocationRequest) -> Iterator[AllocationRefusal]:
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
    request: AllocationRequest, group: int, layer_name: str, spec: AttentionSpec
) -> Iterator[AllocationRefusal]:
    """Check that a page divides into equal kernel blocks of whole elements, in backend's shape."""
    ratio, item = request.kernel_blocks_per_block(group), spec.dtype.itemsize
    if spec.page_size_bytes % (ratio * item):
        found = f"a page of {spec.page_size_bytes} bytes"
        expected = f"{ratio} kernel blocks of whole {spec.dtype} elements"
        yield AllocationRefusal(
            AllocationCondition.KERNEL_BLOCKS, found, expected, group, layer_name
        )
        return
    backend, needed = request.backends[group], spec.unpadded_page_size_bytes // item
    shape = backend.cache_shape(kernel_spec(spec, ratio), ratio)
    sizes = dict(zip(backend.axes, shape, strict=False))
    fits = len(shape) == len(backend.axes) and sizes["block"] == ratio and prod(shape) == needed
    if not fits:
        found = f"{shape} as {' '.join(backend.axes)!r} for {ratio} kernel blocks"
        yield AllocationRefusal(
            AllocationCondition.CACHE_SHAPE, found, f"{needed} elements", group, layer_name
        )
