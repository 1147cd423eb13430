"""KV caches as vLLM registers and describes them: hooks, configs, specs and layouts."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvxfer.engine_side import NULL_BLOCK_ID
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    canonicalize,
)
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.spec import (
    AttentionSpec,
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

CROSS_LAYER = "every layer"
"""Name under which a single tensor of all layers is registered; any name would do."""
RegisteredEntry = torch.Tensor | Sequence[torch.Tensor]

AXES = {"B": "block", "H": "head", "N": "token"}
"""Axis of each letter in a layout's name, from 0.29 on; `C` is one token's elements per head."""
PROBE = {"num_blocks": 1009, "block_size": 16, "num_kv_heads": 7, "head_size": 64}
"""Sizes with which to ask an attention backend for its cache's shape: distinct valid numbers."""
AXIS_OF_SIZE = {1009: "block", 16: "token", 7: "head", 64: "dim", 128: "kv*dim", 2: "kv"}
CPU_BACKEND = "CPU_ATTN"


class KVCacheHooks(ABC):
    """Mix-in for connectors: turns every hook that passes KV caches into `use_kv_caches`.

    Mix it into a connector, in front of vLLM's base class:

        class MyConnector(KVCacheHooks, KVConnectorBase_V1): ...

    vLLM calls exactly one of the hooks, once: `register_kv_caches` with a tensor per layer, or
    `register_cross_layers_kv_cache` (up to 0.28) with one tensor of all layers, which it allocates
    if the model and its attention backend allow it. Nothing is imported from vLLM; releases from
    0.20 on are told apart by the attributes of their objects.

    Implementors must define `use_kv_caches`.
    """

    _vllm_config: Any
    """A `vllm.config.VllmConfig`; vLLM's base class keeps it under this name."""
    _kv_cache_config: Any
    """A `vllm.v1.kv_cache_interface.KVCacheConfig`, likewise."""

    @abstractmethod
    def use_kv_caches(self, caches: CanonicalKVCaches) -> None:
        """Use this worker's KV caches; vLLM owns and keeps their memory while the worker lives."""

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Whether vLLM should allocate one tensor of all layers: yes, its blocks are contiguous."""
        return True

    def register_kv_caches(self, kv_caches: Mapping[str, RegisteredEntry]) -> None:
        """Take one entry per layer; entries of no group, such as those of encoders, are ignored.

        Raises:
            InvalidArgumentError: kvxfer has no spec for a layer's cache.
            LayoutError: A tensor is not laid out as vLLM says, see `canonicalize`.
        """
        config = convert_config(self._kv_cache_config, kv_caches)
        caches = canonicalize_layers(kv_caches, config, self._vllm_config)
        self.use_kv_caches(_without_packed(caches, self._vllm_config))

    def register_cross_layers_kv_cache(
        self, kv_cache: torch.Tensor, attn_backend: type[Any]
    ) -> None:
        """Take one tensor of all layers.

        Raises:
            InvalidArgumentError: kvxfer has no spec for a layer's cache, or the attention backend
                does not state the layout of such a tensor.
            LayoutError: The tensor is not laid out as the backend says, see `canonicalize`.
        """
        config = convert_config(self._kv_cache_config, {})
        layout = _axes_of_backend(attn_backend, layers=True)
        if not layout:
            rule = "a backend that states how it lays out a tensor of all layers"
            raise InvalidArgumentError("attn_backend", attn_backend, rule)
        layouts = {CROSS_LAYER: layout}
        self.use_kv_caches(canonicalize({CROSS_LAYER: kv_cache}, config, layouts=layouts))


def convert_caches(caches: Any) -> CanonicalKVCaches:
    """Convert canonical caches that vLLM made; zero-copy."""
    return CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(t.tensor, t.page_size_bytes) for t in caches.tensors],
        group_data_refs=[
            [CanonicalKVCacheRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
            for refs in caches.group_data_refs
        ],
        null_block_id=NULL_BLOCK_ID,
    )


def convert_config(config: Any, kv_caches: Mapping[str, Any]) -> KVCacheConfig:
    """Convert a `vllm.v1.kv_cache_interface.KVCacheConfig` of a release from 0.20 on."""
    # From 0.29 on, a tensor lists the layers that are placed in it, not those that share bytes.
    shared = (getattr(tensor, "shared_by", ()) for tensor in config.kv_cache_tensors)
    return KVCacheConfig(
        num_blocks=config.num_blocks,
        groups=tuple(
            KVCacheGroup(
                convert_spec(group.kv_cache_spec, kv_caches.get(group.layer_names[0])),
                tuple(group.layer_names),
            )
            for group in config.kv_cache_groups
        ),
        shared_tensors=tuple(layers for layers in shared if layers),
        null_block_id=NULL_BLOCK_ID,
    )


def convert_spec(spec: Any, entry: Any = None) -> KVCacheSpec:
    """Convert the spec of a layer, whose cache is `entry`, or of a whole group.

    It refuses pages that have more than plain keys and values of their type, such as packed or
    scaled ones, and pages that an attention backend orders for its own kernels.
    """
    families = [base.__name__ for base in type(spec).__mro__]
    family = next((name for name in families if name in _FAMILIES), None)
    if family is None:
        raise InvalidArgumentError("kv_cache_spec", spec, f"one of {', '.join(_FAMILIES)}")
    for name in _OF_KERNELS:
        if (given := getattr(spec, name, None)) is not None:
            rule = "None: only the kernel knows what is where in such a page"
            raise InvalidArgumentError(f"kv_cache_spec.{name}", given, rule)
    if family in _FIELDS:
        ours, fields = _FIELDS[family]
        values: dict[str, Any] = {
            name: getattr(spec, theirs, None) if theirs in _OPTIONAL else getattr(spec, theirs)
            for name, theirs in fields.items()
        }
        converted = ours(**values)
    elif family == "MambaSpec":
        converted = whole = MambaSpec(
            tokens_per_block=spec.block_size,
            shapes=tuple(spec.shapes),
            dtypes=tuple(spec.dtypes),
            page_size_padded=spec.page_size_padded,
        )
        if isinstance(entry, torch.Tensor):  # of bytes, from 0.27 on
            shapes = ((whole.unpadded_page_size_bytes,),)
            converted = replace(whole, shapes=shapes, dtypes=(torch.int8,))
    else:
        layers = {name: convert_spec(each, entry) for name, each in spec.kv_cache_specs.items()}
        converted = UniformTypeKVCacheSpecs(tokens_per_block=spec.block_size, layer_specs=layers)
    if converted.page_size_bytes != spec.page_size_bytes:
        rule = f"{spec.page_size_bytes} bytes in a page, not {converted.page_size_bytes}"
        raise InvalidArgumentError("kv_cache_spec", spec, rule)
    return converted


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
_OF_KERNELS = "num_head_slots", "state_content_bytes"
"""Fields that an attention backend sets if its kernels order a page in their own way."""
_FIELDS: Mapping[str, tuple[type[KVCacheSpec], Mapping[str, str]]] = {
    "SlidingWindowMLASpec": (SlidingWindowMLASpec, _ATTENTION | _WINDOW),
    "MLAAttentionSpec": (MLASpec, _ATTENTION),
    "SlidingWindowSpec": (SlidingWindowSpec, _ATTENTION | _VALUES | _WINDOW),
    "ChunkedLocalAttentionSpec": (ChunkedLocalAttentionSpec, _ATTENTION | _VALUES | _CHUNK),
    "CrossAttentionSpec": (CrossAttentionSpec, _ATTENTION | _VALUES),
    "FullAttentionSpec": (FullAttentionSpec, _ATTENTION | _VALUES | _WINDOW | _CHUNK),
}
"""Our class for each of vLLM's classes, by name, and vLLM's names for our fields."""
_FAMILIES = ("UniformTypeKVCacheSpecs", "MambaSpec", *_FIELDS)


def canonicalize_layers(
    kv_caches: Mapping[str, RegisteredEntry], config: KVCacheConfig, vllm_config: Any
) -> CanonicalKVCaches:
    """Canonicalize the registered caches of all layers of a config; raises as `canonicalize`."""
    entries, layouts = dict[str, RegisteredEntry](), dict[str, str]()
    for group in config.groups:
        for name in group.layer_names:
            spec = group.spec.for_layer(name)
            entries[name], layout = _layer_cache(name, kv_caches[name], spec, vllm_config)
            layouts |= {name: layout} if layout else {}
    return canonicalize(entries, config, layouts=layouts)


def _without_packed(caches: CanonicalKVCaches, vllm_config: Any) -> CanonicalKVCaches:
    """Drop the boxes of pages that CPU kernels pack, since they describe the unpacked order."""
    layers = vllm_config.compilation_config.static_forward_context

    def known(ref: CanonicalKVCacheRef) -> CanonicalKVCacheRef:
        kinds = {layers[name].get_attn_backend().get_name() for name in ref.layer_names}
        is_packed = CPU_BACKEND in kinds and any("head" in box.axes for box in ref.boxes)
        return replace(ref, boxes=()) if is_packed else ref

    return replace(
        caches, group_data_refs=[[known(ref) for ref in refs] for refs in caches.group_data_refs]
    )


def _layer_cache(
    name: str, entry: RegisteredEntry, spec: KVCacheSpec, vllm_config: Any
) -> tuple[RegisteredEntry, str]:
    """Return a layer's tensor or states, and its axes in memory order; empty if unknown."""
    if isinstance(spec, MambaSpec) and isinstance(entry, torch.Tensor):
        # `(num_blocks, 1, 1, bytes)`, padded or not
        return [entry[:, 0, 0, : spec.unpadded_page_size_bytes]], ""
    if not isinstance(spec, AttentionSpec) or not isinstance(entry, torch.Tensor):
        return entry, ""
    backend = vllm_config.compilation_config.static_forward_context[name].get_attn_backend()
    named = getattr(vllm_config.cache_config, "kv_cache_layout", None)
    layout = _axes_of_name(named, spec, entry.ndim) if named else _axes_of_backend(backend)
    if backend.get_name() == CPU_BACKEND and layout.endswith("kv*dim"):
        return _as_planes(entry), "block head kv token dim"
    return entry, layout


