"""KV-cache tensors as engines register them, built from the order of their axes in memory."""

from math import prod

import torch


def engine_view(
    physical: str,
    logical: str,
    sizes: dict[str, int],
    *,
    dtype: torch.dtype = torch.float16,
    offset: int = 0,
    block_stride: int | None = None,
) -> torch.Tensor:
    """A tensor whose shape has the axes of `logical` and whose memory has those of `physical`.

    Args:
        physical: Axes, outermost first in memory.
        logical: The same axes in the order of the shape.
        sizes: Size of each axis; `a*b` is the product unless it is given.
        dtype: Type of the elements.
        offset: Elements of the storage before the tensor.
        block_stride: Elements from block to block, when there is more between them than a page.
    """
    axes = physical.split()
    lengths = [
        sizes.get(axis) or prod(sizes[factor] for factor in axis.split("*")) for axis in axes
    ]
    strides = [0] * len(axes)
    dense = 1
    for index in reversed(range(len(axes))):
        strides[index] = (block_stride or dense) if axes[index] == "block" else dense
        dense = strides[index] * lengths[index]
    storage = torch.zeros(offset + dense, dtype=dtype)
    view = storage.as_strided(lengths, strides, offset)
    return view.permute([axes.index(axis) for axis in logical.split()])
