"""Cache tensors: the shapes and layouts that an engine's tensor of one layer may have."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

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
        dtype: Type of the elements.
        axis_sizes: Elements along each named axis of one page, without the block axis. K and V of
            unequal width share one axis, named `kv*dim`.
        layouts: Axis strings that engines are known to use, see `KVLayout`.
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
