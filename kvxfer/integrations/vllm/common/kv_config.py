"""Conversion of vLLM's KV-cache configs and specs to kvxfer's."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from kvxfer.engine_side import NULL_BLOCK_ID
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)


def convert_config(config: Any, kv_caches: Mapping[str, Any]) -> KVCacheConfig:
    """Convert a `vllm.v1.kv_cache_interface.KVCacheConfig` of a release from 0.20 on.

    From 0.27 on, the states of a recurrent layer are registered as one tensor of bytes.

    Raises:
        InvalidArgumentError: kvxfer has no spec for a layer's cache.
    """
    return KVCacheConfig(
        num_blocks=config.num_blocks,
        groups=tuple(
            KVCacheGroup(
                convert_spec(group.kv_cache_spec, kv_caches.get(group.layer_names[0])),
                tuple(group.layer_names),
            )
            for group in config.kv_cache_groups
        ),
        # From 0.29 on a tensor lists its layers, but not the tensors that they share.
        shared_tensors=tuple(
            tuple(tensor.shared_by)
            for tensor in config.kv_cache_tensors
            if getattr(tensor, "shared_by", ())
        ),
        null_block_id=NULL_BLOCK_ID,
    )


def convert_spec(spec: Any, entry: Any = None) -> KVCacheSpec:
    """Convert the spec of a layer with these tensors, or of a whole group, and check its size.

    Raises:
        InvalidArgumentError: kvxfer has no spec for it: a page has other bytes than keys and
            values of this type would have, as packed or scaled ones do.
    """
    families = [base.__name__ for base in type(spec).__mro__]
    family = next((name for name in families if name in _FAMILIES), None)
    if family is None:
        raise InvalidArgumentError("kv_cache_spec", spec, f"one of {', '.join(_FAMILIES)}")
    if family in _FIELDS:
        ours, fields = _FIELDS[family]
        values: dict[str, Any] = {
            name: getattr(spec, theirs, None) if theirs in _OPTIONAL else getattr(spec, theirs)
            for name, theirs in fields.items()
        }
        converted = ours(**values)
    elif family == "MambaSpec":
        converted = _recurrent(spec, entry)
    else:
        layers = {name: convert_spec(each, entry) for name, each in spec.kv_cache_specs.items()}
        converted = UniformTypeKVCacheSpecs(tokens_per_block=spec.block_size, layer_specs=layers)
    if converted.page_size_bytes != spec.page_size_bytes:
        rule = f"{spec.page_size_bytes} bytes in a page, not {converted.page_size_bytes}"
        raise InvalidArgumentError("kv_cache_spec", spec, rule)
    return converted


def _recurrent(spec: Any, entry: Any) -> KVCacheSpec:
    whole = MambaSpec(
        tokens_per_block=spec.block_size,
        shapes=tuple(spec.shapes),
        dtypes=tuple(spec.dtypes),
        page_size_padded=spec.page_size_padded,
    )
    if not isinstance(entry, torch.Tensor):
        return whole
    return replace(whole, shapes=((whole.unpadded_page_size_bytes,),), dtypes=(torch.int8,))


_ATTENTION = {
    "tokens_per_block": "block_size",
    "num_kv_heads": "num_kv_heads",
    "head_dim": "head_size",
    "dtype": "dtype",
    "page_size_padded": "page_size_padded",
}
_VALUES = {"head_dim_v": "head_size_v"}
_WINDOW = {"sliding_window": "sliding_window"}
_CHUNK = {"attention_chunk_tokens": "attention_chunk_size"}
_OPTIONAL = frozenset({"page_size_padded", "head_size_v"})
"""Fields that some releases do not have."""
_FIELDS: Mapping[str, tuple[type[KVCacheSpec], Mapping[str, str]]] = {
    "SlidingWindowMLASpec": (SlidingWindowMLASpec, _ATTENTION | _WINDOW),
    "MLAAttentionSpec": (MLASpec, _ATTENTION),
    "SlidingWindowSpec": (SlidingWindowSpec, _ATTENTION | _VALUES | _WINDOW),
    "ChunkedLocalAttentionSpec": (ChunkedLocalAttentionSpec, _ATTENTION | _VALUES | _CHUNK),
    "CrossAttentionSpec": (CrossAttentionSpec, _ATTENTION | _VALUES),
    "FullAttentionSpec": (FullAttentionSpec, _ATTENTION | _VALUES | _WINDOW | _CHUNK),
}
"""Our class for a class of vLLM, by its name, and vLLM's names of our fields."""
_FAMILIES = ("UniformTypeKVCacheSpecs", "MambaSpec", *_FIELDS)
