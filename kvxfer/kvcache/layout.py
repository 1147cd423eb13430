"""Layouts: the named, strided axes of one registered KV-cache tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from kvxfer.checks import find_repeated, require_texts
from kvxfer.errors import AmbiguousLayoutError, InvalidArgumentError, UnknownLayoutError

ATTENTION_LAYOUTS = (
    "block kv token head dim",
    "block kv head token dim",
    "block token kv head dim",
    "block head kv token dim",
    "block token head kv dim",
    "block head token kv dim",
    "block token head kv*dim",
    "block head token kv*dim",
    "block kv token head*dim",
    "block token kv head*dim",
    "block kv token*head*dim",
    "block kv head*token*dim",
    "kv block token head dim",
    "kv block head token dim",
    "kv block token head*dim",
    "kv block token*head*dim",
    "kv block head*token*dim",
    "head block token kv*dim",
)
"""Layouts of keys and values in one tensor, as axis strings of `KVLayout`."""

SEPARATE_LAYOUTS = (
    "block token head dim",
    "block head token dim",
    "block token head*dim",
    "block head dim",
    "head block token dim",
    "head block dim",
)
"""Layouts of keys, or of values, in a tensor of their own. Without `token`, kernel blocks are
single tokens: a pool of token slots."""

LATENT_LAYOUTS = (
    "block token dim",
    "block token head dim",
    "block head token dim",
    "block token*dim",
)
"""Layouts of one latent vector per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTensorForm:
    """Form of a tensor that an engine registers for a layer: its axes, sizes and known layouts.

    Attributes:
        axis_sizes: Elements along each named axis of one page, without the block axis. K and V of
            unequal width share one axis, named `kv*dim`.
        parts: Name and width of each part, in the order of the K/V axis: `k`, `v`, `latent`,
            `state0`. The width counts elements along the innermost axis.
        encoding: Encoding of the elements, see `PageBox`.
    """

    dtype: torch.dtype
    axis_sizes: Mapping[str, int]
    layouts: tuple[str, ...]
    parts: tuple[tuple[str, int], ...]
    encoding: str = ""

    @property
    def page_size_bytes(self) -> int:
        """Bytes that one block has in this tensor, without padding."""
        return prod(self.axis_sizes.values()) * self.dtype.itemsize


SPLIT_AXES = frozenset({"kv", "layer", "head"})
"""Axes that may lie outside the block axis: each index along them has its own pages."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layout of a tensor: its axes, outermost first in memory, written as in einops.

    Axes are `block`, `kv`, `token`, `head`, `dim`, `layer`, and `s0`, `s1`, ... for states.
    `kv*dim` is one dimension of the tensor that runs over two axes, the first one outermost.
    The order is that of the strides, independent of the order of the tensor's shape.

    Attributes:
        axes: One entry per dimension of the tensor.
    """

    axes: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", require_texts("axes", self.axes))
        factors = self.factors
        if "block" not in self.axes:
            raise InvalidArgumentError("axes", self.axes, "an axis 'block' of its own")
        if find_repeated(factors) is not None or not all(f.isidentifier() for f in factors):
            raise InvalidArgumentError("axes", self.axes, "names of axes, each name once")

    @classmethod
    def parse(cls, layout: "str | KVLayout", *, name: str = "layout") -> "KVLayout":
        """Parse a layout such as `"block head token kv*dim"`; errors call the argument `name`.

        Raises:
            InvalidArgumentError: The text is not a list of distinct axes with `block` among them.
        """
        if isinstance(layout, KVLayout):
            return layout
        if not isinstance(layout, str):
            raise InvalidArgumentError(name, layout, "an axis string")
        try:
            return cls(tuple(layout.split()))
        except InvalidArgumentError as exc:
            raise InvalidArgumentError(name, layout, exc.expected) from exc

    @property
    def factors(self) -> tuple[str, ...]:
        """Every single axis, merged ones split."""
        return tuple(factor for axis in self.axes for factor in axis.split("*"))

    @property
    def outer_axes(self) -> tuple[str, ...]:
        """Axes outside the block axis."""
        return self.axes[: self.axes.index("block")]

    def __str__(self) -> str:
        return " ".join(self.axes)


