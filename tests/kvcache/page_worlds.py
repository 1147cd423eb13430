"""Worlds: keys and values that a model keeps of some tokens, and their portable pages."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.kvcache.spec import AttentionSpec, FullAttentionSpec, MLASpec
from tests.kvcache.zoo_engines import INTEGERS

Values = NDArray[Any]
FIRST_LAYER = 9  # so that layers 9 and 10 are not in the order of their letters


class World:
    """World: keys and values, or latents, of every layer, head and token of a model."""

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
        """Make the spec of every layer of a worker with `num_kv_heads`."""
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


def integers(dtype: torch.dtype) -> np.dtype[Any]:
    """Find the type of integers with as many bytes."""
    name = str(INTEGERS[dtype.itemsize]).removeprefix("torch.")
    return np.dtype(name)
