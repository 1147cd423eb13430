"""Engines of the layout zoo: the tensors that they would register."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch

from kvxfer.engine_side import LAYOUT_ZOO, EngineLayout
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.spec import AttentionSpec, FullAttentionSpec, KVCacheSpec, MLASpec

ZOO = [entry for entry in LAYOUT_ZOO if entry.content != "states"]

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integer types by their size in bytes."""


@dataclass(frozen=True, slots=True)
class ZooGroup:
    """KV-cache group of an engine of the zoo; layers at one position of a block share memory."""

    spec: KVCacheSpec
    positions: tuple[int, ...]
    names: tuple[str, ...]


def plan_groups(groups: Sequence[ZooGroup], num_blocks: int) -> KVCacheConfig:
    shared: list[list[str]] = [[] for _ in range(1 + max(p for g in groups for p in g.positions))]
    for group in groups:
        for name, position in zip(group.names, group.positions, strict=True):
            shared[position].append(name)
    planned = [KVCacheGroup(group.spec, group.names) for group in groups]
    return KVCacheConfig(num_blocks, tuple(planned), tuple(map(tuple, shared)))


class AttentionEngine:
    """Engine that keeps keys and values, or latents, with zeros in its cache."""

    def __init__(
        self,
        entry: EngineLayout,
        groups: Sequence[ZooGroup] = (),
        *,
        num_blocks: int = 5,
        kernel_blocks_per_block: int = 2,
    ) -> None:
        self.entry, self.groups = entry, tuple(groups) or (_default_group(entry),)
        self.config = plan_groups(self.groups, num_blocks)
        spec = self.groups[0].spec
        (form,) = spec.cache_tensors
        self.dtype, self._page_size_bytes = form.dtype, spec.page_size_bytes
        self.sizes = {"kv": 1, "kernel": 1, **form.axis_sizes}
        self.sizes |= {"block": num_blocks, "layer": len(self.config.shared_tensors)}
        if "kv*dim" in self.sizes:  # of another width each: one after the other, as one key
            self.sizes["dim"] = self.sizes.pop("kv*dim")
        if "kernel" in entry.order:
            self.sizes["kernel"] = kernel_blocks_per_block
            self.sizes["token"] //= kernel_blocks_per_block
        self.memory, self.shape = factors(entry.memory), factors(entry.shape)
        self.steps = [axis for axis in self.memory if axis not in self.shape]
        self.strides, num_elements = self._strides()
        self.tensors = self._make_tensors(num_elements)
        self.kv_caches = self._registered()
        self.layouts = dict.fromkeys(self.kv_caches, entry.layout)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.entry.order}, {self.config})"

    @property
    def positions(self) -> dict[str, int]:
        return {n: i for i, names in enumerate(self.config.shared_tensors) for n in names}

    def _strides(self) -> tuple[dict[str, int], int]:
        """Compute the strides of an allocation's axes, and all its elements, padding included."""
        block = next(axis for axis in self.entry.memory.split() if axis.startswith("block"))
        *_, step = factors(block)
        num_steps = prod(self.sizes[axis] for axis in factors(block)[1:])
        outside = self.entry.order[: self.entry.order.index("block")]
        num_parts = num_steps * prod(self.sizes[axis] for axis in outside if axis != "layer")
        page = self._page_size_bytes // self.dtype.itemsize // num_parts
        inside = self.memory[self.memory.index(step) + 1 :]
        strides, dense = {}, 1
        for axis in reversed(self.memory):
            if axis == step:
                dense = page * (self.sizes["layer"] if "layer" in inside else 1)
            elif axis == "layer" and axis in inside and self._is_next_to_blocks(inside):
                dense = page
            strides[axis] = dense
            dense *= self.sizes[axis]
        return strides, dense

    def _is_next_to_blocks(self, inside: Sequence[str]) -> bool:
        """Whether no axis is between blocks and layers, so that padding is between layers."""
        return prod(self.sizes[axis] for axis in inside[: inside.index("layer")]) == 1

    def _make_tensors(self, num_elements: int) -> dict[tuple[int, ...], torch.Tensor]:
        # Engines register 8-bit floats as plain bytes.
        dtype = torch.uint8 if self.dtype.itemsize == 1 else self.dtype
        tensors = {}
        for at in self._indices(self.entry.allocations.split()):
            storage = torch.zeros(num_elements, dtype=dtype).as_strided(
                [self.sizes[axis] for axis in self.memory],
                [self.strides[axis] for axis in self.memory],
            )
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
        at_position: dict[int, list[torch.Tensor]] = {}
        for index, tensor in self.tensors.items():
            at_position.setdefault(index[0], []).append(tensor)
        entries = {p: each[0] if len(each) == 1 else each for p, each in at_position.items()}
        return {name: entries[position] for name, position in self.positions.items()}

    def layer_view(self, layer_name: str) -> torch.Tensor:
        if "layer" not in self.shape:
            view: torch.Tensor = self.kv_caches[layer_name]
            return view
        whole = self.tensors[()]
        return whole.select(self.entry.shape.split().index("layer"), self.positions[layer_name])


def with_kernel_blocks(entry: EngineLayout) -> EngineLayout:
    """Make the same engine with kernel blocks, where it has a block to itself."""
    if "block" not in entry.shape.split():
        return entry
    cut = {"block": "block*kernel"}
    return replace(
        entry,
        shape=" ".join(cut.get(axis, axis) for axis in entry.shape.split()),
        memory=" ".join(cut.get(axis, axis) for axis in entry.memory.split()),
    )


def _default_group(entry: EngineLayout) -> ZooGroup:
    """No two axes look alike; a block has eight tokens where its kernel blocks have four."""
    common: dict[str, Any] = {"tokens_per_block": 8, "head_dim": 6, "dtype": torch.int32}
    spec: AttentionSpec = MLASpec(**common)
    if entry.content == "keys and values":
        spec = FullAttentionSpec(**common, num_kv_heads=7)
    return ZooGroup(spec, (0, 1, 2), ("a", "b", "c"))


def factors(axes: str) -> list[str]:
    return axes.replace("*", " ").split()


def named(entry: EngineLayout) -> str:
    return f"{entry.engine}, {entry.name}"
