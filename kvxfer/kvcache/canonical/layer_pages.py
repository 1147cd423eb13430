"""Pages of layers: place and size of each layer's part of a block, and the boxes in it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch

from kvxfer.errors import LayoutError, PageBoundsError
from kvxfer.kvcache.canonical.registered import LayerPlace, RegisteredCache
from kvxfer.kvcache.layout import CacheTensorForm, dense_strides, describe_tensor
from kvxfer.kvcache.page_box import Digit, PageBox

Axes = Iterable[tuple[str, int, int]]
"""Name, size and stride (in elements) of each axis; merged axes, such as `kv*dim`, are one axis."""


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Pages of all blocks at one place of a tensor, such as those of one layer.

    Block b's page is `num_fragments` fragments, the first of them at
    `address + b * block_stride_bytes`. There is one fragment unless other layers lie between the
    kernel blocks, or the heads, of a page.

    Attributes:
        fragment_size_bytes: Bytes of one fragment, padding included.
        data_size_bytes: Bytes from the first to the last byte of a page that carries data.
        boxes: Boxes of that data; offsets count from `address`.
    """

    group: int
    layer_names: tuple[str, ...]
    layout: str
    storage: torch.UntypedStorage
    address: int
    num_blocks: int
    block_stride_bytes: int
    num_fragments: int
    fragment_size_bytes: int
    fragment_stride_bytes: int
    data_size_bytes: int
    boxes: tuple[PageBox, ...]

    @property
    def extent_bytes(self) -> int:
        """Bytes from the first to the last byte of a page, padding included."""
        return (self.num_fragments - 1) * self.fragment_stride_bytes + self.fragment_size_bytes

    def fragments(self) -> Iterator[tuple[int, int]]:
        """Yield the start and end addresses of each fragment of block 0's page."""
        for index in range(self.num_fragments):
            start = self.address + index * self.fragment_stride_bytes
            yield start, start + self.fragment_size_bytes


def find_pages(cache: RegisteredCache, num_blocks: int) -> list[LayerPages]:
    """Find the pages of a registered cache, in layer order, K before V."""
    if len(cache.tensors) > 1 and _make_up_one_page(cache, num_blocks):
        pages = [_joined_pages(cache, num_blocks)]
    else:
        pages = [
            page for index in range(len(cache.tensors)) for page in _tensor_pages(cache, index)
        ]
    for each in pages:
        last = each.address + (each.num_blocks - 1) * each.block_stride_bytes + each.extent_bytes
        needed_bytes = last - each.storage.data_ptr()
        if needed_bytes > each.storage.nbytes():
            raise PageBoundsError(each.layer_names[0], needed_bytes, each.storage.nbytes())
    return pages


def _tensor_pages(cache: RegisteredCache, index: int) -> list[LayerPages]:
    tensor, reading = cache.tensors[index], cache.readings[index]
    item = tensor.element_size()
    outer = reading.layout.outer_axes
    pages = []
    for place in product(*(range(size) for size in reading.sizes[: len(outer)])):
        at = dict(zip(outer, place, strict=True))
        steps = zip(place, reading.strides[: len(outer)], strict=True)
        offset_bytes = sum(i * stride for i, stride in steps) * item
        if "layer" in reading.layout.axes and "layer" not in outer:
            places = _places_of_groups(cache)
        else:
            places = [((p,), 0) for p in cache.positions[at.get("layer", 0)]]
        for layers, last_position in places:
            boxes = _read_contents(cache, index, at, layers)
            address = tensor.data_ptr() + offset_bytes
            pages.append(_pages(cache, index, layers, last_position, address, boxes))
    return pages


def _places_of_groups(cache: RegisteredCache) -> list[tuple[tuple[LayerPlace, ...], int]]:
    """List each group's layers inside a row of all layers, and the last position it uses."""
    layers: dict[int, list[LayerPlace]] = {}
    last: dict[int, int] = {}
    for position, places in enumerate(cache.positions):
        for place in places:
            layers.setdefault(place.group, []).append(place)
            last[place.group] = position
    return [(tuple(layers[group]), last[group]) for group in sorted(layers)]


