"""Pool of pages: the memory that pages pass through between a model's cache and a backend."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod

import torch

from kvxfer.errors import InvalidArgumentError, PageMappingError
from kvxfer.integrations.transformers.interface import Past
from kvxfer.integrations.transformers.model_layers import LayerShape
from kvxfer.kvcache.canonical import canonicalize
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.memory_region import HOST
from kvxfer.kvcache.portable import PageMapping, WorkerShard, map_caches
from kvxfer.kvcache.spec import FullAttentionSpec, KVCacheSpec, UniformTypeKVCacheSpecs

USUAL_AXES = ("head", "token", "dim")

Axes = Mapping[str, tuple[str, ...]]
KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class PagePool:
    """Pool of pages in host memory, pinned for a GPU; late transfers touch no other memory.

    A page has the keys and values of `tokens_per_page` tokens of every layer. There are at least
    `least` pages. `axes` are those of keys, `k`, and of values, `v`; by default `USUAL_AXES`.

    Attributes:
        caches: The pool as KV caches, a block for each page.
        mappings: Mapping to portable pages; empty if layers have different numbers of heads.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        tokens_per_page: int,
        num_bytes: int,
        axes: Axes,
        least: int,
    ) -> None:
        self._layers, self._tokens = layers, tokens_per_page
        orders = {part: axes.get(part, USUAL_AXES) for part in ("k", "v")}
        specs = [
            FullAttentionSpec(
                tokens_per_block=tokens_per_page,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                head_dim_v=layer.head_dim_v,
                dtype=layer.dtype,
            )
            for layer in layers
        ]
        page_bytes = sum(spec.page_size_bytes for spec in specs)
        self.num_pages = max(least, num_bytes // page_bytes)
        pinned = any(layer.device.type == "cuda" for layer in layers)
        try:
            size = self.num_pages, page_bytes
            rows = torch.empty(size, dtype=torch.uint8, device=HOST, pin_memory=pinned)
        except RuntimeError as exc:
            found = f"{self.num_pages} pages of {page_bytes:,} bytes"
            raise InvalidArgumentError("pool_bytes", found, "memory that is available") from exc
        self._views: list[KeysAndValues] = []
        start = 0
        for layer in layers:
            views = []
            for part, width in (("k", layer.head_dim), ("v", layer.head_dim_v)):
                of_axis = {"head": layer.num_kv_heads, "token": tokens_per_page, "dim": width}
                stop = start + prod(of_axis.values()) * layer.dtype.itemsize
                shape = [of_axis[axis] for axis in orders[part]]
                view = rows[:, start:stop].view(layer.dtype).view(self.num_pages, *shape)
                views.append(view.permute(0, *(1 + orders[part].index(a) for a in USUAL_AXES)))
                start = stop
            self._views.append((views[0], views[1]))
        names = tuple(f"layers.{at}" for at in range(len(layers)))
        layouts = [" ".join(("block", *orders[part])) for part in ("k", "v")]
        whole: KVCacheSpec = specs[0]
        if any(spec != whole for spec in specs):
            of_layers = dict(zip(names, specs, strict=True))
            whole = UniformTypeKVCacheSpecs(tokens_per_block=tokens_per_page, layer_specs=of_layers)
        config = KVCacheConfig(self.num_pages, (KVCacheGroup(whole, names),))
        entries = dict(zip(names, self._views, strict=True))
        self.caches = canonicalize(entries, config, layouts=dict.fromkeys(names, layouts))
        self.mappings: tuple[PageMapping, ...] = ()
        shard = WorkerShard(num_kv_heads=layers[0].num_kv_heads)
        with suppress(PageMappingError):
            self.mappings = map_caches(self.caches, shard, axes=axes)

    def take_in(self, past: Past, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy pages of a model's cache, counted from its first token, to slots of the pool."""
        layers = [(layer.keys, layer.values) for layer in past.layers]
        with torch.inference_mode():  # no gradients, whatever mode the pool was created in
            for ours, theirs in self._pairs(layers, pages, slots):
                ours.copy_(theirs)

    def make_room(self, num_pages: int) -> list[KeysAndValues]:
        """Allocate keys and values of each layer, on its device."""
        num_tokens = num_pages * self._tokens

        def make(layer: LayerShape, width: int) -> torch.Tensor:
            shape = (1, layer.num_kv_heads, num_tokens, width)
            return torch.empty(shape, dtype=layer.dtype, device=layer.device)

        return [
            (make(layer, layer.head_dim), make(layer, layer.head_dim_v)) for layer in self._layers
        ]

    def give_out(
        self, room: Sequence[KeysAndValues], pages: Sequence[int], slots: Sequence[int]
    ) -> None:
        """Copy pages of the pool to the keys and values of each layer."""
        for ours, theirs in self._pairs(room, pages, slots):
            theirs.copy_(ours)

    def _pairs(
        self, layers: Sequence[KeysAndValues], pages: Sequence[int], slots: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pair the memory of pages in the pool with that in the keys and values of each layer."""
        for views, tensors in zip(self._views, layers, strict=True):
            for view, tensor in zip(views, tensors, strict=True):
                for page, slot in zip(pages, slots, strict=True):
                    yield view[slot], tensor[0, :, page * self._tokens : (page + 1) * self._tokens]
