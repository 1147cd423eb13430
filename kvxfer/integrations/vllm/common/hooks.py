"""Connector hooks: a mix-in that turns every hook for KV caches in vLLM's releases into one."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvxfer.engine_side import NULL_BLOCK_ID
from kvxfer.integrations.vllm.common.kv_config import convert_config
from kvxfer.integrations.vllm.common.layouts import cross_layer_layout, layer_cache
from kvxfer.kvcache.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    canonicalize,
)

CROSS_LAYER = "every layer"
"""Name under which the one tensor of all layers is registered; any name would do."""


class KVCacheHooks(ABC):
    """Mix-in for connectors: turns every hook that passes KV caches into `use_kv_caches`.

    To be mixed into a connector, in front of vLLM's base class:

        class MyConnector(KVCacheHooks, KVConnectorBase_V1): ...

    A release calls one of the hooks, once: `register_kv_caches` with a tensor per layer, or
    `register_cross_layers_kv_cache` (up to 0.28) with one tensor of all layers, which it allocates
    where the model and its attention backend allow it. Nothing is imported from vLLM; releases from
    0.20 on are told apart by the attributes of their objects.

    Implementors must define `use_kv_caches`.
    """

    _vllm_config: Any
    """A `vllm.config.VllmConfig`; vLLM's base class keeps it under this name."""
    _kv_cache_config: Any
    """A `vllm.v1.kv_cache_interface.KVCacheConfig`, likewise."""

    @abstractmethod
    def use_kv_caches(self, caches: CanonicalKVCaches) -> None:
        """Use this worker's KV caches, whose memory vLLM owns and keeps as long as the worker."""

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Whether vLLM should allocate one tensor of all layers: yes, its blocks are contiguous."""
        return True

    def register_kv_caches(
        self, kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]
    ) -> None:
        """Take one entry per layer; entries that belong to no group, such as encoders', are left.

        Raises:
            InvalidArgumentError: kvxfer has no spec for a layer's cache.
            LayoutError: A tensor is not laid out as vLLM says, see `canonicalize`.
        """
        config = convert_config(self._kv_cache_config, kv_caches)
        layers = {
            name: layer_cache(name, kv_caches[name], config, self._vllm_config)
            for name in config.layer_names
        }
        layouts = {name: each.layout for name, each in layers.items() if each.layout}
        entries = {name: each.entry for name, each in layers.items()}
        self.use_kv_caches(canonicalize(entries, config, layouts=layouts))

    def register_cross_layers_kv_cache(
        self, kv_cache: torch.Tensor, attn_backend: type[Any]
    ) -> None:
        """Take one tensor of all layers.

        Raises:
            InvalidArgumentError: kvxfer has no spec for a layer's cache, or the attention backend
                does not tell the layout of such a tensor.
            LayoutError: The tensor is not laid out as the backend says, see `canonicalize`.
        """
        config = convert_config(self._kv_cache_config, {})
        layouts = {CROSS_LAYER: cross_layer_layout(attn_backend)}
        self.use_kv_caches(canonicalize({CROSS_LAYER: kv_cache}, config, layouts=layouts))


def convert_caches(caches: Any) -> CanonicalKVCaches:
    """Convert canonical caches that vLLM made; zero-copy."""
    return CanonicalKVCaches(
        tensors=[
            CanonicalKVCacheTensor(tensor.tensor, tensor.page_size_bytes)
            for tensor in caches.tensors
        ],
        group_data_refs=[
            [CanonicalKVCacheRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
            for refs in caches.group_data_refs
        ],
        null_block_id=NULL_BLOCK_ID,
    )