def _pages(
    cache: RegisteredCache,
    index: int,
    places: Sequence[LayerPlace],
    last_position: int,
    address: int,
    boxes: tuple[PageBox, ...],
) -> LayerPages:
    tensor, reading = cache.tensors[index], cache.readings[index]
    item = tensor.element_size()
    ratio = reading.kernel_blocks_per_block
    step_bytes = reading.strides[reading.block_axis] * item
    data_bytes = reading.kernel_page_elements * item
    padded_bytes = _padded_kernel_page_bytes(cache, index)
    if padded_bytes > step_bytes:
        raise LayoutError(
            f"layer {cache.name!r}: blocks are {step_bytes * ratio} bytes apart and need "
            f"{padded_bytes * ratio} with padding ({describe_tensor(tensor)})"
        )
    if "layer" in reading.layout.axes[reading.block_axis :]:
        unused = len(cache.positions) - 1 - last_position
        data_bytes -= unused * reading.strides[reading.layout.axes.index("layer")] * item
    count, size, stride = ratio, padded_bytes, step_bytes
    if reading.has_gaps:
        count, stride = reading.sizes[1], reading.strides[1] * item
        size = data_bytes - (count - 1) * stride
    elif padded_bytes == step_bytes:
        count, size, stride = 1, step_bytes * ratio, step_bytes * ratio
    return LayerPages(
        group=places[0].group,
        layer_names=tuple(place.layer_name for place in places),
        layout=str(reading),
        storage=tensor.untyped_storage(),
        address=address,
        num_blocks=reading.sizes[reading.block_axis] // ratio,
        block_stride_bytes=step_bytes * ratio,
        num_fragments=count,
        fragment_size_bytes=size,
        fragment_stride_bytes=stride,
        data_size_bytes=(ratio - 1) * step_bytes + data_bytes,
        boxes=boxes,
    )


def _padded_kernel_page_bytes(cache: RegisteredCache, index: int) -> int:
    """Compute the bytes of one step along the block axis, padding included, for all its layers."""
    reading = cache.readings[index]
    alone = len(cache.tensors) == 1
    page_bytes = cache.spec.page_size_bytes if alone else cache.forms[index].page_size_bytes
    page_bytes *= len(cache.positions)
    for axis in range(reading.block_axis):
        page_bytes //= reading.sizes[axis]
    return page_bytes // reading.kernel_blocks_per_block


def _make_up_one_page(cache: RegisteredCache, num_blocks: int) -> bool:
    """Whether several tensors make up one page; if not, a padded page is a `LayoutError`."""
    spans = _spans(cache)
    steps = {
        reading.strides[reading.block_axis] * tensor.element_size()
        for tensor, reading in zip(cache.tensors, cache.readings, strict=True)
    }
    follows = all(start + size == following for (start, size), (following, _) in pairwise(spans))
    same_blocks = num_blocks == 1 or (len(steps) == 1 and min(steps) >= cache.spec.page_size_bytes)
    one_storage = len({tensor.untyped_storage().data_ptr() for tensor in cache.tensors}) == 1
    whole = all(
        each.block_axis == 0 and each.kernel_blocks_per_block == 1 and not each.has_gaps
        for each in cache.readings
    )
    if follows and same_blocks and one_storage and whole:
        return True
    if cache.spec.page_size_bytes == cache.spec.unpadded_page_size_bytes:
        return False
    states = "; ".join(describe_tensor(tensor) for tensor in cache.tensors)
    raise LayoutError(
        f"layer {cache.name!r}: tensors ({states}) at byte offsets "
        f"{[start - spans[0][0] for start, _ in spans]} do not make up pages of "
        f"{cache.spec.page_size_bytes} bytes over one allocation"
    )


def _spans(cache: RegisteredCache) -> list[tuple[int, int]]:
    """List the address and the bytes of block 0 in each tensor, in address order."""
    return sorted(
        (tensor.data_ptr(), form.page_size_bytes)
        for tensor, form in zip(cache.tensors, cache.forms, strict=True)
    )


