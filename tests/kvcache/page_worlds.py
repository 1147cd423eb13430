"""Worlds: keys, values and states that a model keeps of some tokens, and their portable pages."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.kvcache.spec import AttentionSpec, FullAttentionSpec, MambaSpec, MLASpec
from tests.kvcache.zoo_engines import INTEGERS

Values = NDArray[Any]
FIRST_LAYER = 9  # so that layers 9 and 10 are not in the order of their letters


class World:
    """World: keys and values, or latents, of every layer, head and token of a model.

    Args:
        positions: For each group the position of each of its layers in a block.
        num_heads: KV heads of the whole model; 1 beside latents.
        num_tokens: Tokens.
        options: More fields of the specs: `dtype`, `head_dim`, `head_dim_v`, `quantization`.
        latents: Whether there is one latent per token.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        positions: Sequence[tuple[int, ...]],
        num_heads: int,
        num_tokens: int,
        options: dict[str, Any],
        latents: bool = False,
    ) -> None:
        self.positions, self.num_tokens, self.latents = tuple(positions), num_tokens, latents
        self.num_heads, self._options = num_heads, options
        spec = self.spec(num_tokens, num_heads)
        (form,) = spec.cache_tensors
        self.parts, self.dtype = form.parts, integers(form.dtype)
        limits, width = np.iinfo(self.dtype), sum(width for _, width in form.parts)
        self.values = [
            rng.integers(
                limits.min,
                limits.max,
                (len(layers), width, num_heads, num_tokens),
                self.dtype,
                endpoint=True,
            )
            for layers in positions
        ]

    def spec(
        self, tokens_per_block: int, num_kv_heads: int, *, padding_factor: int = 0
    ) -> AttentionSpec:
        """Make the spec of every layer of a worker with `num_kv_heads`.

        Args:
            tokens_per_block: Tokens in a block of the worker.
            num_kv_heads: KV heads of the worker.
            padding_factor: Elements of padding for each K or V, head and token.
        """
        spec: AttentionSpec = (
            MLASpec(tokens_per_block=tokens_per_block, **self._options)
            if self.latents
            else FullAttentionSpec(
                tokens_per_block=tokens_per_block, num_kv_heads=num_kv_heads, **self._options
            )
        )
        if not padding_factor:
            return spec
        padding = padding_factor * 2 * num_kv_heads * tokens_per_block * spec.dtype.itemsize
        return replace(spec, page_size_padded=spec.page_size_bytes + padding)

    def layer_number(self, group: int, layer: int) -> int:
        """Compute the number in a layer's name: groups take turns."""
        return FIRST_LAYER + layer * len(self.positions) + group

    def layer_names(self, group: int, prefix: str) -> tuple[str, ...]:
        """Name the layers of a group as an engine does."""
        count = len(self.positions[group])
        return tuple(f"{prefix}.{self.layer_number(group, n)}.attn" for n in range(count))

    def tensors(self, group: int) -> dict[str, Values]:
        """Make the tensors of a group's portable pages, by their names, in their order there.

        They are integers, `(head, token, dim)`, or `(token, dim)` of latents, of all tokens.
        """
        found = {}
        for layer, values in enumerate(self.values[group]):
            start = 0
            for part, width in self.parts:
                tensor = values[start : start + width].transpose(1, 2, 0)
                name = f"layers.{self.layer_number(group, layer)}.{part}"
                found[name] = tensor[0] if self.latents else tensor
                start += width
        return found

    def pages(self, group: int, tokens_per_page: int, num_shards: int = 1) -> NDArray[np.uint8]:
        """Compute all portable pages, uint8, `(num_pages, page_size_bytes)`, by plain indexing."""
        pages = []
        for start in range(0, self.num_tokens, tokens_per_page):
            tokens, page = slice(start, start + tokens_per_page), b""
            for shard in range(num_shards):
                for values in self.tensors(group).values():
                    if not self.latents:
                        share = self.num_heads // num_shards
                        heads = slice(shard * share, (shard + 1) * share)
                        page += values[heads, tokens].tobytes()
                    elif shard == 0:
                        page += values[tokens].tobytes()
            pages.append(np.frombuffer(page, np.uint8))
        return np.stack(pages)


class StateWorld:
    """World of recurrent layers: every block holds states, of any number of tokens.

    Args:
        shapes: Shape of each state, in the whole model.
        dtypes: Type of each state.
        head_axes: Axis along which workers divide each state.
        num_layers: Layers.
        num_blocks: Blocks that hold states.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
        head_axes: Sequence[int],
        num_layers: int,
        num_blocks: int,
    ) -> None:
        self.shapes, self.dtypes, self.head_axes = shapes, dtypes, head_axes
        self.values = [
            [
                rng.integers(-100, 100, (num_blocks, *shape)).astype(integers(dtype))
                for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
            for _ in range(num_layers)
        ]
        self.num_blocks = num_blocks

    def spec(self, tp_size: int, *, padding_bytes: int = 0) -> MambaSpec:
        """Make the spec of every layer of one of `tp_size` workers."""
        shapes = tuple(
            tuple(n // tp_size if axis == head else n for axis, n in enumerate(shape))
            for shape, head in zip(self.shapes, self.head_axes, strict=True)
        )
        spec = MambaSpec(tokens_per_block=8, shapes=shapes, dtypes=tuple(self.dtypes))
        return replace(spec, page_size_padded=spec.page_size_bytes + padding_bytes)

    def pages(self) -> NDArray[np.uint8]:
        """Compute all portable pages, uint8, `(num_blocks, page_size_bytes)`, by plain indexing."""
        return np.stack(
            [
                np.frombuffer(
                    b"".join(
                        np.moveaxis(state[block], head, 0).tobytes()
                        for states in self.values
                        for state, head in zip(states, self.head_axes, strict=True)
                    ),
                    np.uint8,
                )
                for block in range(self.num_blocks)
            ]
        )


def integers(dtype: torch.dtype) -> np.dtype[Any]:
    """Find the type of integers with as many bytes."""
    name = str(INTEGERS[dtype.itemsize]).removeprefix("torch.")
    return np.dtype(name)
