"""Portable pages: a block of the whole model in one fixed order, the same for all workers."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

import torch

from kvxfer.errors import InvalidArgumentError, PageMappingError
from kvxfer.kvcache.page_box import PageBox
from kvxfer.kvcache.portable.worker_shard import WorkerShard

_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableTensor:
    """Tensor of a portable page, contiguous and row-major; axes are outermost first.

    Attributes:
        name: Name of the tensor, e.g. `layers.3.k`.
        first: Index of the first element along each axis; in a shard, not always zero.
        encoding: See `PageBox`.
    """

    name: str
    dtype: torch.dtype
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    first: tuple[int, ...]
    encoding: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PortablePage:
    """Portable page: a block's tokens for all heads and layers, in shards with their own keys."""

    shards: tuple[tuple[PortableTensor, ...], ...]

    @property
    def tensors(self) -> tuple[PortableTensor, ...]:
        """The tensors of all shards."""
        return tuple(tensor for shard in self.shards for tensor in shard)

    @property
    def num_bytes(self) -> int:
        """Bytes of the page."""
        return sum(self.shard_sizes)

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """Bytes of each shard."""
        return tuple(sum(tensor.num_bytes for tensor in shard) for shard in self.shards)

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the page; None if it has only states."""
        counts = {t.shape[t.axes.index("token")] for t in self.tensors if "token" in t.axes}
        if len(counts) > 1:
            raise PageMappingError("token", sorted(counts), "one number of tokens")
        return next(iter(counts), None)


def portable_page(
    boxes: Sequence[PageBox],
    shard: WorkerShard,
    *,
    num_tokens: int,
    num_shards: int = 1,
    axes: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> PortablePage:
    """Derive the portable page of the whole model from the boxes of one worker.

    Tensors are in natural order of their names. In every tensor, the heads are outermost, so that
    the heads of any worker are one contiguous piece; then, by default, the tokens and inner axes.

    Args:
        boxes: Boxes of one block, with their indices in the whole model.
        shard: The worker.
        num_tokens: Tokens of a portable page.
        num_shards: See `map_caches`; tensors without heads are in the first shard.
        axes: Order of the axes of some parts, if all engines agree on an unusual one, e.g.
            `{"k": ("head", "dim", "token")}`.
    """
    parts: dict[str, list[PageBox]] = {}
    for name, box in zip(tensor_names(boxes), boxes, strict=True):
        parts.setdefault(name, []).append(box)
    shards: dict[int, list[PortableTensor]] = {}
    for name in sorted(parts, key=natural_order):
        same, box = parts[name], parts[name][0]
        sizes = {axis: max(b.first_index(axis) + b.extent(axis) for b in same) for axis in box.axes}
        sizes |= {"head": shard.total_heads(same), "token": num_tokens}
        usual = sorted(box.axes, key=lambda axis: (axis != "head", axis != "token", axis))
        order = tuple(axes.get(box.part) or usual)
        if sorted(order) != sorted(box.axes) or "head" in order[1:]:
            expected = f"the axes {box.axes}, heads first"
            raise InvalidArgumentError(f"axes of {box.part!r}", order, expected)
        tensor = PortableTensor(
            name=name,
            dtype=box.dtype,
            axes=order,
            shape=tuple(sizes[axis] for axis in order),
            first=(0,) * len(order),
            encoding=box.encoding,
        )
        for index, share in enumerate(_share_heads(tensor, num_shards)):
            shards.setdefault(index, []).append(share)
    return PortablePage(tuple(map(tuple, shards.values())))


def _share_heads(tensor: PortableTensor, num_shards: int) -> Iterator[PortableTensor]:
    if "head" not in tensor.axes:
        yield tensor
        return
    heads = tensor.shape[0]
    if heads % num_shards:
        rule = f"a divisor of {heads}, the heads of {tensor.name!r}"
        raise InvalidArgumentError("num_shards", num_shards, rule)
    share = heads // num_shards
    for start in range(0, heads, share):
        yield replace(tensor, shape=(share, *tensor.shape[1:]), first=(start, *tensor.first[1:]))


def tensor_names(boxes: Sequence[PageBox]) -> list[str]:
    """Name the tensors of boxes in the same way for all engines, e.g. `layers.3.k`.

    A layer is identified by the number in its name, or by the whole name if that has no number or
    several, or if another layer has the same number.
    """
    layers = dict.fromkeys(box.layer_name for box in boxes)
    numbers = {name: [int(found) for found in _NUMBER.findall(name)] for name in layers}
    count = Counter(found[0] for found in numbers.values() if len(found) == 1)
    called = {
        name: f"layers.{found[0]}" if len(found) == 1 and count[found[0]] == 1 else name
        for name, found in numbers.items()
    }
    return [f"{called[box.layer_name]}.{box.part}" for box in boxes]


def natural_order(name: str) -> tuple[list[str | int], str]:
    """Return a sort key that puts layer 9 before layer 10."""
    pieces = _NUMBER.split(name)
    return [int(piece) if index % 2 else piece for index, piece in enumerate(pieces)], name