def _axes_of_name(name: str, spec: KVCacheSpec, num_axes: int) -> str:
    """Convert a layout's name to axes; a tensor of latents may lack the head axis, of size one."""
    if not isinstance(spec, (MLASpec, SlidingWindowMLASpec)):
        return " ".join(AXES.get(letter, "kv*dim") for letter in name if letter != "L")
    axes = [AXES.get(letter, "dim") for letter in name if letter != "L"]
    return " ".join(axis for axis in axes if axis != "head" or num_axes == len(axes))


def _axes_of_backend(backend: Any, *, layers: bool = False) -> str:
    """Derive the axes in memory order from a backend's shape and stride order; empty if unknown."""
    try:
        shape = backend.get_kv_cache_shape(**PROBE)
    except (AttributeError, NotImplementedError):
        return ""
    axes = [AXIS_OF_SIZE.get(size, "") for size in shape]
    if not all(axes):
        return ""
    if layers:
        axes = ["layer", *axes]
    try:
        order = backend.get_kv_cache_stride_order(include_num_layers_dimension=layers)
    except (AttributeError, NotImplementedError):
        order = () if layers else range(len(axes))
    return " ".join(axes[index] for index in order)


def _as_planes(tensor: torch.Tensor) -> torch.Tensor:
    """View a CPU cache `(num_blocks, heads, tokens, 2*dim)` as kernels do: keys, then values."""
    num_blocks, heads, tokens, width = tensor.shape
    block_stride, head_stride, _, _ = tensor.stride()
    dim = width // 2
    return tensor.as_strided(
        (num_blocks, heads, 2, tokens, dim), (block_stride, head_stride, tokens * dim, dim, 1)
    )
