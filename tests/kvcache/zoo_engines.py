"""Engines of the layout zoo: the tensors that they would register."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.engine_layout import EngineLayout
from kvxfer.kvcache.layout_zoo import LAYOUT_ZOO
from kvxfer.kvcache.spec import AttentionSpec, FullAttentionSpec, MLASpec

ZOO = [entry for entry in LAYOUT_ZOO if entry.content != "states"]

SIZES = {"layer": 3, "block": 5, "kernel": 2, "token": 4, "head": 7, "dim": 6}
"""No two axes look alike; a block has eight tokens where its kernel blocks have four."""


class ZooEngine:
    """An engine with one group of layers, and zeros in its cache.

    Attributes:
        sizes: Size of every axis of the layout.
        names: The layers.
        config: The blocks, the group and its spec.
        tensors: Every registered tensor by its index along the axes that are not in its shape.
        kv_caches: What the engine registers: the tensors of each layer, or one of all layers.
        layouts: Its word for their layout.
    """

    def __init__(
        self,
        entry: EngineLayout,
        sizes: Mapping[str, int] = SIZES,
        dtype: torch.dtype = torch.int32,
    ) -> None:
        self.entry = entry
        tokens = sizes["token"] * sizes["kernel"]
        self.sizes = {**sizes, "kv": 2}
        if "kernel" not in entry.order:
            self.sizes |= {"kernel": 1, "token": tokens}
        if entry.content == "latents":
            self.sizes |= {"kv": 1, "head": 1}
        self.names = tuple(f"layers.{index}" for index in range(sizes["layer"]))
        common: dict[str, Any] = {
            "tokens_per_block": tokens,
            "head_dim": sizes["dim"],
            "dtype": dtype,
        }
        spec: AttentionSpec = MLASpec(**common)
        if entry.content == "keys and values":
            spec = FullAttentionSpec(**common, num_kv_heads=sizes["head"])
        self.config = KVCacheConfig(sizes["block"], (KVCacheGroup(spec, self.names),))
        self.memory = factors(entry.memory)
        self.shape = factors(entry.shape)
        self.steps = [axis for axis in self.memory if axis not in self.shape]
        # Engines register 8-bit floats as plain bytes.
        self.tensors = self._make_tensors(torch.uint8 if dtype.itemsize == 1 else dtype)
        self.kv_caches = self._registered()
        self.layouts = dict.fromkeys(self.kv_caches, entry.layout)

    def _make_tensors(self, dtype: torch.dtype) -> dict[tuple[int, ...], torch.Tensor]:
        tensors = {}
        for at in self._indices(self.entry.allocations.split()):
            storage = torch.zeros([self.sizes[axis] for axis in self.memory], dtype=dtype)
            for step in self._indices(self.steps):
                chosen = dict(zip(self.steps, step, strict=True))
                view = storage[tuple(chosen.get(axis, slice(None)) for axis in self.memory)]
                rest = [axis for axis in self.memory if axis in self.shape]
                view = view.permute([rest.index(axis) for axis in self.shape])
                dims = [prod(self.sizes[f] for f in factors(a)) for a in self.entry.shape.split()]
                tensors[(*at, *step)] = view.view(dims)
        return tensors

    def _indices(self, axes: Sequence[str]) -> Iterator[tuple[int, ...]]:
        return product(*(range(self.sizes[axis]) for axis in axes))

    def _registered(self) -> dict[str, Any]:
        if "layer" in self.shape:
            return {"all layers": self.tensors[()]}
        by_layer: dict[str, list[torch.Tensor]] = {}
        for index, tensor in self.tensors.items():
            by_layer.setdefault(self.names[index[0]], []).append(tensor)
        return {name: each[0] if len(each) == 1 else each for name, each in by_layer.items()}

    def number(self) -> None:
        """Write a number of its own into each element, through the registered tensors."""
        outside = (*self.entry.allocations.split(), *self.steps)
        for index, tensor in self.tensors.items():
            at = dict(zip(outside, index, strict=True))
            tensor.copy_(torch.from_numpy(numbers(self.sizes, self.shape, at)).view(tensor.shape))

    def set_bits(self, at: Mapping[str, int]) -> None:
        """Set every bit of one element, through the registered tensor that has it."""
        outside = (*self.entry.allocations.split(), *self.steps)
        tensor = self.tensors[tuple(at[axis] for axis in outside)]
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
        index = tuple(
            np.ravel_multi_index(
                [at[f] for f in factors(axis)], [self.sizes[f] for f in factors(axis)]
            )
            for axis in self.entry.shape.split()
        )
        tensor.view(integers)[index] = -1


def factors(axes: str) -> list[str]:
    """Every axis by itself."""
    return axes.replace("*", " ").split()


def numbers(
    sizes: Mapping[str, int], axes: Sequence[str], at: Mapping[str, int]
) -> NDArray[np.int32]:
    """A number for each element, which says where it belongs whatever the order of axes."""
    result = np.zeros([sizes[axis] for axis in axes], np.int32)
    for place, name in enumerate(("layer", "block", "kv", "kernel", "token", "head", "dim")):
        weight = 10**place
        if name in axes:
            steps = np.arange(sizes[name], dtype=np.int32) * weight
            result += steps.reshape([-1 if axis == name else 1 for axis in axes])
        else:
            result += np.int32(at.get(name, 0) * weight)
    return result