@dataclass(frozen=True, slots=True)
class LayoutReading:
    """Reading of a tensor by a layout: size, dimension and stride (elements) of each axis.

    Axes of size 1 have no place in memory: their `dims` entry is None and their stride is that of
    a dense tensor. `kernel_blocks_per_block` steps along the block axis make up one block.
    """

    layout: KVLayout
    sizes: tuple[int, ...]
    dims: tuple[int | None, ...]
    strides: tuple[int, ...]
    kernel_blocks_per_block: int

    @property
    def block_axis(self) -> int:
        """Position of the block axis."""
        return self.layout.axes.index("block")

    @property
    def kernel_page_elements(self) -> int:
        """Elements from the first to the last within one step along the block axis."""
        inner = range(self.block_axis + 1, len(self.sizes))
        return 1 + sum((self.sizes[axis] - 1) * self.strides[axis] for axis in inner)

    @property
    def has_gaps(self) -> bool:
        """Whether other layers lie between the heads of a page."""
        heads_outside = self.layout.axes[:2] == ("block", "head") and self.sizes[1] > 1
        return heads_outside and self.strides[1] > prod(self.sizes[2:])

    def __str__(self) -> str:
        text = page_layout(self.layout, self.kernel_blocks_per_block)
        return f"{text}, heads {self.strides[1]} elements apart" if self.has_gaps else text


def page_layout(layout: KVLayout, kernel_blocks_per_block: int) -> str:
    """Format the layout of a ref's pages: their axes, and the kernel blocks of a block."""
    if kernel_blocks_per_block == 1:
        return str(layout)
    return f"{layout}, {kernel_blocks_per_block} kernel blocks per block"


