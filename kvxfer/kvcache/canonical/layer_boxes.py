"""Page contents: the boxes of elements in the pages of a layer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvxfer.kvcache.cache_tensor import CacheTensorForm
from kvxfer.kvcache.canonical.registered import LayerPlace, RegisteredCache
from kvxfer.kvcache.page_box import Digit, PageBox

Axes = Iterable[tuple[str, int, int]]
"""Name, size and stride in elements of axes, merged ones such as `kv*dim` included."""


def read_contents(
    cache: RegisteredCache, index: int, outer: Mapping[str, int], places: Sequence[LayerPlace]
) -> tuple[PageBox, ...]:
    """Describe the pages that one tensor of a registered cache has at one place.

    Args:
        cache: The registered cache.
        index: Index of the tensor in the cache.
        outer: Index of the place along each axis outside of the block axis.
        places: Layers, of one group, whose data is at the place.

    Returns:
        Boxes for the layers in their order, keys before values; offsets count from the place.
    """
    reading, form = cache.readings[index], cache.forms[index]
    every = zip(reading.layout.axes, reading.sizes, reading.strides, strict=True)
    axes = list(every)[reading.block_axis :]
    steps = {axis: stride * cache.tensors[index].element_size() for axis, _, stride in axes}
    return tuple(
        box.moved(_position(cache, place) * steps["layer"] if "layer" in steps else 0)
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
    """Describe one layer's page.

    Args:
        layer_name: The layer.
        form: Form of the layer's tensor.
        axes: Axes inside of a page, and the block axis, whose stride is a kernel block's.
        kernel_blocks_per_block: Steps along the block axis that make up one block.
        outer: Index of the page along each axis outside of the block axis.

    Returns:
        Keys before values; offsets count from the start of the page.
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
            if "kv" not in axis:  # outside of the page, or left out by the layout
                inside.setdefault(axis, (1, 0))
        if part == "latent" and inside["head"][0] == 1:
            inside.pop("head")  # of all heads together
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
    """Yield every single axis, merged ones split, except keys and values of unequal width."""
    known = form.axis_sizes
    for axis, size, stride in axes:
        if axis in known or "*" not in axis:
            yield axis, size, stride
            continue
        inner, steps = stride, []
        for factor in reversed(axis.split("*")):
            count = known[factor] // (ratio if factor == "token" else 1)
            steps.append((factor, count, inner))
            inner *= count
        yield from reversed(steps)


def _position(cache: RegisteredCache, place: LayerPlace) -> int:
    """Find the step along the layer axis at which a layer's data lies."""
    return next(index for index, places in enumerate(cache.positions) if place in places)
