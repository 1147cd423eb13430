"""Engine layouts: the arrangement of an engine's KV cache in memory, described by axes."""

from dataclasses import dataclass
from typing import Literal

from kvxfer.kvcache.allocation import AttentionLayout

Content = Literal["keys and values", "latents", "states"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """Layout of one engine's KV cache.

    Axes are named as in `KVLayout`. Here, `block` may be merged with the axis inside it, if the
    engine has both in one dimension: `block*token` are token slots, `block*kernel` kernel blocks.

    Attributes:
        engine: Name of the engine.
        releases: Releases of the engine, as text.
        name: Name of the layout among the engine's users.
        shape: Axes of one registered tensor, in the order of its shape. Axes of `memory` that are
            missing here are steps from one registered tensor to the next.
        memory: Axes of one allocation, outermost first.
        allocations: Axes whose every index is a separate allocation, outermost first.
        content: Content of a block.
        note: Further remarks.
    """

    engine: str
    releases: str
    name: str
    shape: str
    memory: str
    allocations: str = ""
    content: Content = "keys and values"
    note: str = ""

    @property
    def order(self) -> tuple[str, ...]:
        """Every single axis: those of allocations first, then outermost first in memory."""
        axes = (*self.allocations.split(), *self.memory.split())
        return tuple(factor for axis in axes for factor in axis.split("*"))

    @property
    def layout(self) -> str:
        """Layout of one registered tensor for `canonicalize`, as an axis string of `KVLayout`."""
        registered = {factor for axis in self.shape.split() for factor in axis.split("*")}
        axes = (axis for axis in self.memory.split() if registered.issuperset(axis.split("*")))
        return " ".join("block" if axis.startswith("block*") else axis for axis in axes)

    @property
    def attention_layout(self) -> AttentionLayout | None:
        """The attention backend that has this layout; None if it is not one tensor per layer.

        A backend whose layers have separate allocations takes no layer dimension.
        """
        axes, memory = self.shape.split(), self.memory.split()
        per_layer = [axis for axis in axes if axis != "layer"]
        in_memory = [axis for axis in memory if axis != "layer"]
        if self.content == "states" or sorted(per_layer) != sorted(in_memory):
            return None
        if "block" not in axes or "kv" in self.allocations:
            return None
        return AttentionLayout(" ".join(per_layer), self.memory if "layer" in memory else None)
