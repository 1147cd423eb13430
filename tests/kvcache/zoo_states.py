"""Engines of recurrent layers in the layout zoo: the states that they would register."""

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from kvxfer.engine_side import EngineLayout
from kvxfer.kvcache.spec import MambaSpec
from tests.kvcache.zoo_engines import INTEGERS, ZooEngine, ZooGroup


class StateEngine(ZooEngine):
    """Engine of recurrent layers."""

    def __init__(self, entry: EngineLayout, groups: Sequence[ZooGroup], *, num_blocks: int) -> None:
        super().__init__(entry, groups, num_blocks)
        self.spec = next(g.spec for g in groups if isinstance(g.spec, MambaSpec))
        self.layouts = {}
        states = zip(self.spec.shapes, self.spec.dtypes, strict=True)
        self._elements = [
            (state, index)
            for state, (shape, _) in enumerate(states)
            for index in range(prod(shape))
        ]
        self.num_elements = self.num_positions * num_blocks * len(self._elements)
        ends = np.cumsum([form.page_size_bytes for form in self.spec.cache_tensors]).tolist()
        self._offsets_bytes = [0, *ends[:-1]]
        apart = "state" in entry.allocations
        self._at_position = self._slots() if apart else self._pages()
        self.kv_caches = {n: self._at_position[p] for n, p in self.positions.items()}

    def _slots(self) -> list[list[torch.Tensor]]:
        """Make one allocation per state, for all layers."""
        shapes = zip(self.spec.shapes, self.spec.dtypes, strict=True)
        leading = (self.num_positions, self.config.num_blocks)
        states = [torch.zeros((*leading, *shape), dtype=dtype) for shape, dtype in shapes]
        return [[state[position] for state in states] for position in range(self.num_positions)]

    def _pages(self) -> list[list[torch.Tensor]]:
        """Make one allocation per layer, whose pages have the states side by side."""
        num_blocks, page = self.config.num_blocks, self.spec.page_size_bytes
        layers = []
        for _ in range(self.num_positions):
            raw, states = torch.zeros(num_blocks * page, dtype=torch.int8), []
            for index, offset in enumerate(self._offsets_bytes):
                shape, dtype = self.spec.shapes[index], self.spec.dtypes[index]
                strides = (page // dtype.itemsize, *torch.empty(shape).stride())
                start = offset // dtype.itemsize
                states.append(raw.view(dtype).as_strided((num_blocks, *shape), strides, start))
            layers.append(states)
        return layers

    def set_bits(self, element: int) -> None:
        """Set every bit of one element, through the registered tensor that has it."""
        position, block, state, index = self._at(element)
        tensor = self._at_position[position][state]
        tensor.view(INTEGERS[tensor.element_size()])[block].view(-1)[index].bitwise_not_()

    def block_of(self, element: int) -> int:
        """Find the block that an element is in."""
        return self._at(element)[1]

    def bytes_of(self, element: int, group: int) -> range:
        """Find the bytes of an element in the group's block: layer by layer, state by state."""
        position, _, state, index = self._at(element)
        used = self.groups[group].used_positions
        if position not in used:
            return range(0)
        item = self.spec.dtypes[state].itemsize
        page = used.index(position) * self.spec.unpadded_page_size_bytes
        start = page + self._offsets_bytes[state] + index * item
        return range(start, start + item)

    def _at(self, element: int) -> tuple[int, int, int, int]:
        """Compute position, block, state and index within the state."""
        row, inside = divmod(element, len(self._elements))
        position, block = divmod(row, self.config.num_blocks)
        return position, block, *self._elements[inside]