def _joined_pages(cache: RegisteredCache, num_blocks: int) -> LayerPages:
    spec, (place,) = cache.spec, cache.positions[0]
    step = cache.readings[0].strides[0] * cache.tensors[0].element_size()
    address = _spans(cache)[0][0]
    starts = [tensor.data_ptr() - address for tensor in cache.tensors]
    turned = f" at {', '.join(map(str, starts))}" if starts != sorted(starts) else ""
    boxes = [
        box.moved(start)
        for index, start in enumerate(starts)
        for box in _read_contents(cache, index, {}, (place,))
    ]
    return LayerPages(
        group=place.group,
        layer_names=(place.layer_name,),
        layout=" + ".join(map(str, cache.readings)) + turned,
        storage=cache.tensors[0].untyped_storage(),
        address=address,
        num_blocks=num_blocks,
        block_stride_bytes=spec.page_size_bytes if num_blocks == 1 else step,
        num_fragments=1,
        fragment_size_bytes=spec.page_size_bytes,
        fragment_stride_bytes=spec.page_size_bytes,
        data_size_bytes=spec.unpadded_page_size_bytes,
        boxes=tuple(boxes),
    )


def _read_contents(
    cache: RegisteredCache, index: int, outer: Mapping[str, int], places: Sequence[LayerPlace]
) -> tuple[PageBox, ...]:
    """Describe the pages that one tensor has at one place, with offsets from there.

    `outer` is the index of the place along each axis outside the block axis.
    """
    reading, form = cache.readings[index], cache.forms[index]
    every = zip(reading.layout.axes, reading.sizes, reading.strides, strict=True)
    axes = list(every)[reading.block_axis :]
    steps = {axis: stride * cache.tensors[index].element_size() for axis, _, stride in axes}
    positions = {place: index for index, each in enumerate(cache.positions) for place in each}
    return tuple(
        box.moved(positions[place] * steps.get("layer", 0))
        for place in places
        for box in layer_boxes(
            place.layer_name,
            form,
            [axis for axis in axes if axis[0] != "layer"],
            kernel_blocks_per_block=reading.kernel_blocks_per_block,
            outer=outer,
        )
    )


def layer_boxes(
    layer_name: str,
    form: CacheTensorForm,
    axes: Axes,
    *,
    kernel_blocks_per_block: int,
    outer: Mapping[str, int],
) -> list[PageBox]:
    """Describe one layer's page: keys before values, offsets from the start of the page.

    `axes` are those inside a page, and the block axis, whose stride is that of a kernel block.
    `outer` is the index of the page along each axis outside the block axis.
    """
    item, ratio = form.dtype.itemsize, kernel_blocks_per_block
    single = {name: (size, stride * item) for name, size, stride in _single_axes(axes, form, ratio)}
    boxes = []
    for number, (part, width) in enumerate(form.parts):
        if outer.get("kv", number) != number:
            continue
        inside = dict(single)
        _, kv_stride = inside.pop("kv", (1, 0))
        offset = number * kv_stride
        if "kv*dim" in inside:
            _, stride = inside.pop("kv*dim")
            offset = sum(each for _, each in form.parts[:number]) * stride
            inside["dim"] = (width, stride)
        _, kernel_stride = inside.pop("block")
        for axis in form.axis_sizes:
            if "kv" not in axis:  # outside the page, or left out by the layout
                inside.setdefault(axis, (1, 0))
        if part == "latent" and inside["head"][0] == 1:
            inside.pop("head")  # one latent serves all heads
        digits = [Digit(name, size, stride) for name, (size, stride) in inside.items()]
        if ratio > 1:
            tokens, _ = inside["token"]
            digits.insert(0, Digit("token", ratio, kernel_stride, tokens))
        boxes.append(
            PageBox(
                layer_name=layer_name,
                part=part,
                dtype=form.dtype,
                digits=tuple(digits),
                offset_bytes=offset,
                first=(("head", outer["head"]),) if "head" in outer else (),
                encoding=form.encoding,
            )
        )
    return boxes


def _single_axes(axes: Axes, form: CacheTensorForm, ratio: int) -> Iterator[tuple[str, int, int]]:
    """Split merged axes into single ones, except `kv*dim` of keys and values of unequal width."""
    known = form.axis_sizes
    for axis, size, stride in axes:
        if axis in known or "*" not in axis:
            yield axis, size, stride
            continue
        factors = axis.split("*")
        counts = [known[each] // (ratio if each == "token" else 1) for each in factors]
        yield from zip(factors, counts, dense_strides(counts, stride), strict=True)
