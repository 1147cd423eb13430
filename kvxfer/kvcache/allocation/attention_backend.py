"""Attention backends: the shape and the memory order that a kernel needs for its cache."""

from dataclasses import dataclass, replace
from math import prod
from typing import Protocol, runtime_checkable

from kvxfer.checks import require_instance, require_positive
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.layout import KVLayout
from kvxfer.kvcache.spec import AttentionSpec


@runtime_checkable
class AttentionBackend(Protocol):
    """Description of an engine's attention kernel, as an allocation needs it."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Axis of each dimension of the shape, named as in `KVLayout`; `block` is one of them."""

    def cache_shape(self, spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
        """Compute the shape of one layer's cache, elements.

        Args:
            spec: The layer's spec; its blocks have as many tokens as the kernel's.
            num_blocks: Blocks of that size.
        """

    def stride_order(self) -> tuple[int, ...] | None:
        """List the dimensions of `(num_layers, *cache_shape)`, outermost in memory first.

        None when the kernel cannot read a cache that has a layer dimension.
        """


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Attention backend described by the names of its axes.

    Attributes:
        shape: Axes in the order of the shape, e.g. `"kv block token head dim"`.
        memory: The same axes and `layer`, outermost first in memory, e.g.
            `"block layer kv token head dim"`; None when the kernel takes no layer dimension.
    """

    shape: str
    memory: str | None

    def __post_init__(self) -> None:
        axes = KVLayout.parse(self.shape, name="shape").axes
        if self.memory is None:
            return
        if sorted(KVLayout.parse(self.memory, name="memory").axes) != sorted(("layer", *axes)):
            expected = f"the axes of {self.shape!r} and 'layer'"
            raise InvalidArgumentError("memory", self.memory, expected)

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes in the order of the shape."""
        return tuple(self.shape.split())

    def cache_shape(self, spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
        """Compute the shape of one layer's cache, elements.

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
        return tuple(
            sizes[axis] if axis in sizes else prod(sizes[factor] for factor in axis.split("*"))
            for axis in self.axes
        )

    def stride_order(self) -> tuple[int, ...] | None:
        """List the dimensions of `(num_layers, *cache_shape)`, outermost in memory first."""
        if self.memory is None:
            return None
        logical = ("layer", *self.axes)
        return tuple(logical.index(axis) for axis in self.memory.split())


def memory_axes(backend: AttentionBackend) -> tuple[str, ...] | None:
    """List the axes of a cache of several layers, outermost first; None without a layer axis.

    Raises:
        InvalidArgumentError: The stride order is not one of the backend's axes and `layer`.
    """
    order, logical = backend.stride_order(), ("layer", *backend.axes)
    if order is None:
        return None
    if sorted(order) != list(range(len(logical))):
        raise InvalidArgumentError("stride_order", order, f"each dimension of {logical} once")
    return tuple(logical[dim] for dim in order)


def kernel_spec(spec: AttentionSpec, kernel_blocks_per_block: int) -> AttentionSpec:
    """Make the spec of a kernel block, `kernel_blocks_per_block` of which make up a block."""
    tokens = spec.tokens_per_block // kernel_blocks_per_block
    return replace(spec, tokens_per_block=tokens, page_size_padded=None)
