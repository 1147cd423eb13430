"""Engines of the layout zoo: the tensors that they would register, each element its own number."""

from collections.abc import Mapping
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

TOKENS, KERNEL = 8, 2
ATTENTION = {"layer": 3, "block": 5, "kv": 2, "token": TOKENS, "head": 7, "dim": 6}
LATENTS = ATTENTION | {"kv": 1, "head": 1}
NAMES = tuple(f"layers.{index}" for index in range(ATTENTION["layer"]))
ZOO = [entry for entry in LAYOUT_ZOO if entry.content != "states"]


def sizes_of(entry: EngineLayout) -> dict[str, int]:
    sizes = ATTENTION if entry.content == "keys and values" else LATENTS
    if "kernel" not in entry.order:
        return dict(sizes)
    return sizes | {"kernel": KERNEL, "token": TOKENS // KERNEL}


def config_of(entry: EngineLayout) -> KVCacheConfig:
    sizes = sizes_of(entry)
    common: dict[str, Any] = {
        "tokens_per_block": TOKENS,
        "head_dim": sizes["dim"],
        "dtype": torch.int32,
    }
    spec: AttentionSpec = MLASpec(**common)
    if entry.content == "keys and values":
        spec = FullAttentionSpec(**common, num_kv_heads=sizes["head"])
    return KVCacheConfig(sizes["block"], (KVCacheGroup(spec, NAMES),))


def make_tensors(entry: EngineLayout) -> dict[tuple[int, ...], torch.Tensor]:
    """Every registered tensor, by its index along the axes that are not in its shape.

    Each element is a number of its own, written through the registered tensor.
    """
    sizes = sizes_of(entry)
    memory = [factor for axis in entry.memory.split() for factor in axis.split("*")]
    shape = [factor for axis in entry.shape.split() for factor in axis.split("*")]
    dims = [prod(sizes[f] for f in axis.split("*")) for axis in entry.shape.split()]
    tensors = {}
    for at in product(*(range(sizes[axis]) for axis in entry.allocations.split())):
        storage = torch.zeros([sizes[axis] for axis in memory], dtype=torch.int32)
        steps = [axis for axis in memory if axis not in shape]
        for step in product(*(range(sizes[axis]) for axis in steps)):
            view = storage
            for axis, index in zip(steps, step, strict=True):
                view = view.select(0 if axis == memory[0] else memory.index(axis), index)
            rest = [axis for axis in memory if axis not in steps]
            view = view.permute([rest.index(axis) for axis in shape]).view(dims)
            outside = dict(zip((*entry.allocations.split(), *steps), (*at, *step), strict=True))
            view.copy_(torch.from_numpy(numbers(sizes, shape, outside)).view(dims))
            tensors[(*at, *step)] = view
    return tensors


def numbers(sizes: Mapping[str, int], axes: list[str], at: Mapping[str, int]) -> NDArray[np.int32]:
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


def register(entry: EngineLayout) -> dict[str, Any]:
    """The tensors under the names of their layers, or one tensor of all layers."""
    tensors = make_tensors(entry)
    if "layer" in entry.shape.split():
        return {"all layers": tensors[()]}
    by_layer: dict[str, Any] = {}
    for index, tensor in tensors.items():
        by_layer.setdefault(NAMES[index[0]], []).append(tensor)
    return {name: each[0] if len(each) == 1 else tuple(each) for name, each in by_layer.items()}