def fitting_readings(
    tensor: torch.Tensor,
    form: CacheTensorForm,
    num_blocks: int,
    *,
    layout: KVLayout | None = None,
    num_layers: int | None = None,
    page_size_bytes: int | None = None,
) -> list[LayoutReading]:
    """List the distinct readings of a tensor by layouts of `form` that its sizes and strides fit.

    Dimensions are matched in stride order; neither the order of the shape nor any other hint is
    used. The axes of a state are named by its shape, so if some are of equal size, its reading by
    shape is listed, too. Readings that differ only in the position of axes of size 1 are the same.

    If `layout` is given, only that one is tried. `page_size_bytes` is one layer's page if it is
    padded, and `num_layers` is None for a tensor of one layer.
    """
    candidates = _candidates(form, layout, num_layers)
    if not same_bytes(tensor.dtype, form.dtype):
        return []
    padded_elements = (page_size_bytes or form.page_size_bytes) // form.dtype.itemsize
    readings: dict[tuple[str, ...], LayoutReading] = {}
    tokens = form.axis_sizes.get("token", 1)
    ratios = sorted({max(1, size // num_blocks) for size in tensor.shape})  # the block axis has one
    for candidate in candidates:
        for ratio in ratios if "token" in candidate.factors else [tokens]:
            if tokens % ratio:
                continue
            known = _known_sizes(form.axis_sizes, num_blocks, num_layers, ratio)
            reading = _fit(tensor, candidate, known, ratio, padded_elements)
            if reading is not None:
                readings.setdefault(_significant_axes(candidate, known, num_blocks), reading)
            if reading is not None and layout is None and "s0" in form.axis_sizes:
                by_shape = _read_by_shape(reading)
                readings.setdefault(_significant_axes(by_shape.layout, known, num_blocks), by_shape)
    return list(readings.values())


def require_one(
    readings: Sequence[LayoutReading],
    tensor: torch.Tensor,
    form: CacheTensorForm,
    num_blocks: int,
    layer_name: str,
    *,
    layout: KVLayout | None = None,
    num_layers: int | None = None,
) -> LayoutReading:
    """Return a tensor's only reading, or raise an error that shows all, or what would fit."""
    if len(readings) == 1:
        return readings[0]
    if readings:
        raise AmbiguousLayoutError(layer_name, describe_tensor(tensor), list(map(str, readings)))
    expected = []
    for candidate in _candidates(form, layout, num_layers):
        known = _known_sizes(form.axis_sizes, num_blocks, num_layers, 1)
        sizes = tuple(axis_size(axis, known) for axis in candidate.axes)
        expected.append(f"{str(candidate)!r} {sizes} of {form.dtype}, contiguous within a block")
    raise UnknownLayoutError(layer_name, describe_tensor(tensor), expected)


def describe_tensor(tensor: torch.Tensor) -> str:
    """Format shape, stride and dtype of a tensor."""
    return f"shape {tuple(tensor.shape)}, stride {tensor.stride()}, dtype {tensor.dtype}"


def _candidates(
    form: CacheTensorForm, layout: KVLayout | None, num_layers: int | None
) -> list[KVLayout]:
    if layout is not None:
        return [layout]
    parsed = [KVLayout.parse(text) for text in form.layouts]
    fitting = [candidate for candidate in parsed if _names_every_axis(candidate, form, None)]
    if num_layers is None:
        return fitting
    return [layered for each in fitting for layered in _with_layer_axis(each)]


def _with_layer_axis(layout: KVLayout) -> list[KVLayout]:
    """Add a layer axis where engines have one: outermost, inside the block, inside the head.

    Source: `get_kv_cache_stride_order(include_num_layers_dimension=True)` of vLLM's backends.
    """
    axes = layout.axes
    layered = [KVLayout(("layer", *axes))]
    if axes[0] == "block":
        layered.append(KVLayout(("block", "layer", *axes[1:])))
        if "head" in axes[: axes.index("token") if "token" in axes else 0]:
            inside = axes.index("head") + 1
            layered.append(KVLayout((*axes[:inside], "layer", *axes[inside:])))
    return layered


def parse_layout_of(
    form: CacheTensorForm, layout: str | KVLayout, *, name: str, num_layers: int | None = None
) -> KVLayout:
    """Parse a layout for tensors of one form; an error names the argument by `name`."""
    layout = KVLayout.parse(layout, name=name)
    if not _names_every_axis(layout, form, num_layers):
        axes = [*form.axis_sizes, "block", *(["layer"] if num_layers is not None else [])]
        raise InvalidArgumentError(name, str(layout), f"exactly the axes {sorted(axes)}")
    if not SPLIT_AXES.issuperset(layout.outer_axes):
        expected = f"only {', '.join(map(repr, sorted(SPLIT_AXES)))} outside 'block'"
        raise InvalidArgumentError(name, str(layout), expected)
    return layout


def _names_every_axis(layout: KVLayout, form: CacheTensorForm, num_layers: int | None) -> bool:
    named = set(layout.factors) - {"block"}
    known = {factor for axis in form.axis_sizes for factor in axis.split("*")}
    needed = {f for axis, size in form.axis_sizes.items() if size > 1 for f in axis.split("*")}
    needed.discard("token")  # kernel blocks may be single tokens
    if num_layers is not None:
        known.add("layer")
        needed.add("layer")
    inseparable = {axis for axis in form.axis_sizes if "*" in axis}
    return needed <= named <= known and inseparable.issubset(layout.axes)


def _known_sizes(
    page_axes: Mapping[str, int], num_blocks: int, num_layers: int | None, ratio: int
) -> dict[str, int]:
    """Compute the size of every axis when `ratio` kernel blocks make up a block."""
    sizes = {**page_axes, "block": num_blocks * ratio, "layer": num_layers or 1}
    if "token" in sizes:
        sizes["token"] //= ratio
    return sizes


def dense_strides(sizes: Sequence[int], innermost: int = 1) -> list[int]:
    """Compute the stride of each axis, outermost first, if there are no gaps."""
    return [innermost * prod(sizes[axis + 1 :]) for axis in range(len(sizes))]


def axis_size(axis: str, known: Mapping[str, int]) -> int:
    """Compute the size of an axis, which may be several merged ones."""
    return known[axis] if axis in known else prod(known[factor] for factor in axis.split("*"))


def _significant_axes(
    layout: KVLayout, known: Mapping[str, int], num_blocks: int
) -> tuple[str, ...]:
    """List the axes that have a place in memory, that is, those larger than 1.

    If the only block consists of kernel blocks of one token, its block axis is its token axis.
    """
    kept = (
        "*".join(factor for factor in axis.split("*") if known.get(factor, 2) > 1)
        for axis in layout.axes
    )
    blocks_are_tokens = num_blocks == 1 and known.get("token") == 1
    return tuple(
        "token" if axis == "block" and blocks_are_tokens else axis for axis in kept if axis
    )


def _fit(
    tensor: torch.Tensor,
    layout: KVLayout,
    known: Mapping[str, int],
    ratio: int,
    padded_elements: int,
) -> LayoutReading | None:
    """Match the tensor's dimensions, sorted by stride, with the axes; None if they differ."""
    if tensor.ndim != len(layout.axes):
        return None
    sizes = tuple(axis_size(axis, known) for axis in layout.axes)
    physical = sorted(
        (dim for dim in range(tensor.ndim) if tensor.shape[dim] != 1),
        key=tensor.stride,
        reverse=True,
    )
    if [tensor.shape[dim] for dim in physical] != [size for size in sizes if size != 1]:
        return None
    remaining = iter(physical)
    dims = tuple(next(remaining) if size != 1 else None for size in sizes)
    actual = tuple(None if dim is None else tensor.stride(dim) for dim in dims)
    strides = _page_strides(
        layout, sizes, actual, padded_elements // ratio, whole_blocks=ratio == 1
    )
    return None if strides is None else LayoutReading(layout, sizes, dims, strides, ratio)


def _read_by_shape(reading: LayoutReading) -> LayoutReading:
    """Name a state's axes of equal size in the order of its shape instead of its strides."""
    axes, sizes = reading.layout.axes, reading.sizes
    dims = {at: d for at, d in enumerate(reading.dims) if d is not None and axes[at] != "layer"}
    in_shape = sorted(dims, key=lambda at: (sizes[at], dims[at]))
    in_memory = sorted(dims, key=lambda at: (sizes[at], at))
    named = dict(zip(in_shape, (axes[at] for at in in_memory), strict=True))
    names = tuple(named.get(at, axis) for at, axis in enumerate(axes))
    return replace(reading, layout=KVLayout(names))


def _page_strides(
    layout: KVLayout,
    sizes: tuple[int, ...],
    actual: tuple[int | None, ...],
    padded_elements: int,
    *,
    whole_blocks: bool,
) -> tuple[int, ...] | None:
    """Compute the strides of all axes; None if a page would not be contiguous.

    A page is dense, except that one layer's page may be padded, and that other layers may lie
    between the heads. Gaps of any size may lie between blocks, and between K and V outside the
    blocks.
    """
    block = layout.axes.index("block")
    splits = prod(sizes[:block])
    strides = [0] * len(sizes)
    dense = 1
    for axis in reversed(range(len(sizes))):
        padded = dense
        is_page = (
            layout.axes[axis] == "layer" and axis > block and prod(sizes[block + 1 : axis]) == 1
        )
        if axis == block or is_page:
            padded = max(dense, padded_elements // splits)
        stride = actual[axis]
        if stride is None:
            stride = padded
        may_have_gaps = axis == 1 and layout.axes[:2] == ("block", "head") and whole_blocks
        if stride < dense:
            return None
        if axis > block and stride not in (dense, padded) and not may_have_gaps:
            return None
        strides[axis] = stride
        dense = stride * sizes[axis] if axis != block or sizes[axis] == 1 else stride + 1
    return tuple(strides)


def same_bytes(actual: torch.dtype, expected: torch.dtype) -> bool:
    """Whether two dtypes have the same bytes; engines register 8-bit floats as plain bytes."""
    plain = (torch.uint8, torch.int8)
    if expected.itemsize == 1 and (actual in plain or expected in plain):
        return actual.itemsize == 1
    return actual == expected
